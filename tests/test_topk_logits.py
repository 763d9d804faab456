"""LM head with top-P: every implementation against an fp64 sort, on logits with many exact ties; kernels interpreted, lowered, and on a GPU."""

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.shapes import MODELS
from pallas_kernels.topk_logits import arg_specs, chunks, pallas_gpu, pallas_tpu, ref, topk_logits, triton_gpu

# (tokens, D, V, num_tokens, P): the tokens of K = 2, 7 and 16, then several tiles of tokens; V is no multiple of a tile, D of one slice or several.
CASES = [(1, 64, 520, 500, 4), (6, 96, 2600, 2600, 8), (15, 576, 2600, 2311, 16), (300, 48, 1100, 1090, 5), (7, 16, 100, 90, 1), (15, 64, 90, 90, 16)]
TPU_TILES = {15: (8, 256), 300: (96, 128)}  # three tiles of tokens and of rows at the least


def make(tokens, D, V, num_tokens, P, dtype=jnp.bfloat16):
    """Whole numbers, whose fp32 logits are exact in any order of summing; every row comes three times, so P cuts through equals; NaN in padded rows."""
    rng = np.random.default_rng(tokens + V)
    hidden, rows = rng.integers(-2, 3, (tokens, D)), rng.integers(-2, 3, (num_tokens // 3, D))
    table = np.full((V, D), np.nan)
    table[:num_tokens] = np.resize(rows, (num_tokens, D))
    return jnp.asarray(hidden, dtype), jnp.asarray(table, dtype)


def sorted_best(hidden, rows, num_tokens: int, P: int) -> tuple[np.ndarray, np.ndarray]:
    logits = np.asarray(hidden, np.float64) @ np.asarray(rows, np.float64)[:num_tokens].T
    order = np.lexsort((np.broadcast_to(np.arange(num_tokens), logits.shape), -logits))[:, :P]
    return np.take_along_axis(logits, order, axis=1), order


def check(function, case, dtype=jnp.bfloat16, **kwargs):
    *_, num_tokens, P = case
    hidden, rows = make(*case, dtype=dtype)
    values, ids = jax.jit(functools.partial(function, num_candidates=P, num_tokens=num_tokens, **kwargs))(hidden, rows)
    expected_values, expected_ids = sorted_best(hidden, rows, num_tokens, P)
    assert values.dtype == jnp.float32 and ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(values, expected_values)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ids_and_values_are_those_of_a_sort(case):
    for dtype in (jnp.float32, jnp.bfloat16):
        check(ref.topk_logits, case, dtype)
        check(chunks.topk_logits, case, dtype)
        check(topk_logits, case, dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu_kernels_interpreted(case):
    check(pallas_gpu.topk_logits, case, own_head=True, interpret=True)
    check(pallas_gpu.topk_logits, case, jnp.float32, own_head=False, interpret=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tpu_kernel_interpreted(case):
    for dtype in (jnp.float32, jnp.bfloat16):
        check(pallas_tpu.topk_logits, case, dtype, tile=TPU_TILES.get(case[0]), interpret=True)


@pytest.mark.parametrize(
    "function",
    [
        ref.topk_logits,
        chunks.topk_logits,
        functools.partial(pallas_gpu.topk_logits, own_head=True, interpret=True),
        functools.partial(pallas_tpu.topk_logits, interpret=True),
    ],
)
def test_real_numbers_leading_axes_and_a_lost_token(function):
    """Values near fp64's, ids alike wherever the gap is above rounding; a token of NaN spoils itself alone, and its ids stay inside the table."""
    rng = np.random.default_rng(0)
    hidden, rows = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((2, 3, 64), (1500, 64)))
    values, ids = function(hidden, rows, 8, num_tokens=1400)
    expected_values, expected_ids = sorted_best(hidden.reshape(6, 64), rows, 1400, 9)
    assert values.shape == ids.shape == (2, 3, 8)
    np.testing.assert_allclose(values.reshape(6, 8), expected_values[:, :8], rtol=1e-5)
    assert (expected_values[:, :8] - expected_values[:, 1:]).min() > 1e-4
    np.testing.assert_array_equal(ids.reshape(6, 8), expected_ids[:, :8])
    lost_values, lost_ids = function(hidden.at[1, 1].set(jnp.nan), rows, 8, num_tokens=1400)
    kept = np.arange(6) != 4
    np.testing.assert_array_equal(lost_ids.reshape(6, 8)[kept], ids.reshape(6, 8)[kept])
    assert ((lost_ids >= 0) & (lost_ids < 1500)).all()


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("batch", [1, 8])
def test_kernels_lower_for_the_platform_and_the_default_holds_them_on_a_gpu(platform, batch):
    """Lowered without the device; ``chunks`` and the reference are there on no platform when a kernel was asked for."""
    args, kwargs = arg_specs.arguments(MODELS["tiny"], batch, jax.random.key(0), jnp.bfloat16)
    kind = {"cuda": "NVIDIA H200", "tpu": "TPU v5 lite"}[platform]
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=device)):
        for implementation in ("pallas", None):
            lowered = jax.jit(functools.partial(topk_logits, implementation=implementation, **kwargs)).trace(*args)
            text = lowered.lower(lowering_platforms=(platform,)).as_text()
            marker = {"cuda": "xla.gpu.triton", "tpu": "tpu_custom_call"}[platform]
            assert (marker in text) == (implementation == "pallas" or platform == "cuda")
            assert ("chlo.top_k" in text or "topk" in text.lower().replace("topk_", "")) == (implementation is None and platform == "tpu")


def test_what_a_kernel_does_not_serve_is_refused_by_name():
    hidden, rows = make(6, 96, 520, 520, 8)
    with pytest.raises(ValueError, match="'cuda' is none of 'xla', 'chunks', 'pallas', 'triton'"):
        topk_logits(hidden, rows, 8, num_tokens=520, implementation="cuda")
    with pytest.raises(NotImplementedError, match="the 200 best of 520 .only 1 to 32. on cuda; the 200 best of 520 .only 1 to 128. on tpu"):
        topk_logits(hidden, rows, 200, num_tokens=520, implementation="pallas")
    assert topk_logits(hidden, rows, 200, num_tokens=520)[1].shape == (6, 200)
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match="interpret mode"):
            topk_logits(hidden, rows, 8, num_tokens=520, implementation="pallas")


def test_missing_jax_triton_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    hidden, rows = make(6, 96, 520, 520, 8)
    with pytest.raises(NotImplementedError, match=r"pip install 'dspine-jax\[cuda,triton\]'"):
        topk_logits(hidden, rows, 8, num_tokens=520, implementation="triton")


def test_a_mesh_keeps_the_kernels_away():
    """The table may be spread over it, and a kernel call would gather it."""
    hidden, rows = make(6, 96, 2600, 2600, 8)
    with jax.set_mesh(jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))):
        assert "mesh of several devices" in pallas_gpu.unsupported(hidden, rows, 8)
        rows = jax.device_put(rows, jax.P("tensor"))
        ids = jax.jit(functools.partial(topk_logits, num_candidates=8, num_tokens=2600, implementation="chunks"))(hidden, rows)[1]
    np.testing.assert_array_equal(ids, sorted_best(hidden, rows, 2600, 8)[1])


TRITON_FILE = """
import numpy as np, sys, torch, triton
sys.path.insert(0, {folder!r})
import triton_kernels as k
for case in {cases!r}:
    T, D, V, num_tokens, P = case
    data = np.load({data!r} + f"/{{T}}_{{V}}.npz")
    hidden, rows = (torch.tensor(data[name]).half() for name in ("hidden", "rows"))  # the interpreter multiplies the bits of bfloat16
    W, M, E = 64, 16, 16
    C = triton.cdiv(V, W)
    logits, maxima = torch.full((T, C * W), float("nan")), torch.full((T, C), float("nan"))
    grid = (triton.cdiv(T, M), C)
    k.head_kernel[grid](hidden, rows, logits, maxima, T, V, D, num_tokens, C, M, W, E)
    values, ids = torch.full((T, P), float("nan")), torch.full((T, P), -1, dtype=torch.int32)
    pow2 = triton.next_power_of_2
    k.select_kernel[(T,)](maxima, logits, values, ids, C * W, num_tokens, C, W, P, pow2(C), pow2(P), min(P, C))
    assert (ids.numpy() == data["ids"]).all() and (values.numpy() == data["values"]).all(), case
print("equal", "jax" in sys.modules)
"""


def test_triton_file_by_itself(tmp_path):
    """The plain Triton file under Triton's interpreter, on torch tensors and without JAX, as another project would use it."""
    for name in ("triton", "torch"):
        pytest.importorskip(name, reason=f"needs {name}")
    cases = [CASES[0], (40, 48, 300, 290, 5), CASES[5]]
    for case in cases:
        hidden, rows = make(*case)
        values, ids = sorted_best(hidden, rows, *case[3:])
        hidden, rows = (np.asarray(x, np.float32) for x in (hidden, rows))
        np.savez(tmp_path / f"{case[0]}_{case[2]}.npz", hidden=hidden, rows=rows, values=values.astype(np.float32), ids=ids.astype(np.int32))
    code = TRITON_FILE.format(folder=str(Path(ref.__file__).parent), cases=cases, data=str(tmp_path))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert run.stdout.split() == ["equal", "False"], run.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", [None, "chunks", "pallas", "triton"])
def test_on_a_gpu(implementation):
    """The same table, compiled; then Qwen3-8B's sizes, with whole numbers."""
    if implementation == "triton":
        try:
            importlib.import_module("jax_triton")
        except (ImportError, AttributeError) as error:
            pytest.skip(f"jax-triton: {error}")
    shape = MODELS["qwen3-8b"]
    for case in (*CASES, (15, shape.hidden_size, shape.vocab_size, 151669, 16), (120, shape.hidden_size, 20000, 20000, 8)):
        for dtype in (jnp.bfloat16, jnp.float32):
            check(topk_logits, case, dtype, implementation=implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("module", [pallas_gpu, triton_gpu])
def test_own_head_on_a_gpu(module):
    """The first kernel with every launch, more tokens than the default gives it among them."""
    if module is triton_gpu:
        pytest.importorskip("jax_triton")
    for tokens in (15, 32, 50, 300):
        check(functools.partial(module.topk_logits, own_head=True), (tokens, 576, 5000, 4990, 8))
