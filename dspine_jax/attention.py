"""Masked grouped-query attention with fp32 softmax (the target's attention)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Finite, so a row that sees nothing stays finite in value and gradient.
MASKED = -1e30


def softmax_visible(scores: jax.Array, visible: jax.Array) -> jax.Array:
    """Softmax over the last axis among visible entries; a row that sees nothing gives zeros.

    scores [..., S] fp32, visible [..., S] bool (broadcastable) -> probabilities [..., S] fp32.
    """
    scores = jnp.where(visible, scores, MASKED)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.where(visible, jnp.exp(scores - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0.0, 1.0, total)


def attend(q_BTHC: jax.Array, k_BSGC: jax.Array, v_BSGC: jax.Array, visible_BTS: jax.Array) -> jax.Array:
    """Grouped-query attention, scale C^-1/2, scores and softmax in fp32.

    q [B,T,H,C], k and v [B,S,G,C] with H a multiple of G, visible [B,T,S] bool
    -> [B,T,H,C] in q's dtype. Queries that see no key return 0.
    """
    B, T, H, C = q_BTHC.shape
    G = k_BSGC.shape[2]
    q = q_BTHC.reshape(B, T, G, H // G, C)
    scores = jnp.einsum("btghc,bsgc->bghts", q, k_BSGC, preferred_element_type=jnp.float32) * C**-0.5
    probs = softmax_visible(scores, visible_BTS[:, None, None])
    out = jnp.einsum("bghts,bsgc->btghc", probs.astype(v_BSGC.dtype), v_BSGC, preferred_element_type=jnp.float32)
    return out.reshape(B, T, H, C).astype(q_BTHC.dtype)
