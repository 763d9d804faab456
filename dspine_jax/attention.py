"""Masked grouped-query attention with fp32 softmax (the target's attention), and the fused kernel for whole causal rows."""

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


def causal_attention(q_BTHC: jax.Array, k_BTGC: jax.Array, v_BTGC: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """``attend`` where query t sees keys 0..t, without the [T,T] scores where a fused kernel serves it.

    implementation: 'xla' (``attend``), 'cudnn' (cuDNN's flash attention through JAX: bfloat16 or float16 on an NVIDIA GPU; what it does not
    serve raises), or None: 'cudnn' on a GPU for those types, else 'xla'. Its scores and softmax are fp32 too.
    """
    if implementation is None:
        served = q_BTHC.dtype in (jnp.bfloat16, jnp.float16) and q_BTHC.shape[-1] % 8 == 0 and q_BTHC.shape[-1] <= 128
        implementation = "cudnn" if served and jax.default_backend() == "gpu" else "xla"
    if implementation == "cudnn":
        return jax.nn.dot_product_attention(q_BTHC, k_BTGC, v_BTGC, is_causal=True, implementation="cudnn")
    if implementation != "xla":
        raise ValueError(f"implementation {implementation!r} is none of 'xla', 'cudnn'")
    T = q_BTHC.shape[1]
    return attend(q_BTHC, k_BTGC, v_BTGC, jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (q_BTHC.shape[0], T, T)))
