"""Reference of adjacent causal injection (DESIGN 5.2 and 5.3)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspine_jax.layers import rms_norm


class InjectionWeights(NamedTuple):
    """Arrays of one injection, kernels as [in, out]."""

    norm_D: jax.Array
    feature_DR: jax.Array  # A
    gate_predecessor_RD: jax.Array  # Gp
    gate_hidden_DD: jax.Array  # Gh
    gate_bias_D: jax.Array  # b
    message_RD: jax.Array  # M


def unit(x: jax.Array) -> jax.Array:
    """x / |x| over the last axis in fp32: x * rsqrt(sum(x^2) + 1e-6)."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def predicted_feature(normed: jax.Array, weights: InjectionWeights) -> jax.Array:
    """p = sqrt(R) * unit(A RMSNorm(x)). normed [...,D] -> [...,R] fp32."""
    R = weights.feature_DR.shape[-1]
    return R**0.5 * unit(normed @ weights.feature_DR.astype(normed.dtype))


def gate_from_hidden(normed: jax.Array, weights: InjectionWeights) -> jax.Array:
    """Gh RMSNorm(x) + b: the part of the gate that does not depend on the predecessor. [...,D] fp32."""
    dtype = normed.dtype
    return (normed @ weights.gate_hidden_DD.astype(dtype)).astype(jnp.float32) + weights.gate_bias_D.astype(jnp.float32)


def write(x: jax.Array, hidden_gate: jax.Array, feature: jax.Array, weights: InjectionWeights) -> jax.Array:
    """x + sigmoid(Gp f + hidden_gate) * (M f), one write with predecessor feature f.

    x, hidden_gate [...,D]; feature [...,R] -> [...,D] in x's dtype. Leading axes broadcast, so one
    stream can be written with many candidate predecessors.
    """
    f = feature.astype(x.dtype)
    gate = jax.nn.sigmoid((f @ weights.gate_predecessor_RD.astype(x.dtype)).astype(jnp.float32) + hidden_gate)
    message = (f @ weights.message_RD.astype(x.dtype)).astype(jnp.float32)
    return (x.astype(jnp.float32) + gate * message).astype(x.dtype)


def injection(
    x_BNKD: jax.Array, anchor_feature_BNR: jax.Array, weights: InjectionWeights, *, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write every slot's predicted feature into its successor.

    Slot 0 is decoded, so slot 1 receives the anchor's embedding feature T[anchor]; slot i >= 2
    receives p_{i-1} of the stream *before* any write of this layer. Slot 0 is left as it is.

    x [B,N,K,D], anchor_feature [B,N,R] -> (new stream [B,N,K,D], predicted features p [B,N,K,R]
    fp32, hidden gate [B,N,K,D] fp32 for redoing the write).
    """
    normed = rms_norm(x_BNKD, weights.norm_D, eps)
    p_BNKR = predicted_feature(normed, weights)
    hidden_gate = gate_from_hidden(normed, weights)
    feature = jnp.concatenate([anchor_feature_BNR[:, :, None].astype(jnp.float32), p_BNKR[:, :, 1:-1]], axis=2)
    written = write(x_BNKD[:, :, 1:], hidden_gate[:, :, 1:], feature, weights)
    return jnp.concatenate([x_BNKD[:, :, :1], written], axis=2), p_BNKR, hidden_gate
