"""Building blocks shared by the target and the drafters: norms, projections, RoPE, MLP, attention.

Parameters are held in ``param_dtype`` (fp32 masters while training) and cast to the dtype of
the activations where they are used, so the caller chooses the compute precision by the dtype
of what it feeds in.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def normal_init(std: float):
    """Initialiser drawing N(0, std) in fp32; ``std`` 0 gives zeros."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
        return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    return init


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """weight * x / rms(x) over the last axis, computed in fp32. x [...,D], weight [D] -> x's shape and dtype."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight.astype(jnp.float32)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in fp32, with a multiplicative weight."""

    def __init__(self, size: int, eps: float, *, param_dtype=jnp.float32):
        self.weight = nnx.Param(jnp.ones((size,), param_dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., size], any float dtype -> same shape and dtype."""
        return rms_norm(x, self.weight[...], self.eps)


class Linear(nnx.Module):
    """Dense map contracting the last ``len(in_shape)`` axes: kernel [*in_shape, *out_shape].

    Heads stay an axis of their own ([D,H,C] and [H,C,D]) so that a sharding rule splits whole
    heads and a head count that does not divide is refused rather than cut in half.
    """

    def __init__(
        self,
        in_shape: int | tuple[int, ...],
        out_shape: int | tuple[int, ...],
        *,
        rngs: nnx.Rngs,
        std: float = 0.02,
        bias: bool = False,
        param_dtype=jnp.float32,
    ):
        self.in_shape = (in_shape,) if isinstance(in_shape, int) else tuple(in_shape)
        self.out_shape = (out_shape,) if isinstance(out_shape, int) else tuple(out_shape)
        shape = self.in_shape + self.out_shape
        self.kernel = nnx.Param(normal_init(std)(rngs.params(), shape, param_dtype))
        self.bias = nnx.Param(jnp.zeros(self.out_shape, param_dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., *in_shape] -> [..., *out_shape] in x's dtype."""
        n = len(self.in_shape)
        contract = (tuple(range(x.ndim - n, x.ndim)), tuple(range(n)))
        y = jax.lax.dot_general(x, self.kernel[...].astype(x.dtype), (contract, ((), ())))
        if self.bias is not None:
            y = y + self.bias[...].astype(x.dtype)
        return y

    @property
    def fan(self) -> tuple[int, int]:
        """(inputs, outputs) of the flattened matrix."""
        return math.prod(self.in_shape), math.prod(self.out_shape)


class Embedding(nnx.Module):
    """A table of rows [V,D]; used for token embeddings and for LM-head rows alike."""

    def __init__(self, rows: int, size: int, *, rngs: nnx.Rngs, std: float = 0.02, param_dtype=jnp.float32):
        self.embedding = nnx.Param(normal_init(std)(rngs.params(), (rows, size), param_dtype))


def rope_inv_freq(head_dim: int, theta: float) -> np.ndarray:
    """Inverse frequencies 1 / theta ** (2i/C), float32 [C/2], as a host constant.

    Position 3000 magnifies one unit in the last place to a relative L2 of 2e-5, so every rounding
    of the reference is kept: fp32 exponents, the power rounded to fp32, then the reciprocal in fp32.
    Under jit XLA would fold the reciprocal into the exponent, and each backend has its own pow.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.float32(1) / (np.float64(theta) ** exponent.astype(np.float64)).astype(np.float32)


def apply_rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding with half-split pairing over all of C, computed in fp32.

    x [..., T, heads, C], positions [..., T] int -> same shape and dtype as x.
    """
    angles = positions[..., None].astype(jnp.float32) * rope_inv_freq(x.shape[-1], theta)
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class SwiGLU(nnx.Module):
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, rngs: nnx.Rngs, std: float = 0.02, param_dtype=jnp.float32):
        kw = dict(rngs=rngs, std=std, param_dtype=param_dtype)
        self.gate_proj = Linear(hidden_size, intermediate_size, **kw)
        self.up_proj = Linear(hidden_size, intermediate_size, **kw)
        self.down_proj = Linear(intermediate_size, hidden_size, **kw)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., D] -> [..., D]."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nnx.Module):
    """Projections of grouped-query attention, with q/k norm for Qwen3-style layers.

    Order (BASELINES 1.1): project, norm over C, RoPE. The attention sum itself is a free
    function, so the target, training blocks and cached decoding share these projections.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        qk_norm: bool,
        eps: float,
        rope_theta: float,
        rngs: nnx.Rngs,
        std: float = 0.02,
        param_dtype=jnp.float32,
    ):
        kw = dict(rngs=rngs, std=std, param_dtype=param_dtype)
        self.q_proj = Linear(hidden_size, (num_heads, head_dim), **kw)
        self.k_proj = Linear(hidden_size, (num_kv_heads, head_dim), **kw)
        self.v_proj = Linear(hidden_size, (num_kv_heads, head_dim), **kw)
        self.o_proj = Linear((num_heads, head_dim), hidden_size, **kw)
        self.q_norm = RMSNorm(head_dim, eps, param_dtype=param_dtype) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps, param_dtype=param_dtype) if qk_norm else None
        self.rope_theta = rope_theta

    def queries(self, z: jax.Array, positions: jax.Array) -> jax.Array:
        """z [..., T, D], positions [..., T] -> rotated queries [..., T, H, C]."""
        q = self.q_proj(z)
        if self.q_norm is not None:
            q = self.q_norm(q)
        return apply_rope(q, positions, self.rope_theta)

    def keys_values(self, z: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """z [..., T, D], positions [..., T] -> rotated keys and values, each [..., T, G, C]."""
        k = self.k_proj(z)
        if self.k_norm is not None:
            k = self.k_norm(k)
        return apply_rope(k, positions, self.rope_theta), self.v_proj(z)
