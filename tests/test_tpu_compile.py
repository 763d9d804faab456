"""Every operation compiled for real TPU chips at Qwen3-8B's sizes, by the TPU's own compiler, which needs no TPU.

It rejects what a chip would reject (too much on-chip memory, operations that a chip lacks), which neither interpret mode nor lowering do.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from pallas_kernels import bench, block_attention
from pallas_kernels.shapes import MODELS

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
# (operation, implementation, batch, blocks a row): what each runs by default in a decoding round, and every TPU kernel in a round and in training.
CASES = [(op, None, 1, 1) for op in bench.OPS]
TRAINED = [op for op in bench.OPS if "blocks" in inspect.signature(bench.part(op, "arg_specs").arguments).parameters]
CASES += [(op, "pallas", *sizes) for op in bench.OPS if bench.part(op, "pallas_tpu") for sizes in ((1, 1), (8, 48 if op in TRAINED else 1))]


@pytest.fixture(scope="module")
def library() -> Path:
    path = Path(os.environ.get("TPU_LIBRARY_PATH") or Path(sys.prefix) / "libtpu" / "libtpu" / "libtpu.so")
    if not path.is_file():
        pytest.skip(f"no TPU compiler at {path}: make libtpu installs it, TPU_LIBRARY_PATH names another")
    # Read when the library is loaded: not to ask a cloud's metadata server for chips, and to let several test processes load it.
    os.environ.update(TPU_LIBRARY_PATH=str(path), TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    return path


@pytest.mark.parametrize(("op", "implementation", "batch", "blocks"), CASES, ids=[f"{bench.op_name(op)}-{impl}-{batch}x{n}" for op, impl, batch, n in CASES])
@pytest.mark.parametrize("chip", CHIPS)
def test_every_operation_compiles(library, chip, op, implementation, batch, blocks):
    device = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices[0]
    extra = {} if blocks == 1 else {"blocks": blocks}
    static = {}

    def make(key):
        args, keywords = bench.part(op, "arg_specs").arguments(MODELS["qwen3-8b"], batch, key, jnp.bfloat16, **extra)
        static.update(keywords)
        return args

    sharding = SingleDeviceSharding(device)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), jax.eval_shape(make, jax.random.key(0)))
    backward = op is block_attention and blocks > 1  # the only one with kernels of its own there
    function = functools.partial(bench.function_of(op), **static, implementation=implementation)

    def run(*args):
        if not backward:
            return function(*args)
        outputs, pull = jax.vjp(function, *args)
        return outputs, pull(outputs)

    abstract = AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=abstract)):
        lowered = jax.jit(run).trace(*args).lower(lowering_platforms=("tpu",))
    kernels = 0 if implementation is None else 3 if backward else 1
    assert lowered.as_text().count("@tpu_custom_call") >= kernels
    compiled = lowered.compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * 2**30
