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
    """Scores of every (predecessor, candidate) pair of every drafted slot in one parallel pass.

    ``table[.., i, a, b] = <U[C_i[b]], RMSNorm_out(x_i(C_{i-1}[a]))>`` where x_i(v) is the last write
    of slot i redone with the decoded predecessor v. Slot 1's predecessor is the anchor: all its
    rows are equal.

    J = K-1 drafted slots. pre_write, hidden_gate [B,N,K,D] of the last injection; candidate_ids
    [B,N,J,P]; anchor_feature T[anchor] [B,N,R]; candidate_feature T[C] [B,N,J,P,R]; rows U [V,D]
    -> table [B,N,J,P,P] fp32, axes (slot, predecessor, candidate).
    """
    P = candidate_ids_BNJP.shape[-1]
    anchor = jnp.broadcast_to(anchor_feature_BNR[:, :, None, None], candidate_feature_BNJPR[:, :, :1].shape)
    predecessor = jnp.concatenate([anchor.astype(candidate_feature_BNJPR.dtype), candidate_feature_BNJPR[:, :, :-1]], axis=2)
    stream = jnp.broadcast_to(pre_write_BNKD[:, :, 1:, None], predecessor.shape[:3] + (P, pre_write_BNKD.shape[-1]))
    written = write(stream, hidden_gate_BNKD[:, :, 1:, None], predecessor, weights)
    normed = rms_norm(written, out_norm_D, eps)
    candidates = jnp.take(rows_VD, candidate_ids_BNJP, axis=0).astype(normed.dtype)
    return jnp.einsum("bnjad,bnjcd->bnjac", normed, candidates, preferred_element_type=jnp.float32)


def greedy_walk(table_BNJPP: jax.Array, candidate_ids_BNJP: jax.Array) -> jax.Array:
    """k_i = argmax_b table[i, k_{i-1}, b]; equal scores go to the lowest token id.

    table [B,N,J,P,P], candidate_ids [B,N,J,P] -> drafted token ids [B,N,J] int32.
    """

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
