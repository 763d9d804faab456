"""The policy ``tail_mixed``: scores behind any token, candidate or not, against the table and a loop, and the walk against teacher forcing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_injection
import test_rivals

from dspine_jax.anchors import make_blocks
from dspine_jax.objective import row_context, run_blocks
from dspine_jax.sampling import SamplingConfig, probabilities
from dspine_jax.selection import drafting_states, likeliest, pair_table, select_tail_mixed, tail_mixed_logits
from dspine_jax.vocabulary import vocabulary_logits

SAMPLING = SamplingConfig(temperature=1.5)
NUM_RESCORED = 5  # few, so that others are drawn too


def blocks_of(method: str):
    """(drafter, target, BlockOutput of blocks at three anchors of one row, anchor ids [1,3], anchor features)."""
    tests = {"dspine": test_injection, "dflash2": test_rivals}[method]
    target = tests.target()
    if method == "dspine":
        drafter = test_injection.tiny_drafter(target, method)
        block, feature_BNR = test_injection.run_block(drafter)
        return drafter, target, block, jnp.asarray(tests.row()[0])[jnp.array([tests.ANCHORS])], feature_BNR
    drafter = tests.drafter_of(method)
    tokens, taps = (jnp.asarray(x)[None] for x in tests.row())
    options = dict(block_size=4, mask_token_id=drafter.config.mask_token_id, num_predicting_slots=drafter.config.num_predicting_slots)
    blocks = make_blocks(tokens, jnp.ones_like(tokens, bool), jnp.array([tests.ANCHORS]), jnp.ones((1, 3), bool), **options)
    block, _ = run_blocks(drafter, target, row_context(drafter, taps), blocks, jnp.float32)
    return drafter, target, block, blocks.noise_ids_BNK[..., 0], None


@pytest.mark.parametrize("method", ["dspine", "dflash2"])
def test_scores_are_the_tables_rows_and_exist_for_every_token(method):
    drafter, target, block, anchors_BN, feature_BNR = blocks_of(method)
    logits_BNJV = vocabulary_logits(drafting_states(drafter.config, block), target.output_embedding_VD, target.config.num_tokens)
    table_BNJPP, ids_BNJP = pair_table(drafter, target, block, anchors_BN, feature_BNR)
    P = ids_BNJP.shape[-1]
    assert np.array_equal(likeliest(logits_BNJV, P), ids_BNJP)
    for a in range(P):
        before_BNJ = jnp.concatenate([anchors_BN[..., None], ids_BNJP[:, :, :-1, a]], axis=2)
        mixed_BNJV = np.asarray(tail_mixed_logits(drafter, target, block, logits_BNJV, ids_BNJP, before_BNJ))
        np.testing.assert_allclose(np.take_along_axis(mixed_BNJV, np.asarray(ids_BNJP), -1), table_BNJPP[..., a, :], rtol=1e-4, atol=1e-4)
        others = np.ones(mixed_BNJV.shape, bool)
        np.put_along_axis(others, np.asarray(ids_BNJP), False, -1)
        assert np.array_equal(mixed_BNJV[others], np.asarray(logits_BNJV)[others])
    # Behind tokens outside the candidates: other scores, and at the candidates alone.
    outside_BNJ = jnp.argmin(logits_BNJV[..., : target.config.num_tokens], axis=-1)
    assert not (np.asarray(outside_BNJ)[..., None] == np.asarray(ids_BNJP)).any()
    behind_BNJV = tail_mixed_logits(drafter, target, block, logits_BNJV, ids_BNJP, outside_BNJ)
    changed_BNJV = np.abs(np.asarray(behind_BNJV) - mixed_BNJV) > 1e-3
    assert 0.5 * P < changed_BNJV.sum(-1).mean() <= P


@pytest.mark.parametrize("method", ["dspine", "dflash2"])
def test_the_walk_draws_from_the_laws_of_its_own_path(method):
    """Slot by slot from parts of the block, as at once from the whole block along the drawn tokens: what replay takes for q."""
    drafter, target, block, anchors_BN, _ = blocks_of(method)
    draws = 64
    rows = lambda x: None if x is None else jnp.tile(x[0, :1, None], (draws, 1, *[1] * (x.ndim - 2)))  # noqa: E731
    one = type(block)(rows(block.hidden_BNKD), rows(block.pre_write_BNKD), rows(block.hidden_gate_BNKD), ())
    anchor_B = jnp.tile(anchors_BN[0, :1], draws)
    logits_BNJV = vocabulary_logits(drafting_states(drafter.config, one), target.output_embedding_VD, target.config.num_tokens)
    draft = select_tail_mixed(drafter, target, one, logits_BNJV[:, 0], anchor_B, jax.random.split(jax.random.key(2), draws), SAMPLING, NUM_RESCORED)
    tokens_BJ, ids_BNJP = np.asarray(draft.tokens_BJ), likeliest(logits_BNJV, NUM_RESCORED)
    before_BNJ = jnp.concatenate([anchor_B[:, None], draft.tokens_BJ[:, :-1]], axis=1)[:, None]
    law_BJV = probabilities(tail_mixed_logits(drafter, target, one, logits_BNJV, ids_BNJP, before_BNJ), SAMPLING)[:, 0]
    np.testing.assert_allclose(draft.probs_BJP, law_BJV, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(draft.token_prob_BJ, np.take_along_axis(np.asarray(law_BJV), tokens_BJ[..., None], -1)[..., 0], rtol=1e-4)
    outside = ~(np.asarray(ids_BNJP)[:, 0] == tokens_BJ[..., None]).any(-1)
    assert 0.1 < outside.mean() < 0.95 and (np.asarray(draft.cut_B) == tokens_BJ.shape[1]).all()
