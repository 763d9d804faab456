"""train.compare_torch measures both sides, records what fails and goes on, and says what it needs. (That both compute the same: test_torch_step.py.)"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json

import pytest
from fixtures.drafter_models import TARGET_SIZES

from dspine_jax.config import TargetConfig
from train import compare_torch

TINY = compare_torch.Shape(TargetConfig(**TARGET_SIZES), mask_token_id=3, transfer_size=16, rows=2, width=32, num_anchors=4, vocab_chunk=16)
OPTIONS = ["--shapes", "tiny", "--methods", "dspine", "--steps", "2", "--repeats", "3", "--torch-modes", "eager", "--set", "drafter.num_layers=1"]
OPTIONS += ["--set", "drafter.block_size=4", "--set", "drafter.target_layer_ids=(0,2)", "--set", "compute_dtype=float32"]


@pytest.fixture(autouse=True)
def _tiny_shape(monkeypatch):
    monkeypatch.setitem(compare_torch.SHAPES, "tiny", TINY)


def test_both_sides_are_measured_and_compared(tmp_path, capfd):
    pytest.importorskip("torch", reason="one of the two sides")
    file = tmp_path / "out" / "compare.json"
    assert compare_torch.main([*OPTIONS, "--json", str(file)]) == 0
    (result,) = json.loads(file.read_text())
    assert (result["rows"], result["width"], result["num_anchors"]) == (2, 32, 4)
    for engine in ("jax", "torch"):
        report = result[engine]
        low, high = report["spread_ms"]
        assert 0 < low <= report["step_ms"] <= high and report["tokens_per_s"] == pytest.approx(2 * 32 / report["step_ms"] * 1e3)
        assert report["environment"]["versions"][engine] == importlib.metadata.version(engine)
    assert result["ratio"] == pytest.approx(result["torch"]["step_ms"] / result["jax"]["step_ms"])
    table = capfd.readouterr().out.splitlines()[-2:]
    assert "tiny dspine jax" in table[0] and f"{result['ratio']:.2f}x" in table[1]


def test_a_failure_is_recorded_and_the_rest_goes_on(tmp_path, capfd):
    file = tmp_path / "compare.json"
    options = [*OPTIONS, "--only", "jax", "--methods", "dspine", "dflash", "--set", "mesh.data=3", "--json", str(file)]
    assert compare_torch.main(options) == 1
    errors = [result["jax"]["error"] for result in json.loads(file.read_text())]
    assert len(errors) == 2 and all("does not use exactly 1 devices" in error for error in errors)
    assert "tiny dflash jax" in (last := capfd.readouterr().out.splitlines()[-1]) and "failed" in last


def test_without_torch_the_command_says_what_to_do(monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else real(name, *rest))
    assert compare_torch.main(OPTIONS) == 2
    assert "torch" in (message := capsys.readouterr().err) and "--only jax" in message


@pytest.mark.parametrize(
    "setting", ["loss.l1_weight=0.5", "loss.dpace_alpha=0.5", "loss.prefix_mask=true", "optimizer.ema_decay=0.9", "drafter.label_shift=shifted"]
)
def test_what_pytorch_does_not_compute_is_refused(setting, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: True)
    assert compare_torch.main([*OPTIONS, "--methods", "dflash", "--set", setting]) == 2
    assert f"the PyTorch side computes {setting.split('=')[0]} " in (message := capsys.readouterr().err) and "--only jax" in message


def test_bad_options_are_refused_before_anything_runs(capsys):
    assert compare_torch.main([*OPTIONS, "--only", "jax", "--set", "data.batch_sise=2"]) == 2
    assert "data.batch_size" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        compare_torch.main([*OPTIONS, "--torch-chunks", "0"])
    assert "--torch-chunks: 0 must be at least 1" in capsys.readouterr().err
