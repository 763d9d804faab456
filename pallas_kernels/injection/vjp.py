"""Injection with a gradient by hand, in plain jnp: for training on any platform and any mesh.

Autodiff of the reference keeps fp32 copies of gates, messages and features of every slot and layer for the backward pass. Here the stream, its norm and
the products in the stream's own type are kept, which the forward pass has in memory anyway; everything between them is computed again.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from dspine_jax.layers import rms_norm
from pallas_kernels.injection.ref import InjectionWeights, unit


def _to_successor(p_BNKR: jax.Array, anchor_feature_BNR: jax.Array, dtype) -> jax.Array:
    """What each slot reads: 0, the anchor's feature, then p of the slot before."""
    anchor_BN1R = anchor_feature_BNR[:, :, None].astype(dtype)
    return jnp.concatenate([jnp.zeros_like(anchor_BN1R), anchor_BN1R, p_BNKR[:, :, 1:-1].astype(dtype)], axis=2)


def _features(z_BNKR: jax.Array) -> jax.Array:
    return z_BNKR.shape[-1] ** 0.5 * unit(z_BNKR)


def forward(x_BNKD, anchor_feature_BNR, weights: InjectionWeights, eps: float):
    """-> (``injection``'s outputs, what ``backward`` needs)."""
    dtype = x_BNKD.dtype
    cast = lambda name: getattr(weights, name).astype(dtype)  # noqa: E731
    normed_BNKD = rms_norm(x_BNKD, weights.norm_D, eps)
    z_BNKR = normed_BNKD @ cast("feature_DR")
    hidden_BNKD = normed_BNKD @ cast("gate_hidden_DD")
    p_BNKR = _features(z_BNKR)
    # Slot 0 reads zeros and so keeps its stream bit for bit; a product over K slots needs no slices, which would be copies.
    feature_BNKR = _to_successor(p_BNKR, anchor_feature_BNR, dtype)
    predecessor_BNKD = feature_BNKR @ cast("gate_predecessor_RD")
    message_BNKD = feature_BNKR @ cast("message_RD")
    hidden_gate_BNKD = hidden_BNKD.astype(jnp.float32) + weights.gate_bias_D.astype(jnp.float32)
    gate_BNKD = jax.nn.sigmoid(predecessor_BNKD.astype(jnp.float32) + hidden_gate_BNKD)
    new_BNKD = (x_BNKD.astype(jnp.float32) + gate_BNKD * message_BNKD.astype(jnp.float32)).astype(dtype)
    residuals = x_BNKD, anchor_feature_BNR, weights, normed_BNKD, z_BNKR, hidden_BNKD, predecessor_BNKD, message_BNKD
    return (new_BNKD, p_BNKR, hidden_gate_BNKD), residuals


def backward(eps: float, residuals, cotangents):
    """Cotangents of the outputs -> those of x, the anchors' features and the weights, each in its array's type."""
    x_BNKD, anchor_feature_BNR, weights, normed_BNKD, z_BNKR, hidden_BNKD, predecessor_BNKD, message_BNKD = residuals
    dnew_BNKD, dp_BNKR, dhidden_gate_BNKD = cotangents
    dtype = x_BNKD.dtype
    cast = lambda name: getattr(weights, name).astype(dtype)  # noqa: E731
    wide = lambda x: x.astype(jnp.float32)  # noqa: E731
    # Without the barrier XLA joins products that share an operand, and copies the other two side by side for it: dearer than reading one twice.
    apart = jax.lax.optimization_barrier
    of_weight = lambda inputs, outputs: jnp.einsum("bnki,bnko->io", *apart((inputs, outputs)), preferred_element_type=jnp.float32)  # noqa: E731

    gate_BNKD = jax.nn.sigmoid(wide(predecessor_BNKD) + wide(hidden_BNKD) + wide(weights.gate_bias_D))
    dmessage_BNKD = (wide(dnew_BNKD) * gate_BNKD).astype(dtype)
    dpredecessor_BNKD = wide(dnew_BNKD) * wide(message_BNKD) * gate_BNKD * (1 - gate_BNKD)
    dhidden_BNKD = dpredecessor_BNKD + dhidden_gate_BNKD
    dbias_D = dhidden_BNKD.sum(axis=(0, 1, 2))
    dpredecessor_BNKD, dhidden_BNKD = dpredecessor_BNKD.astype(dtype), dhidden_BNKD.astype(dtype)

    p_BNKR, to_z = jax.vjp(_features, z_BNKR)
    feature_BNKR, to_features = jax.vjp(functools.partial(_to_successor, dtype=dtype), p_BNKR, anchor_feature_BNR)
    dfeature_BNKR = dpredecessor_BNKD @ cast("gate_predecessor_RD").T + dmessage_BNKD @ cast("message_RD").T
    dp_of_writes_BNKR, danchor_BNR = to_features(dfeature_BNKR)
    (dz_BNKR,) = to_z(dp_BNKR + dp_of_writes_BNKR)

    dnormed_BNKD = dhidden_BNKD @ cast("gate_hidden_DD").T + dz_BNKR @ cast("feature_DR").T
    _, to_stream = jax.vjp(functools.partial(rms_norm, eps=eps), x_BNKD, weights.norm_D)
    dx_BNKD, dnorm_D = to_stream(dnormed_BNKD)
    dweights = InjectionWeights(
        dnorm_D,
        of_weight(normed_BNKD, dz_BNKR),
        of_weight(feature_BNKR, dpredecessor_BNKD),
        of_weight(normed_BNKD, dhidden_BNKD),
        dbias_D,
        of_weight(feature_BNKR, dmessage_BNKD),
    )
    return dnew_BNKD + dx_BNKD, danchor_BNR, InjectionWeights(*(d.astype(w.dtype) for d, w in zip(dweights, weights)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def injection(x_BNKD: jax.Array, anchor_feature_BNR: jax.Array, weights: InjectionWeights, eps: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``pallas_kernels.injection.injection``."""
    return forward(x_BNKD, anchor_feature_BNR, weights, eps)[0]


injection.defvjp(forward, backward)
