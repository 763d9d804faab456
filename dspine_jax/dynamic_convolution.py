"""DFlash2's grouped dynamic convolution: a short causal filter over a block's slots, part learned, part computed from the slot (BASELINES 4.4a)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dspine_jax.config import ConvolutionConfig
from dspine_jax.layers import Linear


class GroupedDynamicConvolution(nnx.Module):
    """The filters before (side 0) and after (side 1) one sublayer: base[side,t,d] + delta[side,t,group of d] weighs slot k - t.

    Slots before the block's start count as zero. The context's keys and values never pass it. Initialised to pass everything through.
    """

    def __init__(self, hidden_size: int, config: ConvolutionConfig, *, rngs: nnx.Rngs, param_dtype=jnp.float32):
        self.base_kernel = nnx.Param(jnp.zeros((2, config.taps, hidden_size), param_dtype).at[:, 0].set(1.0))
        self.kernel_projection = Linear(hidden_size, (2, config.taps, hidden_size // config.group_size), std=0.0, rngs=rngs, param_dtype=param_dtype)

    def deltas(self, x_BNKD: jax.Array) -> jax.Array:
        """The computed parts of both sides' filters, from the sublayer's normed input: [B,N,K,2,taps,groups]."""
        return self.kernel_projection(x_BNKD)

    def __call__(self, y_BNKD: jax.Array, deltas: jax.Array, side: int) -> jax.Array:
        """Filter y [B,N,K,D] along its slots -> [B,N,K,D]."""
        B, N, K, D = y_BNKD.shape
        taps, groups = deltas.shape[-2:]
        y = y_BNKD.reshape(B, N, K, groups, D // groups)
        base = self.base_kernel[...][side].reshape(taps, groups, D // groups).astype(y.dtype)
        total = jnp.zeros_like(y)
        for t in range(min(taps, K)):
            moved = jnp.pad(y[:, :, : K - t], ((0, 0), (0, 0), (t, 0), (0, 0), (0, 0)))
            total = total + (base[t] + deltas[..., side, t, :, None]) * moved
        return total.reshape(B, N, K, D)
