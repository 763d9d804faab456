"""dspine-evaluate from files to tables, on a tiny target."""

import dataclasses
import json
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

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
