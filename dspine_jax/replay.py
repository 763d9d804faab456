"""Replay evaluation: the acceptance length of greedy speculative decoding, computed exactly and fast.

At temperature 0 speculative decoding reproduces the greedy continuation whatever the drafter says.
So drafts at *every* position of a stored continuation can be made in parallel, and the chain of
rounds that decoding would have run is then a walk over them (DESIGN 7).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspine_jax.anchors import make_blocks
from dspine_jax.drafter import Drafter
from dspine_jax.objective import row_context, run_blocks
from dspine_jax.selection import select_greedy
from dspine_jax.target import Target

LOOP_NGRAM = 12


@dataclasses.dataclass(frozen=True)
class Round:
    """One round: where its anchor was, how many drafts it could use, and how many were accepted."""

    anchor: int
    proposed: int
    accepted: int
    tokens: int  # committed: accepted + 1, or accepted when the answer ends inside the draft


@functools.partial(jax.jit, static_argnames=("drafter_graph", "target_graph", "dtype", "anchors_per_chunk"))
def _draft(drafter_state, target_state, tokens_BS, anchors_BN, *, drafter_graph, target_graph, dtype, anchors_per_chunk):
    drafter, target = nnx.merge(drafter_graph, drafter_state), nnx.merge(target_graph, target_state)
    config = drafter.config
    tapped_BSE = target(tokens_BS, target_layer_ids=config.target_layer_ids, dtype=dtype).tapped_BTE
    context = row_context(drafter, tapped_BSE)

    def one_chunk(anchors_Bn):
        all_text, keep = jnp.ones_like(tokens_BS, bool), jnp.ones_like(anchors_Bn, bool)
        blocks = make_blocks(tokens_BS, all_text, anchors_Bn, keep, block_size=config.block_size, mask_token_id=config.mask_token_id)
        block, anchor_feature = run_blocks(drafter, target, context, blocks, dtype)
        return select_greedy(drafter, block, target.output_embedding_VD, anchor_feature, num_tokens=target.config.num_tokens)

    B, N = anchors_BN.shape
    chunks = anchors_BN.reshape(B, N // anchors_per_chunk, anchors_per_chunk).swapaxes(0, 1)
    return jax.lax.map(one_chunk, chunks).swapaxes(0, 1).reshape(B, N, config.num_draft_tokens)


def make_drafting(drafter: Drafter, target: Target, *, dtype, anchors_per_chunk: int) -> Callable[[np.ndarray, np.ndarray], jax.Array]:
    """``(tokens [B,S], anchors [B,N]) -> drafts [B,N,K-1]`` at temperature 0, compiled once a shape and architecture.

    N must be a multiple of ``anchors_per_chunk``; only one chunk's logits [B,chunk,K-1,V] fp32 exist at a time.
    """
    drafter_graph, drafter_state = nnx.split(drafter)
    target_graph, target_state = nnx.split(target)
    static = dict(drafter_graph=drafter_graph, target_graph=target_graph, dtype=jnp.dtype(dtype), anchors_per_chunk=anchors_per_chunk)
    return lambda tokens_BS, anchors_BN: _draft(drafter_state, target_state, jnp.asarray(tokens_BS), jnp.asarray(anchors_BN), **static)


def walk_rounds(answer_T: np.ndarray, drafts_TJ: np.ndarray, end: int | None = None) -> list[Round]:
    """The rounds that greedy decoding runs over an answer.

    answer [T] token ids, the first of which is the target's own (prefill's token, the first anchor,
    not counted); drafts [>=T-1, J] drafted at anchor answer[t]. ``end`` stops the text early (loop
    onset). A round commits its accepted drafts plus the bonus token; where the answer ends inside the
    draft (an accepted end token, or the length cap) there is no bonus and the proposal counts as cut there.
    """
    stop = len(answer_T) if end is None else min(end, len(answer_T))
    rounds, anchor = [], 0
    while anchor < stop - 1:
        left = stop - 1 - anchor
        proposed = min(drafts_TJ.shape[1], left)
        wrong = np.nonzero(drafts_TJ[anchor, :proposed] != answer_T[anchor + 1 : anchor + 1 + proposed])[0]
        accepted = int(wrong[0]) if len(wrong) else proposed
        rounds.append(Round(anchor, proposed, accepted, min(accepted + 1, left)))
        anchor += rounds[-1].tokens
    return rounds


def loop_onset(answer_T: np.ndarray) -> int:
    """Smallest t with answer[t:t+12] == answer[s:s+12] for some s < t; the answer's length if it never loops."""
    seen: set[bytes] = set()
    for t in range(len(answer_T) - LOOP_NGRAM + 1):
        gram = np.ascontiguousarray(answer_T[t : t + LOOP_NGRAM]).tobytes()
        if gram in seen:
            return t
        seen.add(gram)
    return len(answer_T)
