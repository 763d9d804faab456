"""Config files, overrides and the checks of the config dataclasses."""

import ast
import dataclasses
import json
from pathlib import Path

import pytest
from flax import nnx

from dspine_jax.config import (
    DrafterConfig,
    InjectionConfig,
    LossConfig,
    OptimizerConfig,
    TargetConfig,
    TrainConfig,
    check_target_layer_ids,
    default_target_layer_ids,
)
from dspine_jax.config_io import apply_overrides, config_from_dict, config_to_dict, load_config, read_config, save_config
from dspine_jax.drafter import Drafter
from dspine_jax.drafter_io import drafter_parameter_counts

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TARGET = TargetConfig(
    family="qwen3",
    vocab_size=160,
    num_tokens=151,
    hidden_size=64,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_embeddings=True,
    eos_token_ids=(2, 5),
)
DSPINE = DrafterConfig(mask_token_id=3, num_layers=2, block_size=8, injection=InjectionConfig(transfer_size=32))
CONFIG = TrainConfig(workdir="out", target="model.gguf", drafter=DSPINE, optimizer=OptimizerConfig(learning_rate=1e-3))


# --- JSON -------------------------------------------------------------------


@pytest.mark.parametrize("config", [TARGET, DSPINE, DrafterConfig(), CONFIG, TrainConfig(), DSPINE.resolve(TARGET)], ids=lambda c: type(c).__name__)
def test_json_round_trip_is_identical(config, tmp_path):
    save_config(config, tmp_path / "deep" / "config.json")
    again = read_config(tmp_path / "deep" / "config.json", type(config))
    assert again == config and hash(again) == hash(config)  # hash: lists would not have come back as tuples
    assert config_from_dict(type(config), config_to_dict(config)) == config
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["config.json"]


def test_json_unknown_key_names_file_and_nearest(tmp_path):
    data = config_to_dict(CONFIG)
    data["optimizer"]["learning_rte"] = data["optimizer"].pop("learning_rate")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"config\.json: unknown key optimizer\.learning_rte; did you mean optimizer\.learning_rate\?"):
        read_config(path)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not valid JSON"),
        ("[1]", "TrainConfig: .* is not a mapping"),
        ('{"steps": 1.5}', "steps: 1.5 is not of type int"),
        ('{"steps": true}', "steps: True is not of type int"),
        ('{"remat": 1}', "remat: 1 is not of type bool"),
        ('{"optimizer": {"learning_rate": NaN}}', "optimizer.learning_rate: nan is not of type float"),
        ('{"optimizer": {"learning_rate": 1e999}}', "optimizer.learning_rate: inf is not of type float"),
        ('{"optimizer": null}', "optimizer: None is not of type OptimizerConfig"),
        ('{"drafter": {"target_layer_ids": [1, "2"]}}', r"drafter.target_layer_ids\[1\]: '2' is not of type int"),
        ('{"drafter": {"injection": {"transfer_size": 0}}}', "injection.transfer_size 0 must be positive"),
        ('{"steps": 0}', "steps is 0; it must be at least 1"),
    ],
)
def test_json_errors_name_file_key_and_value(text, message, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"bad.json.*{message}"):
        read_config(path)


def test_json_missing_required_key(tmp_path):
    data = config_to_dict(TARGET)
    del data["rope_theta"]
    (tmp_path / "t.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="t.json: rope_theta is missing; TargetConfig needs it"):
        read_config(tmp_path / "t.json", TargetConfig)
    with pytest.raises(FileNotFoundError):
        read_config(tmp_path / "absent.json")


# --- overrides --------------------------------------------------------------


@pytest.mark.parametrize(
    "override, path, value",
    [
        ("optimizer.learning_rate=3e-4", "optimizer.learning_rate", 3e-4),
        ("optimizer.learning_rate=1", "optimizer.learning_rate", 1.0),
        ("optimizer.on_nonfinite=stop", "optimizer.on_nonfinite", "stop"),
        ("steps=20", "steps", 20),
        ("remat=True", "remat", True),
        ("remat=false", "remat", False),
        ("workdir=runs/a=b", "workdir", "runs/a=b"),
        ("workdir='12'", "workdir", "12"),
        ("workdir=", "workdir", ""),
        ("workdir=None", "workdir", "None"),  # not optional: plain text
        ("data.max_length=128", "data.max_length", 128),
        ("data.max_length=None", "data.max_length", None),
        ("drafter.target_layer_ids=(1,3)", "drafter.target_layer_ids", (1, 3)),
        ("drafter.target_layer_ids=[1, 3]", "drafter.target_layer_ids", (1, 3)),
        ("drafter.target_layer_ids=1,3", "drafter.target_layer_ids", (1, 3)),
        ("drafter.target_layer_ids=4", "drafter.target_layer_ids", (4,)),
        ("drafter.injection.layers=(1,)", "drafter.injection.layers", (1,)),
        ("drafter.injection=None", "drafter.injection", None),
        ("drafter.injection={}", "drafter.injection", InjectionConfig()),
        ("drafter.injection={'transfer_size': 16}", "drafter.injection", InjectionConfig(transfer_size=16)),
        ("drafter.block_attention=causal", "drafter.block_attention", "causal"),
        ("mesh.data=-1", "mesh.data", -1),
    ],
)
def test_override_sets_exactly_one_value(override, path, value):
    changed = apply_overrides(CONFIG, [override])
    found = changed
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value and type(found) is type(value)
    assert config_to_dict(changed) == _with(config_to_dict(CONFIG), path.split("."), value)


def _with(data, names, value):
    if len(names) == 1:
        plain = config_to_dict(value) if dataclasses.is_dataclass(value) else value
        return {**data, names[0]: plain}
    return {**data, names[0]: _with(data[names[0]], names[1:], value)}


def test_override_creates_an_optional_group_and_applies_together():
    plain = TrainConfig(drafter=DrafterConfig(mask_token_id=3))
    made = apply_overrides(plain, ["drafter.injection.transfer_size=64", "drafter.injection.num_candidates=16"])
    assert made.drafter.injection == InjectionConfig(transfer_size=64, num_candidates=16)
    # Valid only as a whole: either alone, in this order, would be refused.
    both = apply_overrides(plain, ["drafter.injection.layers=(6,)", "drafter.num_layers=7"])
    assert both.drafter.injection_layers == (6,) and both.drafter.num_layers == 7
    last = apply_overrides(plain, ["steps=5", "steps=6"])
    assert last.steps == 6 and plain.steps == TrainConfig().steps
    assert apply_overrides(plain, []) == plain


@pytest.mark.parametrize(
    "override, message",
    [
        ("optimizer.lerning_rate=1", r"unknown key optimizer\.lerning_rate; did you mean optimizer\.learning_rate\? Known in optimizer: learning_rate, beta1"),
        ("learning_rate=1", r"unknown key learning_rate; did you mean optimizer\.learning_rate\? Known at the top level of TrainConfig: workdir, target"),
        ("every=1", r"did you mean checkpoint\.every or log\.every\?"),
        ("optimiser.beta1=1", r"unknown key optimiser; did you mean optimizer\?"),
        ("drafter.injection.transfer=1", r"unknown key drafter\.injection\.transfer; did you mean drafter\.injection\.transfer_size"),
        ("steps.x=1", "steps is a single value of type int"),
        ("steps=1e3", "steps: 1e3 is not of type int"),
        ("steps=True", "steps: True is not of type int"),
        ("steps=None", "steps: None is not of type int"),
        ("steps=", "steps:  is not of type int"),
        ("remat=1", "remat: 1 is not of type bool"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate: fast is not of type float"),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate: nan is not of type float"),
        ("optimizer.learning_rate=1" + "0" * 400, "optimizer.learning_rate: 10+ is not of type float"),
        ("optimizer.learning_rate=__import__('os')", "is not of type float"),
        ("compute_dtype=float16", "compute_dtype: float16 is not of type 'bfloat16' or 'float32'"),
        ("drafter.target_layer_ids=(1,2.5)", r"drafter.target_layer_ids\[1\]: 2.5 is not of type int"),
        ("drafter.target_layer_ids=abc", r"drafter.target_layer_ids: abc is not of type tuple\[int, ...\] or None"),
        ("drafter.injection=5", "drafter.injection: 5 is not of type InjectionConfig or None"),
        ("optimizer=None", "optimizer: None is not of type OptimizerConfig"),
        ("drafter.block_size=1", "drafter.block_size 1 leaves no draft"),
        ("steps", "not of the form key=value"),
        ("=3", "not of the form key=value"),
    ],
)
def test_override_errors(override, message):
    with pytest.raises(ValueError, match=message):
        apply_overrides(CONFIG, [override])


def test_overrides_work_on_other_dataclasses():
    assert apply_overrides(TARGET, ["rope_theta=5000", "eos_token_ids=7"]) == dataclasses.replace(TARGET, rope_theta=5000.0, eos_token_ids=(7,))
    with pytest.raises(ValueError, match="family: gemma is not of type 'qwen3' or 'llama'"):
        apply_overrides(TARGET, ["family=gemma"])


def test_every_leaf_of_the_train_config_can_be_overridden():
    def leaves(config, where=""):
        for f in dataclasses.fields(config):
            value = getattr(config, f.name)
            yield from leaves(value, f"{where}{f.name}.") if dataclasses.is_dataclass(value) else [(f"{where}{f.name}", value)]

    overrides = [f"{key}={value}" for key, value in leaves(CONFIG)]
    assert len(overrides) > 45
    assert apply_overrides(CONFIG, overrides) == CONFIG


# --- config files -----------------------------------------------------------


def test_load_config_runs_the_file(tmp_path):
    path = tmp_path / "small.py"
    path.write_text('"""Doc."""\nfrom dspine_jax.config import TrainConfig\nconfig = TrainConfig(steps=7)\n')
    assert load_config(path) == TrainConfig(steps=7)
    path.write_text('"""Doc."""\nfrom dspine_jax.config import TrainConfig\nconfig = TrainConfig(steps=8)\n')  # same size, same second
    assert load_config(str(path)).steps == 8
    assert [entry.name for entry in tmp_path.iterdir()] == ["small.py"]


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.py", "x = 1", "defines no `config`"),
        ("a.py", "config = {'steps': 1}", "`config` is a dict, not a TrainConfig"),
        ("a.py", "\nfrom dspine_jax.config import TrainConfig\nconfig = TrainConfig(stepz=1)", "line 3: TypeError: .*stepz"),
        ("a.py", "from dspine_jax.config import TrainConfig\nconfig = TrainConfig(steps=0)", "line 2: ValueError: steps is 0"),
        ("a.py", "config = (", "line 1: SyntaxError"),
        ("a.json", "{}", "is not a .py file"),
    ],
)
def test_load_config_errors_name_the_file(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        load_config(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="nowhere.py does not exist"):
        load_config(tmp_path / "nowhere.py")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_shipped_configs_load_and_say_how_to_run_them(path, tmp_path):
    config = load_config(path)
    save_config(config, tmp_path / "config.json")
    assert read_config(tmp_path / "config.json") == config
    assert f"configs/{path.name}" in (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")


def test_there_are_shipped_configs():
    assert list(CONFIGS.glob("*.py"))


# --- the dataclasses' own checks ----------------------------------------------


@pytest.mark.parametrize("drafter", [DrafterConfig(mask_token_id=3), DSPINE], ids=["dflash", "dspine"])
def test_resolved_drafter_has_no_none_and_reads_back(drafter, tmp_path):
    resolved = drafter.resolve(TARGET)
    # None is DFlash there and a mode that the data do not record, not an unset number.
    optional = {"template_mode"} | {part for part in ("injection", "convolution", "selector", "markov", "gru") if getattr(drafter, part) is None}
    assert {name for name, value in config_to_dict(resolved).items() if value is None} == optional
    if resolved.injection is not None:
        assert None not in config_to_dict(resolved.injection).values()
    assert resolved.resolve(TARGET) == resolved
    save_config(resolved, tmp_path / "drafter.json")
    assert read_config(tmp_path / "drafter.json", DrafterConfig).resolve(TARGET) == resolved
    assert resolved.target_layer_ids == (1, 2, 3) and resolved.rope_theta == 1e4 and resolved.hidden_size == 64


def test_resolve_keeps_explicit_sizes_and_sets_attention():
    resolved = dataclasses.replace(DSPINE, num_heads=8, head_dim=8, rope_theta=5e5, target_layer_ids=(0, 3, 4)).resolve(TARGET)
    assert (resolved.num_heads, resolved.head_dim, resolved.rope_theta, resolved.target_layer_ids) == (8, 8, 5e5, (0, 3, 4))
    assert resolved.block_attention == "causal" and resolved.injection.layers == (0, 1)
    assert DrafterConfig(mask_token_id=3).resolve(TARGET).block_attention == "bidirectional"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mask_token_id": None}, "mask_token_id is not set"),
        ({"mask_token_id": 160}, "mask_token_id 160 is outside"),
        ({"mask_token_id": -1}, "mask_token_id -1 is outside"),
        ({"mask_token_id": 5}, r"mask_token_id 5 is an end token of the target \(2, 5\)"),
        ({"hidden_size": 128}, "hidden_size is 128 but the target has 64"),
        ({"vocab_size": 151}, "vocab_size is 151 but the target has 160"),
        ({"num_target_layers": 7}, "num_target_layers is 7 but the target has 6"),
        ({"target_layer_ids": ()}, "target_layer_ids is empty"),
        ({"target_layer_ids": (1, 5)}, "id 5 is the last layer"),
        ({"target_layer_ids": (1, 6)}, r"id 6 is outside 0\.\.5"),
        ({"target_layer_ids": (-1, 3)}, r"id -1 is outside 0\.\.5"),
        ({"target_layer_ids": (3, 1)}, "id 1 does not come after 3"),
        ({"target_layer_ids": (2, 2)}, "id 2 does not come after 2"),
        ({"num_heads": 3}, "num_heads 3 is not a multiple of drafter.num_kv_heads 2"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"injection": InjectionConfig(transfer_size=65)}, "transfer_size 65 exceeds the target's width 64"),
    ],
)
def test_resolve_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DSPINE, **changes).resolve(TARGET)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: InjectionConfig(num_candidates=6), "num_candidates 6 is not a power of two"),
        (lambda: InjectionConfig(num_candidates=0), "num_candidates 0 is not a power of two"),
        (lambda: DrafterConfig(block_size=1), "block_size 1 leaves no draft"),
        (lambda: DrafterConfig(num_layers=0), "num_layers 0 must be at least 1"),
        (lambda: dataclasses.replace(DSPINE, label_shift="shifted"), "drafter.injection needs drafter.label_shift 'same_position'"),
        (lambda: dataclasses.replace(DSPINE, block_attention="bidirectional"), "needs block_attention 'causal'"),
        (lambda: DrafterConfig(injection=InjectionConfig(layers=(5,))), r"injection.layers: 5 is outside 0\.\.4"),
        (lambda: DrafterConfig(injection=InjectionConfig(layers=(2, 1))), r"\(2, 1\) must be increasing"),
        (lambda: DrafterConfig(injection=InjectionConfig(layers=())), "injection.layers is empty"),
        (lambda: LossConfig(loss_decay_gamma=0.0), "loss_decay_gamma 0.0 must be positive"),
        (lambda: LossConfig(vocab_chunk=0), "vocab_chunk 0 must be positive"),
        (lambda: LossConfig(dpace_alpha=1.0), r"loss.dpace_alpha 1.0 must lie in \[0, 1\); None keeps the decay"),
        (lambda: OptimizerConfig(ema_decay=1.0), r"optimizer.ema_decay 1.0 must lie in \[0, 1\)"),
        (lambda: dataclasses.replace(TARGET, num_kv_heads=3), "num_heads 4 is not a multiple of num_kv_heads 3"),
        (lambda: dataclasses.replace(TARGET, head_dim=7), "head_dim 7 is odd"),
        (lambda: dataclasses.replace(TARGET, num_tokens=161), r"num_tokens 161 must lie in 1\.\.160"),
        (lambda: dataclasses.replace(TARGET, rope_theta=0.0), "rope_theta 0.0 must be positive"),
        (lambda: apply_overrides(CONFIG, ["data.batch_size=0"]), "data.batch_size is 0"),
        (lambda: apply_overrides(CONFIG, ["anchors.num_anchors=-1"]), "anchors.num_anchors is -1"),
        (lambda: apply_overrides(CONFIG, ["checkpoint.keep=0"]), "checkpoint.keep is 0"),
        (lambda: apply_overrides(CONFIG, ["log.every=0"]), "log.every is 0"),
        (lambda: apply_overrides(CONFIG, ["epochs=0"]), "epochs is 0"),
    ],
)
def test_dataclasses_refuse_impossible_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_derived_properties():
    layouts = [DrafterConfig(block_size=6, label_shift=layout) for layout in ("same_position", "shifted")]
    assert [(c.first_slot, c.num_predicting_slots, c.num_draft_tokens) for c in layouts] == [(1, 5, 5), (0, 6, 6)]
    assert (DSPINE.method, DSPINE.num_draft_tokens, DSPINE.injection_layers, DSPINE.redoes_last_write) == ("dspine", 7, (0, 1), True)
    first_only = dataclasses.replace(DSPINE, injection=InjectionConfig(layers=(0,)))
    assert first_only.injection_layers == (0,) and not first_only.redoes_last_write
    assert (DrafterConfig().method, DrafterConfig().injection_layers, DrafterConfig().redoes_last_write) == ("dflash", (), False)


@pytest.mark.parametrize(
    "num_layers, ids",
    [(36, (1, 9, 17, 25, 33)), (30, (1, 8, 14, 20, 27)), (40, (1, 10, 19, 28, 37)), (64, (1, 16, 31, 46, 61)), (6, (1, 2, 3)), (5, (1, 2)), (4, (2,))],
)
def test_default_target_layer_ids(num_layers, ids):
    assert default_target_layer_ids(num_layers) == ids
    check_target_layer_ids(ids, num_layers)


def test_default_target_layer_ids_refuse_small_targets_and_repeats():
    with pytest.raises(ValueError, match="3 layers has no default taps; set drafter.target_layer_ids"):
        default_target_layer_ids(3)
    with pytest.raises(ValueError, match="does not come after"):
        default_target_layer_ids(6, num_taps=5)


SHIPPED = [("dflash", 19.36, 0), ("dspine", 22.68, 3.32), ("dflash2", 26.54, 7.18), ("dspark", 25.65, 6.29), ("domino", 23.20, 3.84)]


@pytest.mark.parametrize("method, millions, head", SHIPPED)
def test_shipped_configs_build_their_drafters_for_their_target(method, millions, head):
    """Abstractly: shapes only. The sizes are those of SmolLM2-135M-Instruct; all draft 15 tokens a round."""
    target = TargetConfig("llama", 49152, 49152, 576, 30, 9, 3, 64, 1536, 100000.0, 1e-5, True, (2,), 8192)
    config = load_config(CONFIGS / f"smollm2_135m_{method}.py").drafter.resolve(target)
    drafter = nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0)))
    counts = drafter_parameter_counts(drafter)
    assert (round(counts["total"] / 1e6, 2), round(counts["head"] / 1e6, 2)) == (millions, head)
    assert (config.method, config.num_draft_tokens) == (method, 15)
    if method in ("dflash2", "dspark", "domino"):
        assert f"{millions:.2f}M trained parameters, {head:.2f}M of them" in (CONFIGS / f"smollm2_135m_{method}.py").read_text()
