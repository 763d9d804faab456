"""From block hidden states to drafted tokens: argmax, transition cache, and sampling from a known law."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dspine_jax.candidate_selector import selector_table
from dspine_jax.confidence import confident_prefix
from dspine_jax.config import DrafterConfig
from dspine_jax.drafter import BlockOutput, Drafter
from dspine_jax.sampling import SamplingConfig, draw, draw_from_each, probabilities
from dspine_jax.sequential import SequentialHead, sequential_head, walk, walk_greedily
from dspine_jax.target import Target
from dspine_jax.vocabulary import vocabulary_logits
from pallas_kernels.topk_logits import topk_logits
from pallas_kernels.transition import follow, greedy_walk, transition_table

SLOTWISE = ("hidden_BNKD", "pre_write_BNKD", "hidden_gate_BNKD")  # of a BlockOutput
NUM_RESCORED = 256  # ids of a slot that ``tail_mixed`` scores behind the token drawn: rows of the head, read once a slot, where all pairs would be squared


def anchor_features(drafter: Drafter, rows_VD: jax.Array, tokens: jax.Array) -> jax.Array | None:
    """T of token ids [...] -> [...,R] fp32, or None for a drafter without injection."""
    if drafter.config.injection is None:
        return None
    return drafter.transfer.of_tokens(rows_VD, tokens)


def drafting_states(config: DrafterConfig, block: BlockOutput) -> jax.Array:
    """Hidden states of the slots that draft, in the order of their drafts: [B,N,J,D] of [B,N,K,D]. The one place where decoding reads the layout."""
    first = config.first_slot
    return block.hidden_BNKD[:, :, first : first + config.num_draft_tokens]


def select_greedy(drafter: Drafter, target: Target, block: BlockOutput, anchors_BN: jax.Array, anchor_feature_BNR: jax.Array | None) -> jax.Array:
    """Draft every slot of the block that the layout lets draft. Scores compared in fp32, ties to the lowest id.

    A table over pairs of candidates is walked from the anchor; a sequential head is walked slot by slot over the whole vocabulary; without either every
    slot takes its own argmax. anchors [B,N] token ids -> token ids [B,N,J] int32.
    """
    rows_VD, num_tokens = target.output_embedding_VD, target.config.num_tokens
    if drafter.config.scores_pairs:
        return greedy_walk(*pair_table(drafter, target, block, anchors_BN, anchor_feature_BNR))
    hidden_BNJD = drafting_states(drafter.config, block)
    head = sequential_head(drafter, target)
    if head is None:
        return topk_logits(hidden_BNJD, rows_VD, 1, num_tokens=num_tokens, implementation=drafter.kernels.topk_logits)[1][..., 0]
    flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
    logits_BNJV = vocabulary_logits(hidden_BNJD, rows_VD, num_tokens)
    return walk_greedily(head, flat(hidden_BNJD), flat(logits_BNJV), flat(anchors_BN)).reshape(hidden_BNJD.shape[:3])


def pair_table(
    drafter: Drafter, target: Target, block: BlockOutput, anchors_BN: jax.Array, anchor_feature_BNR: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Candidates of every draft and the scores of all their pairs, of a drafter that ``scores_pairs``. -> (table [B,N,J,P,P] fp32, ids [B,N,J,P] int32)."""
    config, rows_VD, num_tokens = drafter.config, target.output_embedding_VD, target.config.num_tokens
    if config.selector is None:
        return transition_cache(drafter, block, rows_VD, anchor_feature_BNR, num_tokens=num_tokens)
    P = config.selector.num_candidates
    options = dict(num_tokens=num_tokens, topk=drafter.kernels.topk_logits)
    return selector_table(drafter.candidate_selector, drafting_states(config, block), anchors_BN, rows_VD, P, **options)


def transition_cache(
    drafter: Drafter, block: BlockOutput, rows_VD: jax.Array, anchor_feature_BNR: jax.Array, *, num_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Candidates of every drafted slot and the scores of all their pairs (DESIGN 5.5).

    -> (table [B,N,J,P,P] fp32, candidate ids [B,N,J,P] int32), J = K-1.
    """
    P, kernels = drafter.config.injection.num_candidates, drafter.kernels
    _, ids_BNJP = topk_logits(drafting_states(drafter.config, block), rows_VD, P, num_tokens=num_tokens, implementation=kernels.topk_logits)
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
        implementation=kernels.transition,
    )
    return table_BNJPP, ids_BNJP


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """Drafted tokens and the law each was really drawn from.

    tokens_BJ int32; token_prob_BJ fp32: q of the drawn token, 1 for a point mass; ids_BJP and probs_BJP: q's
    support and fp32 probabilities (P = V with ids None for a dense law; both None for a point
    mass); cut_B: slots before this many are proposed.
    """

    tokens_BJ: jax.Array
    token_prob_BJ: jax.Array
    ids_BJP: jax.Array | None
    probs_BJP: jax.Array | None
    cut_B: jax.Array

    def law_at(self, slot_B: jax.Array, vocab_size: int) -> jax.Array:
        """q of one slot a row as a dense [B,V] array."""
        row = lambda x_BJP: jnp.take_along_axis(x_BJP, slot_B[:, None, None], axis=1)[:, 0]  # noqa: E731
        if self.probs_BJP is None:
            return jax.nn.one_hot(jnp.take_along_axis(self.tokens_BJ, slot_B[:, None], axis=1)[:, 0], vocab_size, dtype=jnp.float32)
        if self.ids_BJP is None:
            return row(self.probs_BJP)
        zeros = jnp.zeros((slot_B.shape[0], vocab_size), jnp.float32)
        return jnp.put_along_axis(zeros, row(self.ids_BJP), row(self.probs_BJP), axis=1, inplace=False)

    def first(self, count: int) -> Draft:
        """Only the first ``count`` slots: later ones never influence how earlier ones are judged."""
        cut = lambda x: None if x is None else x[:, :count]  # noqa: E731
        return Draft(self.tokens_BJ[:, :count], self.token_prob_BJ[:, :count], cut(self.ids_BJP), cut(self.probs_BJP), jnp.minimum(self.cut_B, count))


def point_mass(tokens_BJ: jax.Array) -> Draft:
    """A draft whose every token was certain."""
    B, J = tokens_BJ.shape
    return Draft(tokens_BJ, jnp.ones((B, J), jnp.float32), None, None, jnp.full((B,), J, jnp.int32))


def slot_keys(keys_B: jax.Array, slot: int | jax.Array) -> jax.Array:
    """A key a row for one slot."""
    return jax.vmap(lambda key: jax.random.fold_in(key, slot))(keys_B)


def select_independent(logits_BJV: jax.Array, keys_B: jax.Array, sampling: SamplingConfig) -> Draft:
    """Draw every slot from its own marginal (DFlash under its own q)."""
    B, J, _ = logits_BJV.shape
    probs_BJV = probabilities(logits_BJV, sampling)
    tokens_BJ = jnp.stack([draw(slot_keys(keys_B, j), probs_BJV[:, j]) for j in range(J)], axis=1)
    token_prob_BJ = jnp.take_along_axis(probs_BJV, tokens_BJ[..., None], axis=2)[..., 0]
    return Draft(tokens_BJ, token_prob_BJ, None, probs_BJV, jnp.full((B,), J, jnp.int32))


def select_sequentially(
    head: SequentialHead, hidden_BJD: jax.Array, logits_BJV: jax.Array, anchor_B: jax.Array, keys_B: jax.Array, sampling: SamplingConfig
) -> Draft:
    """Draw every slot from its logits corrected by the tokens drawn before it: q is the law of the corrected logits along the drawn path."""

    def choose(index, corrected_BV):
        probs_BV = probabilities(corrected_BV, sampling)
        return draw(slot_keys(keys_B, index), probs_BV), probs_BV

    tokens_BJ, probs_BJV = walk(head, hidden_BJD, logits_BJV, anchor_B, choose)
    token_prob_BJ = jnp.take_along_axis(probs_BJV, tokens_BJ[..., None], axis=2)[..., 0]
    return Draft(tokens_BJ, token_prob_BJ, None, probs_BJV, jnp.full(anchor_B.shape, tokens_BJ.shape[1], jnp.int32))


def cut_by_confidence(drafter: Drafter, hidden_BJD: jax.Array, anchor_B: jax.Array, draft: Draft, threshold: float) -> Draft:
    """End the proposal before the first slot whose confidence is below the threshold.

    Lossless, because a slot's confidence reads only the tokens before it: whether it is proposed is settled before it is drawn.
    """
    J = draft.tokens_BJ.shape[1]
    predecessors_BJ = jnp.concatenate([anchor_B[:, None], draft.tokens_BJ[:, :-1]], axis=1)
    logits_BJ = drafter.confidence_logits(hidden_BJD[:, None, :J], predecessors_BJ[:, None])[:, 0]
    return dataclasses.replace(draft, cut_B=jnp.minimum(draft.cut_B, confident_prefix(logits_BJ, threshold)))


def select_on_candidates(table_BJPP: jax.Array, ids_BJP: jax.Array, keys_B: jax.Array, sampling: SamplingConfig) -> Draft:
    """Walk the table, drawing each slot from the softmax of its row: q lives on P candidates (DESIGN 5.5).

    Lossless because a slot's candidates and row are fixed before its token is drawn. A slot's noise does not depend on its row, so what every row would
    draw is settled at once, and the walk only follows it.
    """
    B, J, P = ids_BJP.shape
    probs_BJPP = probabilities(table_BJPP, sampling)
    keys_BJ = jax.vmap(slot_keys, (None, 0), 1)(keys_B, jnp.arange(J))
    drawn_BJP = draw_from_each(keys_BJ.reshape(B * J, *keys_BJ.shape[2:]), probs_BJPP.reshape(B * J, P, P)).reshape(B, J, P)
    choice_BJ = follow(drawn_BJP)
    row_BJ = jnp.pad(choice_BJ[:, :-1], ((0, 0), (1, 0)))
    probs_BJP = jnp.take_along_axis(probs_BJPP, row_BJ[..., None, None], axis=2)[:, :, 0]
    pick = lambda x: jnp.take_along_axis(x, choice_BJ[..., None], axis=2)[..., 0]  # noqa: E731
    return Draft(pick(ids_BJP), pick(probs_BJP), ids_BJP, probs_BJP, jnp.full((B,), J, jnp.int32))


def likeliest(logits_BJV: jax.Array, count: int = NUM_RESCORED) -> jax.Array:
    """Ids of the ``count`` best base logits of every draft, which ``tail_mixed`` scores anew. [...,V] -> [...,Q] int32, Q = min(count, V)."""
    return jax.lax.top_k(logits_BJV, min(count, logits_BJV.shape[-1]))[1]


def tail_mixed_logits(
    drafter: Drafter, target: Target, block: BlockOutput, logits_BNJV: jax.Array, ids_BNJQ: jax.Array, predecessors_BNJ: jax.Array
) -> jax.Array:
    """Base logits of every draft, those of some ids replaced by their scores behind the token before, which may be any: what ``pair_table`` says of them.

    logits [B,N,J,V] fp32, ids [B,N,J,Q] of ``likeliest``, predecessors [B,N,J] token ids -> [B,N,J,V] fp32.
    """
    config, rows_VD = drafter.config, target.output_embedding_VD
    if config.selector is None:
        hidden_BNJD = drafter.conditioned(block, anchor_features(drafter, rows_VD, predecessors_BNJ))
        rows_BNJQD = jnp.take(rows_VD, ids_BNJQ, axis=0).astype(hidden_BNJD.dtype)
        scores_BNJQ = jnp.einsum("bnjd,bnjqd->bnjq", hidden_BNJD, rows_BNJQD, preferred_element_type=jnp.float32)
    else:
        pairs = drafter.candidate_selector.pair_scores(drafting_states(config, block), predecessors_BNJ[..., None], ids_BNJQ)
        scores_BNJQ = jnp.take_along_axis(logits_BNJV, ids_BNJQ, axis=-1) + pairs[..., 0, :]
    return jnp.put_along_axis(logits_BNJV, ids_BNJQ, scores_BNJQ, axis=-1, inplace=False)


def select_tail_mixed(
    drafter: Drafter,
    target: Target,
    block: BlockOutput,
    logits_BJV: jax.Array,
    anchor_B: jax.Array,
    keys_B: jax.Array,
    sampling: SamplingConfig,
    num_rescored: int = NUM_RESCORED,
) -> Draft:
    """Draw slot by slot from one softmax over V: the likeliest ids by their scores behind the token drawn before, all others by base logits.

    Every slot's scores are made when the token before is drawn: it need not have a row in the table, and no pairs are formed.
    block: one a row, [B,1,K,...]; logits [B,J,V] fp32, anchor [B] token ids, keys [B].
    """
    B, J, _ = logits_BJV.shape
    ids_BNJQ, extra = likeliest(logits_BJV, num_rescored)[:, None], drafter.config.first_slot
    before_B, tokens, token_probs, probs = anchor_B, [], [], []
    for j in range(J):
        one = dataclasses.replace(block, **{f: None if (x := getattr(block, f)) is None else x[:, :, j : j + 1 + extra] for f in SLOTWISE})
        mixed_BNJV = tail_mixed_logits(drafter, target, one, logits_BJV[:, None, j : j + 1], ids_BNJQ[:, :, j : j + 1], before_B[:, None, None])
        probs.append(probabilities(mixed_BNJV[:, 0, 0], sampling))
        before_B = draw(slot_keys(keys_B, j), probs[-1])
        tokens.append(before_B)
        token_probs.append(jnp.take_along_axis(probs[-1], before_B[:, None], axis=1)[:, 0])
    return Draft(jnp.stack(tokens, 1), jnp.stack(token_probs, 1), None, jnp.stack(probs, 1), jnp.full((B,), J, jnp.int32))
