"""Loading targets from HF folders: config keys, tied heads, padded tables, shards, refusals (T02, T07, T08, T09)."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dspine_jax.checkpoint_io import module_to_tensors
from dspine_jax.target import Target
from dspine_jax.target_io import load_target, read_target_config
from dspine_jax.vocabulary import vocabulary_logits

FIXTURES = Path(__file__).parent / "fixtures"
BAR = 1e-5


def relative_l2(ours, theirs) -> float:
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@nnx.jit
def run(model, tokens_BT):
    out = model(tokens_BT)
    return out.hidden_BTD, model.logits(out.hidden_BTD)


def reference(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURES / name / "reference.npz"))


@pytest.fixture
def folder(tmp_path):
    """Call with a fixture's name and config changes (None deletes a key): a private copy of the folder."""

    def copy(name: str = "target_llama", **changes) -> Path:
        out = tmp_path / name
        shutil.copytree(FIXTURES / name, out, ignore=shutil.ignore_patterns("reference.npz"))
        edit(out, **changes)
        return out

    return copy


def edit(path: Path, **changes) -> None:
    config = json.loads((path / "config.json").read_text())
    for key, value in changes.items():
        config[key] = value
        if value is None:
            del config[key]
    (path / "config.json").write_text(json.dumps(config))


def shard(path: Path) -> dict[str, str]:
    """Split model.safetensors in two; returns the weight map."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return files


# ---- what is read ------------------------------------------------------------------------------


def test_config_fields():
    config = read_target_config(FIXTURES / "target_qwen3")
    assert (config.family, config.vocab_size, config.num_tokens, config.hidden_size, config.num_layers) == ("qwen3", 128, 128, 64, 6)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size) == (4, 2, 32, 96)
    assert (config.rope_theta, config.rms_norm_eps, config.tie_embeddings) == (1e6, 1e-6, False)
    assert (config.eos_token_ids, config.max_position_embeddings) == ((2, 5), 4096)
    assert read_target_config(str(FIXTURES / "target_llama")).tie_embeddings


def test_config_is_read_without_weights(folder):
    path = folder()
    (path / "model.safetensors").unlink()
    assert read_target_config(path).num_layers == 2


def test_head_dim_is_derived_only_when_absent(folder):
    assert read_target_config(folder(head_dim=None)).head_dim == 16
    assert read_target_config(FIXTURES / "target_qwen3").head_dim == 32  # 64 / 4 would be 16


def test_llama_without_key_value_heads_is_multi_head(folder):
    assert read_target_config(folder(num_key_value_heads=None)).num_kv_heads == 4


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([7, 2], 2, (7, 2)), (9, [2, 5], (9, 2, 5)), (None, 4, (4,)), (6, None, (6,)), (None, None, ())],
)
def test_end_ids_come_from_both_files(folder, generation, config, expected):
    path = folder(eos_token_id=config)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert read_target_config(path).eos_token_ids == expected


def test_default_dtype_is_bf16_and_weights_are_exact():
    model = load_target(FIXTURES / "target_llama")
    stored = load_file(FIXTURES / "target_llama" / "model.safetensors")
    ours = {("" if name.startswith("lm_head") else "model.") + name: value for name, value in module_to_tensors(model).items()}
    assert ours.keys() == stored.keys()
    for name, value in stored.items():
        assert ours[name].dtype == value.dtype == jnp.bfloat16
        np.testing.assert_array_equal(ours[name], value)


def test_sharding_is_asked_for_every_array():
    one = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    model = load_target(FIXTURES / "target_llama", sharding=lambda path: one)
    arrays = jax.tree.leaves(nnx.state(model))
    assert len(arrays) == 2 * 9 + 2
    assert all(array.sharding == one for array in arrays)


def test_shards_equal_one_file(folder):
    path = folder("target_qwen3")
    shard(path)
    whole, parts = module_to_tensors(load_target(FIXTURES / "target_qwen3")), module_to_tensors(load_target(path))
    assert whole.keys() == parts.keys()
    for name in whole:
        np.testing.assert_array_equal(whole[name], parts[name])


def test_stored_rotary_buffers_are_passed_over(folder):
    path = folder()
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}, path / "model.safetensors")
    assert load_target(path).config.num_layers == 2


# ---- T02 ---------------------------------------------------------------------------------------


def write_tokenizer(path: Path, vocab: dict[str, int], added: list[int]) -> None:
    tokenizer = {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": [{"id": i, "content": f"<{i}>"} for i in added]}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))


def test_table_rows_and_usable_ids_are_two_numbers(folder):
    path = folder("target_qwen3")
    write_tokenizer(path, {f"t{i}": i for i in range(118)}, [118, 119])
    model, ref = load_target(path, dtype=jnp.float32), reference("target_qwen3")
    assert (model.config.vocab_size, model.config.num_tokens) == (128, 120)
    hidden, logits = run(model, jnp.asarray(ref["short_tokens"]))
    assert relative_l2(vocabulary_logits(hidden, model.output_embedding_VD, 128), ref["short_logits"]) <= BAR
    assert relative_l2(logits[..., :120], ref["short_logits"][..., :120]) <= BAR
    assert np.all(np.asarray(logits[..., 120:]) == -1e30)


def test_a_tokenizer_larger_than_the_table_is_capped(folder):
    path = folder()
    write_tokenizer(path, {"a": 0}, [200])
    assert read_target_config(path).num_tokens == 128


def test_table_must_have_the_rows_of_the_config(folder):
    path = folder(vocab_size=120)
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor 'model\.embed_tokens\.weight' has shape \[128, 64\], the config asks for \[120, 64\]"):
        load_target(path)


# ---- T07, T08 ----------------------------------------------------------------------------------


def test_tied_head_is_the_embedding():
    model, ref = load_target(FIXTURES / "target_llama", dtype=jnp.float32), reference("target_llama")
    assert "lm_head.weight" not in load_file(FIXTURES / "target_llama" / "model.safetensors")
    hidden, logits = run(model, jnp.asarray(ref["short_tokens"]))
    assert relative_l2(logits, ref["short_logits"]) <= BAR
    random_head = Target(model.config, rngs=nnx.Rngs(0)).output_embedding_VD
    assert relative_l2(vocabulary_logits(hidden, random_head, 128), ref["short_logits"]) > 0.5, "the comparison must see a head left at random"


def table_count(model) -> int:
    return sum(set(array.shape) == {128, 64} for array in jax.tree.leaves(nnx.state(model)))


def test_tied_table_is_one_array_after_load_and_after_save_and_load(tmp_path):
    model = load_target(FIXTURES / "target_llama", dtype=jnp.float32)
    assert table_count(model) == 1
    assert table_count(load_target(FIXTURES / "target_qwen3")) == 2
    shutil.copy(FIXTURES / "target_llama" / "config.json", tmp_path)
    save_file({f"model.{name}": value for name, value in module_to_tensors(model).items()}, tmp_path / "model.safetensors")
    again = load_target(tmp_path, dtype=jnp.float32)
    assert table_count(again) == 1
    hidden = jnp.ones((1, 1, 64))
    before = again.logits(hidden)
    again.embed_tokens.embedding[...] += 1.0
    np.testing.assert_allclose(again.logits(hidden) - before, 64.0, rtol=1e-4)


def test_tied_folder_with_a_head_tensor(folder):
    path = folder()
    tensors = load_file(path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": table.copy()}, path / "model.safetensors")
    assert table_count(load_target(path)) == 1
    save_file(tensors | {"lm_head.weight": (table + 1).astype(table.dtype)}, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: tie_word_embeddings is true but 'lm_head\.weight' differs"):
        load_target(path)


# ---- T09 ---------------------------------------------------------------------------------------

NESTED, TOP = 10_000_000.0, 1_000_000.0
THETA_CASES = {
    "nested only": ({"rope_parameters": {"rope_type": "default", "rope_theta": NESTED}}, NESTED, False),
    "top level only": ({"rope_parameters": None, "rope_theta": TOP}, TOP, False),
    "nested wins": ({"rope_parameters": {"rope_type": "default", "rope_theta": NESTED}, "rope_theta": TOP}, NESTED, True),
    "nested without the key": ({"rope_parameters": {"rope_type": "default"}, "rope_theta": TOP}, TOP, False),
    "older dict": ({"rope_parameters": None, "rope_scaling": {"type": "default", "rope_theta": NESTED}}, NESTED, False),
    "older dict wins": ({"rope_parameters": None, "rope_scaling": {"rope_theta": NESTED}, "rope_theta": TOP}, NESTED, True),
    "newest dict first": ({"rope_parameters": {"rope_theta": NESTED}, "rope_scaling": {"rope_theta": TOP}}, NESTED, True),
    "all agree": ({"rope_parameters": {"rope_theta": TOP, "partial_rotary_factor": 1.0}, "rope_theta": 1_000_000}, TOP, False),
}


@pytest.mark.parametrize("case", THETA_CASES)
def test_rope_theta_is_found_and_right_at_position_3000(folder, case):
    changes, theta, warned = THETA_CASES[case]
    path = folder(**changes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = read_target_config(path)
    assert config.rope_theta == theta
    messages = [str(w.message) for w in caught if "rope_theta" in str(w.message)]
    assert len(messages) == int(warned)
    if warned:
        assert str(path / "config.json") in messages[0] and str(NESTED) in messages[0] and str(TOP) in messages[0]
        return  # the logits depend on config.rope_theta alone; the cases without a warning run them
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load_target(path, dtype=jnp.float32)
    check_far_logits(model, theta)


def check_far_logits(model, theta: float) -> None:
    ref = reference("target_llama")
    at = ref["long_positions"].tolist().index(3000)
    _, logits = run(model, jnp.asarray(ref["long_tokens"][:, :3001]))
    assert relative_l2(logits[:, 3000], ref[f"long_logits_theta_{theta:.0f}"][:, at]) <= BAR
    wrong = NESTED if theta == TOP else TOP
    assert relative_l2(logits[:, 3000], ref[f"long_logits_theta_{wrong:.0f}"][:, at]) > 1e-2, "position 3000 must tell the two apart"


def test_nested_theta_beside_another_top_level_one_is_used_in_the_logits(folder):
    path = folder(**THETA_CASES["nested wins"][0])
    with pytest.warns(UserWarning, match="the first is used"):
        model = load_target(path, dtype=jnp.float32)
    check_far_logits(model, NESTED)


# ---- refusals ----------------------------------------------------------------------------------

LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
CONFIG_REFUSALS = [
    ({"rope_parameters": None}, "rope_theta is neither in rope_parameters"),
    ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is neither in rope_parameters"),
    ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_parameters.rope_theta is '1e6'"),
    ({"rope_parameters": LINEAR}, "rope_parameters.rope_type is 'linear'"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.type is 'yarn'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.rope_type is 'llama3'"),
    ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1, 2]}}, "rope_parameters holds mrope_section"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"model_type": "gemma3"}, "model_type 'gemma3' is not supported; this port computes qwen3 and llama"),
    ({"model_type": None}, "model_type None"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"use_sliding_window": True}, "use_sliding_window is True"),
    ({"rope_interleaved": True}, "rope_interleaved is True"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types holds sliding_attention"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is"),
    ({"hidden_size": None}, "hidden_size is None"),
    ({"rms_norm_eps": None}, "rms_norm_eps is None"),
    ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
    ({"head_dim": 15}, "head_dim 15 is odd"),
    ({"head_dim": None, "num_attention_heads": 6}, "head_dim is absent and hidden_size 64 is not a multiple"),
    ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
    ({"eos_token_id": ["</s>"]}, "eos_token_id '</s>' is not a token id"),
]


@pytest.mark.parametrize(("changes", "message"), CONFIG_REFUSALS, ids=[message for _, message in CONFIG_REFUSALS])
def test_configs_that_are_not_computed_are_refused_naming_file_and_value(folder, changes, message):
    path = folder(**changes)
    for call in (read_target_config, load_target):
        with pytest.raises(ValueError) as caught:
            call(path)
        assert str(caught.value).startswith(f"{path / 'config.json'}: ")
        assert message in str(caught.value)


def test_broken_json_is_refused_naming_the_file(folder):
    path = folder()
    (path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        read_target_config(path)


def test_paths_that_hold_no_target(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        load_target(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"config\.json: the file is missing"):
        load_target(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.safetensors: not a \.gguf file"):
        load_target(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_unread(folder, name):
    path = folder()
    (path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load_target(path)
    (path / name).write_bytes(b"never opened")
    with pytest.raises(ValueError, match=rf"holds only {name}; such files are pickles, which run code"):
        load_target(path)


def test_damaged_or_missing_weights_name_their_file(folder):
    path = folder()
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a whole safetensors file"):
        load_target(path)
    file.write_bytes(content)
    shutil.copy(file, path / "x")
    files = shard(path)
    first = path / files["model.norm.weight"]
    saved = first.read_bytes()
    first.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{first.name}: this shard is named in model\.safetensors\.index\.json but is missing"):
        load_target(path)
    first.write_bytes(saved[: len(saved) // 2])
    with pytest.raises(ValueError, match=rf"{first.name}: not a whole safetensors file"):
        load_target(path)
    first.write_bytes(saved)
    shutil.move(path / "x", file)
    with pytest.raises(ValueError, match=r"both model\.safetensors and model\.safetensors\.index\.json"):
        load_target(path)


def test_index_and_shards_must_agree(folder):
    path = folder()
    files = shard(path)
    index = path / "model.safetensors.index.json"
    one, two = sorted(set(files.values()))
    cases = [
        (files | {"model.absent.weight": one}, rf"{one}: .* says that tensor 'model\.absent\.weight' is in this shard, but it is not"),
        (files | {"model.norm.weight": one if files["model.norm.weight"] == two else two}, "tensor 'model.norm.weight' is in this shard, but it is not"),
        ({name: file for name, file in files.items() if name != "model.norm.weight"}, "holds tensor 'model.norm.weight', which .* does not list"),
        (files | {"model.norm.weight": "../other.safetensors"}, r"points to '\.\./other\.safetensors'"),
        ({}, "'weight_map' is missing or empty"),
    ]
    for weight_map, message in cases:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=message):
            load_target(path)
    index.write_text(json.dumps({"weight_map": files}))
    norm = load_file(path / files["model.norm.weight"])["model.norm.weight"]
    other = path / (one if files["model.norm.weight"] == two else two)
    save_file(load_file(other) | {"model.norm.weight": norm}, other)
    with pytest.raises(ValueError, match="'model.norm.weight' is also in"):
        load_target(path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, r"missing tensor model\.layers\.1\.mlp\.up_proj\.weight \[96, 64\]"),
        ("model.layers.0.self_attn.q_norm.weight", np.ones(16, np.float32), r"no tensor model\.layers\.0\.self_attn\.q_norm\.weight \[16\]"),
        ("model.norm.weight", np.ones(63, np.float32), r"'model\.norm\.weight' has shape \[63\], the config asks for \[64\]"),
        ("model.norm.weight", np.ones(64, np.int32), r"'model\.norm\.weight' holds int32"),
    ],
)
def test_weights_must_fit_the_config(folder, name, value, message):
    path = folder()
    tensors = load_file(path / "model.safetensors")
    del tensors[name if name in tensors else "model.norm.weight"]
    if name.endswith("q_norm.weight"):
        tensors["model.norm.weight"] = np.ones(64, np.float32)
    if value is not None:
        tensors[name] = value
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=message) as caught:
        load_target(path)
    assert str(path) in str(caught.value)


def test_untied_folder_without_a_head_is_refused(folder):
    with pytest.raises(ValueError, match=r"missing tensor lm_head\.weight \[128, 64\]"):
        load_target(folder(tie_word_embeddings=False))
