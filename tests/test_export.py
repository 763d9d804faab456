"""dspine-export: the served layout, both ways without loss; what is refused, and that nothing in a folder runs (area F of the known failures)."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fixtures.drafter_models import reference_of, tiny_drafter, tiny_target
from safetensors.numpy import load_file, save_file
from test_gguf_io import TEXTS, write_tokenizer

from dspine_jax.checkpoint_io import SafetensorsFiles, module_to_tensors
from dspine_jax.drafter_io import load_drafter, read_drafter_config, save_drafter
from dspine_jax.gguf_io import gguf_tokenizer
from dspine_jax.target_io import load_head_rows, load_target, read_target_config, save_target
from serve import export

TAPS = (0, 3, 4)  # of 6: no formula gives them
BACKBONE = ["fc.weight", "hidden_norm.weight", "norm.weight"] + [
    f"layers.{i}.{name}.weight"
    for i in range(2)
    for name in (
        *("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        *(f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    )
]
INJECTED = [f"injections.{i}.{name}" for i in range(2) for name in ("norm.weight", "feature.weight", "gate_predecessor.weight", "message.weight")]
INJECTED += [f"injections.{i}.gate_hidden.{leaf}" for i in range(2) for leaf in ("weight", "bias")]
CONVOLVED = [f"layers.{i}.{side}_conv.{name}" for i in range(2) for side in ("attention", "mlp") for name in ("base_kernel", "kernel_projection.weight")]
SELECTOR = [f"candidate_selector.{name}" for name in ("hidden_projection.weight", "predecessor_codebook", "successor_codebook")]
KEYS = {
    "dflash": BACKBONE,
    "dflash2": [*BACKBONE, *CONVOLVED, *SELECTOR],
    "domino": [*BACKBONE, "prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"],
    "dspine": [*BACKBONE, *INJECTED, "transfer.mean", "transfer.basis", "transfer.table"],
}


@pytest.fixture(scope="module")
def models():
    target = tiny_target(num_layers=6)
    return target, {method: tiny_drafter(target, method, target_layer_ids=TAPS, template_mode="unset") for method in KEYS}


@pytest.fixture
def root(models, tmp_path) -> Path:
    """target/, dflash/ and dspine/ in our own layout."""
    target, drafters = models
    save_target(tmp_path / "target", target, dtype=jnp.float32)
    (tmp_path / "target" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {str(i): i for i in range(target.config.num_tokens)}}}))
    for method, drafter in drafters.items():
        save_drafter(tmp_path / method, drafter)
    return tmp_path


def command(root: Path, *words: object) -> int:
    return export.main([str(word) for word in words] + ["--target", str(root / "target")])


def served(root: Path, method: str = "dspine", dtype: str = "float32") -> Path:
    assert command(root, root / method, "--output", root / "served", "--dtype", dtype) == 0
    return root / "served"


def edit(folder: Path, name: str = "model.safetensors", **tensors: np.ndarray | None) -> None:
    """Replace tensors of a file, or leave them out (None)."""
    changed = load_file(folder / name) | tensors
    save_file({key: value for key, value in changed.items() if value is not None}, folder / name)


def refused(folder: Path, root: Path) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load_drafter(folder, read_target_config(root / "target"))
    return str(error.value)


@pytest.mark.parametrize("method", KEYS)
def test_out_and_back_changes_no_bit(method, models, root, capsys):
    folder = served(root, method)
    assert command(root, folder, "--import", "--output", root / "back", "--verify") == 0
    assert "verified" in capsys.readouterr().out
    for name in ("model.safetensors", "config.json"):
        assert (root / "back" / name).read_bytes() == (root / method / name).read_bytes(), name
    # E07: the key set is pinned. Linear kernels are [out,in], once: fc and o_proj are not square.
    tensors, drafter = load_file(folder / "model.safetensors"), models[1][method]
    assert sorted(tensors) == sorted(KEYS[method])
    np.testing.assert_array_equal(tensors["fc.weight"], np.asarray(drafter.fc.kernel[...]).T)
    o_proj = np.asarray(drafter.layers[1].self_attn.o_proj.kernel[...])
    np.testing.assert_array_equal(tensors["layers.1.self_attn.o_proj.weight"], o_proj.reshape(-1, o_proj.shape[-1]).T)


def test_bfloat16_is_rounded_once_and_the_transfer_space_stays_fp32(models, root):
    tensors = load_file(served(root, dtype="bfloat16") / "model.safetensors")
    for name, value in module_to_tensors(models[1]["dspine"]).items():
        kept = np.float32 if name.startswith("transfer.") else ml_dtypes.bfloat16
        assert tensors[name].dtype == kept
        np.testing.assert_array_equal(tensors[name], value.astype(kept))
    assert tensors["transfer.table"].dtype == ml_dtypes.bfloat16


def test_the_table_is_t_of_every_row(models, root):
    target, drafters = models
    table = load_file(served(root) / "model.safetensors")["transfer.table"]
    reference = reference_of(drafters["dspine"], target)
    assert table.shape == (128, 24)
    np.testing.assert_allclose(table[:120], [reference.token_feature(v) for v in range(120)], atol=2e-5)


def test_config_says_what_each_reader_needs(models, root):
    """Section by section what docs/serving.md lists: a key that is absent is guessed by some server without a word."""
    for method, causal in (("dflash", False), ("dspine", True)):
        c = models[1][method].config
        assert command(root, root / method, "--output", root / "served", "--overwrite", "--dtype", "bfloat16") == 0
        data = json.loads((root / "served" / "config.json").read_text())
        own = data.pop("dflash_config")
        assert own["target_layer_ids"] == list(TAPS) and own["mask_token_id"] == c.mask_token_id  # E01
        assert own["block_size"] == data["block_size"] == 6 and own["num_draft_tokens"] == 5  # E03
        assert own["causal"] is data["is_causal"] is causal and own["num_tokens"] == 120
        assert data["rope_theta"] == data["rope_parameters"]["rope_theta"] == c.rope_theta and data["rope_parameters"]["rope_type"] == "default"
        assert data["dtype"] == data["torch_dtype"] == "bfloat16" and data["layer_types"] == ["full_attention"] * 2
        assert data["architectures"] == [{"dflash": "DFlashDraftModel", "dspine": "DSpineDraftModel"}[method]] and "auto_map" not in data
        assert (data["num_attention_heads"], data["num_key_value_heads"], data["head_dim"], data["intermediate_size"]) == (4, 2, 32, 80)
        assert (data["hidden_size"], data["vocab_size"], data["num_target_layers"], data["num_hidden_layers"]) == (64, 128, 6, 2)
        assert data["max_position_embeddings"] == 2048 and data["model_type"] == "qwen3" and data["rms_norm_eps"] == c.rms_norm_eps
    assert (own["dspine_version"], own["dspine_rank"], own["dspine_top_k"], own["dspine_layers"]) == (1, 24, 4, [0, 1])


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [("dspark", {}, "a dspark drafter is not written for servers"), ("dflash", {"label_shift": "shifted"}, "from the slots of their own positions")],
)
def test_drafters_that_no_server_reads_are_refused(method, changes, words, models, root, capsys):
    target = models[0]
    save_drafter(root / "other", tiny_drafter(target, method, target_layer_ids=TAPS, **changes))
    assert command(root, root / "other", "--output", root / "served") == 2
    assert words in capsys.readouterr().err and not (root / "served").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["dflash_config"].pop("target_layer_ids"), "taps are never guessed"),
        (lambda d: d["dflash_config"].update(target_layer_ids=[1, 5]), "id 5 is the last layer"),
        (lambda d: d["dflash_config"].update(target_layer_ids=[1, 6]), "id 6 is outside"),
        (lambda d: d["dflash_config"].update(target_layer_ids=[-1, 3]), "id -1 is outside"),
        (lambda d: d["dflash_config"].update(target_layer_ids=[3, 1]), "id 1 does not come after 3"),
        (lambda d: d["dflash_config"].update(target_layer_ids=[2, 2]), "id 2 does not come after 2"),
        (lambda d: d["dflash_config"].pop("dspine_top_k"), "dspine_top_k is None"),
        (lambda d: d["dflash_config"].update(dspine_version=2), "dspine_version is 2"),
        (lambda d: d["dflash_config"].update(dspine_layers=[0, 2]), "2 is outside 0..1"),
        (lambda d: d["dflash_config"].update(label_shift="shifted"), "slots predict the token after theirs"),
        (lambda d: d.update(hidden_size=32), "hidden_size is 32 but the target has 64: this drafter belongs to another target"),
        (lambda d: d.update(vocab_size=64), "vocab_size is 64 but the target has 128"),
        (lambda d: d.update(num_target_layers=8), "num_target_layers is 8 but the target has 6"),
        (lambda d: (d.pop("dflash_config"), d.update(markov_rank=0, block_size=7)), "DeepSpec's layout"),
        (lambda d: (d.pop("dflash_config"), d.update(speculators_model_type="dflash")), "vllm-project/speculators"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_before_a_weight_is_read(change, words, root, monkeypatch):
    folder = served(root)
    data = json.loads((folder / "config.json").read_text())
    change(data)
    (folder / "config.json").write_text(json.dumps(data))

    def untouched(*args):
        raise AssertionError("a weight file was opened")

    monkeypatch.setattr(SafetensorsFiles, "__init__", untouched)
    message = refused(folder, root)
    assert words in message and str(folder / "config.json") in message


@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "injections.0.gate_hidden.bias", "transfer.basis", "transfer.table"])
def test_tensors_are_exactly_those_of_the_config(name, root):
    """E07: nothing is skipped, nothing is left at its initial value."""
    folder = served(root)
    whole = load_file(folder / "model.safetensors")
    edit(folder, **{name: None})
    assert name in refused(folder, root)
    save_file(whole, folder / "model.safetensors")
    edit(folder, **{"markov_head.markov_w1.weight": np.zeros((2, 2), np.float32)})
    assert "markov_head.markov_w1.weight" in refused(folder, root)
    if name != "transfer.table":
        save_file(whole | {name: whole[name][:-1]}, folder / "model.safetensors")
        assert name in refused(folder, root) and "shape" in refused(folder, root)


def test_a_prefix_before_all_names_is_read_and_before_some_is_refused(models, root):
    folder = served(root)
    whole = load_file(folder / "model.safetensors")
    save_file({f"model.{name}": value for name, value in whole.items()}, folder / "model.safetensors")
    again = module_to_tensors(load_drafter(folder, models[0].config))
    ours = module_to_tensors(models[1]["dspine"])
    assert all(np.array_equal(again[name], ours[name]) for name in ours)
    save_file({f"model.{name}" if name.startswith("layers.") else name: value for name, value in whole.items()}, folder / "model.safetensors")
    assert "layers.0" in refused(folder, root)


def test_shards_are_read_and_each_must_be_whole(models, root):
    """E12: every tensor in the index exactly once, total size right, a missing shard named."""
    folder = served(root)
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + name.startswith('layers.')}-of-00002.safetensors" for name in whole}
    for file in set(files.values()):
        save_file({name: whole[name] for name in whole if files[name] == file}, folder / file)
    index = {"metadata": {"total_size": sum(x.nbytes for x in whole.values())}, "weight_map": files}

    def written(**changes):
        (folder / "model.safetensors.index.json").write_text(json.dumps(index | changes))

    written()
    again = module_to_tensors(load_drafter(folder, models[0].config))
    assert all(np.array_equal(again[name], value) for name, value in module_to_tensors(models[1]["dspine"]).items())
    written(metadata={"total_size": 12})
    assert "total_size is 12" in refused(folder, root)
    written(weight_map={name: file for name, file in files.items() if name != "norm.weight"})
    assert "holds tensor 'norm.weight', which" in refused(folder, root)
    written()
    edit(folder, "model-00001-of-00002.safetensors", **{"layers.0.input_layernorm.weight": np.ones(64, np.float32)})
    assert "'layers.0.input_layernorm.weight' is also in" in refused(folder, root)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors: this shard is named" in refused(folder, root)


def test_nothing_in_a_folder_is_executed_and_pickles_are_refused(root):
    folder = served(root)
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | {"auto_map": {"AutoModel": "modeling.Trap"}}))
    for name in ("modeling.py", "conftest.py", "__init__.py"):
        (folder / name).write_text(f"open({str(root / 'ran')!r}, 'w').close()\n")
    load_drafter(folder, read_target_config(root / "target"))
    assert not (root / "ran").exists()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin; such files are pickles, which run code when read: refused" in refused(folder, root)


def test_a_table_of_another_target_of_the_same_sizes_is_refused(root, capsys):
    folder = served(root)
    save_target(root / "target", tiny_target(seed=9, num_layers=6), dtype=jnp.float32)
    assert command(root, folder, "--import", "--output", root / "back") == 2
    assert "this drafter belongs to another target" in capsys.readouterr().err and not (root / "back").exists()


def test_verify_finds_a_changed_bit(root, capsys, monkeypatch):
    monkeypatch.setattr(export, "served_tensors", lambda *args, original=export.served_tensors: touched(original(*args)))
    writes = iter((True, False))

    def touched(tensors):
        if next(writes):
            tensors["norm.weight"] = np.nextafter(tensors["norm.weight"], np.float32(9), dtype=np.float32)
        return tensors

    assert command(root, root / "dflash", "--output", root / "served", "--dtype", "float32", "--verify") == 1
    assert capsys.readouterr().err.startswith("differs: norm.weight: ")


def test_a_mask_token_of_the_tokenizer_must_be_ours(root, capsys):
    content = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 7, "content": "<|MASK|>"}]}
    (root / "target" / "tokenizer.json").write_text(json.dumps(content))
    assert command(root, root / "dflash", "--output", root / "served") == 2
    assert "<|MASK|> has id 7, the drafter was trained with mask_token_id 3" in capsys.readouterr().err


def test_the_card_has_target_data_tau_and_launch(root):
    entry = {"full": {"rounds": 4, "tau_pooled": 3.25}}
    method = {"folders": [str(root / "dspine")], "policy": "greedy", "benchmarks": {"gsm8k": entry}, "full_average_tau": 3.25}
    (root / "results.json").write_text(json.dumps({"temperatures": {"T0.0": {"methods": {"dspine": method}}}}))
    assert command(root, root / "dspine", "--output", root / "served", "--results", root / "results.json") == 0
    card = (root / "served" / "README.md").read_text()
    assert "qwen3, 6 layers, width 64, 128 embedding rows" in card and "| 0.0 | greedy | 3.25 | 3.25 |" in card
    assert "--speculative-num-draft-tokens 6 \\" in card and "drafts (5)" in card and "training data | not recorded" in card
    assert command(root, root / "dflash", "--output", root / "other", "--results", root / "results.json") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["d"], "a drafter folder and --output belong together"),
        ([], "nothing to write"),
        (["--target-output", "x", "--verify"], "--verify is about a drafter"),
        (["d", "--output", "x", "--import", "--results", "r"], "--results is for the model card"),
        (["d", "--output", "x", "--import", "--dtype", "float32"], "--import keeps every bit in float32"),
    ],
)
def test_options_without_an_effect_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        export.parse_args([*words, "--target", "t"])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_a_folder_in_use_is_kept(root, capsys):
    folder = served(root)
    before = (folder / "config.json").read_bytes()
    assert command(root, root / "dflash", "--output", folder) == 2 and (folder / "config.json").read_bytes() == before
    assert command(root, root / "dflash", "--output", root / "dflash", "--overwrite") == 2
    assert "is the drafter's own folder" in capsys.readouterr().err
    assert command(root, root / "dflash", "--output", folder, "--overwrite") == 0
    assert read_drafter_config(folder, read_target_config(root / "target")).method == "dflash"


def test_a_gguf_target_becomes_a_folder(tmp_path, capsys):
    """Weights, config and token ids are those of the GGUF file; a folder is refused."""
    from transformers import AutoTokenizer

    gguf, folder = tmp_path / "target.gguf", tmp_path / "folder"
    write_tokenizer(gguf, "smollm")
    words = ["--target", str(gguf), "--target-output", str(folder), "--dtype", "float32"]
    assert export.main(words) == 0
    assert read_target_config(folder) == read_target_config(gguf)
    ours, theirs = (module_to_tensors(load_target(path, dtype=jnp.float32)) for path in (folder, gguf))
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    np.testing.assert_array_equal(load_head_rows(folder), load_head_rows(gguf))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert tokenizer.encode(text) == gguf_tokenizer(gguf).encode(text)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "He"}], tokenize=False) == "He!"
    assert export.main(words) == 2 and "is not empty" in capsys.readouterr().err
    assert export.main(["--target", str(folder), "--target-output", str(tmp_path / "x")]) == 2
    assert "is an HF folder already" in capsys.readouterr().err
