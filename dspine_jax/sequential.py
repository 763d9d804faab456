"""Heads that correct a draft's logits by the drafts before it: run along the true text in training, slot by slot in decoding.

Such a head gives every draft a code, and ``corrected logits = u + code table^T`` with a trained table [V,R]: one more product
beside the LM head's, so nothing of size V is ever a function of pairs of tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dspine_jax.drafter import Drafter
from dspine_jax.gru_head import GRUHead
from dspine_jax.markov import MarkovHead
from dspine_jax.target import Target

SequentialHead = MarkovHead | GRUHead


def sequential_head(drafter: Drafter, target: Target) -> SequentialHead | None:
    """The head by which a DSpark or Domino drafter corrects its logits; None for drafters without one."""
    if drafter.config.markov is not None:
        return drafter.markov_head
    if drafter.config.gru is not None:
        return GRUHead(drafter.prefix_gru, drafter.embed_proj, target.input_embedding_VD)
    return None


def text_codes(head: SequentialHead, hidden_BNJD: jax.Array, predecessors_BNJ: jax.Array) -> jax.Array:
    """Codes of all drafts where each follows a known token: hidden [B,N,J,D], predecessors [B,N,J] -> [B,N,J,R]."""
    state = head.first_state(predecessors_BNJ.shape[:2])
    J = predecessors_BNJ.shape[2]
    if not head.recurrent:
        return head.step(state, hidden_BNJD, predecessors_BNJ, jnp.arange(J))[1]
    slots_first = (jnp.moveaxis(hidden_BNJD, 2, 0), jnp.moveaxis(predecessors_BNJ, 2, 0), jnp.arange(J))
    return jnp.moveaxis(jax.lax.scan(lambda state, draft: head.step(state, *draft), state, slots_first)[1], 0, 2)


def correction(head: SequentialHead, codes: jax.Array) -> jax.Array:
    """What codes [...,R] add to the logits: [...,V] fp32."""
    return jnp.einsum("...r,vr->...v", codes, head.table_VR.astype(codes.dtype), preferred_element_type=jnp.float32)


def walk(
    head: SequentialHead,
    hidden_BJD: jax.Array,
    logits_BJV: jax.Array,
    anchor_B: jax.Array,
    choose: Callable[[jax.Array, jax.Array], tuple[jax.Array, object]],
) -> tuple[jax.Array, object]:
    """Draft left to right, each token chosen from logits corrected by the tokens chosen before it.

    hidden [B,J,D], base logits [B,J,V] fp32 (padded columns masked), anchor [B]. ``choose(draft index, corrected [B,V])`` gives
    the token [B] and what is to be kept of it -> (tokens [B,J] int32, the kept things with J as axis 1).
    """

    def one(carry, draft):
        state, previous_B = carry
        hidden_BD, logits_BV, index = draft
        state, code_BR = head.step(state, hidden_BD, previous_B, index)
        token_B, kept = choose(index, logits_BV + correction(head, code_BR))
        return (state, token_B), (token_B, kept)

    first = head.first_state(anchor_B.shape), anchor_B.astype(jnp.int32)
    drafts = jnp.moveaxis(hidden_BJD, 1, 0), jnp.moveaxis(logits_BJV, 1, 0), jnp.arange(logits_BJV.shape[1])
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), jax.lax.scan(one, first, drafts)[1])


def walk_greedily(head: SequentialHead, hidden_BJD: jax.Array, logits_BJV: jax.Array, anchor_B: jax.Array) -> jax.Array:
    """The best token of every draft after the best ones before it, ties to the lowest id. -> [B,J] int32."""
    best = lambda index, logits_BV: (jnp.argmax(logits_BV, axis=-1).astype(jnp.int32), None)  # noqa: E731
    return walk(head, hidden_BJD, logits_BJV, anchor_B, best)[0]
