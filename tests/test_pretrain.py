"""A target written as a folder reads back as itself, and a small one can be trained from nothing."""

import json

import jax
import jax.numpy as jnp
import pytest
import tiny
from chats import write_text
from flax import nnx

from dspine_jax.target_io import load_target, read_target_config, save_target
from train import pretrain


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True, "family": "llama", "num_tokens": 128, "eos_token_ids": (2, 5)}], ids=["qwen3", "llama"])
def test_a_saved_target_reads_back_bit_for_bit(changes, tmp_path):
    target = tiny.tiny_target(**{"num_tokens": 128, "eos_token_ids": (2,)} | changes)
    save_target(tmp_path, target, dtype=jnp.float32)
    again = load_target(tmp_path, dtype=jnp.float32)
    assert again.config == target.config
    tiny.assert_bit_equal(nnx.state(again), nnx.state(target))
    assert not list(tmp_path.glob(".*partial"))


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path)


SIZES = "--hidden-size 16 --num-layers 1 --head-dim 8 --num-kv-heads 1 --intermediate-size 32 --max-length 16 --batch-size 8 --dtype float32".split()


def run(text, *extra: str) -> int:
    return pretrain.main(["--tokenizer", str(text / "tokenizer"), "--output", str(text / "target"), *SIZES, *extra])


def test_a_small_target_learns_its_text(text):
    data = ["--data", str(text / "rows"), "--held-out", str(text / "rows"), "--steps", "200", "--learning-rate", "1e-2"]
    assert run(text, *data) == 0
    last = json.loads((text / "target" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 200 and last["loss"] < 0.5 and last["held_out_loss"] < 0.5, "guessing among nine gives 2.2"
    target = load_target(text / "target", dtype=jnp.float32)
    assert (target.config.eos_token_ids, target.config.num_tokens, target.config.tie_embeddings) == ((2,), 120, True)
    assert last["parameters"] == sum(x.size for x in jax.tree.leaves(nnx.state(target)))
    choice_BT = target.logits(target(jnp.array([[10, 11, 12, 13]])).hidden_BTD).argmax(-1)
    assert choice_BT[0].tolist() == [11, 12, 13, 14]


def test_the_config_alone_is_what_the_trained_target_has(text):
    assert run(text, "--config-only") == 0
    alone = read_target_config(text / "target")
    assert not (text / "target" / "model.safetensors").exists()
    assert run(text, "--data", str(text / "rows"), "--steps", "1") == 0
    assert read_target_config(text / "target") == alone


def test_bad_input_is_named_in_one_line(text, capsys):
    for extra, words in ([], "--data"), (["--data", str(text / "none")], "none"), (["--data", str(text / "rows"), "--num-kv-heads", "3"], "num_kv_heads 3"):
        assert run(text, *extra) == 2
        error = capsys.readouterr().err.strip()
        assert error.startswith("error: ") and words in error and "\n" not in error
