"""The decode loop with scripted drafters (known failures, area D), its memory and its one device call."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scripted
import tiny
from flax import nnx
from scripted import ENDS, Scripted, begin, chain_target, cut, naive_greedy, renamed, right_drafts, wrong_from

from dspine_jax import speculative
from dspine_jax.acceptance import acceptance_statistics
from dspine_jax.config import AnchorConfig
from dspine_jax.drafter import Drafter
from dspine_jax.generation import generate, read_rows
from dspine_jax.kv_cache import write_rows
from dspine_jax.replay import Round, walk_rounds
from dspine_jax.sampling import SamplingConfig
from dspine_jax.speculative import Decoder, DecodeSettings

# Nearly all tests share one block size, one pair of end ids and one shape: compiling is what takes the time.
K = 7
J = K - 1
SETTINGS = DecodeSettings(J, stop_ids=ENDS)
PLAIN = DecodeSettings(0, stop_ids=ENDS)
SHAPE = dict(width=64, room=64)
MASK = tiny.MASK_ID


@pytest.fixture(scope="module", autouse=True)
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        scripted.install(patch)
        yield


@pytest.fixture(scope="module")
def target():
    return tiny.tiny_target()


@pytest.fixture(scope="module")
def prompts():
    return tiny.prompts((5, 7, 3, 9, 1, 6, 4, 8))


@pytest.fixture(scope="module")
def texts(target, prompts):
    """Greedy text of every prompt [8,80], made without the code under test."""
    return naive_greedy(target, prompts, 80)


def untrained(target, method: str, block_size: int) -> Drafter:
    drafter = Drafter(tiny.train_config(method, drafter={"block_size": block_size}).drafter.resolve(target.config), rngs=nnx.Rngs(4))
    tiny.randomise(drafter, 5)
    if method == "dspine":
        drafter.transfer.basis.set_value(jnp.asarray(np.random.default_rng(6).normal(size=(64, 16)), jnp.float32))
    return drafter


def scripted_run(target, prompt, drafts_TJ, **limits):
    """One prompt with a table of drafts; its rounds must be those of the walk over its text."""
    drafts_TJ = drafts_TJ[:66]  # one shape of table
    decoder = Decoder(target, Scripted(target, drafts_TJ[None]), SETTINGS)
    answer = generate(decoder, [prompt], **{"max_new_tokens": 20} | limits)[0]
    assert answer.rounds == walk_rounds(np.array(answer.tokens), drafts_TJ)
    return answer


def plain_run(target, prompt, max_new_tokens: int = 20):
    return generate(Decoder(target, None, PLAIN), [prompt], max_new_tokens=max_new_tokens)[0]


def test_plain_decoding_equals_whole_forward_passes(target, prompts, texts):
    """The reference of all that follows, on the decode loop without a drafter."""
    for prompt, text_T in zip(prompts, texts):
        answer = plain_run(target, prompt, 60)
        assert answer.tokens == cut(text_T, 60)
        assert [r.tokens for r in answer.rounds] == [1] * (len(answer.tokens) - 1)


# ---- end tokens ----------------------------------------------------------------------------------


def run_with_ends(target, prompt, text_T, names: dict[int, int], miss: int | None = None):
    """Declare tokens end tokens by giving them the ids of ``ENDS``; -> the answer and the text under its new names."""
    assert not set(ENDS) & set(text_T[:60].tolist())
    target, rename = renamed(target, names)
    text, prompt = rename(text_T), rename(prompt)
    drafts = right_drafts(text, J)
    answer, plain = scripted_run(target, prompt, drafts if miss is None else wrong_from(drafts, miss)), plain_run(target, prompt)
    assert answer.tokens == plain.tokens == cut(text, 20)
    assert answer.finish_reason == plain.finish_reason == ("stop" if answer.tokens[-1] in ENDS else "length")
    return answer, text


def test_an_end_token_in_the_middle_of_a_block_ends_the_text(target, prompts, texts):
    """L02: for k = 3..12 the k-th greedy token is the end token; right drafts run on past it; the first place of the id counts."""
    row, counts = 6, []
    for k in range(3, 13):
        stop = int(texts[row, k - 1])
        answer, _ = run_with_ends(target, prompts[row], texts[row], {stop: ENDS[0]})
        counts.append(texts[row].tolist().index(stop) + 1)
        assert len(answer.tokens) == counts[-1] and answer.finish_reason == "stop"
    assert len(set(counts)) == 9 and min(counts) == 1 and K < max(counts), "an id that occurs twice has to be among them"


@pytest.mark.parametrize("ids", [ENDS, ENDS[::-1]])
def test_the_earlier_of_two_end_tokens_wins(target, prompts, texts, ids):
    """L02: whichever of the two ids it is."""
    row, early, late = 6, 3, 5
    answer, text = run_with_ends(target, prompts[row], texts[row], {int(texts[row, early]): ids[0], int(texts[row, late]): ids[1]})
    assert answer.tokens == text[: early + 1] and text[late] in ENDS
    assert answer.rounds == [Round(0, 3, 3, 3)]


@pytest.mark.parametrize(
    ("place", "row", "index", "miss", "rounds"),
    [("prefill", 1, 0, None, []), ("after a miss", 1, 2, 1, [Round(0, 2, 1, 2)]), ("after a whole block", 6, 7, None, [Round(0, J, J, K)])],
)
def test_an_end_token_of_the_targets_own_ends_the_text(target, prompts, texts, place, row, index, miss, rounds):
    """L02: as the first token of all, in place of a wrong draft, and as the bonus after a whole block."""
    answer, text = run_with_ends(target, prompts[row], texts[row], {int(texts[row, index]): ENDS[1]}, miss)
    assert answer.tokens == text[: index + 1] and answer.finish_reason == "stop"
    assert answer.rounds == rounds


def test_an_end_token_in_the_prompt_stops_nothing(target, prompts, texts):
    """L02."""
    row = 1
    stop = next(t for t in prompts[row] if t not in texts[row, :30])
    answer, _ = run_with_ends(target, prompts[row], texts[row], {stop: ENDS[0]})
    assert len(answer.tokens) == 20 and answer.finish_reason == "length"


def test_a_wrong_draft_of_an_end_token_stops_nothing(target, prompts, texts):
    """L02: only what is committed can end the text."""
    row = 1
    drafts = right_drafts(texts[row], J)
    drafts[:, 1:] = ENDS[0]
    answer = scripted_run(target, prompts[row], drafts)
    assert answer.tokens == texts[row, :20].tolist() and answer.finish_reason == "length"


# ---- values that mean nothing --------------------------------------------------------------------


def real_runs(target, method: str, some_prompts: list[list[int]]):
    """A batch of 8 with an untrained drafter, repeated to that size."""
    return generate(Decoder(target, untrained(target, method, K), SETTINGS), (some_prompts * 8)[:8], max_new_tokens=20)


@pytest.fixture(scope="module")
def chain():
    """The target says 5, M, 7 and then 0, the id that fills unused rows."""
    return chain_target({4: 5, 5: MASK, MASK: 7, 7: 0, 0: 9})


@pytest.mark.parametrize("drafter", ["right", "wrong", "masks", *tiny.METHODS])
def test_a_token_with_the_masks_id_is_text_like_any_other(chain, drafter):
    """L03: the output is [5, M, 7], of length 3, whether or not M is drafted."""
    text_T = naive_greedy(chain, [[4]], 80)[0]
    assert text_T[:5].tolist() == [5, MASK, 7, 0, 9]
    if drafter in tiny.METHODS:
        assert real_runs(chain, drafter, [[4]])[0].tokens == cut(text_T, 20)
        return
    right = right_drafts(text_T, J)
    drafts = {"right": right, "wrong": wrong_from(right, 0), "masks": np.full_like(right, MASK)}[drafter]
    for limit in (3, 5):
        answer = scripted_run(chain, [4], drafts, max_new_tokens=limit)
        assert answer.tokens == [5, MASK, 7, 0, 9][:limit] and len(answer.tokens) == limit


def test_a_prompt_keeps_its_mask_tokens(target):
    """L03: every one of them is fed, and the text is not that of the prompt without them."""
    prompt = [9, MASK, 40, MASK, 17, MASK]
    with_masks, without = naive_greedy(target, [prompt, [t for t in prompt if t != MASK]], 80)
    assert with_masks[:20].tolist() != without[:20].tolist()
    assert scripted_run(target, prompt, right_drafts(with_masks, J)).tokens == cut(with_masks, 20)
    state = begin(Decoder(target, Scripted(target, right_drafts(with_masks, J)[None, :66]), SETTINGS), [prompt], [20], **SHAPE)
    assert state.target_cache.lengths_B.tolist() == state.draft_cache.lengths_B.tolist() == [len(prompt)]


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("finished", ["no room", "limit reached", "end token"])
def test_right_wrong_and_finished_rows_live_as_if_alone(target, prompts, texts, finished):
    """L12: text, rounds and metrics of a batch of three are those of the rows alone; the finished row counts for nothing."""
    rows, limits = [1, 2, 0], [30, 30, {"no room": 0, "limit reached": 1, "end token": 30}[finished]]
    target, rename = renamed(target, {int(texts[0, 0]): ENDS[0]} if finished == "end token" else {})
    prompts, text_BT = [rename(prompts[row]) for row in rows], np.array([rename(texts[row]) for row in rows])
    assert not np.isin(text_BT[:2, :30], ENDS).any()
    drafts = np.stack([right_drafts(text_T, J)[:66] for text_T in text_BT])
    drafts[1] = wrong_from(drafts[1], 0)

    def both(picked: list[int]):
        decoder = Decoder(target, Scripted(target, drafts[picked]), SETTINGS)
        start = lambda: begin(decoder, [prompts[i] for i in picked], [limits[i] for i in picked], **SHAPE)  # noqa: E731
        return start(), decoder.run(start(), 1000)

    before, after = both([0, 1, 2])
    assert before.finished_B.tolist() == [False, False, True]
    together = read_rows(after, ENDS)
    assert together == [answer for i in range(3) for answer in read_rows(both([i])[1], ENDS)]
    assert [a.tokens for a in together[:2]] == text_BT[:2, :30].tolist()
    assert [r.tokens for r in together[0].rounds] == [K, K, K, K, 1]
    assert [r.tokens for r in together[1].rounds] == [1] * 29

    assert together[2].rounds == [] and together[2].tokens == text_BT[2, : min(1, limits[2])].tolist()
    for name in ("tokens_BT", "count_B", "rounds_B", "accepted_BT", "proposed_BT", "committed_BT", "anchor_B"):
        assert np.array_equal(getattr(after, name)[2], getattr(before, name)[2]), name
    assert int(after.target_cache.lengths_B[2]) == int(after.draft_cache.lengths_B[2]) == len(prompts[2])
    with_it, without = (acceptance_statistics([a.rounds for a in answers], J) for answers in (together, together[:2]))
    assert with_it | {"prompts": 2} == without


# ---- features of the prompt ----------------------------------------------------------------------


@pytest.mark.parametrize("method", tiny.METHODS)
def test_the_first_draft_sees_every_token_of_the_prompt(target, method):
    """L14: the context is 23 rows long after 23 tokens (the anchor is prefill's own token), and each of them matters."""
    drafter = untrained(target, method, K)
    settings = DecodeSettings(J, SamplingConfig(1.0), "own" if method == "dflash" else "tail_mixed")  # laws over the whole vocabulary
    prompt = [int(t) for t in np.random.default_rng(1).integers(4, 120, 23)]
    state = begin(Decoder(target, drafter, settings), [prompt], [20], width=32, room=20)
    assert state.draft_cache.lengths_B.tolist() == state.target_cache.lengths_B.tolist() == [23]

    # Row 0: features as they are; 1..23: one position zeroed; 24: all zeroed; 25: as they are, with nonsense past the prompt.
    keep_RT = np.ones((26, 32), bool)
    keep_RT[1:24, :23] &= ~np.eye(23, dtype=bool)
    keep_RT[24, :23] = False

    @nnx.jit
    def laws(drafter, target, tokens_BT, state):
        taps_BTE = target(tokens_BT, target_layer_ids=drafter.config.target_layer_ids).tapped_BTE
        taps_RTE = jnp.where(keep_RT[..., None], taps_BTE, 0.0).at[25, 23:].set(7.0)
        many = lambda x: jnp.repeat(x, 26, axis=0)  # noqa: E731
        cache = drafter.extend_cache(drafter.empty_cache(26, state.draft_cache.capacity, jnp.float32), taps_RTE, jnp.full((26,), 23))
        rebuilt = dataclasses.replace(state, draft_cache=cache, anchor_B=many(state.anchor_B))
        ours = speculative.propose(drafter, target, state, state.keys_B, settings)
        return speculative.propose(drafter, target, rebuilt, many(state.keys_B), settings).probs_BJP, ours.probs_BJP

    laws_RJV, ours_BJV = map(np.asarray, laws(drafter, target, jnp.asarray([prompt + [0] * 9]), state))
    away_R = [tiny.relative_l2(law_JV[0], ours_BJV[0, 0]) for law_JV in laws_RJV]
    assert max(away_R[0], away_R[25]) < 1e-5, "the loop's own context must be the prompt's features, and no more than them"
    assert min(away_R[1:25]) > 1e-3, away_R


# ---- rejections and room -------------------------------------------------------------------------


def test_a_miss_at_every_slot_commits_what_was_right_and_one_token_more(target, prompts, texts):
    """L18: row k - 1 misses at the k-th proposal of every round and so commits k tokens; the last row never misses.

    After each round the valid length is prompt + committed, less the newest token, which has not been fed;
    at the end these rows hold what one pass over the text gives, and nothing refused.
    """
    row, limit = 1, 40
    drafts = right_drafts(texts[row], J)[:66]
    table = np.stack([wrong_from(drafts, k) for k in range(J)] + [drafts])
    decoder = Decoder(target, Scripted(target, table), SETTINGS)
    state = begin(decoder, [prompts[row]] * K, [limit] * K, **SHAPE)
    P, per_round, count = len(prompts[row]), np.arange(1, K + 1), np.ones(K, int)
    while not state.finished_B.all():
        state = decoder.run(state, 1)
        count = np.minimum(count + per_round, limit)
        assert state.count_B.tolist() == count.tolist()
        assert state.target_cache.lengths_B.tolist() == state.draft_cache.lengths_B.tolist() == (P + count - 1).tolist()
        assert all(state.tokens_BT[b, :n].tolist() == texts[row, :n].tolist() for b, n in enumerate(count))
    assert state.rounds_B.tolist() == [-(-(limit - 1) // k) for k in per_round]

    fed = prompts[row] + texts[row, : limit - 1].tolist()
    fresh = begin(decoder, [fed] * K, [1] * K, **SHAPE)
    assert fresh.target_cache.lengths_B.tolist() == [len(fed)] * K
    for ours, theirs in ((state.target_cache, fresh.target_cache), (state.draft_cache, fresh.draft_cache)):
        for a, b in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values)):
            assert tiny.relative_l2(a[:, : len(fed)], b[:, : len(fed)]) < 1e-5


def test_a_write_past_the_end_leaves_the_valid_rows_alone():
    """L19: 8 rows, 7 of them valid, a block of 4: a bare update slice would overwrite rows 4..7."""
    rng = np.random.default_rng(2)
    cache_BSGC = jnp.asarray(rng.normal(size=(2, 8, 2, 4)), jnp.float32)
    new_BTGC = jnp.asarray(rng.normal(size=(2, 4, 2, 4)), jnp.float32)
    written = np.asarray(jax.jit(write_rows)(cache_BSGC, new_BTGC, jnp.array([7, 2])))
    bare = np.asarray(jax.lax.dynamic_update_slice(cache_BSGC, new_BTGC, (0, 7, 0, 0)))
    expected = np.array(cache_BSGC)
    expected[0, 7:], expected[1, 2:6] = new_BTGC[0, :1], new_BTGC[1]
    tiny.assert_bit_equal(written, expected)
    assert not np.array_equal(bare[0, 4:7], expected[0, 4:7])


def test_verifying_past_the_end_leaves_the_valid_rows_alone(target, prompts):
    """L19 at the target: every layer's rows 0..6 bit for bit, and the counter."""
    prompt = jnp.asarray([prompts[1]])
    out = nnx.jit(lambda target, tokens: target.prefill(tokens, jnp.array([7]), capacity=8))(target, prompt)
    verified = nnx.jit(lambda target, block, cache: target.verify(block, cache))(target, jnp.array([[9, 8, 7, 6]]), out.cache)
    assert verified.cache.lengths_B.tolist() == [7] and verified.cache.capacity == 8
    for old, new in zip((*out.cache.keys, *out.cache.values), (*verified.cache.keys, *verified.cache.values)):
        tiny.assert_bit_equal(new[:, :7], old[:, :7])
        assert not np.array_equal(new[:, 7], old[:, 7])


@pytest.fixture(scope="module")
def wide(target):
    """A prompt as wide as its bucket, and its text."""
    prompt = [int(t) for t in np.random.default_rng(8).integers(4, 120, 64)]
    return prompt, naive_greedy(target, [prompt], 80, width=144)[0]


@pytest.mark.parametrize("miss", [None, 0, J - 1])
def test_the_caches_hold_every_round_of_the_longest_run(target, wide, miss):
    """L19: no spare row in the prompt's width nor in the room; each round fits before it starts, and the text is plain greedy's."""
    prompt, text_T = wide
    drafts = right_drafts(text_T, J)[:66]
    decoder = Decoder(target, Scripted(target, (drafts if miss is None else wrong_from(drafts, miss))[None]), SETTINGS)
    state = begin(decoder, [prompt], [64], **SHAPE)
    fits = lambda cache: int(cache.lengths_B.max()) + K <= cache.capacity  # noqa: E731
    while not state.finished_B.all():
        assert fits(state.target_cache) and fits(state.draft_cache)
        state = decoder.run(state, 1)
    assert fits(state.target_cache) and fits(state.draft_cache), "rounds of slower rows still write here"
    assert state.tokens_BT[0].tolist() == cut(text_T, 64) and not np.isin(text_T[:64], ENDS).any()


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("miss", [None, 0, 3])
@pytest.mark.parametrize("limit", [1, K - 1, K, K + 1, 2 * K + 3])
def test_output_limits_inside_a_block_are_exact(target, prompts, texts, miss, limit):
    """L20: never one token more, with a drafter that is right, wrong, or right for three slots."""
    drafts = right_drafts(texts[1], J)
    answer = scripted_run(target, prompts[1], drafts if miss is None else wrong_from(drafts, miss), max_new_tokens=limit)
    assert answer.tokens == texts[1, :limit].tolist() and answer.finish_reason == "length"


def test_the_context_limit_is_prompt_and_output_together(target, prompts, texts):
    """L20: one token short of the limit gives one token, at the limit none with a reason, past it an error before compute."""
    P, drafts = len(prompts[1]), right_drafts(texts[1], J)
    for room in (1, 0, J, K, K + 1):
        answer = scripted_run(target, prompts[1], drafts, max_length=P + room)
        assert (answer.tokens, answer.finish_reason) == (texts[1, :room].tolist(), "length")

    class Untouched(Decoder):
        def start(self, *_, **__):
            raise AssertionError("computed before the check")

    with pytest.raises(ValueError, match=f"context limit of {P - 1}"):
        generate(Untouched(target, None, PLAIN), [prompts[1]], max_new_tokens=20, max_length=P - 1)


@pytest.mark.parametrize("method", tiny.METHODS)
def test_prompts_shorter_than_a_block(target, method):
    """L20: one token, two, and one less than a block."""
    short = [[50], [7, 9], [4, 8, 15, 16, 23, 42]]
    assert [a.tokens for a in real_runs(target, method, short)[:3]] == [cut(text_T, 20) for text_T in naive_greedy(target, short, 20)]


# ---- slots ---------------------------------------------------------------------------------------


class SlotsOff(Drafter):
    """A drafter whose slots are read ``off`` places too early: 1 takes slot j for the token at anchor + j + 1."""

    def __call__(self, *args, **kwargs):
        block = super().__call__(*args, **kwargs)
        move = lambda x: None if x is None else jnp.roll(x, self.off[...], axis=2)  # noqa: E731
        moved = {name: move(getattr(block, name)) for name in ("hidden_BNKD", "pre_write_BNKD", "hidden_gate_BNKD")}
        return dataclasses.replace(block, **moved)


@pytest.mark.parametrize("method, layout", [("dflash", "same_position"), ("dflash", "shifted"), ("dspine", "same_position")])
def test_proposals_are_read_from_the_slots_that_were_trained(target, method, layout):
    """L01: of a drafter that knows 8 sequences by heart >= 90 % of the proposals are accepted, one slot off or served as the other layout <= 20 %."""
    rng = np.random.default_rng(3)
    prompts = [[int(t) for t in rng.integers(4, 120, 4)] for _ in range(64)]
    text_BT = naive_greedy(target, prompts, 20, width=24)
    rows = [b for b in range(64) if (np.diff(text_BT[b]) != 0).all()][:8]
    assert len(rows) == 8, "no token may follow itself"
    prompts, text_BT = [prompts[b] for b in rows], text_BT[rows]
    tokens_BS = np.concatenate([np.array(prompts), text_BT], axis=1).astype(np.int32)
    mask_BS = np.broadcast_to(np.arange(24) >= 4, tokens_BS.shape)

    steps, optimizer = 120, {"learning_rate": 1e-2, "warmup_fraction": 0.05}
    sizes = {"num_layers": 1, "label_shift": layout}
    s = tiny.setup(tiny.train_config(method, drafter=sizes, steps=steps, anchors=AnchorConfig(num_anchors=16), optimizer=optimizer), target=target)
    state = s.state
    with jax.set_mesh(s.mesh):
        batch = s.batch(tokens_BS, mask_BS)
        for _ in range(steps):
            state, _ = s.step(state, s.target_state, batch)
    trained = nnx.merge(s.graphdef, jax.device_get(state.params), jax.device_get(state.frozen))
    other_layout = {"same_position": "shifted", "shifted": "same_position"}[layout]
    ratio = []
    for off, read_as in ((0, layout), (1, layout)) + ((0, other_layout),) * (method == "dflash"):
        drafter = SlotsOff(dataclasses.replace(trained.config, label_shift=read_as), rngs=nnx.Rngs(0))
        nnx.update(drafter, nnx.state(trained))
        drafter.off = nnx.Variable(jnp.int32(off))
        answers = generate(Decoder(target, drafter, DecodeSettings(3)), prompts, max_new_tokens=20)
        assert [a.tokens for a in answers] == text_BT.tolist()
        ratio.append(acceptance_statistics([a.rounds for a in answers], 3)["accepted_over_proposed"])
    assert ratio[0] >= 0.9 and max(ratio[1:]) <= 0.2, ratio


@pytest.mark.parametrize("method", tiny.METHODS)
def test_the_draft_length_is_chosen_when_decoding(target, prompts, texts, method):
    """1..K-1 drafts of a drafter trained for K-1 are the first of its whole draft."""
    counts = range(1, K) if method == "dflash" else (1, 3, J)  # each compiles a block of its own where attention is causal
    drafter = untrained(target, method, K)
    state = begin(Decoder(target, drafter, SETTINGS), prompts, [20] * 8, **SHAPE)

    @nnx.jit
    def proposals(drafter, target, state):
        return [speculative.propose(drafter, target, state, state.keys_B, DecodeSettings(count)) for count in counts]

    drafts = proposals(drafter, target, state)
    whole_BJ = np.asarray(drafts[-1].tokens_BJ)
    assert whole_BJ.shape == (8, J) and len(np.unique(whole_BJ)) > 8
    for count, draft in zip(counts, drafts):
        assert np.array_equal(draft.tokens_BJ, whole_BJ[:, :count]) and draft.cut_B.tolist() == [count] * 8


def test_fewer_drafts_give_the_same_text(target, prompts, texts):
    """Two of six right drafts: rounds of three tokens."""
    drafts = right_drafts(texts[1], J)[:66]
    decoder = Decoder(target, Scripted(target, drafts[None]), dataclasses.replace(SETTINGS, num_draft_tokens=2))
    answer = generate(decoder, [prompts[1]], max_new_tokens=20)[0]
    assert answer.tokens == texts[1, :20].tolist()
    assert answer.rounds == walk_rounds(texts[1, :20], drafts[:, :2]) and answer.rounds[0] == Round(0, 2, 2, 3)


# ---- memory and the host -------------------------------------------------------------------------


def lower_loop(decoder: Decoder, loop, *, batch: int, width: int, room: int):
    """``loop`` lowered for shapes alone, nothing allocated -> (lowered, bytes of the target's KV cache, of both caches)."""
    shape = jax.ShapeDtypeStruct
    ints = shape((batch,), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    arguments = decoder._drafter_state, decoder._target_state
    state = speculative._start.eval_shape(*arguments, shape((batch, width), jnp.int32), ints, ints, keys, room=room, **decoder._static)
    size = lambda cache: sum(x.size * x.dtype.itemsize for x in (*cache.keys, *cache.values))  # noqa: E731
    target_bytes = size(state.target_cache)
    return loop.lower(*arguments, state, shape((), jnp.int32), **decoder._static), target_bytes, target_bytes + size(state.draft_cache)


LONG = dict(batch=2, width=64, room=8192 - 64 - 4)  # capacity 8192 with blocks of 4: two rows of cache outweigh everything else


@pytest.mark.parametrize("method", tiny.METHODS)
def test_a_round_needs_less_memory_than_one_kv_cache(method):
    """Rollback is a counter: both caches are updated in the caller's buffers, and no copy of them is among the temporaries.

    What there is, one layer's scores and keys and values laid out for the products, does not grow with
    the layers: 9.5 MB for 3, 6 and 12 of them, where the cache of 6 takes 25.2 MB.
    """
    target = tiny.tiny_target(num_layers=6)
    lowered, target_bytes, both_bytes = lower_loop(Decoder(target, untrained(target, method, 4), DecodeSettings(3)), speculative._run_rounds, **LONG)
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < target_bytes / 2
    assert both_bytes <= memory.alias_size_in_bytes


def test_a_round_that_chooses_between_caches_would_be_noticed(target, monkeypatch):
    """The check above can fail: keeping finished rows' caches by a select holds the old and the new at one time."""
    real = speculative.decoding_round

    def selecting(drafter, target, state, settings, width):
        new = real(drafter, target, state, settings, width)
        keep = lambda old, new: tuple(jnp.where(state.finished_B[:, None, None, None], a, b) for a, b in zip(old, new))  # noqa: E731
        old, cache = state.target_cache, new.target_cache
        return dataclasses.replace(new, target_cache=dataclasses.replace(cache, keys=keep(old.keys, cache.keys), values=keep(old.values, cache.values)))

    monkeypatch.setattr(speculative, "decoding_round", selecting)
    afresh = lambda *args, **kwargs: speculative._run_rounds.__wrapped__(*args, **kwargs)  # noqa: E731
    loop = jax.jit(afresh, static_argnames=("drafter_graph", "target_graph", "settings"), donate_argnums=2)
    lowered, target_bytes, _ = lower_loop(Decoder(target, Scripted(target, np.zeros((2, 8, 3))), DecodeSettings(3)), loop, **LONG)
    assert lowered.compile().memory_analysis().temp_size_in_bytes > target_bytes


def primitives(jaxpr) -> set[str]:
    """Names of all primitives, inner programs included."""
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                names |= primitives(inner)
    return names


@pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_whole_answer_is_one_device_call(target, prompts, texts, platform, monkeypatch):
    """No transfer of any kind inside ``Decoder.run``, no call back to the host in its program, and ``generate`` calls it once."""
    drafts = wrong_from(right_drafts(texts[1], J), 2)[:66]
    decoder = Decoder(target, Scripted(target, drafts[None]), SETTINGS)
    many = jax.block_until_ready(jnp.int32(1000))
    warm, state = (begin(decoder, [prompts[1]], [60], **SHAPE) for _ in range(2))
    decoder.run(warm, many)
    with jax.transfer_guard("disallow"):
        state = decoder.run(state, many)
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            jnp.ones(()) + np.ones(3)
    assert int(state.rounds_B[0]) == 20 and state.tokens_BT[0, :60].tolist() == texts[1, :60].tolist()

    jaxpr = jax.make_jaxpr(lambda state: decoder.run(state, many))(begin(decoder, [prompts[1]], [60], **SHAPE))
    names = primitives(jaxpr.jaxpr)
    assert {"while", "scatter", "dot_general"} <= names
    assert not [name for name in names if "callback" in name or "feed" in name or name == "device_put"]

    calls = []
    run = Decoder.run
    monkeypatch.setattr(Decoder, "run", lambda self, *args: calls.append(1) or run(self, *args))
    assert len(generate(decoder, [prompts[1]], max_new_tokens=60)[0].rounds) == 20 and calls == [1]
