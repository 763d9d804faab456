"""Injection with a gradient by hand, in plain jnp: for training on any platform and any mesh.

Autodiff of the reference keeps fp32 copies of gates, messages and features of every slot and layer for the backward pass. Here the stream, its norm and
the products in the stream's own type are kept, which the forward pass has in memory anyway; everything between them is computed again.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from dspine_jax.layers import rms_norm
from pallas_kernels.injection import ref
from pallas_kernels.injection.ref import InjectionWeights, unit


def _to_successor(p_BNKR: jax.Array, anchor_feature_BNR: jax.Array, dtype) -> jax.Array:
    """What each slot reads: 0, the anchor's feature, then p of the slot before."""
    anchor_BN1R = anchor_feature_BNR[:, :, None].astype(dtype)
    return jnp.concatenate([jnp.zeros_like(anchor_BN1R), anchor_BN1R, p_BNKR[:, :, 1:-1].astype(dtype)], axis=2)


def _features(z_BNKR: jax.Array) -> jax.Array:
    return z_BNKR.shape[-1] ** 0.5 * unit(z_BNKR)


def _joined(weights: InjectionWeights, dtype) -> tuple[jax.Array, jax.Array]:
    """[Gh | A] [D,D+R] and [Gp | M] [R,2D]: what shares an input is one product, forward and backward, and wide enough to fill a device."""
    join = lambda *parts: jnp.concatenate([part.astype(dtype) for part in parts], axis=1)  # noqa: E731
    return join(weights.gate_hidden_DD, weights.feature_DR), join(weights.gate_predecessor_RD, weights.message_RD)


def _forward(x_BNKD, anchor_feature_BNR, weights: InjectionWeights, eps: float):
    dtype = x_BNKD.dtype
    D = x_BNKD.shape[-1]
    of_hidden, of_feature = _joined(weights, dtype)
    normed_BNKD = rms_norm(x_BNKD, weights.norm_D, eps)
    hidden_side = normed_BNKD @ of_hidden
    hidden_BNKD, z_BNKR = jnp.split(hidden_side, [D], axis=-1)
    p_BNKR = _features(z_BNKR)
    # Slot 0 reads zeros and so keeps its stream bit for bit; a product over K slots needs no slices, which would be copies.
    feature_BNKR = _to_successor(p_BNKR, anchor_feature_BNR, dtype)
    feature_side = feature_BNKR @ of_feature
    predecessor_BNKD, message_BNKD = jnp.split(feature_side, 2, axis=-1)
    hidden_gate_BNKD = hidden_BNKD.astype(jnp.float32) + weights.gate_bias_D.astype(jnp.float32)
    gate_BNKD = jax.nn.sigmoid(predecessor_BNKD.astype(jnp.float32) + hidden_gate_BNKD)
    new_BNKD = (x_BNKD.astype(jnp.float32) + gate_BNKD * message_BNKD.astype(jnp.float32)).astype(dtype)
    return (new_BNKD, p_BNKR, hidden_gate_BNKD), (x_BNKD, anchor_feature_BNR, weights, normed_BNKD, hidden_side, feature_side)


def _backward(eps: float, residuals, cotangents):
    x_BNKD, anchor_feature_BNR, weights, normed_BNKD, hidden_side, feature_side = residuals
    dnew_BNKD, dp_BNKR, dhidden_gate_BNKD = cotangents
    dtype = x_BNKD.dtype
    D = x_BNKD.shape[-1]
    of_hidden, of_feature = _joined(weights, dtype)
    hidden_BNKD, z_BNKR = jnp.split(hidden_side, [D], axis=-1)
    predecessor_BNKD, message_BNKD = jnp.split(feature_side, 2, axis=-1)
    wide = lambda x: x.astype(jnp.float32)  # noqa: E731
    of_weight = lambda inputs, outputs: jnp.einsum("bnki,bnko->io", inputs, outputs, preferred_element_type=jnp.float32)  # noqa: E731

    gate_BNKD = jax.nn.sigmoid(wide(predecessor_BNKD) + wide(hidden_BNKD) + wide(weights.gate_bias_D))
    dmessage_BNKD = (wide(dnew_BNKD) * gate_BNKD).astype(dtype)
    dpredecessor_BNKD = wide(dnew_BNKD) * wide(message_BNKD) * gate_BNKD * (1 - gate_BNKD)
    dhidden_BNKD = dpredecessor_BNKD + dhidden_gate_BNKD
    dbias_D = dhidden_BNKD.sum(axis=(0, 1, 2))
    dfeature_side = jnp.concatenate([dpredecessor_BNKD.astype(dtype), dmessage_BNKD], axis=-1)

    p_BNKR, to_z = jax.vjp(_features, z_BNKR)
    feature_BNKR, to_features = jax.vjp(functools.partial(_to_successor, dtype=dtype), p_BNKR, anchor_feature_BNR)
    dp_of_writes_BNKR, danchor_BNR = to_features(dfeature_side @ of_feature.T)
    (dz_BNKR,) = to_z(dp_BNKR + dp_of_writes_BNKR)

    dhidden_side = jnp.concatenate([dhidden_BNKD.astype(dtype), dz_BNKR], axis=-1)
    _, to_stream = jax.vjp(functools.partial(rms_norm, eps=eps), x_BNKD, weights.norm_D)
    dx_BNKD, dnorm_D = to_stream(dhidden_side @ of_hidden.T)
    dgate_hidden_DD, dfeature_DR = jnp.split(of_weight(normed_BNKD, dhidden_side), [D], axis=1)
    dgate_predecessor_RD, dmessage_RD = jnp.split(of_weight(feature_BNKR, dfeature_side), 2, axis=1)
    dweights = InjectionWeights(dnorm_D, dfeature_DR, dgate_predecessor_RD, dgate_hidden_DD, dbias_D, dmessage_RD)
    return dnew_BNKD + dx_BNKD, danchor_BNR, InjectionWeights(*(d.astype(w.dtype) for d, w in zip(dweights, weights)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def injection(x_BNKD: jax.Array, anchor_feature_BNR: jax.Array, weights: InjectionWeights, eps: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``pallas_kernels.injection.injection``. Undifferentiated it is the reference: decoding must not copy weights to join them."""
    return ref.injection(x_BNKD, anchor_feature_BNR, weights, eps=eps)


injection.defvjp(_forward, _backward)
