"""Lossless decoding: one jitted loop of rounds, for a drafter or for the target alone.

A round drafts a block after the newest token (the anchor), verifies it in one target pass, keeps
the accepted prefix plus one token from the target, and moves the length counters: rollback is a
counter. Rows accept different lengths and live as if alone; nothing leaves the device inside.

Greedy output equals plain greedy decoding of the same target (fp32). At temperature > 0 a draft is
accepted with probability min(1, p/q) and replaced from the residual max(p - q, 0), where q is the
law it was really drawn from: the output then follows the target's law exactly (BASELINES 7).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from dspine_jax.drafter import Drafter
from dspine_jax.kv_cache import KVCache
from dspine_jax.prompt_lookup import PromptLookup, TextHistory
from dspine_jax.sampling import SamplingConfig, draw, probabilities, residual, sample
from dspine_jax.selection import (
    Draft,
    anchor_features,
    cut_by_confidence,
    drafting_states,
    pair_table,
    point_mass,
    select_greedy,
    select_independent,
    select_on_candidates,
    select_sequentially,
    select_tail_mixed,
    slot_keys,
)
from dspine_jax.sequential import sequential_head
from dspine_jax.target import Target
from dspine_jax.transfer import Frozen, token_table
from dspine_jax.vocabulary import vocabulary_logits

Policy = Literal["own", "tail_mixed", "point_mass"]


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
    """What is compiled into the loop.

    num_draft_tokens: proposals a round, at most what the drafter was trained for; 0 is plain decoding. policy at
    temperature > 0: 'own' samples the drafter's law (DSpine, DFlash2: on its candidates), 'tail_mixed' lets their
    law reach the whole vocabulary, 'point_mass' proposes the greedy draft. dtype: compute precision.
    confidence_threshold: a confidence head ends the proposal before the first draft below it; 0 proposes all.
    """

    num_draft_tokens: int
    sampling: SamplingConfig = SamplingConfig()
    policy: Policy = "own"
    stop_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    confidence_threshold: float = 0.0

    def check(self, drafter: Drafter | PromptLookup | None) -> None:
        """Refuse settings the drafter cannot serve. Raises ValueError."""
        if self.num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens {self.num_draft_tokens} must be 0 (plain decoding) or positive")
        if self.num_draft_tokens and drafter is None:
            raise ValueError(f"num_draft_tokens {self.num_draft_tokens} needs a drafter; without one use 0")
        if drafter is not None and self.num_draft_tokens > drafter.config.num_draft_tokens:
            raise ValueError(f"num_draft_tokens {self.num_draft_tokens} exceeds the {drafter.config.num_draft_tokens} this drafter was trained for")
        if not 0.0 <= self.confidence_threshold <= 1.0:
            raise ValueError(f"confidence_threshold {self.confidence_threshold} must lie in [0, 1]; 0 proposes every draft")
        if self.confidence_threshold and not (drafter is not None and drafter.config.confidence):
            raise ValueError(f"confidence_threshold {self.confidence_threshold} needs a drafter with a confidence head (drafter.confidence); use 0")
        if drafter is not None and self.policy not in drafter.config.policies:
            raise ValueError(f"policy {self.policy!r} cannot be served by a {drafter.config.method} drafter; it can: {', '.join(drafter.config.policies)}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything the loop carries. T: room for output tokens.

    target_cache, draft_cache: preallocated, lengths = tokens fed; anchor_B: newest token, not fed yet;
    tokens_BT, count_B: output so far; limit_B: most tokens a row may produce; finished_B; rounds_B;
    accepted_BT, proposed_BT, committed_BT: the log, one entry a round; keys_B: random key a row.
    """

    target_cache: KVCache
    draft_cache: KVCache | TextHistory | None
    anchor_B: jax.Array
    tokens_BT: jax.Array
    count_B: jax.Array
    limit_B: jax.Array
    finished_B: jax.Array
    rounds_B: jax.Array
    accepted_BT: jax.Array
    proposed_BT: jax.Array
    committed_BT: jax.Array
    keys_B: jax.Array


def start(
    drafter: Drafter | PromptLookup | None,
    target: Target,
    prompts_BS: jax.Array,
    lengths_B: jax.Array,
    limit_B: jax.Array,
    keys_B: jax.Array,
    room: int,
    settings: DecodeSettings,
    capacity: int | None = None,
) -> DecodeState:
    """Prefill right-padded prompts and choose the first token, which is the first anchor.

    prompts [B,S] int, lengths [B] >= 1, limit [B] output tokens a row may have (0: finished at once),
    keys [B] typed random keys, room >= limit. The caches hold ``capacity`` rows; by default S + room + block, so no round
    can run over their end.
    """
    B, S = prompts_BS.shape
    dtype = jnp.dtype(settings.dtype)
    capacity = S + room + settings.num_draft_tokens + 1 if capacity is None else capacity
    taps = drafter.config.target_layer_ids if drafter is not None else ()
    out = target.prefill(prompts_BS, lengths_B, capacity=capacity, target_layer_ids=taps, dtype=dtype)
    last_BD = jnp.take_along_axis(out.hidden_BTD, (lengths_B - 1)[:, None, None], axis=1)[:, 0]
    first_B = sample(slot_keys(keys_B, 0), target.logits(last_BD), settings.sampling)
    draft_cache = None
    if drafter is not None:
        draft_cache = extend_cache(drafter, drafter.empty_cache(B, capacity, dtype), prompts_BS, out.tapped_BTE, lengths_B)
    zeros = jnp.zeros((B, room), jnp.int32)
    count_B = jnp.minimum(limit_B, 1)
    return DecodeState(
        target_cache=out.cache,
        draft_cache=draft_cache,
        anchor_B=first_B,
        tokens_BT=zeros.at[:, 0].set(jnp.where(count_B > 0, first_B, 0)),
        count_B=count_B,
        limit_B=limit_B,
        finished_B=(count_B >= limit_B) | _is_stop(first_B, settings),
        rounds_B=jnp.zeros((B,), jnp.int32),
        accepted_BT=zeros,
        proposed_BT=zeros,
        committed_BT=zeros,
        keys_B=keys_B,
    )


def idle(drafter: Drafter | PromptLookup | None, target: Target, batch: int, capacity: int, room: int, settings: DecodeSettings) -> DecodeState:
    """A state whose rows are all finished and empty, for ``insert`` to fill."""
    c, dtype = target.config, jnp.dtype(settings.dtype)
    zeros_B, zeros_BT = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, room), jnp.int32)
    return DecodeState(
        target_cache=KVCache.empty(batch, capacity, c.num_layers, c.num_kv_heads, c.head_dim, dtype),
        draft_cache=None if drafter is None else drafter.empty_cache(batch, capacity, dtype),
        anchor_B=zeros_B,
        tokens_BT=zeros_BT,
        count_B=zeros_B,
        limit_B=zeros_B,
        finished_B=jnp.ones((batch,), bool),
        rounds_B=zeros_B,
        accepted_BT=zeros_BT,
        proposed_BT=zeros_BT,
        committed_BT=zeros_BT,
        keys_B=jax.random.split(jax.random.key(0), batch),
    )


def insert(state: DecodeState, fresh: DecodeState, row_n: jax.Array) -> DecodeState:
    """Put row i of a state just started into row row_n[i] of another; rows past its end are dropped.

    The fresh caches and token arrays may be narrower: what lies behind their end is never read before it is written.
    """

    def put(old, new):
        if old.ndim == 1:
            return old.at[row_n].set(new, mode="drop")
        return old.at[row_n, : new.shape[1]].set(new, mode="drop")

    return jax.tree.map(put, state, fresh)


def extend_cache(drafter: Drafter | PromptLookup, cache, tokens_BT: jax.Array, tapped_BTE: jax.Array | None, count_B: jax.Array):
    """Let the drafter remember the first count [B] of T tokens that the target was just fed."""
    return drafter.extend_cache(cache, tokens_BT if isinstance(drafter, PromptLookup) else tapped_BTE, count_B)


def propose(drafter: Drafter | PromptLookup, target: Target, state: DecodeState, keys_B: jax.Array, settings: DecodeSettings) -> Draft:
    """Draft the block after each row's anchor. A block-causal drafter runs only the slots it needs."""
    if isinstance(drafter, PromptLookup):
        return drafter.propose(state.draft_cache, state.anchor_B).first(settings.num_draft_tokens)
    config = drafter.config
    block_size = settings.num_draft_tokens + config.first_slot if config.block_attention == "causal" else config.block_size
    rows_VD, num_tokens = target.output_embedding_VD, target.config.num_tokens
    length_B = state.draft_cache.lengths_B
    noise_ids_BK = jnp.full((length_B.shape[0], block_size), config.mask_token_id, jnp.int32).at[:, 0].set(state.anchor_B)
    noise_BNKD = jnp.take(target.input_embedding_VD, noise_ids_BK, axis=0).astype(settings.dtype)[:, None]
    positions_BNK = (length_B[:, None] + jnp.arange(block_size, dtype=jnp.int32))[:, None]
    feature_BNR = anchor_features(drafter, rows_VD, state.anchor_B[:, None])
    block = drafter(noise_BNKD, state.draft_cache.keys, state.draft_cache.values, length_B[:, None], positions_BNK, feature_BNR)
    hidden_BJD = drafting_states(config, block)[:, 0]
    if settings.sampling.greedy or settings.policy == "point_mass":
        draft = point_mass(select_greedy(drafter, target, block, state.anchor_B[:, None], feature_BNR)[:, 0])
    elif config.scores_pairs and settings.policy == "own":
        table_BNJPP, ids_BNJP = pair_table(drafter, target, block, state.anchor_B[:, None], feature_BNR)
        draft = select_on_candidates(table_BNJPP[:, 0], ids_BNJP[:, 0], keys_B, settings.sampling)
    else:
        logits_BJV = vocabulary_logits(hidden_BJD, rows_VD, num_tokens)
        if config.scores_pairs:
            draft = select_tail_mixed(drafter, target, block, logits_BJV, state.anchor_B, keys_B, settings.sampling)
        elif (head := sequential_head(drafter, target)) is not None:
            draft = select_sequentially(head, hidden_BJD, logits_BJV, state.anchor_B, keys_B, settings.sampling)
        else:
            draft = select_independent(logits_BJV, keys_B, settings.sampling)
    draft = draft.first(settings.num_draft_tokens)
    if settings.confidence_threshold:
        draft = cut_by_confidence(drafter, hidden_BJD, state.anchor_B, draft, settings.confidence_threshold)
    return draft


def accept_uniforms(keys_B: jax.Array, count: int) -> jax.Array:
    """Uniforms that decide acceptance, independent of those that drew the draft. -> [B,count]."""
    return jax.vmap(lambda key: jax.random.uniform(key, (count,)))(keys_B)


def judge_greedy(draft: Draft, logits_BKV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Accept while a proposed draft is the target's argmax (ties to the lowest id). -> (num_accepted [B], next token [B])."""
    choice_BK = jnp.argmax(logits_BKV, axis=-1).astype(jnp.int32)
    right_BJ = (draft.tokens_BJ == choice_BK[:, :-1]) & (jnp.arange(draft.tokens_BJ.shape[1]) < draft.cut_B[:, None])
    accepted_B = jnp.cumprod(right_BJ.astype(jnp.int32), axis=1).sum(axis=1)
    return accepted_B, jnp.take_along_axis(choice_BK, accepted_B[:, None], axis=1)[:, 0]


def judge_sampled(
    draft: Draft, logits_BKV: jax.Array, accept_keys_B: jax.Array, next_keys_B: jax.Array, sampling: SamplingConfig
) -> tuple[jax.Array, jax.Array]:
    """Accept slot i while uniform x q(y_i) < p(y_i); then draw from the residual, or from p after the last proposal.

    p is taken after temperature, top-k, top-p and the vocabulary mask. -> (num_accepted [B], next token [B]).
    """
    p_BKV = probabilities(logits_BKV, sampling)
    p_token_BJ = jnp.take_along_axis(p_BKV[:, :-1], draft.tokens_BJ[..., None], axis=2)[..., 0]
    J = draft.tokens_BJ.shape[1]
    keep_BJ = accept_uniforms(accept_keys_B, J) * draft.token_prob_BJ < p_token_BJ
    keep_BJ = keep_BJ & (jnp.arange(J) < draft.cut_B[:, None])
    accepted_B = jnp.cumprod(keep_BJ.astype(jnp.int32), axis=1).sum(axis=1)
    p_BV = jnp.take_along_axis(p_BKV, accepted_B[:, None, None], axis=1)[:, 0]
    q_BV = draft.law_at(jnp.minimum(accepted_B, J - 1), p_BV.shape[-1])
    law_BV = jnp.where((accepted_B < draft.cut_B)[:, None], residual(p_BV, q_BV), p_BV)
    return accepted_B, draw(next_keys_B, law_BV)


def decoding_round(
    drafter: Drafter | PromptLookup | None, target: Target, state: DecodeState, settings: DecodeSettings, width: int | None = None
) -> DecodeState:
    """Draft, verify, accept, commit. Finished rows pass through unchanged but for rows of cache past their length.

    ``width``: how many rows of the target's cache are read, where not all can be filled.
    """
    J, sampling = settings.num_draft_tokens, settings.sampling
    # A key a row and round: a row's text does not depend on its neighbours, nor on how rounds are cut into calls.
    keys_B = jax.vmap(jax.random.fold_in)(state.keys_B, state.rounds_B + 1)
    draw_keys_B, accept_keys_B, next_keys_B = (slot_keys(keys_B, purpose) for purpose in range(3))
    B = state.anchor_B.shape[0]
    draft = propose(drafter, target, state, draw_keys_B, settings) if J else point_mass(jnp.zeros((B, 0), jnp.int32))
    block_BK = jnp.concatenate([state.anchor_B[:, None], draft.tokens_BJ], axis=1)
    taps = drafter.config.target_layer_ids if state.draft_cache is not None else ()
    out = target.verify(block_BK, state.target_cache, target_layer_ids=taps, dtype=jnp.dtype(settings.dtype), width=width)
    logits_BKV = target.logits(out.hidden_BTD)
    if sampling.greedy:
        accepted_B, next_B = judge_greedy(draft, logits_BKV)
    elif J:
        accepted_B, next_B = judge_sampled(draft, logits_BKV, accept_keys_B, next_keys_B, sampling)
    else:
        accepted_B, next_B = jnp.zeros((B,), jnp.int32), sample(next_keys_B, logits_BKV[:, 0], sampling)

    index_K = jnp.arange(J + 1)
    new_BK = jnp.where(index_K == accepted_B[:, None], next_B[:, None], jnp.pad(draft.tokens_BJ, ((0, 0), (0, 1))))
    left_B = state.limit_B - state.count_B
    # The earliest stop token ends the text, whatever its slot; lengths decide what is real, values never do.
    stops_BK = _is_stop(new_BK, settings) & (index_K <= accepted_B[:, None])
    until_stop_B = jnp.where(stops_BK.any(axis=1), jnp.argmax(stops_BK, axis=1) + 1, J + 2)
    active_B = ~state.finished_B
    committed_B = jnp.where(active_B, jnp.minimum(jnp.minimum(accepted_B + 1, left_B), until_stop_B), 0)
    proposed_B = jnp.minimum(jnp.minimum(draft.cut_B, left_B), until_stop_B)
    count_B = state.count_B + committed_B
    row_B = jnp.arange(B)
    T = state.tokens_BT.shape[1]
    slot_BK = jnp.where(index_K < committed_B[:, None], state.count_B[:, None] + index_K, T)
    log_slot_B = jnp.where(active_B, state.rounds_B, T)
    last_B = jnp.take_along_axis(new_BK, jnp.maximum(committed_B - 1, 0)[:, None], axis=1)[:, 0]
    length_B = state.target_cache.lengths_B + committed_B
    draft_cache = state.draft_cache
    if draft_cache is not None:
        draft_cache = extend_cache(drafter, draft_cache, block_BK, out.tapped_BTE, committed_B)
    return dataclasses.replace(
        state,
        target_cache=out.cache.with_lengths(length_B),
        draft_cache=draft_cache,
        anchor_B=jnp.where(active_B, last_B, state.anchor_B),
        tokens_BT=state.tokens_BT.at[row_B[:, None], slot_BK].set(new_BK, mode="drop"),
        count_B=count_B,
        finished_B=state.finished_B | (count_B >= state.limit_B) | (until_stop_B <= committed_B),
        rounds_B=state.rounds_B + active_B,
        accepted_BT=state.accepted_BT.at[row_B, log_slot_B].set(jnp.minimum(accepted_B, committed_B), mode="drop"),
        proposed_BT=state.proposed_BT.at[row_B, log_slot_B].set(proposed_B, mode="drop"),
        committed_BT=state.committed_BT.at[row_B, log_slot_B].set(committed_B, mode="drop"),
    )


def _is_stop(tokens: jax.Array, settings: DecodeSettings) -> jax.Array:
    """Whether each token is one of the stop ids."""
    found = jnp.zeros(tokens.shape, bool)
    for stop in settings.stop_ids:
        found = found | (tokens == stop)
    return found


@functools.partial(jax.jit, static_argnames=("drafter_graph", "target_graph", "settings", "width"), donate_argnames=("state",))
def _run_rounds(
    drafter_state, target_state, state: DecodeState, max_rounds: jax.Array, enough=None, *, drafter_graph, target_graph, settings, width=None
) -> DecodeState:
    drafter = None if drafter_graph is None else nnx.merge(drafter_graph, drafter_state)
    target = nnx.merge(target_graph, target_state)
    enough = state.finished_B.shape[0] if enough is None else enough

    def go_on(carry):
        done, state = carry
        return (done < max_rounds) & (state.finished_B.sum() < enough)

    def one(carry):
        done, state = carry
        return done + 1, decoding_round(drafter, target, state, settings, width)

    return jax.lax.while_loop(go_on, one, (jnp.int32(0), state))[1]


@functools.partial(jax.jit, static_argnames=("drafter_graph", "target_graph", "settings", "room"))
def _start(drafter_state, target_state, prompts_BS, lengths_B, limit_B, keys_B, *, drafter_graph, target_graph, settings, room) -> DecodeState:
    drafter = None if drafter_graph is None else nnx.merge(drafter_graph, drafter_state)
    return start(drafter, nnx.merge(target_graph, target_state), prompts_BS, lengths_B, limit_B, keys_B, room, settings)


@functools.partial(jax.jit, static_argnames=("drafter_graph", "target_graph", "settings", "batch", "capacity", "room"))
def _idle(drafter_state, target_state, *, drafter_graph, target_graph, settings, batch, capacity, room) -> DecodeState:
    drafter = None if drafter_graph is None else nnx.merge(drafter_graph, drafter_state)
    return idle(drafter, nnx.merge(target_graph, target_state), batch, capacity, room, settings)


@functools.partial(jax.jit, static_argnames=("drafter_graph", "target_graph", "settings"), donate_argnames=("state",))
def _refill(drafter_state, target_state, state: DecodeState, row_n, prompts_nS, lengths_n, limit_n, keys_n, *, drafter_graph, target_graph, settings):
    drafter = None if drafter_graph is None else nnx.merge(drafter_graph, drafter_state)
    S = prompts_nS.shape[1]
    fresh = start(drafter, nnx.merge(target_graph, target_state), prompts_nS, lengths_n, limit_n, keys_n, 1, settings, capacity=S)
    return insert(state, fresh, row_n)


def with_token_table(drafter: Drafter | PromptLookup, target: Target, dtype) -> Drafter | PromptLookup:
    """A drafter with the same arrays that looks tokens' features up instead of computing them each round; one without injection as it is."""
    if isinstance(drafter, PromptLookup) or drafter.config.injection is None:
        return drafter
    drafter = nnx.merge(*nnx.split(drafter))
    table_VR = jax.jit(token_table, static_argnames="dtype")(drafter.transfer, target.output_embedding_VD, dtype=jnp.dtype(dtype))
    drafter.transfer.table = nnx.data(Frozen(table_VR))
    return drafter


class Decoder:
    """A target with or without a drafter, compiled once per shape and settings."""

    def __init__(self, target: Target, drafter: Drafter | PromptLookup | None, settings: DecodeSettings):
        settings.check(drafter)
        self.target, self.drafter, self.settings = target, drafter, settings
        self._target_graph, self._target_state = nnx.split(target)
        self._drafter_graph, self._drafter_state = (None, None) if drafter is None else nnx.split(with_token_table(drafter, target, settings.dtype))
        self._static = dict(drafter_graph=self._drafter_graph, target_graph=self._target_graph, settings=settings)

    def start(self, prompts_BS: jax.Array, lengths_B: jax.Array, limit_B: jax.Array, keys_B: jax.Array, *, room: int) -> DecodeState:
        """Jitted ``start``; shapes (B, S, room) decide the compilation."""
        return _start(self._drafter_state, self._target_state, prompts_BS, lengths_B, limit_B, keys_B, room=room, **self._static)

    def idle(self, batch: int, *, capacity: int, room: int) -> DecodeState:
        """A state of ``batch`` finished rows to refill: caches of ``capacity`` rows, ``room`` for output tokens."""
        return _idle(self._drafter_state, self._target_state, batch=batch, capacity=capacity, room=room, **self._static)

    def refill(self, state: DecodeState, row_n, prompts_nS, lengths_n, limit_n, keys_n) -> DecodeState:
        """Start n prompts in rows ``row_n`` of the state, whose buffers are reused; a row number past its end drops a prompt."""
        return _refill(self._drafter_state, self._target_state, state, row_n, prompts_nS, lengths_n, limit_n, keys_n, **self._static)

    def run(self, state: DecodeState, max_rounds: int, *, enough: int | None = None, width: int | None = None) -> DecodeState:
        """Up to ``max_rounds`` rounds in one device call, or until ``enough`` rows (default: all) are finished; the given state's buffers are reused.

        ``width``: how many rows of the target's cache are read; it must cover prompt, output and a block of every unfinished row.
        """
        enough = None if enough is None else jnp.int32(enough)
        return _run_rounds(self._drafter_state, self._target_state, state, jnp.int32(max_rounds), enough, width=width, **self._static)
