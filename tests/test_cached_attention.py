"""Attention to a cache: the reference against a loop, the GPU kernel (interpreted, and on a GPU) against the reference, the choice between them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import AbstractDevice, AbstractMesh

from dspine_jax.attention import attend
from pallas_kernels.cached_attention import cached_attention, pallas_gpu

# (T, H, G, C, S)
SHAPES = [(1, 9, 3, 64, 128), (1, 4, 4, 16, 64), (4, 9, 3, 64, 192), (16, 4, 2, 32, 64)]


def make(T, H, G, C, S, dtype=jnp.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    start_B = jnp.asarray([0, 1, 63 - T + 1, S - T - 1, S - T], jnp.int32).clip(0)
    return draw(5, T, H, C), draw(5, S, G, C), draw(5, S, G, C), start_B


@pytest.mark.parametrize("shape", SHAPES)
def test_reference_sees_what_is_written_and_no_more(shape):
    """Every row alone, cut to what its query may see; ``width`` changes nothing while it covers the rows."""
    q, k, v, start_B = make(*shape, dtype=jnp.float32)
    out = cached_attention(q, k, v, start_B, implementation="xla")
    for b, start in enumerate(start_B.tolist()):
        for t in range(shape[0]):
            seen = start + t + 1
            alone = attend(q[b : b + 1, t : t + 1], k[b : b + 1, :seen], v[b : b + 1, :seen], jnp.ones((1, 1, seen), bool))
            np.testing.assert_allclose(out[b, t], alone[0, 0], rtol=1e-5, atol=1e-6)
    short = cached_attention(q[:2], k[:2], v[:2], start_B[:2], width=32, implementation="xla")
    np.testing.assert_allclose(short, out[:2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_kernel_equals_the_reference(shape, dtype):
    """In the interpreter, which is no evidence for the GPU compiler; nonsense behind a row's end must not matter."""
    q, k, v, start_B = make(*shape, dtype=dtype)
    hidden = jnp.arange(shape[4])[None, :, None, None] > (start_B + shape[0] - 1)[:, None, None, None]
    nonsense = lambda x: jnp.where(hidden, 7.0, x).astype(dtype)  # noqa: E731
    ours = pallas_gpu.cached_attention(q, nonsense(k), nonsense(v), start_B, interpret=True)
    exact = cached_attention(*(x.astype(jnp.float32) for x in (q, k, v)), start_B, implementation="xla")
    assert tiny.relative_l2(ours.astype(jnp.float32), exact) < 6e-3


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_on_a_gpu(shape):
    q, k, v, start_B = make(*shape)
    ours = jax.jit(lambda *args: cached_attention(*args, implementation="pallas"))(q, k, v, start_B)
    exact = cached_attention(*(x.astype(jnp.float32) for x in (q, k, v)), start_B, implementation="xla")
    assert tiny.relative_l2(ours.astype(jnp.float32), exact) < 6e-3


@pytest.mark.parametrize(("rows", "dtype", "found"), [(64, jnp.bfloat16, True), (64, jnp.float32, False), (4, jnp.bfloat16, False)])
def test_many_rows_on_a_gpu_take_the_kernel(rows, dtype, found):
    """Lowered for one: the decoding step of a large batch in bf16 holds the kernel; in fp32, or with few rows, it does not."""
    args = (jnp.zeros((rows, 1, 9, 64), dtype), *(jnp.zeros((rows, 128, 3, 64), dtype) for _ in "kv"), jnp.zeros(rows, jnp.int32))
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=device)):
        assert ("triton" in jax.jit(cached_attention).trace(*args).lower(lowering_platforms=("cuda",)).as_text()) == found


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((1, 4, 2, 16, 64), jnp.float32, "float32"),
        ((1, 4, 2, 24, 64), jnp.bfloat16, "head width of 24"),
        ((1, 4, 2, 16, 65), jnp.bfloat16, "cache of 65 rows"),
        ((40, 4, 2, 16, 64), jnp.bfloat16, "80 queries a kv head"),
    ],
)
def test_what_the_kernel_does_not_serve_is_refused_by_name(shape, dtype, words):
    with pytest.raises(NotImplementedError, match=words):
        cached_attention(*make(*shape, dtype=dtype), implementation="pallas")
    assert cached_attention(*make(*shape, dtype=dtype)).shape == (5, shape[0], shape[1], shape[3])
    with pytest.raises(ValueError, match="'cuda' is none of"):
        cached_attention(*make(*shape, dtype=dtype), implementation="cuda")


def test_a_platform_without_the_kernel_is_named(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(NotImplementedError, match="cached_attention: no such kernel for tpu, only for cuda"):
        cached_attention(*make(*SHAPES[0]), implementation="pallas")
