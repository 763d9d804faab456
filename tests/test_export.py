"""dspine-export: the served layout, both ways without loss; what is refused, and that nothing in a folder runs (area F of the known failures)."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from fixtures.drafter_models import reference_of, tiny_drafter, tiny_target
from safetensors.numpy import load_file, save_file
from test_gguf_io import TEXTS, write_tokenizer

from dspine_jax.checkpoint_io import SafetensorsFiles, module_to_tensors
from dspine_jax.config_io import save_config
from dspine_jax.drafter_io import load_drafter, read_drafter_config, save_drafter
from dspine_jax.generation import generate
from dspine_jax.gguf_io import gguf_tokenizer
from dspine_jax.speculative import Decoder, DecodeSettings
from dspine_jax.target import Target
from dspine_jax.target_io import load_head_rows, load_target, read_target_config, save_target
from serve import export
from train.data import Manifest, write_dataset

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
MARKOV = ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]
KEYS = {
    "dflash": BACKBONE,
    "dflash2": [*BACKBONE, *CONVOLVED, *SELECTOR],
    "dspark": [*BACKBONE, *MARKOV, "confidence_head.proj.weight", "confidence_head.proj.bias"],
    "dspark gated": [*BACKBONE, *MARKOV, *(f"{name}.{leaf}" for name in ("markov_head.gate_proj", "confidence_head.proj") for leaf in ("weight", "bias"))],
    "dspark rnn": [*BACKBONE, *MARKOV, "markov_head.joint_proj.weight", "markov_head.joint_proj.bias"],
    "domino": [*BACKBONE, "prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"],
    "dspine": [*BACKBONE, *INJECTED, "transfer.mean", "transfer.basis", "transfer.table"],
}
KEYS["domino same position"] = KEYS["domino"]


@pytest.fixture(scope="module")
def models():
    target = tiny_target(num_layers=6)
    return target, {method: tiny_drafter(target, method, target_layer_ids=TAPS, template_mode="unset") for method in KEYS}


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory) -> Path:
    target, drafters = models
    folder = tmp_path_factory.mktemp("whole")
    save_target(folder / "target", target, dtype=jnp.float32)
    (folder / "target" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {str(i): i for i in range(target.config.num_tokens)}}}))
    for method, drafter in drafters.items():
        save_drafter(folder / method, drafter)
    return folder


@pytest.fixture
def root(whole, tmp_path) -> Path:
    """target/ and a folder in our own layout for each of KEYS, to be changed at will."""
    return shutil.copytree(whole, tmp_path / "root")


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
    [
        ("dflash", {"label_shift": "shifted"}, "from the slots of their own positions"),
        ("dspark", {"label_shift": "same_position"}, "from the slots before their positions"),
        ("dspark", {"markov": None, "confidence_with_markov": False}, "without a Markov head"),
        ("dspine", {"injection": {"layers": (0,)}}, "no write to redo, which is not served"),
        ("dspine", {"injection": {"num_candidates": 1}}, "a walk needs at least 2 candidates"),
    ],
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
        (lambda d: d.pop("dflash_config"), "dflash_config is None"),
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


HEADS = {"dspine": ["layers.1.mlp.up_proj.weight", "injections.0.gate_hidden.bias", "transfer.basis", "transfer.table"]}
HEADS |= {"dspark": ["markov_head.markov_w1.weight", "confidence_head.proj.bias"], "dflash2": ["candidate_selector.successor_codebook"]}
HEADS |= {"domino": ["prefix_gru.weight_hh_l0", "embed_proj.2.weight"]}


@pytest.mark.parametrize(("method", "name"), [(method, name) for method, names in HEADS.items() for name in names])
def test_tensors_are_exactly_those_of_the_config(method, name, root):
    """E07: nothing is skipped, nothing is left at its initial value."""
    folder = served(root, method)
    whole = load_file(folder / "model.safetensors")
    edit(folder, **{name: None})
    assert name in refused(folder, root)
    save_file(whole, folder / "model.safetensors")
    edit(folder, **{"lilicorr.weight": np.zeros((2, 2), np.float32)})
    assert "lilicorr.weight" in refused(folder, root)
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


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize(("method", "block", "drafts"), [("dflash", 16, 15), ("dspark", 7, 7), ("domino", 16, 15)])
def test_three_numbers_of_a_block_are_told_apart(method, block, drafts, models, root, monkeypatch):
    """E03: the served folder's, its card's and its engines' numbers are those of decoding itself: proposals a round, and tokens that the target verifies."""
    save_drafter(root / "other", tiny_drafter(models[0], method, target_layer_ids=TAPS, block_size=block))
    assert command(root, root / "other", "--output", root / "served") == 0
    data, card = json.loads((root / "served" / "config.json").read_text()), (root / "served" / "README.md").read_text()
    assert (data["block_size"], data["dflash_config"]["block_size"], data["dflash_config"]["num_draft_tokens"]) == (block, block, drafts)
    assert f"--speculative-num-draft-tokens {drafts + 1} \\" in card and f"the drafts ({drafts})" in card
    widths, verify = set(), Target.verify
    monkeypatch.setattr(Target, "verify", lambda self, tokens, *args, **kw: (widths.add(tokens.shape[1]), verify(self, tokens, *args, **kw))[1])
    drafter = load_drafter(root / "served", models[0].config)
    answer = generate(Decoder(models[0], drafter, DecodeSettings(drafter.config.num_draft_tokens)), [[9, 8, 7]], max_new_tokens=20)[0]
    assert widths == {drafts + 1} and max(r.proposed for r in answer.rounds) == drafts


SIZES = {"hidden_size": (32, 64), "vocab_size": (64, 128), "num_target_layers": (8, 6)}


@pytest.mark.parametrize("method", ["dflash", "dspark", "dspine"])
@pytest.mark.parametrize("size", SIZES)
def test_another_targets_drafter_is_neither_exported_nor_imported(size, method, root, capsys, monkeypatch):
    """Both commands stop before a weight file is opened and leave nothing behind."""
    folder, (changed, right) = served(root, method), SIZES[size]
    for source, words in ((root / method, []), (folder, ["--import"])):
        file = source / "config.json"
        file.write_text(file.read_text().replace(f'"{size}": {right}', f'"{size}": {changed}'))
        with monkeypatch.context() as patched:
            patched.setattr(SafetensorsFiles, "__init__", lambda *args: pytest.fail("a weight file was opened"))
            assert command(root, source, *words, "--output", root / "out") == 2
        assert f"{size} is {changed} but the target has {right}: this drafter belongs to another target" in capsys.readouterr().err
        assert not (root / "out").exists()


def deepspec(models, root: Path, method: str = "dspark", **changes) -> Path:
    """A drafter as DeepSpec saves it: every key at top level, the target's embedding and LM head among the tensors."""
    target, drafters = models
    folder = served(root, method) if method == "dspark" else root / "deepspec"
    if method == "dflash":  # its DFlash is DSpark of rank 0
        save_drafter(folder, tiny_drafter(target, method, target_layer_ids=TAPS, label_shift="shifted"))
        data = json.loads((served(root, "dspark") / "config.json").read_text()) | {"markov_rank": 0, "enable_confidence_head": False}
        del data["markov_head_type"], data["confidence_head_with_markov"]
    else:
        data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (data | changes).items() if k != "dflash_config" and v is not None}))
    edit(folder, **{"embed_tokens.weight": np.asarray(target.input_embedding_VD), "lm_head.weight": np.asarray(target.output_embedding_VD)})
    return folder


@pytest.mark.parametrize("method", ["dspark", "dflash"])
def test_deepspecs_folders_are_read(method, models, root, capsys):
    folder = deepspec(models, root, method)
    assert command(root, folder, "--import", "--output", root / "back", "--verify") == 0
    back = load_drafter(root / "back", models[0].config)
    assert (back.config.method, back.config.label_shift, back.config.num_draft_tokens) == (method, "shifted", 6)
    if method == "dspark":
        assert (root / "back" / "model.safetensors").read_bytes() == (root / "dspark" / "model.safetensors").read_bytes()
    # Its copy of the LM head says which target it was trained for.
    edit(folder, **{"lm_head.weight": np.asarray(models[0].output_embedding_VD)[::-1].copy()})
    assert command(root, folder, "--import", "--output", root / "other") == 2
    assert "lm_head.weight does not fit the target's LM head" in capsys.readouterr().err and not (root / "other").exists()


def test_specforges_dspark_folders_are_read(models, root):
    """The keys nested, the training name of the class, code to be run: all of it is read or passed over."""
    folder = served(root, "dspark")
    data = json.loads((folder / "config.json").read_text())
    heads = {name: data.pop(name) for name in ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")}
    del data["target_layer_ids"], data["mask_token_id"], data["dflash_config"]["label_shift"]
    data["dflash_config"]["projector_type"] = "dspark"
    for nested in ({"dspark_config": heads}, {"dflash_config": data["dflash_config"] | heads}):
        for name in ("DSparkDraftModel", "AutoModel"):
            content = data | {"architectures": [name], "auto_map": {"AutoModel": "dspark.DSparkDraftModel"}} | nested
            (folder / "config.json").write_text(json.dumps(content))
            assert read_drafter_config(folder, models[0].config) == models[1]["dspark"].config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"markov_rank": None}, "markov_rank is None, expected a whole number"),
        ({"markov_head_type": None}, "markov_head_type is None, expected 'vanilla'"),
        ({"enable_confidence_head": None}, "enable_confidence_head is None, expected true or false"),
        ({"confidence_head_with_markov": None}, "confidence_head_with_markov is None, expected true or false"),
        ({"sample_from_anchor": False}, "sample_from_anchor is False: slots predict the tokens of their own positions"),
        ({"shift_label": False}, "shift_label is False"),
        ({"target_layer_ids": None}, "taps are never guessed"),
        ({"mask_token_id": None}, "mask_token_id is None"),
        ({"architectures": ["Gemma4DSparkModel"]}, "dflash_config is None"),
        ({"markov_rank": 16}, "has shape [1, 72], the config asks for [1, 80]"),
        ({"markov_head_type": "gated"}, "missing tensors markov_head.gate_proj.bias"),
        ({"enable_confidence_head": False}, "this model has no tensors confidence_head.proj.bias"),
    ],
)
def test_what_is_no_whole_dspark_folder_is_refused(changes, words, models, root):
    assert words in refused(deepspec(models, root, **changes), root)


def test_dspark_says_what_each_reader_needs(models, root):
    """SGLang builds its heads from top-level keys alone, vLLM and DeepSpec read taps and mask token there too."""
    for method, kind, with_markov in (("dspark", "vanilla", True), ("dspark gated", "gated", False)):
        assert command(root, root / method, "--output", root / "served", "--overwrite") == 0
        data = json.loads((root / "served" / "config.json").read_text())
        own, c = data["dflash_config"], models[1][method].config
        assert data["architectures"] == ["Qwen3DSparkModel"] and data["is_causal"] is own["causal"] is False
        assert (data["markov_rank"], data["markov_head_type"]) == (8, kind)
        assert data["enable_confidence_head"] is True and data["confidence_head_with_markov"] is with_markov
        assert data["target_layer_ids"] == own["target_layer_ids"] == list(TAPS) and data["mask_token_id"] == own["mask_token_id"] == c.mask_token_id
        # E03, layout N: 6 slots, 6 drafts, a verify pass of 7.
        assert data["block_size"] == own["block_size"] == own["num_draft_tokens"] == 6 and own["label_shift"] == "shifted"
        card = (root / "served" / "README.md").read_text()
        assert "--speculative-algorithm DSPARK \\" in card and "--speculative-num-draft-tokens 7 \\" in card and "the drafts (6)" in card


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
    # A drafter in its run's folder: the card says what it was trained on.
    write_dataset(root / "rows", *tiny.rows(4), Manifest(name="some rows", source="a public set", target="the target itself"))
    config = tiny.train_config("dspine", steps=70)
    save_config(dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(root / "rows"), batch_size=8)), root / "config.json")
    assert command(root, root / "dspine", "--output", root / "trained") == 0
    card = (root / "trained" / "README.md").read_text()
    assert "| training data | some rows, 4 rows: a public set; answers by: the target itself |" in card and "| steps | 70 of 8 rows x " in card
    assert "Not measured." in card


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
