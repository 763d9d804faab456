"""Memory and time of a training config on H200s, reckoned from shapes alone: nothing is loaded, no device is needed.

    python -m train.estimate configs/qwen3_8b_dspine.py --set target=Qwen3-8B --gpus 8 --width 3072 --rows 100000

Memory is counted: the state by the sharding rules, the target, what the backward pass keeps of a block's slots, and the chunk of the vocabulary. Time is
the arithmetic of a step divided by the speed that a step of these kernels was measured at (``MEASURED``); it leaves out the input pipeline and talk
between GPUs. Tests hold the memory to the peaks in docs/results.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh

from dspine_jax.config import DrafterConfig, TargetConfig, TrainConfig
from dspine_jax.drafter import Drafter
from dspine_jax.sharding import AXES, parameter_spec, path_name
from dspine_jax.target import Target
from train.step import abstract_state

GIB = 2**30
# FLOP/s of the step in docs/results.json, compare_torch/qwen3-4b/dspine/jax/step_ms: one H200, 4 rows x 3072 tokens, 512 anchors, 554.0761 ms.
# ``step_flops`` of its config is 3.175e14 (a test counts again): 58% of what the chip is said to do.
MEASURED = 3.175e14 / 0.5540761
# fp32 arrays of the size of a chunk's logits that live at once where a head has parameters before the vocabulary (dspine_jax/head_losses.py); so reckoned,
# steps compiled for an H200 (Qwen3-4B's sizes with 8 target layers, 4 rows) need 29.2 GiB instead of 30.1 (DSpark) and 31.0 instead of 30.9 (Domino).
HEAD_LOGITS = 5


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Of one GPU: bytes by use; of a step: floating-point operations of all GPUs, and seconds."""

    bytes: dict[str, int]
    flops: float
    seconds: float

    @property
    def gib(self) -> float:
        """All uses together."""
        return sum(self.bytes.values()) / GIB


def estimate(config: TrainConfig, target: TargetConfig, *, gpus: int, width: int) -> Estimate:
    """Reckon a step of ``config`` (drafter resolved or not) with rows of ``width`` tokens on ``gpus`` devices.

    Raises ValueError where the mesh or the batch does not divide.
    """
    config = dataclasses.replace(config, drafter=config.drafter.resolve(target))
    shape = mesh_shape(config, gpus)
    if config.data.batch_size % (shape["data"] * shape["fsdp"]):
        raise ValueError(f"data.batch_size {config.data.batch_size} does not divide by mesh.data x mesh.fsdp = {shape['data']} x {shape['fsdp']}")
    flops = step_flops(config, target, width)
    return Estimate(step_bytes(config, target, width, shape), flops, flops / gpus / MEASURED)


def mesh_shape(config: TrainConfig, gpus: int) -> dict[str, int]:
    """Devices of each axis, -1 replaced. Raises ValueError where they are not ``gpus`` in all."""
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    known = math.prod(size for size in sizes.values() if size != -1)
    sizes = {axis: gpus // known if size == -1 else size for axis, size in sizes.items()}
    if math.prod(sizes.values()) != gpus:
        raise ValueError(f"mesh {sizes} does not use exactly {gpus} devices; change mesh.data, mesh.fsdp or mesh.tensor")
    return sizes


def shard_bytes(tree, mesh: AbstractMesh, itemsize: int | None = None) -> int:
    """Bytes of one device's part of a tree of arrays, by the rules table; as ``itemsize`` bytes a number where given."""
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        parts = 1
        if leaf.ndim and not path_name(path).endswith("rng"):
            parts = math.prod(mesh.shape[axis] for axis in parameter_spec(path_name(path), leaf.shape, mesh) if axis is not None)
        total += leaf.size * (itemsize or leaf.dtype.itemsize) // parts
    return total


def step_bytes(config: TrainConfig, target: TargetConfig, width: int, shape: dict[str, int]) -> dict[str, int]:
    """Bytes on one device. ``config`` resolved; bf16 or fp32 compute as it says."""
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape))
    c, compute = config.drafter, jnp.dtype(config.compute_dtype).itemsize
    state = abstract_state(config)[1]
    frozen_target = nnx.split(nnx.eval_shape(lambda: Target(target, rngs=nnx.Rngs(0))))[1]
    rows = config.data.batch_size // (shape["data"] * shape["fsdp"])
    slots = rows * config.anchors.num_anchors * c.block_size
    D, H, G, F = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    # Inputs and outputs of every product and norm of a layer, which its backward pass reads; with remat a layer's input, and one layer at a time.
    layer = 4 * D + (3 * H + 3 * G + 3 * F) // shape["tensor"]
    layers = c.num_layers * layer if not config.remat else c.num_layers * D + layer
    if c.convolution is not None:
        layers += c.num_layers * 4 * D
    if c.injection is not None:
        layers += len(c.injection_layers) * (5 * D + 2 * c.injection.transfer_size)
    chunk = rows * min(config.loss.vocab_chunk, config.anchors.num_anchors * c.num_predicting_slots)
    logits = 4 * HEAD_LOGITS if needs_head_losses(config) else compute
    paths = 2 if c.redoes_last_write or c.gru is not None or c.selector is not None else 1
    return {
        "target": shard_bytes(frozen_target, mesh, compute),
        "masters, moments and counters": shard_bytes(state, mesh),
        "gradients": shard_bytes(state.params, mesh),
        "weights in the compute precision": shard_bytes(state.params, mesh, compute) if compute < 4 else 0,
        "tapped states": rows * width * len(c.target_layer_ids) * D * compute,
        "kept for the backward pass": slots * layers * compute,
        "gradients of the states before the vocabulary": paths * slots * D * compute,
        "a chunk of the vocabulary": chunk * target.vocab_size * logits // shape["tensor"],
    }


def needs_head_losses(config: TrainConfig) -> bool:
    """Whether the main path goes through logits with gradients of their own: a head before the vocabulary, or the distance from the target's law."""
    c = config.drafter
    return c.markov is not None or c.gru is not None or c.confidence or config.loss.l1_weight > 0


def step_flops(config: TrainConfig, target: TargetConfig, width: int) -> float:
    """Floating-point operations of the matrix products of one step, all rows: two a multiplication. ``config`` resolved.

    The target once, up to its last tapped layer (all of it where its law is taught); the drafter three times (forward, and backward to inputs and
    weights) over every slot, its context projections over every token; the vocabulary as losses.py and head_losses.py pass it.
    """
    c, B, N = config.drafter, config.data.batch_size, config.anchors.num_anchors
    tokens, slots, predicting = B * width, B * N * c.block_size, B * N * c.num_predicting_slots
    D, H, G, V = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, target.vocab_size
    taught = config.loss.l1_weight > 0 or c.confidence

    t = target
    heads, kv_heads = t.num_heads * t.head_dim, t.num_kv_heads * t.head_dim
    target_layer = 2 * t.hidden_size * (2 * heads + 2 * kv_heads + 3 * t.intermediate_size) + 2 * heads * width  # causal: half of the width, for two products
    flops = float(tokens * target_layer * (t.num_layers if taught else max(c.target_layer_ids) + 1))

    context = 2 * (len(c.target_layer_ids) * D * D + c.num_layers * 2 * D * G)
    attention = c.num_layers * 4 * H * (width // 2 + c.block_size)  # an anchor sees half of a row on average
    flops += 3.0 * (tokens * context + slots * (2 * slot_weights(c) + attention))

    R = c.markov.rank if c.markov is not None else c.gru.projection_size if c.gru is not None else 0
    pass_alone = 2 * 2 * D * V  # logits, and the gradient of the states
    pass_head = 2 * V * (3 * D + 4 * R)  # logits twice (they are formed again), gradients of states, codes and table
    main = pass_head + (2 * 2 * D * V if taught else 0) if needs_head_losses(config) else pass_alone
    flops += float(predicting) * main
    if c.redoes_last_write:
        flops += float(predicting - B * N) * pass_alone  # the first draft shares the main path's pass
    if c.gru is not None:
        flops += float(predicting) * pass_alone
    if c.selector is not None:
        flops += float(predicting) * 2 * 2 * D * V  # top-P of the logits, formed again in the backward pass
    return flops


def slot_weights(config: DrafterConfig) -> int:
    """Numbers in the matrices that every slot is multiplied with: all but the context projection and tables with a row a token."""
    params = nnx.state(nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0))), nnx.Param)
    sizes = {path: variable.get_value() for path, variable in nnx.to_flat_state(params)}
    return sum(x.size for path, x in sizes.items() if path[0] != "fc" and x.ndim > 1 and config.vocab_size not in x.shape)


def summary(config: TrainConfig, target: TargetConfig, *, gpus: int, width: int) -> str:
    """The one line that configs quote: memory of a GPU, time of a step."""
    found = estimate(config, target, gpus=gpus, width=width)
    return f"{gpus} x H200, rows of {width} tokens: {found.gib:.0f} GiB a GPU, {found.seconds:.2f} s a step"


def main(argv: list[str] | None = None) -> int:
    """Print the estimate. Returns 0, or 2 for bad input."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m train.estimate", description=__doc__, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("config", type=Path, help="training config; its target's config.json is read")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a field, as in dspine-train; repeatable")
    parser.add_argument("--gpus", type=int, default=1, help="devices (default 1)")
    parser.add_argument("--width", type=int, default=3072, help="tokens of a row (default 3072)")
    parser.add_argument("--rows", type=int, help="rows of the data: also print the time of all epochs")
    args = parser.parse_args(argv)
    from dspine_jax.config_io import apply_overrides, load_config
    from dspine_jax.target_io import read_target_config

    try:
        config = apply_overrides(load_config(args.config), args.set)
        target = read_target_config(config.target)
        found = estimate(config, target, gpus=args.gpus, width=args.width)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(summary(config, target, gpus=args.gpus, width=args.width))
    for name, size in found.bytes.items():
        print(f"{size / GIB:8.2f} GiB  {name}")
    print(f"{found.flops / 1e12:8.1f} TFLOP a step, at {MEASURED / 1e12:.0f} TFLOP/s a GPU")
    if args.rows and config.epochs:
        steps = config.epochs * args.rows // config.data.batch_size
        print(f"{config.epochs} epochs of {args.rows:,} rows: {steps:,} steps, {steps * found.seconds / 3600:.1f} h")
    return 0


if __name__ == "__main__":
    sys.exit(main())
