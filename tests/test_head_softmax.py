"""LM head with softmax weights: the kernel against the reference, odd sizes, meshes, and the loss that uses it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dspine_jax.config import MeshConfig
from dspine_jax.sharding import make_mesh
from pallas_kernels.head_softmax import head_softmax, pallas_gpu, ref

CASES = {  # B, T, D, V, usable rows
    "odd": (2, 131, 72, 301, 287),  # three tiles of states and of rows, two of the inner width, none of them whole
    "whole": (1, 256, 128, 256, 256),
    "smaller than a tile": (1, 3, 24, 40, 40),
}


def arrays(B, T, D, V, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, rows = jax.random.normal(keys[0], (B, T, D), dtype), jax.random.normal(keys[1], (V, D), dtype) * 0.3
    return hidden, rows, jax.random.normal(keys[2], (B, T)) + 2


def relative(a, b) -> float:
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def compare(ours, theirs):
    assert relative(ours[0], theirs[0]) <= 4e-3 and relative(ours[1], theirs[1]) <= 1e-5
    np.testing.assert_array_equal(ours[2], theirs[2])


@pytest.mark.parametrize("case", CASES)
def test_kernel_equals_reference(case):
    B, T, D, V, usable = CASES[case]
    args, how = arrays(B, T, D, V), dict(num_tokens=usable, largest=74.0)
    weights, total, best = pallas_gpu.head_softmax(*args, **how, interpret=True)
    compare((weights, total, best), ref.head_softmax(*args, **how))
    assert weights.dtype == jnp.bfloat16 and total.dtype == jnp.float32 and best.dtype == jnp.int32
    assert (np.asarray(weights[..., usable:], np.float32) == 0).all() and (np.asarray(best) < usable).all()


def test_ties_go_to_the_lowest_id_and_nan_stays():
    hidden, rows = jnp.ones((1, 2, 16), jnp.bfloat16).at[0, 1].set(jnp.nan), jnp.zeros((300, 16), jnp.bfloat16).at[jnp.array([140, 141, 280])].set(1.0)
    weights, total, best = pallas_gpu.head_softmax(hidden, rows, jnp.zeros((1, 2)), num_tokens=300, largest=74.0, interpret=True)
    assert best[0, 0] == 140 and np.isfinite(total[0, 0]) and np.isnan(total[0, 1])


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (1, 1, 8)])
def test_kernel_on_a_mesh(shape):
    """Rows over data and fsdp, the vocabulary over tensor: totals add up and the largest logit is that of all parts, ties included."""
    hidden, rows, origin = arrays(8, 5, 32, 320)
    rows = rows.at[300].set(rows[3])  # the same logits in the first and the last part
    mesh = make_mesh(MeshConfig(*shape))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    how = dict(num_tokens=310, largest=74.0)
    with jax.set_mesh(mesh):
        args = put(hidden, ("data", "fsdp")), put(rows, "tensor", "fsdp"), put(origin, ("data", "fsdp"))
        ours = jax.jit(functools.partial(pallas_gpu.head_softmax, **how, interpret=True))(*args)
    compare(jax.device_get(ours), ref.head_softmax(hidden, rows, origin, **how))


def test_explicit_choice_never_falls_back():
    args = arrays(1, 4, 16, 32, jnp.float32)
    with pytest.raises(NotImplementedError, match="float32"):
        head_softmax(*args, num_tokens=32, largest=74.0, implementation="pallas")
    with pytest.raises(ValueError, match="'mosaic'"):
        head_softmax(*args, num_tokens=32, largest=74.0, implementation="mosaic")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_same_table_on_the_gpu(case):
    B, T, D, V, usable = CASES[case]
    args, how = arrays(B, T, D, V), dict(num_tokens=usable, largest=74.0)
    compare(*(jax.jit(functools.partial(head_softmax, **how, implementation=name))(*args) for name in ("pallas", "xla")))
