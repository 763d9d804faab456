"""Replay evaluation: the acceptance length of speculative decoding, computed exactly and fast.

At temperature 0 speculative decoding reproduces the greedy continuation whatever the drafter says.
So drafts at *every* position of a stored continuation can be made in parallel, and the chain of
rounds that decoding would have run is then a walk over them (DESIGN 7).

At temperature > 0 the text follows the target's law whatever the drafter says, so a stored *sampled*
continuation y is as good as the one decoding would have produced. Given that slot i commits y_i, its
draft was accepted with probability min(p, q)(y_i) / p(y_i) = min(1, q(y_i) / p(y_i)), p and q on the true
prefix: the rounds of the walk are exact in law.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspine_jax.anchors import make_blocks
from dspine_jax.drafter import Drafter
from dspine_jax.objective import row_context, run_blocks
from dspine_jax.prompt_lookup import NOT_PROPOSED, PromptLookup, PromptLookupConfig, lookups_at, num_proposed
from dspine_jax.sampling import SamplingConfig, probabilities
from dspine_jax.selection import drafting_states, likeliest, pair_table, select_greedy, tail_mixed_logits
from dspine_jax.sequential import correction, sequential_head, text_codes
from dspine_jax.target import Target
from dspine_jax.vocabulary import vocabulary_logits

LOOP_NGRAM = 12


@dataclasses.dataclass(frozen=True)
class Round:
    """One round: where its anchor was, how many drafts it could use, and how many were accepted."""

    anchor: int
    proposed: int
    accepted: int
    tokens: int  # committed: accepted + 1, or accepted when the answer ends inside the draft


def over_anchors(drafter: Drafter, target: Target, tokens_BS: jax.Array, anchors_BN: jax.Array, dtype, anchors_per_chunk: int, use):
    """``use(context, blocks)`` on chunks of anchors; leaves [B,chunk,...] come back as [B,N,...]. Also the target's last hidden states [B,S,D].

    context: ``row_context`` of the rows; blocks: ``Blocks`` of the chunk's anchors, ready for ``run_blocks``.
    """
    config = drafter.config
    out = target(tokens_BS, target_layer_ids=config.target_layer_ids, dtype=dtype)
    context = row_context(drafter, out.tapped_BTE)

    def one_chunk(anchors_Bn):
        all_text, keep = jnp.ones_like(tokens_BS, bool), jnp.ones_like(anchors_Bn, bool)
        blocks = make_blocks(
            tokens_BS,
            all_text,
            anchors_Bn,
            keep,
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            num_predicting_slots=config.num_draft_tokens,
        )
        return use(context, blocks)

    B, N = anchors_BN.shape
    chunks = jax.lax.map(one_chunk, anchors_BN.reshape(B, N // anchors_per_chunk, anchors_per_chunk).swapaxes(0, 1))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(B, N, *x.shape[3:]), chunks), out.hidden_BTD


def _blocks_at(drafter: Drafter, target: Target, tokens_BS: jax.Array, anchors_BN: jax.Array, dtype, anchors_per_chunk: int, use):
    """``over_anchors`` with ``use(block, anchor_feature, blocks)`` of the drafter's own pass."""

    def run(context, blocks):
        return use(*run_blocks(drafter, target, context, blocks, dtype), blocks)

    return over_anchors(drafter, target, tokens_BS, anchors_BN, dtype, anchors_per_chunk, run)


@functools.partial(jax.jit, static_argnames=("drafter_graph", "target_graph", "dtype", "anchors_per_chunk"))
def _draft(drafter_state, target_state, tokens_BS, anchors_BN, *, drafter_graph, target_graph, dtype, anchors_per_chunk):
    drafter, target = nnx.merge(drafter_graph, drafter_state), nnx.merge(target_graph, target_state)

    def use(block, anchor_feature, blocks):
        return select_greedy(drafter, target, block, blocks.noise_ids_BNK[..., 0], anchor_feature)

    return _blocks_at(drafter, target, tokens_BS, anchors_BN, dtype, anchors_per_chunk, use)[0]


@functools.partial(jax.jit, static_argnames=("drafter_graph", "target_graph", "dtype", "anchors_per_chunk"))
def _confidences(drafter_state, target_state, tokens_BS, anchors_BN, *, drafter_graph, target_graph, dtype, anchors_per_chunk):
    drafter, target = nnx.merge(drafter_graph, drafter_state), nnx.merge(target_graph, target_state)

    def use(block, anchor_feature, blocks):
        anchors_Bn = blocks.noise_ids_BNK[..., 0]
        drafts_BnJ = select_greedy(drafter, target, block, anchors_Bn, anchor_feature)
        before_BnJ = jnp.concatenate([anchors_Bn[..., None], drafts_BnJ[..., :-1]], axis=-1)
        return drafts_BnJ, drafter.confidence_logits(drafting_states(drafter.config, block), before_BnJ)

    return _blocks_at(drafter, target, tokens_BS, anchors_BN, dtype, anchors_per_chunk, use)[0]


@functools.partial(jax.jit, static_argnames=("drafter_graph", "target_graph", "dtype", "anchors_per_chunk", "sampling", "policy"))
def _accept_odds(drafter_state, target_state, tokens_BS, anchors_BN, *, drafter_graph, target_graph, dtype, anchors_per_chunk, sampling, policy):
    drafter, target = nnx.merge(drafter_graph, drafter_state), nnx.merge(target_graph, target_state)
    rows_VD, num_tokens = target.output_embedding_VD, target.config.num_tokens

    def use(block, anchor_feature, blocks):
        text_BNJ = blocks.labels_BNJ
        anchors_BN, hidden_BNJD = blocks.noise_ids_BNK[..., 0], drafting_states(drafter.config, block)
        if policy == "point_mass":
            return (select_greedy(drafter, target, block, anchors_BN, anchor_feature) == text_BNJ).astype(jnp.float32)
        if policy == "tail_mixed":
            logits_BNJV = vocabulary_logits(hidden_BNJD, rows_VD, num_tokens)
            mixed_BNJV = tail_mixed_logits(drafter, target, block, logits_BNJV, likeliest(logits_BNJV), blocks.predecessors_BNJ)
            return _pick(probabilities(mixed_BNJV, sampling), text_BNJ)
        if not drafter.config.scores_pairs:
            logits_BNJV = vocabulary_logits(hidden_BNJD, rows_VD, num_tokens)
            if (head := sequential_head(drafter, target)) is not None:
                logits_BNJV = logits_BNJV + correction(head, text_codes(head, hidden_BNJD, blocks.predecessors_BNJ))
            return _pick(probabilities(logits_BNJV, sampling), text_BNJ)
        # The law of a slot given the text before it: the table's row of the previous token, where that is a candidate.
        table_BNJPP, ids_BNJP = pair_table(drafter, target, block, anchors_BN, anchor_feature)
        is_text_BNJP = ids_BNJP == text_BNJ[..., None]
        index_BNJ, known_BNJ = jnp.argmax(is_text_BNJP, axis=-1), is_text_BNJP.any(axis=-1)
        first = ((0, 0), (0, 0), (1, 0))
        row_BNJ = jnp.pad(index_BNJ[..., :-1], first)
        reached_BNJ = jnp.pad(known_BNJ[..., :-1], first, constant_values=True)
        scores_BNJP = jnp.take_along_axis(table_BNJPP, row_BNJ[..., None, None], axis=3)[..., 0, :]
        return jnp.where(reached_BNJ & known_BNJ, _pick(probabilities(scores_BNJP, sampling), index_BNJ), 0.0)

    q_BNJ, hidden_BSD = _blocks_at(drafter, target, tokens_BS, anchors_BN, dtype, anchors_per_chunk, use)
    if policy == "point_mass":
        return q_BNJ  # min(p, 1) / p: accepted wherever it is the text
    following_BS = jnp.roll(tokens_BS, -1, axis=1)
    p_BS = jax.lax.map(lambda row: _pick(probabilities(target.logits(row[0]), sampling), row[1]), (hidden_BSD, following_BS))
    positions_BM = (anchors_BN[..., None] + jnp.arange(q_BNJ.shape[-1])).reshape(len(tokens_BS), -1)
    p_BNJ = jnp.take_along_axis(p_BS, jnp.minimum(positions_BM, tokens_BS.shape[1] - 1), axis=1).reshape(q_BNJ.shape)
    return jnp.minimum(q_BNJ / jnp.maximum(p_BNJ, 1e-30), 1.0)


def _pick(probs: jax.Array, ids: jax.Array) -> jax.Array:
    """Each law's probability of one id. [...,V], [...] -> [...]."""
    return jnp.take_along_axis(probs, ids[..., None], axis=-1)[..., 0]


def compiled(function, drafter: Drafter, target: Target, **static) -> Callable[[np.ndarray, np.ndarray], jax.Array]:
    """``(tokens [B,S], anchors [B,N]) -> ...`` of a jitted function of both models' states and, as keywords, their graphs and ``static``."""
    drafter_graph, drafter_state = nnx.split(drafter)
    target_graph, target_state = nnx.split(target)
    static |= dict(drafter_graph=drafter_graph, target_graph=target_graph)
    return lambda tokens_BS, anchors_BN: function(drafter_state, target_state, jnp.asarray(tokens_BS), jnp.asarray(anchors_BN), **static)


def make_drafting(drafter: Drafter | PromptLookup, target: Target, *, dtype, anchors_per_chunk: int) -> Callable[[np.ndarray, np.ndarray], jax.Array]:
    """``(tokens [B,S], anchors [B,N]) -> drafts [B,N,J]`` at temperature 0, compiled once a shape and architecture.

    N must be a multiple of ``anchors_per_chunk``; only one chunk's logits [B,chunk,J,V] fp32 exist at a time. A prompt lookup has NOT_PROPOSED in slots
    where it finds nothing.
    """
    if isinstance(drafter, PromptLookup):
        return functools.partial(lookups_at, config=drafter.config)
    return compiled(_draft, drafter, target, dtype=jnp.dtype(dtype), anchors_per_chunk=anchors_per_chunk)


def make_confidences(drafter: Drafter, target: Target, *, dtype, anchors_per_chunk: int) -> Callable[[np.ndarray, np.ndarray], tuple[jax.Array, jax.Array]]:
    """``(tokens [B,S], anchors [B,N]) -> (drafts [B,N,J], confidence logits [B,N,J] fp32)`` at temperature 0, along the drafted path.

    What ``confidence.fit_temperatures`` is fitted on: whether a prefix survived is whether the drafts equal the text. Needs a confidence head.
    """
    if not drafter.config.confidence:
        raise ValueError(f"this {drafter.config.method} drafter has no confidence head (drafter.confidence)")
    return compiled(_confidences, drafter, target, dtype=jnp.dtype(dtype), anchors_per_chunk=anchors_per_chunk)


def make_accept_odds(
    drafter: Drafter | PromptLookup, target: Target, sampling: SamplingConfig, policy: str, *, dtype, anchors_per_chunk: int
) -> Callable[[np.ndarray, np.ndarray], jax.Array]:
    """``(tokens [B,S], anchors [B,N]) -> odds [B,N,J] fp32``: with what probability each slot's draft was accepted, given that the text was committed.

    0 where the slot cannot have been proposed, below 0 where a prompt lookup has nothing to propose. Slots past the row's text hold nothing of meaning.
    Shapes as in ``make_drafting``.
    """
    if isinstance(drafter, PromptLookup):
        return functools.partial(_lookup_odds, config=drafter.config)
    static = dict(dtype=jnp.dtype(dtype), anchors_per_chunk=anchors_per_chunk, sampling=sampling, policy=policy)
    return compiled(_accept_odds, drafter, target, **static)


@functools.partial(jax.jit, static_argnames="config")
def _lookup_odds(tokens_BS: jax.Array, anchors_BN: jax.Array, *, config: PromptLookupConfig) -> jax.Array:
    drafts_BNJ = lookups_at(tokens_BS, anchors_BN, config)
    text_BM = (anchors_BN[..., None] + 1 + jnp.arange(drafts_BNJ.shape[-1])).reshape(len(tokens_BS), -1)
    text_BNJ = jnp.take_along_axis(tokens_BS, jnp.minimum(text_BM, tokens_BS.shape[1] - 1), axis=1).reshape(drafts_BNJ.shape)
    return jnp.where(drafts_BNJ == NOT_PROPOSED, -1.0, (drafts_BNJ == text_BNJ).astype(jnp.float32))


def replay_shape(prompts: Sequence, answers: Sequence, *, batch_size: int, anchors_per_chunk: int, every: int = 1) -> dict[str, int]:
    """The one shape that ``replay_rows`` gives all batches of these rows: {"batch_size", "width", "num_anchors", "every"}."""
    up = lambda value, step: -(-max(value, 1) // step) * step  # noqa: E731
    width = up(max(len(p) + len(a) for p, a in zip(prompts, answers)), 64)
    num_anchors = up(-(-max(map(len, answers)) // every), anchors_per_chunk)
    return {"batch_size": batch_size, "width": width, "num_anchors": num_anchors, "every": every}


def replay_rows(
    judging: Callable[[np.ndarray, np.ndarray], jax.Array],
    prompts: Sequence,
    answers: Sequence,
    *,
    batch_size: int,
    width: int,
    num_anchors: int,
    every: int = 1,
    on_rows: Callable[[int], object] = lambda count: None,
) -> list[np.ndarray]:
    """What ``judging`` (``make_drafting``, ``make_accept_odds``) says at every answer position: [answer-1, J] a row, ids or odds.

    prompts, answers: token ids of each row. ``every`` n: only at every n-th position, from the first. A ``judging`` that gives a tree of arrays
    gives a tree a row. ``on_rows`` hears of every batch that is done.
    """
    judged = []
    for begin in range(0, len(prompts), batch_size):
        rows = range(begin, min(begin + batch_size, len(prompts)))
        tokens_BS = np.zeros((batch_size, width), np.int32)
        anchors_BN = np.zeros((batch_size, num_anchors), np.int32)
        counts = [-(-max(len(answers[row]) - 1, 0) // every) for row in rows]
        for b, row in enumerate(rows):
            start, stop = len(prompts[row]), len(prompts[row]) + len(answers[row])
            tokens_BS[b, :start], tokens_BS[b, start:stop] = prompts[row], answers[row]
            anchors_BN[b, : counts[b]] = start + every * np.arange(counts[b])
        of_batch = jax.tree.map(np.asarray, judging(tokens_BS, anchors_BN))
        judged.extend(jax.tree.map(lambda x, b=b, count=count: x[b, :count], of_batch) for b, count in enumerate(counts))
        on_rows(len(rows))
    return judged


def text_after_anchors(answer_T: np.ndarray, num_anchors: int, num_draft_tokens: int) -> np.ndarray:
    """What a perfect drafter drafts: answer[t+1+j] for anchor t and slot j, -1 past the end. -> [num_anchors, J]."""
    padded = np.concatenate([np.asarray(answer_T, np.int64), np.full(num_draft_tokens + 1, -1)])
    return padded[np.arange(num_anchors)[:, None] + 1 + np.arange(num_draft_tokens)]


def walk_rounds(answer_T: np.ndarray, drafts_TJ: np.ndarray, end: int | None = None) -> list[Round]:
    """The rounds that greedy decoding runs over an answer.

    answer [T] token ids, the first of which is the target's own (prefill's token, the first anchor,
    not counted); drafts [>=T-1, J] drafted at anchor answer[t]. ``end`` stops the text early (loop
    onset). A round commits its accepted drafts plus the bonus token; where the answer ends inside the
    draft (an accepted end token, or the length cap) there is no bonus and the proposal counts as cut there.
    """
    right_TJ = drafts_TJ[: len(answer_T)] == text_after_anchors(answer_T, min(len(drafts_TJ), len(answer_T)), drafts_TJ.shape[1])
    return walk_judged(len(answer_T), right_TJ, end, num_proposed(drafts_TJ))


def walk_sampled_rounds(odds_TJ: np.ndarray, uniforms_T: np.ndarray, length: int, end: int | None = None) -> list[Round]:
    """Rounds over a sampled answer of ``length`` tokens: slot j after anchor t is accepted while uniforms[t+1+j] < odds[t,j].

    uniforms [length] in [0, 1), one a token: every token is judged in one round only, so one each is enough, and
    drafters judged with the same uniforms are compared in pairs.
    """
    judged_TJ = text_after_anchors(np.arange(length), len(odds_TJ), odds_TJ.shape[1])
    return walk_judged(length, (judged_TJ >= 0) & (uniforms_T[judged_TJ] < odds_TJ), end, np.cumprod(odds_TJ >= 0, axis=1).sum(axis=1))


def walk_judged(length: int, accept_TJ: np.ndarray, end: int | None, proposed_T: np.ndarray) -> list[Round]:
    """Rounds over an answer of ``length`` tokens, given for every anchor how many slots it proposes and which would be accepted."""
    stop = length if end is None else min(end, length)
    rounds, anchor = [], 0
    while anchor < stop - 1:
        left = stop - 1 - anchor
        proposed = min(int(proposed_T[anchor]), left)
        wrong = np.nonzero(~accept_TJ[anchor, :proposed])[0]
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


def longest_repeat(answer_T: np.ndarray, longest_period: int = 64) -> int:
    """Most tokens in a row that repeat what stood a fixed distance of at most ``longest_period`` before them."""
    best = 0
    for period in range(1, min(longest_period, len(answer_T) - 1) + 1):
        breaks = np.flatnonzero(np.concatenate([[True], answer_T[period:] != answer_T[:-period], [True]]))
        best = max(best, int(np.diff(breaks).max()) - 1)
    return best
