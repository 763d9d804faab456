"""Replay of stored continuations: rounds by hand, against the decode loop, and the statistics made of them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from scipy.stats import chi2_contingency

from dspine_jax.acceptance import acceptance_statistics, paired_bootstrap
from dspine_jax.drafter import Drafter
from dspine_jax.generation import generate
from dspine_jax.replay import Round, longest_repeat, loop_onset, make_accept_odds, make_drafting, walk_rounds, walk_sampled_rounds
from dspine_jax.sampling import SamplingConfig
from dspine_jax.selection import anchor_features, select_greedy
from dspine_jax.speculative import Decoder, DecodeSettings

# ---- rounds of given drafts ----------------------------------------------------------------------


def drafts_from(answer: np.ndarray, right: list[int], J: int) -> np.ndarray:
    """Drafts [T-1,J] that are right for their first ``right[t]`` slots and wrong from there on."""
    drafts = np.full((len(answer) - 1, J), -1)
    for t in range(len(answer) - 1):
        known = answer[t + 1 : t + 1 + min(right[t], J)]
        drafts[t, : len(known)] = known
    return drafts


def test_a_drafter_that_is_always_wrong_gives_one_token_a_round():
    answer = np.arange(10, 20)
    rounds = walk_rounds(answer, drafts_from(answer, [0] * 9, 4))
    assert [r.tokens for r in rounds] == [1] * 9
    assert [r.proposed for r in rounds] == [4, 4, 4, 4, 4, 4, 3, 2, 1]


def test_a_drafter_that_is_always_right_gives_whole_blocks_and_no_bonus_past_the_end():
    answer = np.arange(10, 22)  # 11 tokens after the first: 5 + 5 + 1
    rounds = walk_rounds(answer, drafts_from(answer, [9] * 11, 4))
    assert rounds == [Round(0, 4, 4, 5), Round(5, 4, 4, 5), Round(10, 1, 1, 1)]


def test_an_end_token_as_bonus_counts_and_inside_the_draft_takes_no_bonus():
    answer = np.arange(10, 16)
    assert walk_rounds(answer, drafts_from(answer, [2, 0, 0, 1, 0], 4)) == [Round(0, 4, 2, 3), Round(3, 2, 1, 2)]
    assert walk_rounds(answer, drafts_from(answer, [2, 0, 0, 2, 0], 4)) == [Round(0, 4, 2, 3), Round(3, 2, 2, 2)]


def test_scoring_to_an_onset_clips_the_last_round():
    answer = np.arange(10, 30)
    full = walk_rounds(answer, drafts_from(answer, [3] * 19, 4))
    early = walk_rounds(answer, drafts_from(answer, [3] * 19, 4), end=7)
    assert early[0] == full[0]
    assert early == [Round(0, 4, 3, 4), Round(4, 2, 2, 2)]
    assert walk_rounds(answer, drafts_from(answer, [3] * 19, 4), end=1) == []


@pytest.mark.parametrize("seed", range(6))
def test_loop_onset_equals_its_definition(seed):
    rng = np.random.default_rng(seed)
    answer = rng.integers(0, 50, 60).astype(np.uint16)
    if seed % 2:
        begin = int(rng.integers(20, 30))
        answer[begin:] = np.resize(answer[5 : 5 + 13 + seed], 60 - begin)
    pairs = [t for t in range(49) for s in range(t) if (answer[t : t + 12] == answer[s : s + 12]).all()]
    assert loop_onset(answer) == (min(pairs) if pairs else 60)
    assert bool(pairs) == bool(seed % 2)


def test_a_constant_answer_loops_from_its_second_token():
    assert loop_onset(np.full(30, 7)) == 1
    assert loop_onset(np.full(12, 7)) == 12  # too short for two 12-grams


# ---- against the decode loop ---------------------------------------------------------------------

# Few usable ids, so that untrained drafters are right now and then and rounds differ in length.
FEW = dict(vocab_size=16, num_tokens=9, eos_token_ids=())


@pytest.fixture(scope="module")
def target():
    return tiny.tiny_target(**FEW)


def untrained(target, method: str, block_size: int, **sizes) -> Drafter:
    config = tiny.train_config(method, drafter={"block_size": block_size} | sizes).drafter.resolve(target.config)
    drafter = Drafter(config, rngs=nnx.Rngs(4))
    tiny.randomise(drafter, 5)
    if method == "dspine":
        drafter.transfer.basis.set_value(jnp.asarray(np.random.default_rng(6).normal(size=(64, 16)), jnp.float32))
    return drafter


REPLAYED = [("dflash", 7, (), {}), ("dspine", 7, (), {}), ("dspine", 4, (5,), {}), ("dflash", 2, (5,), {})]
REPLAYED += [("dflash2", 5, (), {}), ("dspark rnn", 4, (5,), {}), ("domino", 5, (), {})]
REPLAYED += [("dflash", 6, (), {"label_shift": "shifted"}), ("dflash", 3, (5,), {"label_shift": "shifted", "block_attention": "causal"})]


@pytest.mark.parametrize("method, block_size, stop, sizes", REPLAYED)
def test_replay_gives_the_rounds_of_the_decode_loop(target, method, block_size, stop, sizes):
    """To the last round, clipped at the cap and at end tokens, on continuations made in the same precision."""
    drafter = untrained(target, method, block_size, **sizes)
    rng = np.random.default_rng(7)
    prompts = [[int(t) for t in rng.integers(4, 9, n)] for n in (3, 9, 6, 11)]
    plain = generate(Decoder(target, None, DecodeSettings(0, stop_ids=stop)), prompts, max_new_tokens=40)
    settings = DecodeSettings(drafter.config.num_draft_tokens, stop_ids=stop)
    decoded = generate(Decoder(target, drafter, settings), prompts, max_new_tokens=40)
    assert [a.tokens for a in decoded] == [a.tokens for a in plain]

    drafting = make_drafting(drafter, target, dtype=jnp.float32, anchors_per_chunk=8)
    tokens_BS, anchors_BN = np.zeros((4, 56), np.int32), np.zeros((4, 40), np.int32)
    for b, (prompt, answer) in enumerate(zip(prompts, plain)):
        tokens_BS[b, : len(prompt) + len(answer.tokens)] = prompt + answer.tokens
        anchors_BN[b, : len(answer.tokens) - 1] = len(prompt) + np.arange(len(answer.tokens) - 1)
    drafts = np.asarray(drafting(tokens_BS, anchors_BN))
    replayed = [walk_rounds(np.array(answer.tokens), drafts[b]) for b, answer in enumerate(plain)]
    assert replayed == [answer.rounds for answer in decoded]
    accepted = [r.accepted for rounds in replayed for r in rounds]
    assert min(accepted) == 0 and max(accepted) >= 1  # otherwise nothing was compared
    if stop:
        assert any(answer.finish_reason == "stop" for answer in decoded)


@nnx.jit
def feed_prompt(drafter, target, tokens_BS, length_B):
    out = target.prefill(tokens_BS, length_B, capacity=64, target_layer_ids=drafter.config.target_layer_ids)
    cache = drafter.extend_cache(drafter.empty_cache(1, 64, jnp.float32), out.tapped_BTE, length_B)
    return target.logits(out.hidden_BTD).argmax(-1), out.cache, cache


@nnx.jit
def feed_one(target, token_B, cache):
    out = target.step(token_B, cache)
    return target.logits(out.hidden_BTD).argmax(-1), out.cache


@nnx.jit
def feed_block(drafter, target, block_BK, target_cache):
    out = target.verify(block_BK, target_cache, target_layer_ids=drafter.config.target_layer_ids)
    return target.logits(out.hidden_BTD).argmax(-1), out.cache, out.tapped_BTE


@nnx.jit
def commit(drafter, cache, tapped_BTE, count_B):
    return drafter.extend_cache(cache, tapped_BTE, count_B)


@nnx.jit
def draft_block(drafter, target, token_B, cache):
    c, rows_VD = drafter.config, target.output_embedding_VD
    ids_BNK = jnp.full((1, 1, c.block_size), c.mask_token_id).at[:, :, 0].set(token_B[:, None])
    feature = anchor_features(drafter, rows_VD, ids_BNK[..., 0])
    positions = (cache.lengths_B[:, None] + jnp.arange(c.block_size))[:, None]
    block = drafter(jnp.take(target.input_embedding_VD, ids_BNK, axis=0), cache.keys, cache.values, cache.lengths_B[:, None], positions, feature)
    return select_greedy(drafter, target, block, token_B[:, None], feature)[0, 0]


def literal_rounds(drafter, target, prompt: list[int], cap: int, stop: tuple[int, ...]) -> tuple[list[int], list[Round]]:
    """Speculative decoding of one prompt with lists, a token at a time."""
    length = jnp.array([len(prompt)])
    choices, target_cache, cache = feed_prompt(drafter, target, jnp.array([prompt + [0] * (12 - len(prompt))]), length)
    tokens, rounds = [int(choices[0, len(prompt) - 1])], []
    while len(tokens) < cap and tokens[-1] not in stop:
        drafts = [int(t) for t in draft_block(drafter, target, jnp.array(tokens[-1:]), cache)]
        choices, full_cache, tapped = feed_block(drafter, target, jnp.array([tokens[-1:] + drafts]), target_cache)
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == int(choices[0, accepted]):
            accepted += 1
        left, kept = cap - len(tokens), []
        for token in (drafts[:accepted] + [int(choices[0, accepted])])[:left]:
            kept.append(token)
            if token in stop:
                left = len(kept)
                break
        rounds.append(Round(len(tokens) - 1, min(len(drafts), left), min(accepted, len(kept)), len(kept)))
        target_cache = full_cache.with_lengths(target_cache.lengths_B + len(kept))
        cache = commit(drafter, cache, tapped, jnp.array([len(kept)]))
        tokens += kept
    return tokens, rounds


@pytest.mark.parametrize("method, block_size, seed", [("dflash", 4, 15), ("dspine", 6, 8)])
def test_replay_gives_the_rounds_of_a_literal_simulation(method, block_size, seed):
    """Draft, verify, accept and commit written out with lists, on text that the target made a token at a time."""
    target = tiny.tiny_target(**FEW | {"num_tokens": 5})
    drafter = untrained(target, method, block_size)
    tiny.randomise(drafter, seed)  # one that by chance is right for several slots running
    drafting = make_drafting(drafter, target, dtype=jnp.float32, anchors_per_chunk=11)
    accepted, endings, shifted = [], set(), 0
    for prompt in ([0, 3, 4, 1, 2, 3, 2, 4], [3, 1, 4, 4, 0], [4]):
        choices, cache, _ = feed_prompt(drafter, target, jnp.array([prompt + [0] * (12 - len(prompt))]), jnp.array([len(prompt)]))
        text = [int(choices[0, len(prompt) - 1])]
        while len(text) < 34:
            choices, cache = feed_one(target, jnp.array(text[-1:]), cache)
            text.append(int(choices[0, 0]))
        for stop in ((), (3,), (4,)):
            answer = text[: next((i for i, token in enumerate(text) if token in stop), 33) + 1]
            tokens, rounds = literal_rounds(drafter, target, prompt, 34, stop)
            assert tokens == answer
            tokens_BS, anchors_BN = np.zeros((1, 48), np.int32), np.zeros((1, 33), np.int32)
            tokens_BS[0, : len(prompt) + len(answer)] = prompt + answer
            anchors_BN[0, : len(answer) - 1] = len(prompt) + np.arange(len(answer) - 1)
            drafts = np.asarray(drafting(tokens_BS, anchors_BN))[0]
            assert walk_rounds(np.array(answer), drafts) == rounds
            accepted += [r.accepted for r in rounds]
            shifted += walk_rounds(np.array(answer), np.roll(drafts, 1, axis=0)) != rounds
            if rounds:
                endings.add(("stop" if answer[-1] in stop else "cap", "draft" if rounds[-1].accepted == rounds[-1].tokens else "bonus"))
    assert min(accepted) == 0 and max(accepted) == block_size - 1, "otherwise too little was compared"
    assert {("stop", "draft"), ("cap", "draft")} <= endings
    assert shifted, "drafts taken one anchor too early must be noticed"


def two_sample_p_value(ours: list[int], theirs: list[int]) -> float:
    """Chi-square p-value that two lists of counts follow one law; rare counts are merged."""
    both = np.bincount(ours + theirs)
    table = np.array([np.bincount(x, minlength=len(both)) for x in (ours, theirs)])
    common = both >= 20
    table = np.concatenate([table[:, common], table[:, ~common].sum(1, keepdims=True)], axis=1)
    return float(chi2_contingency(table[:, table.sum(0) > 0]).pvalue)


SAMPLED = [("dflash", "own"), ("dspine", "own"), ("dspine", "tail_mixed"), ("dspine", "point_mass")]
SAMPLED += [("dflash2", "own"), ("dflash2", "tail_mixed"), ("dspark rnn", "own"), ("dspark", "point_mass"), ("domino", "own")]


@pytest.mark.parametrize("method, policy", SAMPLED)
def test_sampled_replay_follows_the_law_of_the_decode_loop(target, method, policy):
    """Accepted drafts of the first round, and rounds of a whole answer, over 1,500 answers each; the wrong law is noticed."""
    drafter, sampling, rows = untrained(target, method, 4 if method.startswith("dspark") else 5), SamplingConfig(0.8), 1500
    prompts = [[4, 5, 6]] * rows
    plain = generate(Decoder(target, None, DecodeSettings(0, sampling)), prompts, max_new_tokens=12, seed=1)
    decoded = generate(Decoder(target, drafter, DecodeSettings(4, sampling, policy)), prompts, max_new_tokens=12, seed=2)
    tokens_BS = np.array([prompt + answer.tokens for prompt, answer in zip(prompts, plain)])
    anchors_BN = np.broadcast_to(3 + np.arange(11), (rows, 11))
    uniforms_BT = np.random.default_rng(3).uniform(size=(rows, 12))

    def replayed(sampling):
        odds = make_accept_odds(drafter, target, sampling, policy, dtype=jnp.float32, anchors_per_chunk=11)
        return [walk_sampled_rounds(odds_TJ, uniforms_T, 12) for odds_TJ, uniforms_T in zip(np.asarray(odds(tokens_BS, anchors_BN)), uniforms_BT)]

    def p_values(rounds):
        theirs = [answer.rounds for answer in decoded]
        statistics = (lambda walk: walk[0].accepted, lambda walk: walk[1].accepted, len)
        return [two_sample_p_value([s(walk) for walk in rounds], [s(walk) for walk in theirs]) for s in statistics]

    assert min(p_values(replayed(sampling))) > 1e-3
    if policy != "point_mass":  # whose odds know no law
        assert min(p_values(replayed(SamplingConfig(0.3)))) < 1e-5
    accepted = [r.accepted for answer in decoded for r in answer.rounds]
    assert min(accepted) == 0 and max(accepted) >= 2


def test_sampled_rounds_by_hand():
    """A uniform below the odds accepts; the last round is cut at the end of the answer, without a bonus."""
    odds_TJ = np.array([[0.9, 0.5, 0.9], [1.0, 1.0, 1.0], [0.2, 1.0, 1.0], [1.0, 1.0, 0.0]])
    uniforms_T = np.array([0.0, 0.8, 0.6, 0.1, 0.1])
    assert walk_sampled_rounds(odds_TJ, uniforms_T, 5) == [Round(0, 3, 1, 2), Round(2, 2, 2, 2)]
    assert walk_sampled_rounds(odds_TJ, uniforms_T, 5, end=2) == [Round(0, 1, 1, 1)]
    assert walk_sampled_rounds(odds_TJ[:0], uniforms_T[:1], 1) == []


def test_longest_repeat_counts_tokens_that_repeat_at_a_fixed_distance():
    assert longest_repeat(np.array([1, 2, 3, 4])) == 0
    assert longest_repeat(np.full(30, 7)) == 29
    assert longest_repeat(np.array([9, 1, 2, 1, 2, 1, 2, 5, 7])) == 4
    assert longest_repeat(np.array([5])) == longest_repeat(np.array([], int)) == 0


def test_rounds_do_not_depend_on_how_many_run_in_one_call(target):
    decoder = Decoder(target, untrained(target, "dspine", 7), DecodeSettings(6))
    prompts = [[4, 5, 6], [7, 8, 4, 5, 6, 7]]
    seen = []
    stepwise = generate(decoder, prompts, max_new_tokens=20, rounds_per_call=1, on_progress=lambda rows: seen.append(len(rows[0].tokens)))
    assert stepwise == generate(decoder, prompts, max_new_tokens=20)
    assert seen == sorted(seen) and len(seen) == max(len(row.rounds) for row in stepwise)


def test_a_row_decodes_as_if_alone(target):
    decoder = Decoder(target, untrained(target, "dspine", 7), DecodeSettings(6))
    prompts = [[4, 5, 6], [7, 8, 4, 5, 6, 7], [5, 5]]
    together = generate(decoder, prompts, max_new_tokens=20)
    assert together == [generate(decoder, [prompt], max_new_tokens=20)[0] for prompt in prompts]


# ---- statistics ----------------------------------------------------------------------------------


def test_acceptance_statistics_by_their_definitions():
    """L23: 3 rounds of 4 proposals, accepted 4, 1 and 0."""
    stats = acceptance_statistics([[Round(0, 4, 4, 5), Round(5, 4, 1, 2), Round(7, 4, 0, 1)]], 4)
    assert stats["tau_pooled"] == pytest.approx(8 / 3)
    assert stats["accepted_over_proposed"] == pytest.approx(5 / 12)
    assert stats["accept_rate"] == pytest.approx([2 / 3, 1 / 3, 1 / 3, 1 / 3])
    assert stats["cond_accept"] == pytest.approx([2 / 3, 1 / 2, 1, 1])


def test_pooled_and_per_request_averages_differ():
    prompts = [[Round(0, 4, 3, 4)], [Round(0, 4, 0, 1)] * 3, []]
    stats = acceptance_statistics(prompts, 4)
    assert (stats["tau_pooled"], stats["tau_per_request"], stats["prompts"]) == (7 / 4, 2.5, 3)
    assert acceptance_statistics([[]], 4) == {"rounds": 0, "tokens": 0, "prompts": 1}


def test_slots_that_were_never_proposed_have_no_rate():
    stats = acceptance_statistics([[Round(0, 2, 2, 2)]], 3)
    assert stats["accept_rate"] == [1.0, 1.0, None] and stats["cond_accept"] == [1.0, 1.0, None]


def test_paired_bootstrap_of_a_constant_gain_has_no_width_and_noise_covers_one():
    rng = np.random.default_rng(0)
    rounds = rng.integers(50, 100, 32).astype(float)
    base = {"a": (2 * rounds, rounds), "b": (3 * rounds, rounds)}
    more = {name: (1.2 * tokens, r) for name, (tokens, r) in base.items()}
    gain = paired_bootstrap(more, base, resamples=500)
    assert gain["ratio"] == pytest.approx(1.2) and gain["ratio_interval"] == pytest.approx([1.2, 1.2])
    assert gain["ratio_accepted"] == pytest.approx(2.0 / 1.5)
    noisy = {name: (tokens * rng.uniform(0.8, 1.25, 32), r) for name, (tokens, r) in base.items()}
    low, high = paired_bootstrap(noisy, base, resamples=500)["ratio_interval"]
    assert low < 1.0 < high
    with pytest.raises(ValueError, match="same prompts"):
        paired_bootstrap({"a": base["a"]}, base)


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 5, 6, 7, 15])
def test_output_limits_are_exact(target, limit):
    """L20 around a block of 6: never one token more, equal to plain decoding."""
    drafter, prompts = untrained(target, "dspine", 6), [[4, 5, 6], [7]]
    plain = generate(Decoder(target, None, DecodeSettings(0)), prompts, max_new_tokens=limit)
    ours = generate(Decoder(target, drafter, DecodeSettings(5)), prompts, max_new_tokens=limit)
    assert [len(a.tokens) for a in ours] == [limit, limit]
    assert [a.tokens for a in ours] == [a.tokens for a in plain]


def test_the_context_limit_ends_cleanly(target):
    decoder = Decoder(target, untrained(target, "dspine", 6), DecodeSettings(5))
    long = [4 + i % 5 for i in range(12)]
    assert [len(a.tokens) for a in generate(decoder, [long[:11], long, long[:4]], max_new_tokens=30, max_length=12)] == [1, 0, 8]
    with pytest.raises(ValueError, match="context limit of 11"):
        generate(decoder, [long], max_new_tokens=30, max_length=11)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generate(decoder, [long, []], max_new_tokens=3)
    with pytest.raises(ValueError, match="table of 16 rows"):
        generate(decoder, [[99]], max_new_tokens=3)


def test_settings_the_drafter_cannot_serve_are_refused(target):
    dflash = untrained(target, "dflash", 4)
    with pytest.raises(ValueError, match="exceeds the 3"):
        Decoder(target, dflash, DecodeSettings(4))
    with pytest.raises(ValueError, match="tail_mixed"):
        Decoder(target, dflash, dataclasses.replace(DecodeSettings(3), policy="tail_mixed"))
    with pytest.raises(ValueError, match="needs a drafter"):
        Decoder(target, None, DecodeSettings(3))


def test_twenty_prompt_lengths_compile_once(target):
    """K11: prompts of one shape bucket share one program."""
    from dspine_jax import speculative

    decoder = Decoder(target, untrained(target, "dspine", 5), DecodeSettings(4))
    generate(decoder, [[4]], max_new_tokens=5)
    before = speculative._start._cache_size(), speculative._run_rounds._cache_size()
    for length in range(1, 21):
        generate(decoder, [[4 + i % 5 for i in range(length)]], max_new_tokens=5)
    assert (speculative._start._cache_size(), speculative._run_rounds._cache_size()) == before
