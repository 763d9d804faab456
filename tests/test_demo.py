"""The embedded demo: what ships is small, decodes as well as stated, and `python -m serve.demo` runs from end to end."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from dspine_jax.drafter_io import load_drafter, save_drafter
from dspine_jax.target_io import read_target_config
from serve import assets, demo, generate
from train.data import DatasetFolder, write_dataset

MOST_BYTES = 25_000_000
# tau of the shipped drafters on the eight prompts, 128 tokens each: measured 3.43 and 3.86 in fp32. A drafter that is broken, or read wrongly, lies near 1.
LEAST_TAU = {"dflash": 3.1, "dspine": 3.5}


def call(module, argv: list[str]) -> tuple[int, dict]:
    """Exit code and the JSON object printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = module.main(argv)
    return code, json.loads(out.getvalue())


def test_assets_are_small_and_complete():
    folder = assets.demo_folder()
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
    assert {path.suffix for path in files} <= {".json", ".jsonl", ".md", ".npy", ".safetensors"}
    target = read_target_config(folder / "target")
    assert target.family == "qwen3" and target.num_layers == 10
    for name in ("train", "evaluation"):
        DatasetFolder(folder / "data" / name, vocab_size=target.num_tokens)


@pytest.fixture(scope="module")
def decoded() -> dict[str, dict]:
    """Reports of decoding the demo's prompts with each shipped drafter, compared with plain greedy decoding."""
    folder, reports = assets.demo_folder(), {}
    for method in demo.METHODS:
        options = ["--drafter", str(folder / method)] if method != "dspine" else []  # the demo's own default
        code, reports[method] = call(generate, ["--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "128", "--check", "--json", *options])
        assert code == 0
    return reports


@pytest.mark.slow
@pytest.mark.parametrize("method", demo.METHODS)
def test_shipped_drafters_reach_their_acceptance(decoded, method):
    assert decoded[method]["matches_greedy"]
    assert decoded[method]["tau"] >= LEAST_TAU[method]


@pytest.mark.slow
def test_both_drafters_give_one_text_and_dspine_needs_fewer_rounds(decoded):
    assert decoded["dflash"]["text"] == decoded["dspine"]["text"]
    assert decoded["dspine"]["rounds"] < decoded["dflash"]["rounds"]


def test_a_broken_drafter_falls_below_the_stated_acceptance(tmp_path):
    """The control of the test above: one projection set to zero, the same text."""
    folder = assets.demo_folder()
    drafter = load_drafter(folder / "dspine", read_target_config(folder / "target"))
    drafter.fc.kernel.set_value(jax.numpy.zeros_like(drafter.fc.kernel[...]))
    save_drafter(tmp_path / "broken", drafter)
    options = ["--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "32", "--check", "--json", "--drafter", str(tmp_path / "broken")]
    code, report = call(generate, options)
    assert code == 0 and report["matches_greedy"]
    assert report["tau"] < min(LEAST_TAU.values()) - 0.5


def test_generate_without_a_target_uses_the_demo():
    args = generate.parse_args(["hello"])
    assert (Path(args.target), Path(args.drafter)) == (assets.demo_folder() / "target", assets.demo_folder() / "dspine")
    assert generate.parse_args(["hello", "--drafter", "mine"]).drafter == "mine"
    assert generate.parse_args(["hello", "--target", "mine"]).drafter is None


def test_an_installation_without_the_demo_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(assets, "__file__", str(tmp_path / "serve" / "assets.py"))
    monkeypatch.setattr(assets, "DISTRIBUTION", "no-such-distribution")
    with pytest.raises(SystemExit) as stop:
        generate.parse_args(["hello"])
    assert stop.value.code == 2 and "holds no demo" in capsys.readouterr().err


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory) -> Path:
    """The demo with two evaluation rows and two prompts, so that its runner ends soon."""
    source, folder = assets.demo_folder(), tmp_path_factory.mktemp("demo")
    shutil.copytree(source, folder, dirs_exist_ok=True)
    data = DatasetFolder(source / "data" / "evaluation")
    rows = (np.asarray(data.tokens[:2]), np.asarray(data.loss_mask[:2]), np.asarray(data.lengths[:2]))
    write_dataset(folder / "data" / "evaluation", *rows, data.manifest, overwrite=True)
    lines = (source / "prompts.jsonl").read_text().splitlines()[:2]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.slow
def test_the_demo_runs(small_demo, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(assets, "demo_folder", lambda: small_demo)
    stale, foreign = tmp_path / "demo" / "runs" / "dspine" / "stale", tmp_path / "eval" / "parts"
    for folder in (stale, foreign):
        folder.mkdir(parents=True)
    assert demo.main(["--output", str(tmp_path), "--steps", "3", "--repeats", "1", "--max-new-tokens", "24", "--seed", "5"]) == 0
    assert not stale.exists(), "a former demo's workdir must not be taken for this one's"
    assert foreign.exists(), "an evaluation beside it is not the demo's to remove"
    results = json.loads((tmp_path / "demo.json").read_text())
    assert (results["steps"], results["seed"]) == (3, 5)
    assert results["matches_greedy"] is True and results["speedup"] > 0 and results["seconds"] > 0
    for method in demo.METHODS:
        assert 1 <= results[method]["tau"] < results[method]["shipped_tau"]
        records = [json.loads(line) for line in (tmp_path / "demo" / "runs" / method / "metrics.jsonl").read_text().splitlines()]
        assert records[-1]["step"] == 3
        assert json.loads((tmp_path / "demo" / "runs" / method / "config.json").read_text())["seed"] == 5
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "identical to plain greedy decoding" in out and f"{results['dspine']['shipped_tau']:.2f}" in out


def test_both_methods_are_trained_alike():
    from dspine_jax.config_io import config_to_dict, load_config

    dflash, dspine = (config_to_dict(load_config(demo.CONFIGS / f"{method}.py")) for method in demo.METHODS)
    assert {name for name in dspine if dspine[name] != dflash[name]} == {"workdir", "drafter"}
    assert {name for name in dspine["drafter"] if dspine["drafter"][name] != dflash["drafter"][name]} == {"injection"}


@pytest.mark.parametrize("text, words", [("--steps 0", "--steps 0 must be at least 1"), ("--repeats 0", "--repeats 0 must be at least 1")])
def test_bad_options_are_refused(text, words, capsys):
    with pytest.raises(SystemExit):
        demo.main(text.split())
    assert words in capsys.readouterr().err
