"""LM head with softmax weights: the kernel against the reference, odd sizes, meshes, and the loss that uses it."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dspine_jax.config import MeshConfig
from dspine_jax.losses import cross_entropy
from dspine_jax.sharding import make_mesh
from pallas_kernels import dispatch
from pallas_kernels.head_softmax import head_softmax, mosaic_gpu, ref

CASES = {  # B, T, D, V, usable rows; three tiles of states, vocabulary rows and inner width, and one of each
    "three tiles": (3, 256, 192, 384, 351),
    "one tile": (2, 128, 64, 128, 128),
}
GPU_CASES = CASES | {"whole model": (32, 64, 576, 49152, 49152)} | {f"Qwen3, {D} wide": (4, 64, D, 151936, 151669) for D in (1024, 2560, 5120)}


def interpreter():
    """Pallas' parameters to run a Hopper kernel on the CPU."""
    if jax.version.__version_info__ < (0, 11):
        pytest.skip(f"jax {jax.__version__} cannot interpret this kernel, 0.11 can")
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def arrays(B, T, D, V, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, rows = jax.random.normal(keys[0], (B, T, D), dtype), jax.random.normal(keys[1], (V, D), dtype) * 0.3
    return hidden, rows, jax.random.normal(keys[2], (B, T)) + 2


def relative(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)  # weights reach e^74, whose square is no fp32 number
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def compare(ours, theirs):
    assert relative(ours[0], theirs[0]) <= 4e-3 and relative(ours[1], theirs[1]) <= 1e-5
    np.testing.assert_array_equal(ours[2], theirs[2])


@pytest.mark.parametrize("case", CASES)
def test_kernel_equals_reference(case):
    B, T, D, V, usable = CASES[case]
    args, how = arrays(B, T, D, V), dict(num_tokens=usable, largest=74.0)
    weights, total, best = mosaic_gpu.head_softmax(*args, **how, interpret=interpreter())
    compare((weights, total, best), ref.head_softmax(*args, **how))
    assert weights.dtype == jnp.bfloat16 and total.dtype == jnp.float32 and best.dtype == jnp.int32
    assert (np.asarray(weights[..., usable:], np.float32) == 0).all() and (np.asarray(best) < usable).all()


def ties_and_nan():
    """(states, rows) whose best logit of state 0 is that of ids 140, 141 and 280, and of which state 1 is not a number."""
    hidden = jnp.ones((1, 256, 64), jnp.bfloat16).at[0, 1].set(jnp.nan)
    return hidden, jnp.zeros((384, 64), jnp.bfloat16).at[jnp.array([140, 141, 280])].set(1.0), jnp.zeros((1, 256))


@pytest.mark.parametrize("usable", [384, 281])
def test_ties_go_to_the_lowest_id_and_nan_stays(usable):
    weights, total, best = mosaic_gpu.head_softmax(*ties_and_nan(), num_tokens=usable, largest=74.0, interpret=interpreter())
    assert best[0, 0] == 140 and np.isfinite(total[0, 0]) and np.isnan(total[0, 1])


@pytest.mark.gpu
@pytest.mark.parametrize("usable", [384, 281])
def test_ties_and_nan_on_the_gpu(usable):
    weights, total, best = head_softmax(*ties_and_nan(), num_tokens=usable, largest=74.0, implementation="mosaic_gpu")
    assert best[0, 0] == 140 and np.isfinite(total[0, 0]) and np.isnan(total[0, 1])


def one_device(hidden_BTD, rows_VD, origin_BT, end_1, *, largest, padded, interpret):
    """What the kernel leaves on a device, in jnp (Pallas' interpreter runs on one device only)."""
    tiles = []
    for first in range(0, rows_VD.shape[0], mosaic_gpu.ROWS):
        part = rows_VD[first : first + mosaic_gpu.ROWS]
        weights, total, best = ref.head_softmax(hidden_BTD, part, origin_BT, num_tokens=mosaic_gpu.ROWS, largest=largest)
        top = jnp.einsum("btd,vd->btv", hidden_BTD, part, preferred_element_type=jnp.float32).max(-1)
        tiles.append((weights, total, top, best + first))
    weights, *partial = zip(*tiles)
    assert end_1.shape == (1,) and not padded
    return jnp.concatenate(weights, -1), *(jnp.stack(x, -1) for x in partial)


@pytest.mark.parametrize("shape", [(4, 1, 2), (2, 2, 2), (1, 1, 8)])
def test_spread_over_a_mesh(shape, monkeypatch):
    """Rows over data and fsdp, the vocabulary over tensor: totals add up and the largest logit is that of all parts, ties to the lowest id."""
    hidden, rows, origin = arrays(8, 16, 64, 1024)
    rows = rows.at[1000].set(rows[3])  # the same logits in the first and the last part
    mesh = make_mesh(MeshConfig(*shape))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    how = dict(num_tokens=1024, largest=74.0)
    monkeypatch.setattr(mosaic_gpu, "_local", one_device)
    with jax.set_mesh(mesh):
        args = put(hidden, ("data", "fsdp")), put(rows, "tensor", "fsdp"), put(origin, ("data", "fsdp"))
        ours = jax.jit(functools.partial(mosaic_gpu.head_softmax, **how))(*args)
    compare(jax.device_get(ours), ref.head_softmax(hidden, rows, origin, **how))
    assert (np.asarray(ours[2]) != 1000).all() and (np.asarray(ours[2]) == 3).any()


@pytest.mark.skipif(jax.version.__version_info__ < (0, 11), reason="the kernel serves jax 0.11 and newer")
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_loss_on_a_hopper_runs_the_kernel(shape, dtype, monkeypatch):
    """Lowered for a GPU, on one device and on a mesh; in fp32 the reference stays."""
    monkeypatch.setattr(mosaic_gpu, "not_hopper", lambda: None)
    mesh = make_mesh(MeshConfig(*shape), jax.devices()[: math.prod(shape)])
    at = lambda size, dtype, *spec: jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, P(*spec)))  # noqa: E731
    rows = ("data", "fsdp")
    args = at((8, 256, 64), dtype, rows), at((1024, 64), dtype, "tensor", "fsdp"), at((8, 256), jnp.int32, rows)
    with jax.set_mesh(mesh):
        gradient = jax.grad(lambda hidden, head, labels: cross_entropy(hidden, head, labels, 1024, 256)[0].sum())
        lowered = jax.jit(gradient).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert ("custom_call @mosaic_gpu" in lowered) == (dtype == jnp.bfloat16)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("D", [1024, 2560, 5120])
def test_a_large_vocabulary_is_the_kernels_or_falls_back_at_once(D, dtype, monkeypatch):
    """K05, lowered for a GPU: the kernel's tiles do not grow with the sizes. The compiler's turn is ``GPU_CASES``."""
    monkeypatch.setattr(mosaic_gpu, "not_hopper", lambda: None)
    args = jax.eval_shape(lambda: arrays(4, 64, D, 151936, dtype))
    lowered = jax.jit(functools.partial(head_softmax, num_tokens=151669, largest=74.0)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    served = dtype == jnp.bfloat16 and jax.version.__version_info__ >= (0, 11)
    assert ("custom_call @mosaic_gpu" in lowered) == served


def test_a_kernel_that_fails_leaves_the_loss_right_with_one_warning(monkeypatch):
    """K05: three types of error, of which none stops a choice that was left open, and each an explicit one."""
    hidden, rows, _ = arrays(2, 128, 64, 128)
    labels = jnp.arange(256).reshape(2, 128) % 128
    loss = lambda: np.asarray(cross_entropy(hidden, rows, labels, 128, 128)[0])  # noqa: E731
    plain, said = loss(), []
    monkeypatch.setattr(mosaic_gpu, "unsupported", lambda *_: None)
    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.setattr(dispatch.warnings, "warn", lambda text, **_: said.append(text))
    for error in (NotImplementedError("no such layout"), ValueError("too much shared memory"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")):

        def broken(*_, error=error, **__):
            raise error

        monkeypatch.setattr(mosaic_gpu, "head_softmax", broken)
        jax.clear_caches()
        np.testing.assert_array_equal(loss(), plain)
        with pytest.raises(type(error), match=str(error)):
            head_softmax(hidden, rows, jnp.zeros((2, 128)), num_tokens=128, largest=74.0, implementation="mosaic_gpu")
    assert said == ["head_softmax: plain XLA instead of the kernel, which raised NotImplementedError: no such layout"]


def test_explicit_choice_never_falls_back():
    args = arrays(1, 4, 16, 32)
    with pytest.raises(NotImplementedError, match="jax 0.10" if jax.version.__version_info__ < (0, 11) else "1 x 4 states"):
        head_softmax(*args, num_tokens=32, largest=74.0, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="'pallas'"):
        head_softmax(*args, num_tokens=32, largest=74.0, implementation="pallas")


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES)
def test_same_table_on_the_gpu(case):
    B, T, D, V, usable = GPU_CASES[case]
    args, how = arrays(B, T, D, V), dict(num_tokens=usable, largest=74.0)
    compare(*(jax.jit(functools.partial(head_softmax, **how, implementation=name))(*args) for name in ("mosaic_gpu", "xla")))
