"""Reference of the LM head with top-P: logits over all rows, then the P best."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspine_jax.vocabulary import vocabulary_logits


def topk_logits(hidden: jax.Array, rows_VD: jax.Array, num_candidates: int, *, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Top-P of fp32 logits ``hidden U^T`` among the first ``num_tokens`` rows, ties to the lowest id.

    hidden [...,D], rows U [V,D] -> (values [...,P] fp32 falling, ids [...,P] int32).
    """
    values, ids = jax.lax.top_k(vocabulary_logits(hidden, rows_VD, num_tokens), num_candidates)
    return values, ids.astype(jnp.int32)
