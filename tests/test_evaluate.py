"""dspine-evaluate from files to tables, on a tiny target."""

import dataclasses
import json
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import scripted
import tiny
from flax import nnx

from dspine_jax import replay
from dspine_jax.drafter import Drafter
from dspine_jax.drafter_io import save_drafter
from dspine_jax.generation import generate
from dspine_jax.speculative import Decoder, DecodeSettings
from dspine_jax.target_io import load_target, read_target_config
from serve import benchmarks, evaluate
from train.data import Manifest, write_dataset


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target folder, two drafters (one twice, as two seeds), and greedy continuations of two benchmarks."""
    root = tmp_path_factory.mktemp("evaluate")
    tiny.write_target(root / "target")
    config = read_target_config(root / "target")
    for name, method, seed in (("a", "dflash", 1), ("b0", "dspine", 2), ("b1", "dspine", 3)):
        drafter = Drafter(tiny.train_config(method).drafter.resolve(config), rngs=nnx.Rngs(seed))
        if method == "dspine":
            drafter.transfer.basis.set_value(jnp.asarray(np.random.default_rng(0).normal(size=(64, 16)), jnp.float32))
        save_drafter(root / name, drafter)
    decoder = Decoder(load_target(root / "target", dtype=jnp.float32), None, DecodeSettings(0))
    for name, rows in (("first", 3), ("second", 2)):
        rng = np.random.default_rng(rows)
        prompts = [[int(t) for t in rng.integers(4, 120, rng.integers(3, 9))] for _ in range(rows)]
        answers = generate(decoder, prompts, max_new_tokens=16)
        lengths = np.array([len(p) + len(a.tokens) for p, a in zip(prompts, answers)])
        tokens, mask = np.zeros((rows, 32), np.int64), np.zeros((rows, 32), bool)
        for row, (prompt, answer) in enumerate(zip(prompts, answers)):
            tokens[row, : lengths[row]] = prompt + answer.tokens
            mask[row, len(prompt) : lengths[row]] = True
        write_dataset(root / "data" / name, tokens, mask, lengths, Manifest(name=name, source="test"))
    return root


def arguments(root, *extra: str) -> list[str]:
    return ["--target", str(root / "target"), "--data", str(root / "data"), "--output", str(root / "out"), "--dtype", "float32", *extra]


def test_two_methods_with_seeds_on_two_benchmarks(files, capsys):
    drafters = ["--drafter", str(files / "a"), "--drafter", f"dspine={files / 'b0'}", "--drafter", f"dspine={files / 'b1'}", "--batch-size", "2"]
    assert evaluate.main(arguments(files, *drafters)) == 0
    results = json.loads((files / "out" / "results.json").read_text())
    assert results["environment"]["versions"]["jax"] and set(results["temperatures"]) == {"T0"}
    results = results["temperatures"]["T0"]
    assert set(results["methods"]) == {"dflash", "dspine"} and set(results["comparisons"]) == {"dspine_over_dflash"}
    dspine = results["methods"]["dspine"]
    assert len(dspine["folders"]) == 2 and len(dspine["full_average_tau_by_seed"]) == 2
    for method in results["methods"].values():
        for name, rows in (("first", 3), ("second", 2)):
            entry = method["benchmarks"][name]
            # tau can be computed again from the raw log, and every answer is covered to its end
            log = [r for seed in entry["rounds"] for prompt in seed["full"] for r in prompt]
            assert entry["full"]["tau_pooled"] == pytest.approx(sum(r[3] for r in log) / len(log))
            assert sum(r[3] for r in log) == rows * 15 * len(method["folders"])
            assert all(0 <= r[2] <= r[1] <= 3 for r in log)
    text = (files / "out" / "results.md").read_text()
    assert text in capsys.readouterr().out
    for words in ("full text", "to the loop onset", "| dspine | conditional |", "dspine_over_dflash, full: tau x", "Answers that start to loop"):
        assert words in text


def test_one_folder_and_fewer_prompts(files):
    extra = ["--drafter", str(files / "a"), "--prompts", "1"]
    assert evaluate.main([*arguments(files, *extra), "--data", str(files / "data" / "first")]) == 0
    (entry,) = json.loads((files / "out" / "results.json").read_text())["temperatures"]["T0"]["methods"]["dflash"]["benchmarks"].values()
    assert entry["full"]["prompts"] == 1


@pytest.mark.parametrize(
    "extra, words",
    [
        (["--drafter", "nowhere"], "nowhere"),
        (["--drafter", "{root}/a", "--data", "{root}/target"], "holds no dataset folder"),
        (["--drafter", "{root}/a", "--target", "{root}/none"], "none"),
    ],
)
def test_bad_input_is_named_in_one_line(files, capsys, extra, words):
    assert evaluate.main(arguments(files, *(text.format(root=files) for text in extra))) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and words in error and "\n" not in error


def test_drafters_with_other_numbers_of_drafts_or_for_other_targets_are_refused(files, tmp_path, capsys):
    """Tau grows with the drafts a round: pooling or comparing unequal numbers would say nothing, without a word."""
    config = read_target_config(files / "target")
    for name, block_size, sizes in (("short", 3, config), ("foreign", 4, dataclasses.replace(config, vocab_size=256))):
        save_drafter(tmp_path / name, Drafter(tiny.train_config("dflash", drafter={"block_size": block_size}).drafter.resolve(sizes), rngs=nnx.Rngs(0)))
    for label in ("", "dflash="):
        assert evaluate.main(arguments(files, "--drafter", str(files / "a"), "--drafter", f"{label}{tmp_path / 'short'}")) == 2
        error = capsys.readouterr().err
        assert "equal number of drafts" in error and f"{files / 'a'} 3" in error and f"{tmp_path / 'short'} 2" in error
    assert evaluate.main(arguments(files, "--drafter", str(tmp_path / "foreign"))) == 2
    assert f"{tmp_path / 'foreign' / 'config.json'}: drafter.vocab_size is 256 but the target has 128" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_refused_before_the_work(files, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert evaluate.main([*arguments(files, "--drafter", "nowhere"), "--output", str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err and (tmp_path / "file").read_text() == "mine"


def write_answers(folder, name: str, answers: list[list[int]]) -> None:
    """Rows with the prompt 4 5 6 and the given answers."""
    tokens, mask = np.zeros((len(answers), 40), np.int64), np.zeros((len(answers), 40), bool)
    for row, answer in enumerate(answers):
        tokens[row, : 3 + len(answer)] = [4, 5, 6, *answer]
        mask[row, 3 : 3 + len(answer)] = True
    write_dataset(folder, tokens, mask, np.array([3 + len(answer) for answer in answers]), Manifest(name=name, source="test"))


def test_benchmarks_of_one_name_never_replace_each_other(files, tmp_path, capsys):
    for folder in ("x", "y"):
        write_answers(tmp_path / folder, "same", [[7, 8, 9]])
    assert evaluate.main([*arguments(files, "--drafter", str(files / "a")), "--data", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "y") in error and "a second dataset named 'same'" in error


def test_answers_without_a_round_count_nowhere_and_break_nothing(files, tmp_path, capsys):
    """A constant answer loops at its second token, an answer of one token ends there: no round in that text for any drafter."""
    plain = [int(t) for t in np.random.default_rng(0).integers(4, 120, 20)]
    write_answers(tmp_path / "mixed", "mixed", [plain, [7] * 20])
    write_answers(tmp_path / "loops", "loops", [[7] * 20, [8] * 30])
    write_answers(tmp_path / "over", "over", [[2], [2]])
    drafters = ["--drafter", str(files / "a"), "--drafter", str(files / "b0")]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a mean of nothing would be NaN
        assert evaluate.main([*arguments(files, *drafters), "--data", str(tmp_path)]) == 0
        assert evaluate.main([*arguments(files, *drafters), "--data", str(tmp_path / "over"), "--output", str(tmp_path / "none")]) == 0
    results = json.loads((files / "out" / "results.json").read_text(), parse_constant=pytest.fail)["temperatures"]["T0"]
    dflash = results["methods"]["dflash"]
    rounds = {scope: {name: entry[scope]["rounds"] for name, entry in dflash["benchmarks"].items()} for scope in ("full", "onset")}
    assert rounds["full"]["over"] == rounds["onset"]["over"] == rounds["onset"]["loops"] == 0 < rounds["full"]["loops"]
    assert 0 < rounds["onset"]["mixed"] < rounds["full"]["mixed"]
    assert {name: entry["loop_share"] for name, entry in dflash["benchmarks"].items()} == {"mixed": 0.5, "loops": 1.0, "over": 0.0}
    assert dflash["onset_average_tau"] == dflash["benchmarks"]["mixed"]["onset"]["tau_pooled"] == dflash["onset_average_tau_by_seed"][0]
    assert set(results["comparisons"]["dspine_over_dflash"]) == {"full", "onset"}
    nothing = json.loads((tmp_path / "none" / "results.json").read_text(), parse_constant=pytest.fail)["temperatures"]["T0"]
    assert nothing["methods"]["dflash"]["full_average_tau"] is None and nothing["comparisons"] == {"dspine_over_dflash": {}}
    assert "| dflash | - | - | - | - |" in (tmp_path / "none" / "results.md").read_text()


def test_answers_in_several_pieces_are_refused():
    with pytest.raises(ValueError, match="row 0: the answer is not one run"):
        benchmarks.answer_spans(np.array([[0, 1, 0, 1]]), np.array([4]))
    assert benchmarks.answer_spans(np.array([[0, 0, 1, 1, 0]]), np.array([4])) == [(2, 4)]


def test_sizes_must_be_positive(files):
    with pytest.raises(SystemExit):
        evaluate.parse_args(arguments(files, "--drafter", "x", "--batch-size", "0"))


# ---- temperatures, real decoding, parts ----------------------------------------------------------


def test_two_temperatures_and_real_decoding(files, tmp_path, capsys):
    """Replay and decode loop agree to the last round in fp32; sampled text is scored under every policy a drafter serves."""
    drafters = ["--drafter", str(files / "a"), "--drafter", str(files / "b0")]
    extra = ["--temperature", "0", "1", "--max-new-tokens", "16", "--decode", "2", "--output", str(tmp_path)]
    assert evaluate.main([*arguments(files, *drafters), *extra]) == 0
    results = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)["temperatures"]
    assert set(results) == {"T0", "T1"}
    assert {label: set(by_policy) for label, by_policy in results["T1"]["policies"].items()} == {
        "dflash": {"own", "point_mass"},
        "dspine": {"own", "tail_mixed", "point_mass"},
    }
    for method in results["T1"]["methods"].values():
        assert method["full_average_tau"] >= max(other["full_average_tau"] for other in method["other_policies"].values())
    greedy = [e for e in results["T0"]["decoding"] if e["method"] != "plain"]
    assert {(e["method"], e["drafts"]) for e in greedy} == {("dflash", 3), ("dspine", 3)}
    for entry in greedy:
        assert (entry["state"], entry["identical"]) == ("identical", 4)
        assert entry["tau"] == pytest.approx(entry["replay_tau"], abs=0)
    assert all(e["state"] == "sampled" and e["tau"] >= 1 for e in results["T1"]["decoding"] if e["method"] != "plain")
    for temperature in ("T0", "T1"):
        assert (tmp_path / f"acceptance_{temperature}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = capsys.readouterr().out
    for words in ("### tau, temperature 1, full text", "### real decoding, temperature 0", "dspine, average tau by policy: own", "Answers cut by the cap"):
        assert words in text


def test_a_shifted_drafter_and_a_prompt_lookup_are_scored_beside_each_other(files, tmp_path):
    """A shifted drafter of 3 slots and the lookup both draft 3; decoding and replay agree to the last round."""
    sizes = {"block_size": 3, "num_layers": 1}
    drafter = Drafter(tiny.train_config("dspark", drafter=sizes).drafter.resolve(read_target_config(files / "target")), rngs=nnx.Rngs(1))
    save_drafter(tmp_path / "dspark", drafter)
    drafters = ["--drafter", str(tmp_path / "dspark"), "--drafter", "prompt-lookup"]
    extra = ["--temperature", "0", "1", "--max-new-tokens", "16", "--decode", "2", "--output", str(tmp_path / "out")]
    assert evaluate.main([*arguments(files, *drafters), *extra]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())["temperatures"]
    policies = {label: set(by_policy) for label, by_policy in results["T1"]["policies"].items()}
    assert policies == {"dspark": {"own", "point_mass"}, "prompt-lookup": {"own"}}
    greedy = [e for e in results["T0"]["decoding"] if e["method"] != "plain"]
    assert {(e["method"], e["drafts"]) for e in greedy} == {("dspark", 3), ("prompt-lookup", 3)}
    for entry in greedy:
        assert (entry["state"], entry["identical"]) == ("identical", 4)
        assert entry["tau"] == pytest.approx(entry["replay_tau"], abs=0)
    lookup = results["T0"]["methods"]["prompt-lookup"]
    assert lookup["parameters"]["total"] == 0
    assert any(r[1] == 0 for entry in lookup["benchmarks"].values() for prompt in entry["rounds"][0]["full"] for r in prompt), "some rounds propose nothing"


def test_fewer_drafts_a_round_are_decoded_and_replayed_alike(files, tmp_path):
    extra = ["--drafter", str(files / "b0"), "--max-new-tokens", "16", "--decode", "3", "--decode-drafts", "2", "1", "--decode-batch-size", "2"]
    assert evaluate.main([*arguments(files), *extra, "--output", str(tmp_path)]) == 0
    _, two, one = json.loads((tmp_path / "results.json").read_text())["temperatures"]["T0"]["decoding"]
    assert (two["drafts"], one["drafts"]) == (2, 1) and one["tau"] <= 2
    assert [e["tau"] for e in (two, one)] == [pytest.approx(e["replay_tau"], abs=0) for e in (two, one)]


def test_finished_parts_are_taken_over_and_those_of_other_inputs_are_not(files, tmp_path, monkeypatch):
    extra = ["--drafter", str(files / "a"), "--output", str(tmp_path)]
    calls = []
    real = replay.replay_rows
    monkeypatch.setattr(replay, "replay_rows", lambda *a, **k: calls.append(1) or real(*a, **k))

    def interrupted(*a, **k):
        if calls:
            raise KeyboardInterrupt
        calls.append(1)
        return real(*a, **k)

    with monkeypatch.context() as patch:
        patch.setattr(replay, "replay_rows", interrupted)
        assert evaluate.main([*arguments(files), *extra]) == 130
    assert not (tmp_path / "results.json").exists()
    calls.clear()
    assert evaluate.main([*arguments(files), *extra]) == 0
    assert len(calls) == 1  # of two benchmarks one was done
    first = json.loads((tmp_path / "results.json").read_text())
    calls.clear()
    assert evaluate.main([*arguments(files), *extra]) == 0
    again = json.loads((tmp_path / "results.json").read_text())
    assert not calls and first["temperatures"] == again["temperatures"]
    assert evaluate.main([*arguments(files), "--drafter", str(files / "b0"), "--output", str(tmp_path)]) == 0
    assert evaluate.main([*arguments(files), "--drafter", f"dflash={files / 'b0'}", "--output", str(tmp_path)]) == 0
    assert len(calls) == 4  # the same label with other weights is scored anew


def test_prompts_from_jsonl_are_continued_by_the_target(files, tmp_path, monkeypatch):
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "letters.jsonl").write_text('{"prompt": "abc"}\n{"turns": ["de"]}\n')
    monkeypatch.setattr(benchmarks, "load_tokenizer", lambda *a: None)
    monkeypatch.setattr(benchmarks, "chat_ids", lambda tokenizer, messages, mode: [4 + ord(c) - ord("a") for c in messages[-1]["content"]])
    base = ["--target", str(files / "target"), "--dtype", "float32", "--drafter", str(files / "a"), "--max-new-tokens", "9"]
    assert evaluate.main([*base, "--benchmarks", str(tmp_path / "prompts"), "--output", str(tmp_path / "out")]) == 0
    (entry,) = json.loads((tmp_path / "out" / "results.json").read_text())["temperatures"]["T0"]["methods"]["dflash"]["benchmarks"].values()
    decoder = Decoder(load_target(files / "target", dtype=jnp.float32), None, DecodeSettings(0, stop_ids=(2,)))
    answers = generate(decoder, [[4, 5, 6], [7, 8]], max_new_tokens=9)
    assert entry["full"]["tokens"] == sum(len(a.tokens) - 1 for a in answers)


def test_text_that_differs_fails_and_shows_no_speed(files, tmp_path, monkeypatch, capsys):
    """L22: a benchmark whose text is not that of plain decoding exits non-zero."""
    from dspine_jax import speculative

    monkeypatch.setattr(speculative, "judge_greedy", scripted.accept_everything)
    speculative._run_rounds.clear_cache()
    extra = ["--drafter", str(files / "a"), "--output", str(tmp_path), "--max-new-tokens", "16", "--decode", "2"]
    assert evaluate.main([*arguments(files), *extra]) == 1
    speculative._run_rounds.clear_cache()
    assert "no near tie explains it" in capsys.readouterr().err
    entry = json.loads((tmp_path / "results.json").read_text())["temperatures"]["T0"]["decoding"][1]
    assert entry["state"] == "differs" and entry["identical"] < 4 and entry["tokens_per_s"] is None and entry["speedup"] is None
    assert "text differs from plain greedy decoding" in (tmp_path / "results.md").read_text()


def test_a_looping_target_is_flagged_and_shows_no_speed(files, tmp_path):
    """L22: the text is one token hundreds of times, which is easy to draft."""
    config = json.loads((files / "target" / "config.json").read_text())
    from safetensors.numpy import load_file, save_file

    (tmp_path / "target").mkdir()
    tensors = load_file(files / "target" / "model.safetensors")
    tensors["lm_head.weight"] = np.zeros_like(tensors["lm_head.weight"])  # every logit equal: always the lowest id
    save_file(tensors, tmp_path / "target" / "model.safetensors")
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    (tmp_path / "target" / "tokenizer.json").write_bytes((files / "target" / "tokenizer.json").read_bytes())
    extra = ["--target", str(tmp_path / "target"), "--drafter", str(files / "a"), "--output", str(tmp_path), "--max-new-tokens", "60", "--decode", "2"]
    assert evaluate.main([*arguments(files), *extra]) == 0
    for entry in json.loads((tmp_path / "results.json").read_text())["temperatures"]["T0"]["decoding"]:
        assert entry["longest_repeat"] == 59 and entry["looped_share"] > 0.9
        assert entry["tokens_per_s"] is None and entry["speedup"] is None and "loop onset" in entry["withheld"]
    assert "Speed withheld" in (tmp_path / "results.md").read_text()


@pytest.mark.parametrize(
    "extra, words",
    [
        (["--decode-drafts", "4", "--decode", "1"], "must lie in 1..3"),
        (["--temperature", "-1"], "temperature -1.0"),
        (["--temperature", "1", "--top-p", "0"], "top_p 0.0"),
    ],
)
def test_settings_that_cannot_be_scored_are_refused(files, tmp_path, capsys, extra, words):
    assert evaluate.main([*arguments(files, "--drafter", str(files / "a")), "--output", str(tmp_path), *extra]) == 2
    assert words in capsys.readouterr().err
