"""DSpark's confidence: proposals cut by it stay lossless, its calibration against brute force, and the scheduler's admissions."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from dspine_jax.confidence import confident_prefix, expected_calibration_error, fit_temperatures, prefix_survival, schedule_drafts
from dspine_jax.drafter import Drafter
from dspine_jax.generation import generate
from dspine_jax.replay import make_confidences
from dspine_jax.sampling import SamplingConfig
from dspine_jax.speculative import Decoder, DecodeSettings, propose

FEW = dict(vocab_size=16, num_tokens=9, eos_token_ids=())


# ---- proposals that end early --------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    """A target of few ids and a drafter whose confidences lie on both sides of one half."""
    target = tiny.tiny_target(**FEW)
    drafter = Drafter(tiny.train_config("dspark").drafter.resolve(target.config), rngs=nnx.Rngs(0))
    tiny.randomise(drafter, 5)
    drafter.confidence_head.proj.bias.set_value(jnp.array([1.0]))
    return target, drafter


def test_the_prefix_before_the_first_unsure_draft():
    logits = jnp.array([[2.0, 0.1, -0.1, 3.0], [-1.0, 5.0, 5.0, 5.0], [1.0, 1.0, 1.0, 1.0]])
    assert confident_prefix(logits, 0.5).tolist() == [2, 0, 4]
    assert confident_prefix(logits, 0.0).tolist() == [4, 4, 4]


def test_cut_proposals_give_the_same_greedy_text_and_end_at_the_first_unsure_draft(pair):
    """Rounds propose what the confidence of the drafted path allows, none at all included; the text is that of plain decoding."""
    target, drafter = pair
    prompts = [[4, 5, 6], [7, 8, 4, 5], [8]]
    plain = generate(Decoder(target, None, DecodeSettings(0)), prompts, max_new_tokens=40)
    whole, cut = (generate(Decoder(target, drafter, DecodeSettings(4, confidence_threshold=t)), prompts, max_new_tokens=40) for t in (0.0, 0.5))
    assert [a.tokens for a in whole] == [a.tokens for a in cut] == [a.tokens for a in plain]
    far = lambda answers: [r.proposed for answer in answers for r in answer.rounds if r.anchor < 35]  # where the limit cuts nothing  # noqa: E731
    proposed = far(cut)
    assert min(proposed) == 0 and max(proposed) == 4 and 1 <= np.mean(proposed) <= 3
    assert all(r.accepted <= r.proposed for answer in cut for r in answer.rounds)
    assert set(far(whole)) == {4}


def test_confidences_of_stored_text_are_those_of_the_decode_loop(pair):
    """At every round's anchor the replayed confidences cut the proposal where decoding cut it, and the drafts are its drafts."""
    target, drafter = pair
    prompt = [4, 5, 6]
    (answer,) = generate(Decoder(target, drafter, DecodeSettings(4, confidence_threshold=0.5)), [prompt], max_new_tokens=40)
    confidences = make_confidences(drafter, target, dtype=jnp.float32, anchors_per_chunk=13)
    drafts, logits = (np.asarray(x)[0] for x in confidences(np.array([prompt + answer.tokens]), 3 + np.arange(39)[None]))
    for r in answer.rounds:
        if r.anchor < 35:
            assert int(confident_prefix(jnp.asarray(logits[r.anchor : r.anchor + 1]), 0.5)[0]) == r.proposed
        assert drafts[r.anchor, : r.accepted].tolist() == answer.tokens[r.anchor + 1 : r.anchor + 1 + r.accepted]
    with pytest.raises(ValueError, match="this dflash drafter has no confidence head"):
        make_confidences(Drafter(tiny.train_config("dflash").drafter.resolve(target.config), rngs=nnx.Rngs(0)), target, dtype=jnp.float32, anchors_per_chunk=1)


def test_a_draft_is_cut_where_its_own_path_becomes_unsure(pair):
    target, drafter = pair
    state = Decoder(target, drafter, DecodeSettings(4)).start(
        jnp.asarray(np.random.default_rng(0).integers(4, 9, (32, 64))), jnp.full(32, 9), jnp.full(32, 40), jax.random.split(jax.random.key(0), 32), room=64
    )
    sampling = SamplingConfig(1.0)
    run = nnx.jit(propose, static_argnums=4)
    whole, cut = (run(drafter, target, state, state.keys_B, DecodeSettings(4, sampling, confidence_threshold=t)) for t in (0.0, 0.5))
    np.testing.assert_array_equal(whole.tokens_BJ, cut.tokens_BJ)
    assert set(np.asarray(whole.cut_B)) == {4} and len(set(np.asarray(cut.cut_B))) >= 4


def test_a_threshold_without_a_head_or_out_of_range_is_refused(pair):
    target, drafter = pair
    plain = Drafter(tiny.train_config("dflash").drafter.resolve(target.config), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="confidence_threshold 0.5 needs a drafter with a confidence head"):
        Decoder(target, plain, DecodeSettings(3, confidence_threshold=0.5))
    with pytest.raises(ValueError, match=r"confidence_threshold 1.5 must lie in \[0, 1\]"):
        Decoder(target, drafter, DecodeSettings(3, confidence_threshold=1.5))


# ---- calibration ---------------------------------------------------------------------------------


def test_the_calibration_error_by_hand():
    """Bins of width 0.5: (0.2, 0.4 against 0, 1) and (0.9 against 1): 2/3 x |0.3 - 0.5| + 1/3 x |0.9 - 1|."""
    assert expected_calibration_error(np.array([0.2, 0.4, 0.9]), np.array([0, 1, 1]), bins=2) == pytest.approx(2 / 3 * 0.2 + 1 / 3 * 0.1)
    assert expected_calibration_error(np.array([1.0, 0.0]), np.array([1, 0])) == 0.0


def overconfident_rounds(count: int = 20_000):
    """(logits [R,3], accepted [R]) where the true confidences are sigmoid(z / T) with T = 2, 1, 0.5."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0.5, 2.0, (count, 3))
    right = rng.random((count, 3)) < 1 / (1 + np.exp(-logits / [2.0, 1.0, 0.5]))
    return logits, np.cumprod(right, axis=1).sum(axis=1)


def test_temperatures_are_found_and_calibrate_every_prefix():
    logits, accepted = overconfident_rounds()
    temperatures = fit_temperatures(logits, accepted)
    assert np.abs(np.log(temperatures / [2.0, 1.0, 0.5])).max() < 0.25, temperatures
    for j in range(3):
        before, after = (expected_calibration_error(prefix_survival(logits, t)[:, j], accepted > j) for t in (None, temperatures))
        assert after < 0.02 and (j == 2 or after < before / 2)


def test_each_temperature_is_the_best_of_the_grid_given_those_before():
    """Against a search that recomputes every prefix from the start."""
    logits, accepted = overconfident_rounds(300)
    grid, chosen = np.array([0.25, 0.5, 1.0, 2.0, 4.0]), []
    for j in range(3):
        errors = {t: expected_calibration_error(prefix_survival(logits[:, : j + 1], np.array([*chosen, t]))[:, j], accepted > j) for t in grid}
        chosen.append(min(errors, key=lambda t: (errors[t], abs(np.log(t)))))  # noqa: B023
    assert fit_temperatures(logits, accepted, grid=grid).tolist() == chosen
    with pytest.raises(ValueError, match="no rounds to calibrate on"):
        fit_temperatures(np.zeros((0, 3)), np.zeros(0))


# ---- the scheduler -------------------------------------------------------------------------------


def throughput(lengths, confidence, speed) -> float:
    survival = np.cumprod(confidence, axis=1)
    expected = sum(1 + survival[r, :n].sum() for r, n in enumerate(lengths))
    return expected * speed(len(lengths) + sum(lengths))


@pytest.mark.parametrize("seed", range(5))
def test_where_speed_falls_smoothly_the_schedule_is_the_best_of_all(seed):
    """Every allocation of 3 requests of up to 3 drafts is tried."""
    rng = np.random.default_rng(seed)
    confidence, cost = rng.uniform(0.2, 0.99, (3, 3)), rng.uniform(0.05, 0.6)
    speed = lambda batch: 1.0 / (1.0 + cost * batch)  # noqa: E731
    lengths = schedule_drafts(confidence, speed)
    best = max(itertools.product(range(4), repeat=3), key=lambda n: throughput(n, confidence, speed))
    assert tuple(lengths) == best


def test_admission_stops_at_the_first_draft_that_does_not_pay():
    """A cliff behind which speed recovers: a search over all sizes would jump it, and would let later tokens decide."""
    confidence = np.full((2, 4), 0.9)
    speed = lambda batch: {2: 10.0, 3: 9.0, 4: 1.0}.get(batch, 100.0)  # noqa: E731
    assert schedule_drafts(confidence, speed).tolist() == [1, 0]
    assert max(throughput(n, confidence, speed) for n in ((1, 0), (2, 2))) == throughput((2, 2), confidence, speed)


def test_free_verification_admits_everything_and_dear_verification_nothing():
    confidence = np.random.default_rng(1).uniform(0.1, 0.9, (4, 5))
    assert schedule_drafts(confidence, lambda batch: 1.0).tolist() == [5] * 4
    assert schedule_drafts(confidence, lambda batch: 2.0**-batch).tolist() == [0] * 4
    assert schedule_drafts(np.zeros((2, 0)), lambda batch: 1.0).tolist() == [0, 0]


def test_a_later_confidence_never_changes_what_was_admitted_before_it():
    """The output's law needs this: whether draft j is verified is a function of drafts up to j alone (and of other requests)."""
    rng = np.random.default_rng(3)
    speed = lambda batch: 1.0 / (1.0 + 0.3 * batch)  # noqa: E731
    for _ in range(50):
        confidence = rng.uniform(0.2, 0.99, (1, 6))
        length = schedule_drafts(confidence, speed)[0]
        for j in range(6):
            other = confidence.copy()
            other[0, j + 1 :] = rng.uniform(0.2, 0.99, 5 - j)
            assert min(schedule_drafts(other, speed)[0], j + 1) == min(length, j + 1)
