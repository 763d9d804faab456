"""dspine-evaluate from files to tables, on a tiny target."""

import json

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
from serve import evaluate
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
    assert set(results["methods"]) == {"dflash", "dspine"} and set(results["comparisons"]) == {"dspine_over_dflash"}
    assert results["environment"]["versions"]["jax"]
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
    (entry,) = json.loads((files / "out" / "results.json").read_text())["methods"]["dflash"]["benchmarks"].values()
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


def test_answers_in_several_pieces_are_refused():
    with pytest.raises(ValueError, match="row 0: the answer is not one run"):
        evaluate.answer_spans(np.array([[0, 1, 0, 1]]), np.array([4]))
    assert evaluate.answer_spans(np.array([[0, 0, 1, 1, 0]]), np.array([4])) == [(2, 4)]


def test_sizes_must_be_positive(files):
    with pytest.raises(SystemExit):
        evaluate.parse_args(arguments(files, "--drafter", "x", "--batch-size", "0"))
