"""Public DFlash folders: read, run and started from like the project's own; what is not DFlash is refused by name."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from flax import nnx

from dspine_jax.checkpoint_io import module_to_tensors
from dspine_jax.drafter import Drafter
from dspine_jax.drafter_io import load_drafter, read_drafter_config, save_drafter

CONFIG = tiny.resolved(tiny.train_config("dflash")).drafter


def public(**changes) -> dict:
    """config.json of CONFIG as z-lab writes it."""
    own = {"target_layer_ids": list(CONFIG.target_layer_ids), "mask_token_id": CONFIG.mask_token_id} | changes.pop("dflash_config", {})
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": CONFIG.block_size, "dflash_config": own,
        "num_hidden_layers": CONFIG.num_layers, "num_attention_heads": CONFIG.num_heads, "num_key_value_heads": CONFIG.num_kv_heads,
        "head_dim": CONFIG.head_dim, "intermediate_size": CONFIG.intermediate_size, "hidden_size": CONFIG.hidden_size, "vocab_size": CONFIG.vocab_size,
        "num_target_layers": CONFIG.num_target_layers, "rms_norm_eps": CONFIG.rms_norm_eps, "attention_bias": False, "dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": CONFIG.rope_theta}, "layer_types": ["full_attention"] * CONFIG.num_layers,
    } | changes  # fmt: skip


@pytest.fixture
def folder(tmp_path) -> Path:
    drafter = Drafter(CONFIG, rngs=nnx.Rngs(0))
    tiny.randomise(drafter, 3)
    save_drafter(tmp_path / "own", drafter)
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "model.safetensors").write_bytes((tmp_path / "own" / "model.safetensors").read_bytes())
    (tmp_path / "public" / "config.json").write_text(json.dumps(public()))
    return tmp_path / "public"


def rewrite(folder: Path, **changes) -> None:
    (folder / "config.json").write_text(json.dumps(public(**changes)))


def test_a_public_folder_is_the_same_drafter(folder):
    ours, theirs = load_drafter(folder.parent / "own", tiny.TARGET), load_drafter(folder, tiny.TARGET)
    assert ours.config == theirs.config
    a, b = module_to_tensors(ours), module_to_tensors(theirs)
    assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"dflash_config": {"block_size": 6}}, "block_size", 6),
        ({"rope_parameters": None, "rope_theta": 500}, "rope_theta", 500.0),
        ({"is_causal": True}, "block_attention", "causal"),
        ({"dflash_config": {"causal": True}}, "block_attention", "causal"),
    ],
)
def test_keys_are_read_where_public_folders_have_them(folder, changes, field, value):
    rewrite(folder, **changes)
    assert read_drafter_config(folder, tiny.TARGET) == dataclasses.replace(CONFIG, **{field: value})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dflash_config": {"projector_type": "domino"}}, "gru_hidden_dim is None, expected a whole number"),
        ({"projector_type": "eagle3"}, "projector_type 'eagle3' is another drafter"),
        ({"projector_type": "dspark"}, "markov_rank is None, expected a whole number"),
        ({"speculators_model_type": "dflash"}, "the layout of vllm-project/speculators"),
        ({"projector_type": "domino", "gru_hidden_dim": 8, "emb_dim": 8, "pure_draft_prefix_len": 2}, "pure_draft_prefix_len 2 is not supported"),
        ({"selector_rank": 64}, "conv_kernel_size is None, expected a whole number"),
        ({"markov_rank": 256}, "markov_rank is 256: this is another drafter"),
        ({"dflash_config": {"shift_label": True}}, "shift_label is set without projector_type"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn' is not supported"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "only full attention"),
        ({"attention_bias": True}, "only full attention without biases"),
        ({"dflash_config": {"target_layer_ids": None}}, "taps are never guessed"),
        ({"dflash_config": {"mask_token_id": None}}, "mask_token_id is None"),
        ({"hidden_size": 32}, "belongs to another target"),
        ({"num_target_layers": 30}, "belongs to another target"),
        ({"rope_parameters": None}, "rope_theta is None"),
    ],
)
def test_what_is_not_dflash_for_this_target_is_refused_by_name(folder, changes, words):
    rewrite(folder, **changes)
    with pytest.raises(ValueError, match="config.json") as error:
        load_drafter(folder, tiny.TARGET)
    assert words in str(error.value)


PUBLIC_PARTS = {
    "dflash2": {"dflash_config": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 4}},
    "domino": {"dflash_config": {"projector_type": "domino", "shift_label": True, "gru_hidden_dim": 12, "emb_dim": 8, "pure_draft_prefix_len": 1}},
    "domino same position": {"projector_type": "domino", "gru_hidden_dim": 12, "emb_dim": 8, "pure_draft_prefix_len": 1},
}


@pytest.mark.parametrize("name", PUBLIC_PARTS)
def test_public_folders_of_dflash2_and_domino_are_the_same_drafters(name, tmp_path):
    config = tiny.resolved(tiny.train_config(name)).drafter
    drafter = Drafter(config, rngs=nnx.Rngs(0))
    tiny.randomise(drafter, 3)
    save_drafter(tmp_path, drafter)
    (tmp_path / "config.json").write_text(json.dumps(public(**PUBLIC_PARTS[name])))
    theirs = load_drafter(tmp_path, tiny.TARGET)
    assert theirs.config == config and theirs.config.method == name.split()[0]
    tiny.assert_bit_equal(nnx.state(theirs), nnx.state(drafter))


def test_training_starts_from_a_public_folder(folder, tmp_path, capsys):
    from train.loop import run

    config = tiny.train_config("dflash", steps=1, mesh=tiny.MeshConfig(data=8), target=str(tiny.write_target(tmp_path / "target")))
    data = dataclasses.replace(config.data, path=str(tiny.write_data(tmp_path / "data")))
    config = dataclasses.replace(config, data=data, workdir=str(tmp_path / "run"), init_from=str(folder))
    trained = load_drafter(run(config), tiny.TARGET)
    assert f"init_from: weights of {folder}" in capsys.readouterr().out
    start, end = nnx.state(load_drafter(folder, tiny.TARGET), nnx.Param), nnx.state(trained, nnx.Param)
    moved = [float(abs(a - b).max()) for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(end))]
    assert 0 < max(moved) < 0.05  # one step from there; random weights lie farther away


def test_a_folder_that_the_authors_package_writes(tmp_path):
    torch = pytest.importorskip("torch")
    model = pytest.importorskip("dflash.model")
    from transformers import Qwen3Config

    torch.manual_seed(0)
    keys = {name: value for name, value in public().items() if name not in ("architectures", "model_type", "dtype", "layer_types")}
    theirs = model.DFlashDraftModel(Qwen3Config(**keys))
    theirs.save_pretrained(tmp_path / "zlab")
    ours = module_to_tensors(load_drafter(tmp_path / "zlab", tiny.TARGET))
    for name, tensor in theirs.state_dict().items():
        assert np.array_equal(ours[name], tensor.float().numpy()), name
