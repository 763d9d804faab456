"""Continuous refill: texts are those of ``generate`` however rows are refilled; queues, limits, errors, interruption; programs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from dspine_jax import speculative
from dspine_jax.drafter import Drafter
from dspine_jax.generation import FetchedRows, bucket, generate_batches
from dspine_jax.refill import Request, answer_prompts, answer_stream, cache_rows, group_size, text_limit, warm_up
from dspine_jax.sampling import SamplingConfig
from dspine_jax.speculative import Decoder, DecodeSettings

pytestmark = pytest.mark.usefixtures("quick_compiler")
ENDS = (5, 6, 7)
LAWS = {"greedy": SamplingConfig(0.0), "sampled": SamplingConfig(0.7), "nucleus": SamplingConfig(0.7, 20, 0.95)}
LIMIT, MAX_LENGTH = 24, 128


@pytest.fixture(scope="module")
def target():
    return tiny.tiny_target()


@pytest.fixture(scope="module")
def prompts():
    return tiny.prompts(np.random.default_rng(0).integers(1, 100, 30))


@pytest.fixture(scope="module")
def decoders(target):
    return {name: Decoder(target, None, DecodeSettings(0, law, stop_ids=ENDS)) for name, law in LAWS.items()}


@pytest.fixture(scope="module")
def expected(decoders, prompts):
    """What ``generate`` gives for the same seed and row numbers."""
    options = dict(max_new_tokens=LIMIT, seed=3)
    return {name: [a for batch in generate_batches(decoder, prompts, 8, **options) for a in batch] for name, decoder in decoders.items()}


def requests(prompts, limits=None):
    return [Request(i, prompt, LIMIT if limits is None else limits[i], i) for i, prompt in enumerate(prompts)]


def stream(decoder, asked, **options):
    asked = iter(asked)
    return answer_stream(decoder, lambda: next(asked, None), **{"batch_size": 8, "max_length": MAX_LENGTH, "max_new_tokens": LIMIT, "seed": 3} | options)


def texts(decoder, asked, **options):
    """Answers by owner; nobody is answered twice."""
    found = list(stream(decoder, asked, **options))
    assert len({request.owner for request, _ in found}) == len(found)
    return {request.owner: answer for request, answer in found}


@pytest.mark.parametrize("law", LAWS)
def test_texts_are_those_of_generate(decoders, prompts, expected, law):
    """Text, rounds and reason of all 30, for batches with and without spare rows, calls of 3 to 64 rounds, in both orders of the queue."""
    asked, decoder = requests(prompts), decoders[law]
    assert {answer.finish_reason for answer in expected[law]} == {"stop", "length"}
    for options in ({}, {"rounds_per_call": 5, "rows_per_refill": 3}, {"batch_size": 64, "rounds_per_call": 64}):
        for order in (asked, asked[::-1]):
            found = texts(decoder, order, **options)
            assert [found[i] for i in range(len(prompts))] == expected[law], options


@pytest.fixture(scope="module")
def drafters(target):
    made = {}
    for method in tiny.METHODS:
        made[method] = Drafter(tiny.train_config(method, drafter={"block_size": 4}).drafter.resolve(target.config), rngs=nnx.Rngs(4))
        tiny.randomise(made[method], 5)
    made["dspine"].transfer.basis.set_value(jnp.asarray(np.random.default_rng(6).normal(size=(64, 16)), jnp.float32))
    return made


@pytest.mark.parametrize("method", tiny.METHODS)
def test_a_drafter_may_help(target, drafters, prompts, expected, method):
    """Greedy text is plain greedy's, and rounds are those of the same drafter in ``generate``."""
    decoder = Decoder(target, drafters[method], DecodeSettings(3, stop_ids=ENDS))
    found = texts(decoder, requests(prompts[:12]), batch_size=3)
    assert [found[i].tokens for i in range(12)] == [answer.tokens for answer in expected["greedy"][:12]]
    (alone,) = generate_batches(decoder, prompts[:12], 12, max_new_tokens=LIMIT, seed=3)
    assert [found[i] for i in range(12)] == alone


@pytest.mark.parametrize(("method", "policy"), [("dflash", "own"), ("dspine", "tail_mixed")])
def test_sampled_texts_of_a_list_are_those_of_generate(target, drafters, prompts, method, policy):
    """Text, rounds and reason by key and prompt, whatever rows they meet in, with drafts of one law and of another."""
    prompts = [prompt for prompt in prompts if len(prompt) <= 64]
    decoder = Decoder(target, drafters[method], DecodeSettings(3, SamplingConfig(0.7, 0, 0.95), policy, ENDS))
    options = dict(max_new_tokens=LIMIT, max_length=MAX_LENGTH, seed=3)
    expected = [answer for batch in generate_batches(decoder, prompts[:12], 12, **options) for answer in batch]
    found = list(answer_prompts(decoder, prompts[:12], batch_size=3, **options))
    assert [i for i, _ in found] != sorted(i for i, _ in found) and len(found) == 12  # in the order in which they finish
    assert [answer for _, answer in sorted(found, key=lambda pair: pair[0])] == expected


def test_small_queues(decoders, prompts, expected):
    """None, one, and fewer prompts than rows."""
    assert texts(decoders["greedy"], []) == {}
    for count in (1, 5):
        assert texts(decoders["greedy"], requests(prompts[:count])) == dict(enumerate(expected["greedy"][:count]))


def test_limits_of_their_own(decoders, prompts, expected):
    """0 gives no token, with a reason; others cut the same text."""
    limits = [i % 4 * 3 for i in range(len(prompts))]
    found = texts(decoders["sampled"], requests(prompts, limits))
    for i, limit in enumerate(limits):
        whole = expected["sampled"][i].tokens
        assert found[i].tokens == whole[:limit]
        assert found[i].finish_reason == ("stop" if limit and found[i].tokens[-1] in ENDS else "length")


def test_requests_may_arise_from_answers(decoders, prompts, expected):
    """Each answer asks for the next prompt, so the queue is empty again and again."""
    left = requests(prompts[:6])[::-1]
    ready, found = [left.pop()], {}
    options = dict(batch_size=8, max_length=MAX_LENGTH, max_new_tokens=LIMIT, seed=3)
    for request, answer in answer_stream(decoders["greedy"], lambda: ready.pop() if ready else None, **options):
        found[request.owner] = answer
        ready.extend([left.pop()] if left else [])
    assert found == dict(enumerate(expected["greedy"][:6]))


def test_requests_without_a_place_are_refused(decoders, prompts, expected):
    """Named with sizes; what was finished before is handed on first."""
    for bad, words in (
        (Request(9, [4] * 110, LIMIT), "request 9: 110 prompt tokens and 24 to be written do not fit max_length 128"),
        (Request(9, [4], LIMIT + 1), "with answers of up to 24"),
        (Request(9, [], 1), "prompt 9 is empty"),
        (Request(9, [4, 500], 1), "prompt 9 holds a token id outside"),
    ):
        with pytest.raises(ValueError, match=words):
            texts(decoders["greedy"], [bad])
    for name in ("batch_size", "rounds_per_call", "rows_per_refill", "max_length"):
        with pytest.raises(ValueError, match=f"{name} 0"):
            texts(decoders["greedy"], requests(prompts), **{name: 0})
    found = {}
    with pytest.raises(ValueError, match="prompt 99 is empty"):
        for request, answer in stream(decoders["greedy"], [*requests(prompts[:20]), Request(99, [], 1)], batch_size=4):
            found[request.owner] = answer
    assert 0 < len(found) < 20 and all(expected["greedy"][i] == answer for i, answer in found.items())


@pytest.mark.parametrize("when", ["before a call", "in a call", "while waiting"])
def test_an_interruption_leaves_what_there_is(when, decoders, prompts, expected, monkeypatch):
    """Ctrl-C: what the device has finished by then is handed on whole, then what it has begun; in a call the buffers are gone, and with them the begun."""
    owner, name = (FetchedRows, "of") if when == "while waiting" else (Decoder, "run")
    real, calls = getattr(owner, name), []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 6 and when != "in a call":
            raise KeyboardInterrupt
        answer = real(*args, **kwargs)
        if len(calls) == 6 and when == "in a call":
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(owner, name, interrupted)
    found = []
    with pytest.raises(KeyboardInterrupt):
        for request, answer in stream(decoders["greedy"], requests(prompts), rounds_per_call=5):
            found.append((request.owner, answer))
    whole = {i: answer for i, answer in found if answer.finish_reason != "unfinished"}
    begun = {i: answer for i, answer in found if answer.finish_reason == "unfinished"}
    assert len(found) == len(whole) + len(begun) and list(whole) == [i for i, _ in found][: len(whole)]
    assert len(whole) > 3 and all(expected["greedy"][i] == answer for i, answer in whole.items())
    assert all(expected["greedy"][i].tokens[: len(answer.tokens)] == answer.tokens != [] for i, answer in begun.items())
    assert bool(begun) == (when != "in a call")


def test_the_device_works_while_answers_are_taken(decoders, prompts, monkeypatch):
    """The next call is sent off before the first answer of the last one is handed on."""
    run, events = Decoder.run, []
    monkeypatch.setattr(Decoder, "run", lambda self, *args, **kwargs: events.append("run") or run(self, *args, **kwargs))
    for _ in stream(decoders["greedy"], requests(prompts)):
        events.append("answer")
    first = events.index("answer")
    assert events[:first].count("run") >= 2


def test_few_programs(target, prompts):
    """One a prompt width and one for decoding, however many requests there are, and none for a second run."""
    decoder = Decoder(target, None, DecodeSettings(0, stop_ids=(9,)))
    before = speculative._refill._cache_size(), speculative._run_rounds._cache_size()
    for _ in range(2):
        texts(decoder, requests(prompts), batch_size=5)
        assert speculative._refill._cache_size() - before[0] == 2  # prompts of up to 64 and of up to 128 tokens
        assert speculative._run_rounds._cache_size() - before[1] <= 2


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_list_is_compiled_ahead(target, drafters, drafts):
    """K11: 20 prompts of 20 lengths in 3 buckets take 3 programs that start rows and one that decodes; the run itself, and a second one, take none."""
    lengths = np.random.default_rng(1).permutation([*range(1, 40, 6), *range(66, 128, 10), *range(130, 256, 20)])[:20].tolist()
    assert len(set(lengths)) == 20 and {bucket(length) for length in lengths} == {64, 128, 256}
    decoder = Decoder(target, drafters["dspine"] if drafts else None, DecodeSettings(drafts, stop_ids=(11,)))
    asked, sizes = tiny.prompts(lengths), dict(batch_size=4, max_new_tokens=8, max_length=512)
    programs = lambda: (speculative._refill._cache_size(), speculative._run_rounds._cache_size(), speculative._idle._cache_size())  # noqa: E731
    before = programs()
    warm_up(decoder, asked, **sizes)
    compiled = programs()
    assert [now - then for now, then in zip(compiled, before)] == [3, 1, 1]
    for order in (asked, asked[::-1]):
        assert len(dict(answer_prompts(decoder, order, **sizes))) == 20
        assert programs() == compiled


def test_reads_follow_the_longest_prompt_so_far(target):
    """One long prompt at the end of a list does not make the others read caches of its length; both widths are compiled ahead."""
    decoder = Decoder(target, None, DecodeSettings(0, stop_ids=(12,)))
    asked, sizes = tiny.prompts([5, 9, 20, 7, 30, 8, 4, 6, 11, 12, 400]), dict(batch_size=2, max_new_tokens=8, max_length=512)
    widths, run = [], Decoder.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "run", lambda self, *args, width, **kwargs: widths.append(width) or run(self, *args, width=width, **kwargs))
        warm_up(decoder, asked, **sizes)
        ahead, widths[:] = sorted(widths), []
        assert len(dict(answer_prompts(decoder, asked, **sizes))) == 11
    assert ahead == [64, 512] == sorted(set(widths)) and widths == sorted(widths)


def test_prompts_of_like_length_start_together(decoders, prompts, monkeypatch):
    """Fewer columns are computed than if groups were as they come."""
    refill, widths = Decoder.refill, []
    monkeypatch.setattr(Decoder, "refill", lambda self, state, rows, prompts, *rest: widths.append(prompts.shape) or refill(self, state, rows, prompts, *rest))
    texts(decoders["greedy"], requests(prompts), batch_size=16, rows_per_refill=4)
    columns = sum(n * S for n, S in widths)
    as_they_come = sum(4 * (64 if max(map(len, prompts[i : i + 4])) <= 64 else 128) for i in range(0, len(prompts), 4))
    assert columns < 0.8 * as_they_come


def test_sizes():
    assert [cache_rows(n) for n in (1, 64, 65, 512)] == [64, 64, 128, 512]
    assert [group_size(n) for n in (1, 16, 17, 1024)] == [1, 1, 2, 64]
    assert [text_limit(n, 100, 512) for n in (5, 65, 300)] == [164, 228, 512]


def test_rows_dropped_by_an_insert_change_nothing(target, prompts):
    """A group that is not full carries row numbers past the end."""
    decoder = Decoder(target, None, DecodeSettings(0))
    state = decoder.idle(4, capacity=64, room=8)
    key_n = jax.random.split(jax.random.key(1), 2)
    limits, lengths, rows = np.full(2, 5, np.int32), np.full(2, 3, np.int32), np.asarray([2, 4], np.int32)
    state = decoder.refill(state, rows, np.full((2, 64), 9, np.int32), lengths, limits, key_n)
    assert state.finished_B.tolist() == [True, True, False, True] and state.limit_B.tolist() == [0, 0, 5, 0]
    assert state.target_cache.lengths_B.tolist() == [0, 0, 3, 0]
    assert np.asarray(state.target_cache.keys[0]).any(axis=(1, 2, 3)).tolist() == [False, False, True, False]


def test_a_call_ends_when_enough_rows_are_finished(target):
    """Rows at work lose nothing by it, and their neighbours do not wait."""
    decoder = Decoder(target, None, DecodeSettings(0))
    limits, key_n = np.asarray([3, 9, 5, 7], np.int32), jax.random.split(jax.random.key(1), 4)
    state = decoder.idle(4, capacity=64, room=64)
    state = decoder.refill(state, np.arange(4, dtype=np.int32), np.full((4, 64), 9, np.int32), np.full(4, 3, np.int32), limits, key_n)
    for enough, max_rounds, rounds in ((2, 100, [2, 4, 4, 4]), (4, 1, [2, 5, 4, 5]), (1, 100, [2, 5, 4, 5]), (4, 100, [2, 8, 4, 6])):
        state = decoder.run(state, max_rounds, enough=enough)
        assert state.rounds_B.tolist() == rounds
    assert state.count_B.tolist() == limits.tolist()


def test_benchmark_prints_one_line(tmp_path, target, prompts, capsys):
    """On a dataset folder; every figure is there, and the tokens are those of the stream."""
    from dspine_jax.target_io import load_target
    from serve import bench_regeneration
    from train.data import Manifest, pad_rows, write_dataset

    folder = tiny.write_target(tmp_path / "target")
    ids = [np.asarray([*prompt, 9, 8, 2]) for prompt in prompts]
    masks = [np.asarray([0] * len(prompt) + [1, 1, 1]) for prompt in prompts]
    write_dataset(tmp_path / "data", *pad_rows(ids, masks, width=max(map(len, ids))), Manifest(name="x", source="y"))
    options = "--batch-size 4 --max-length 128 --max-new-tokens 24 --dtype float32 --limit 12".split()
    assert bench_regeneration.main(["--target", str(folder), "--prompts", str(tmp_path / "data"), *options]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    real = load_target(folder, dtype=jnp.float32)
    decoder = Decoder(real, None, DecodeSettings(0, SamplingConfig(0.7), stop_ids=real.config.eos_token_ids))
    found = texts(decoder, requests(prompts[:12]), seed=0)
    assert report["answers"] == 12 and report["answer_tokens"] == sum(len(a.tokens) for a in found.values())
    assert report["tokens_per_s"] > 0 and 0 < report["prefill_share"] + report["decode_share"] <= 1
    assert bench_regeneration.main(["--target", str(folder), "--prompts", str(tmp_path / "none.jsonl")]) == 2
