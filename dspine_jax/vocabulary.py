"""Logits over the target's vocabulary, with padded columns taken out."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30


def vocabulary_logits(hidden: jax.Array, rows_VD: jax.Array, num_tokens: int) -> jax.Array:
    """hidden [...,D] times LM-head rows U [V,D] -> fp32 logits [...,V]; columns >= num_tokens are -1e30.

    A padded column would score exactly 0 and win the argmax whenever every real score is negative.
    """
    logits = jnp.einsum("...d,vd->...v", hidden, rows_VD.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return mask_padded_vocabulary(logits, num_tokens)


def mask_padded_vocabulary(logits: jax.Array, num_tokens: int) -> jax.Array:
    """Set columns >= num_tokens of [...,V] to -1e30 (no-op when the table is not padded)."""
    if num_tokens == logits.shape[-1]:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < num_tokens, logits, MASKED)
