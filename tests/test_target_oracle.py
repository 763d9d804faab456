"""The port beside the live torch models of transformers (Python 3.11; elsewhere the stored fixtures speak for them)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is the live oracle; the stored fixtures are compared in test_target.py")

from dspine_jax.target_io import load_target  # noqa: E402

_spec = importlib.util.spec_from_file_location("make_fixtures", Path(__file__).parent / "make_fixtures.py")
make_fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_fixtures)

BAR = 1e-5


def relative_l2(ours, theirs) -> float:
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


CASES = {
    "qwen3 tied, grouped by 2, wide heads": ("qwen3", {"layers": 3, "head_dim": 32, "theta": 1e6, "tied": True}),
    "qwen3 untied, one key/value head": ("qwen3", {"layers": 2, "head_dim": 16, "theta": 5e6, "tied": False, "num_key_value_heads": 1}),
    "llama untied, no grouping": ("llama", {"layers": 3, "head_dim": 16, "theta": 1e4, "tied": False, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_and_logits_through_a_folder_that_transformers_wrote(tmp_path, case):
    family, sizes = CASES[case]
    model = make_fixtures.random_model(family, seed=5, **sizes)
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 128, (2, 19)).astype(np.int32)
    theirs = make_fixtures.reference(model, tokens)
    ours = load_target(tmp_path, dtype=jnp.float32)
    assert ours.config.tie_embeddings == sizes["tied"]
    taps = tuple(range(sizes["layers"] - 1))
    out = ours(jnp.asarray(tokens), target_layer_ids=taps)
    for index, features in enumerate(np.split(np.asarray(out.tapped_BTE), len(taps), axis=-1)):
        assert relative_l2(features, theirs["layers"][index]) <= BAR, f"layer {index}"
        assert relative_l2(features, theirs["hf_states"][index + 1]) <= BAR, f"entry {index + 1}"
    assert relative_l2(out.hidden_BTD, theirs["hf_states"][-1]) <= BAR
    assert relative_l2(ours.logits(out.hidden_BTD), theirs["logits"]) <= BAR


def test_fixtures_are_what_the_script_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(make_fixtures, "HERE", tmp_path)
    make_fixtures.main()
    stored = Path(__file__).parent / "fixtures"
    for name in ("target_qwen3", "target_llama"):
        assert (tmp_path / name / "config.json").read_bytes() == (stored / name / "config.json").read_bytes()
        assert (tmp_path / name / "model.safetensors").read_bytes() == (stored / name / "model.safetensors").read_bytes()
        fresh, kept = np.load(tmp_path / name / "reference.npz"), np.load(stored / name / "reference.npz")
        assert set(fresh) == set(kept)
        for key in kept:
            assert relative_l2(fresh[key], kept[key]) <= BAR, key
