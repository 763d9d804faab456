"""Exact top-P through the maxima of chunks: ``lax.top_k`` then sees V / 128 and 128 P numbers a row instead of V.

The P best lie in the P chunks with the largest maxima, ties to the lower chunk: were one outside, each of those P chunks would hold a number that comes
before it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspine_jax.vocabulary import vocabulary_logits

CHUNK = 128


def topk_logits(hidden: jax.Array, rows_VD: jax.Array, num_candidates: int, *, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """See ``pallas_kernels.topk_logits.topk_logits``; plain XLA, any platform."""
    return topk(vocabulary_logits(hidden, rows_VD, num_tokens), num_candidates)


def topk(logits: jax.Array, num_candidates: int) -> tuple[jax.Array, jax.Array]:
    """logits [...,V] -> (P largest falling, their ids int32), [...,P] each; ties to the lowest id, as ``lax.top_k``."""
    V, P = logits.shape[-1], num_candidates
    if V <= P * CHUNK:
        values, ids = jax.lax.top_k(logits, P)
        return values, ids.astype(jnp.int32)
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, -V % CHUNK)]
    chunks = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(*logits.shape[:-1], -1, CHUNK)
    chosen = _sorted(jax.lax.top_k(chunks.max(axis=-1), P)[1].astype(jnp.int32))  # in order of ids, for the second top_k breaks ties by place
    kept = jnp.take_along_axis(chunks, chosen[..., None], axis=-2)
    values, place = jax.lax.top_k(kept.reshape(*logits.shape[:-1], P * CHUNK), P)
    place = place.astype(jnp.int32)
    return values, jnp.take_along_axis(chosen, place // CHUNK, axis=-1) * CHUNK + place % CHUNK


def _sorted(ids: jax.Array) -> jax.Array:
    """Few different numbers a row [...,P] in rising order, by counting: XLA would launch a sort."""
    rank = jnp.sum(ids[..., None, :] < ids[..., None], axis=-1)
    return jnp.sum(jnp.where(rank[..., None, :] == jnp.arange(ids.shape[-1])[:, None], ids[..., None, :], 0), axis=-1)
