"""Reference of block attention: block queries against a shared context plus their own block."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspine_jax.attention import softmax_visible


def block_attention(
    q_BNKHC: jax.Array,
    ctx_k_BSGC: jax.Array,
    ctx_v_BSGC: jax.Array,
    block_k_BNKGC: jax.Array,
    block_v_BNKGC: jax.Array,
    context_len_BN: jax.Array,
    *,
    causal: bool,
) -> jax.Array:
    """Each block sees context positions j < context_len and its own slots; blocks never see each other.

    Strictly below the anchor: the anchor's own target state does not exist when drafting. With
    ``causal`` slot i sees own slots <= i, else all of them. Scores and softmax in fp32, scale C^-1/2.

    q [B,N,K,H,C]; ctx_k, ctx_v [B,S,G,C]; block_k, block_v [B,N,K,G,C]; context_len [B,N] int
    -> [B,N,K,H,C] in q's dtype. (BASELINES 1.1, 2.2)
    """
    B, N, K, H, C = q_BNKHC.shape
    S, G = ctx_k_BSGC.shape[1:3]
    q = q_BNKHC.reshape(B, N, K, G, H // G, C)
    ctx_scores = jnp.einsum("bnkghc,bsgc->bnghks", q, ctx_k_BSGC, preferred_element_type=jnp.float32)
    own_scores = jnp.einsum("bnkghc,bnjgc->bnghkj", q, block_k_BNKGC, preferred_element_type=jnp.float32)
    scores = jnp.concatenate([ctx_scores, own_scores], axis=-1) * C**-0.5
    ctx_visible = jnp.broadcast_to((jnp.arange(S) < context_len_BN[..., None])[:, :, None, :], (B, N, K, S))
    own_visible = jnp.tril(jnp.ones((K, K), bool)) if causal else jnp.ones((K, K), bool)
    visible = jnp.concatenate([ctx_visible, jnp.broadcast_to(own_visible, (B, N, K, K))], axis=-1)
    probs = softmax_visible(scores, visible[:, :, None, None]).astype(ctx_v_BSGC.dtype)
    out = jnp.einsum("bnghks,bsgc->bnkghc", probs[..., :S], ctx_v_BSGC, preferred_element_type=jnp.float32)
    out = out + jnp.einsum("bnghkj,bnjgc->bnkghc", probs[..., S:], block_v_BNKGC, preferred_element_type=jnp.float32)
    return out.reshape(B, N, K, H, C).astype(q_BNKHC.dtype)
