"""Reference of the LM head with softmax weights: logits in memory, then one pass over them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspine_jax.vocabulary import vocabulary_logits


def head_softmax(hidden_BTD: jax.Array, rows_VD: jax.Array, origin_BT: jax.Array, *, num_tokens: int, largest: float):
    """See ``pallas_kernels.head_softmax.head_softmax``."""
    logits = vocabulary_logits(hidden_BTD, rows_VD, num_tokens)
    weights = jnp.exp(jnp.minimum(logits - origin_BT[..., None], largest))
    total, best = sum_and_argmax(weights, logits)
    return weights.astype(hidden_BTD.dtype), total, best


def sum_and_argmax(weights: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum of weights, and lowest id of the largest logit, over the last axis in one pass. Both [...,V] fp32 -> ([...] fp32, [...] int32)."""

    def combine(a, b):
        a_first = (a[1] > b[1]) | ((a[1] == b[1]) & (a[2] < b[2]))
        return a[0] + b[0], jnp.where(a_first, a[1], b[1]), jnp.where(a_first, a[2], b[2])

    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    start = jnp.float32(0), jnp.float32(-jnp.inf), jnp.int32(jnp.iinfo(jnp.int32).max)
    total, _, best = jax.lax.reduce((weights, logits, ids), start, combine, (logits.ndim - 1,))
    return total, best
