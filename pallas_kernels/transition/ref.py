"""Reference of the transition cache: the P x P table of every slot, and its greedy walk (DESIGN 5.5)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspine_jax.layers import rms_norm
from pallas_kernels.injection import InjectionWeights, write


def transition_table(
    pre_write_BNKD: jax.Array,
    hidden_gate_BNKD: jax.Array,
    candidate_ids_BNJP: jax.Array,
    anchor_feature_BNR: jax.Array,
    candidate_feature_BNJPR: jax.Array,
    rows_VD: jax.Array,
    weights: InjectionWeights,
    out_norm_D: jax.Array,
    *,
    eps: float,
) -> jax.Array:
    """See ``pallas_kernels.transition.transition_table``."""
    P = candidate_ids_BNJP.shape[-1]
    predecessor = predecessor_features(anchor_feature_BNR, candidate_feature_BNJPR)
    stream = jnp.broadcast_to(pre_write_BNKD[:, :, 1:, None], predecessor.shape[:3] + (P, pre_write_BNKD.shape[-1]))
    written = write(stream, hidden_gate_BNKD[:, :, 1:, None], predecessor, weights)
    normed = rms_norm(written, out_norm_D, eps)
    candidates = jnp.take(rows_VD, candidate_ids_BNJP, axis=0).astype(normed.dtype)
    return jnp.einsum("bnjad,bnjcd->bnjac", normed, candidates, preferred_element_type=jnp.float32)


def predecessor_features(anchor_feature_BNR: jax.Array, candidate_feature_BNJPR: jax.Array) -> jax.Array:
    """T of each slot's possible predecessors [B,N,J,P,R]: the candidates of the slot before, for slot 1 the anchor P times."""
    anchor = jnp.broadcast_to(anchor_feature_BNR[:, :, None, None], candidate_feature_BNJPR[:, :, :1].shape)
    return jnp.concatenate([anchor.astype(candidate_feature_BNJPR.dtype), candidate_feature_BNJPR[:, :, :-1]], axis=2)


def greedy_walk(table_BNJPP: jax.Array, candidate_ids_BNJP: jax.Array) -> jax.Array:
    """See ``pallas_kernels.transition.greedy_walk``; one slot after the other."""

    def pick(row_BN, slot):
        table_BNPP, ids_BNP = slot
        scores = jnp.take_along_axis(table_BNPP, row_BN[..., None, None], axis=2)[:, :, 0]
        best = jnp.max(scores, axis=-1, keepdims=True)
        token = jnp.min(jnp.where(scores == best, ids_BNP, jnp.iinfo(jnp.int32).max), axis=-1)
        choice = jnp.argmax(ids_BNP == token[..., None], axis=-1)
        return choice, token

    slots = (jnp.moveaxis(table_BNJPP, 2, 0), jnp.moveaxis(candidate_ids_BNJP, 2, 0))
    start = jnp.zeros(table_BNJPP.shape[:2], jnp.int32)
    _, tokens_JBN = jax.lax.scan(pick, start, slots)
    return jnp.moveaxis(tokens_JBN, 0, 2)
