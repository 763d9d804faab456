"""Walks through the transition cache without a step after the other: choose for every possible predecessor at once, then compose the choices."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def greedy_walk(table_BNJPP: jax.Array, candidate_ids_BNJP: jax.Array) -> jax.Array:
    """k_i = argmax_b table[i, k_{i-1}, b]; equal scores go to the lowest token id.

    table [B,N,J,P,P], candidate_ids [B,N,J,P] -> drafted token ids [B,N,J] int32. A row of NaN gives some candidate.
    """
    choice_BNJ = follow(best_candidates(table_BNJPP, candidate_ids_BNJP))
    return jnp.take_along_axis(candidate_ids_BNJP, choice_BNJ[..., None], axis=-1)[..., 0]


def best_candidates(table: jax.Array, candidate_ids: jax.Array) -> jax.Array:
    """The best candidate after each predecessor: table [...,J,P,P], candidate_ids [...,J,P] -> columns [...,J,P] int32."""
    column = jax.lax.broadcasted_iota(jnp.int32, table.shape, table.ndim - 1)
    ids = jnp.broadcast_to(candidate_ids[..., None, :], table.shape)

    def better(a, b):
        first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] <= b[1]))
        return tuple(jnp.where(first, x, y) for x, y in zip(a, b))

    worst = jnp.float32(-jnp.inf), jnp.int32(jnp.iinfo(jnp.int32).max), jnp.int32(0)
    return jax.lax.reduce((table, ids, column), worst, better, (table.ndim - 1,))[2]


def follow(choice: jax.Array) -> jax.Array:
    """Candidate of every slot, from the one that each predecessor leads to: choice [...,J,P] int32 -> [...,J] int32.

    Slot 1's predecessors are all the anchor, so the walk starts at any of them. Maps compose in any grouping: log2(J) gathers instead of J dependent steps.
    """
    compose = lambda early, late: jnp.take_along_axis(late, early, axis=-1)  # noqa: E731
    return jax.lax.associative_scan(compose, choice, axis=choice.ndim - 2)[..., 0]
