"""From block hidden states to drafted tokens, at temperature 0."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspine_jax.drafter import BlockOutput, Drafter
from pallas_kernels.topk_logits import topk_logits
from pallas_kernels.transition import greedy_walk, transition_table


def anchor_features(drafter: Drafter, rows_VD: jax.Array, tokens: jax.Array) -> jax.Array | None:
    """T of token ids [...] -> [...,R] fp32, or None for a drafter without injection."""
    if drafter.config.injection is None:
        return None
    return drafter.transfer(jnp.take(rows_VD, tokens, axis=0))


def select_greedy(
    drafter: Drafter, block: BlockOutput, rows_VD: jax.Array, anchor_feature_BNR: jax.Array | None, *, num_tokens: int
) -> jax.Array:
    """Draft slots 1..K-1. Scores compared in fp32, ties to the lowest id.

    Without a redone last write every slot takes its own argmax; with it the transition cache is
    built over the top-P candidates of each slot and walked. -> token ids [B,N,K-1] int32.
    """
    hidden_BNJD = block.hidden_BNKD[:, :, 1:]
    if not drafter.config.redoes_last_write:
        return topk_logits(hidden_BNJD, rows_VD, 1, num_tokens=num_tokens)[1][..., 0]
    injection = drafter.config.injection
    _, ids_BNJP = topk_logits(hidden_BNJD, rows_VD, injection.num_candidates, num_tokens=num_tokens)
    table_BNJPP = transition_table(
        block.pre_write_BNKD,
        block.hidden_gate_BNKD,
        ids_BNJP,
        anchor_feature_BNR,
        anchor_features(drafter, rows_VD, ids_BNJP),
        rows_VD,
        drafter.injections[str(drafter.config.num_layers - 1)].weights,
        drafter.norm.weight[...],
        eps=drafter.config.rms_norm_eps,
    )
    return greedy_walk(table_BNJPP, ids_BNJP)
