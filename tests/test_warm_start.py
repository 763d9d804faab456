"""Training that starts from an exported drafter: the same weights, the same transfer space and the same loss on every mesh, or a refusal that says why."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from dspine_jax.anchors import make_blocks
from dspine_jax.config import CheckpointConfig, DataConfig, MeshConfig, TrainConfig
from dspine_jax.config_io import apply_overrides, config_to_dict, read_config, save_config
from dspine_jax.drafter_io import load_drafter, save_drafter
from dspine_jax.objective import block_objective
from dspine_jax.sharding import assert_shardings, make_mesh, tree_shardings
from dspine_jax.target_io import load_target
from dspine_jax.transfer import Frozen
from train import loop
from train.data import DatasetFolder, Manifest, make_iterator, write_dataset
from train.main import main
from train.step import abstract_state, step_anchors
from train.warm_start import load_start

pytestmark = pytest.mark.usefixtures("quick_compiler")


class Started(Exception):
    """The first step would come next."""


@dataclasses.dataclass
class Runs:
    """A source run of two steps, and what later runs need: a config of the same drafter with other answers and another seed."""

    base: Path
    source: Path  # its exported drafter
    config: TrainConfig

    def at(self, name: str, **changes) -> TrainConfig:
        return dataclasses.replace(self.config, workdir=str(self.base / name), **changes)


def run(config: TrainConfig, devices: int = 8):
    """``loop.run`` on some of the fake devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_mesh", lambda mesh: make_mesh(mesh, jax.devices()[:devices]))
        return loop.run(config)


def first_state(config: TrainConfig, devices: int = 8):
    """The state that a run would hand to its first step."""
    found = []

    def stop(config, mesh, graphdef, target, state, *rest):
        found.append(state)
        raise Started

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Started):
        patch.setattr(loop, "_train", stop)
        run(config, devices)
    return found[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    base = tmp_path_factory.mktemp("warm")
    target = tiny.write_target(base / "target")
    write_dataset(base / "others", *tiny.rows(11, seed=7), Manifest(name="others", source="random", template_mode="unset"))
    config = tiny.train_config("dspine", drafter={"num_layers": 1}, steps=2, target=str(target), workdir=str(base / "source"))
    config = dataclasses.replace(config, data=DataConfig(path=str(tiny.write_data(base / "data")), batch_size=8))
    source = run(config, 1)
    others = DataConfig(path=str(base / "others"), batch_size=8)
    return Runs(base, source, dataclasses.replace(config, seed=3, data=others, init_from=str(source), checkpoint=CheckpointConfig(every=1)))


def parts(folder):
    """(params, frozen) of a drafter folder."""
    return nnx.split(load_drafter(folder, tiny.TARGET), nnx.Param, Frozen)[1:]


def loss_of(folder, config: TrainConfig) -> float:
    """The loss that an exported drafter has on the first batch and anchors of a run, without the trainer."""
    drafter, target = load_drafter(folder, tiny.TARGET), load_target(config.target, dtype=jnp.float32)
    rows = next(make_iterator(DatasetFolder(config.data.path), data_config=config.data, seed=config.seed))
    tokens, mask = jnp.asarray(rows["tokens"]), jnp.asarray(rows["loss_mask"])
    anchors, keep = step_anchors(jax.random.key_data(jax.random.key(config.seed)), jnp.int32(0), mask, config)
    c = drafter.config
    blocks = make_blocks(tokens, mask, anchors, keep, block_size=c.block_size, mask_token_id=c.mask_token_id)
    return float(block_objective(drafter, target, tokens, blocks, config.loss, jnp.float32)[0])


MESHES = {"one device": (1, MeshConfig()), "fsdp and tensor": (8, MeshConfig(data=2, fsdp=2, tensor=2))}


@pytest.mark.parametrize("devices, mesh", MESHES.values(), ids=MESHES)
def test_the_first_step_sees_the_exported_weights_and_their_transfer_space(runs, devices, mesh, capsys):
    """Bit for bit, in fp32, laid out as planned; moments and counters are new. Other answers would have given another space."""
    state = first_state(runs.at(f"first {devices}", mesh=mesh), devices)
    params, frozen = parts(runs.source)
    tiny.assert_bit_equal(state.params, params)
    tiny.assert_bit_equal(state.frozen, frozen)
    assert {str(x.dtype) for x in jax.tree.leaves((state.params, state.frozen))} == {"float32"}
    assert_shardings(state, tree_shardings(state, make_mesh(mesh, jax.devices()[:devices])))
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves((state.opt_state, state.step, state.updates)))
    out = capsys.readouterr().out
    assert out.count("init_from") == 1
    line = f"init_from: weights and transfer space of {runs.source}; drafter.template_mode is None there, unset in this run; the optimizer starts anew\n"
    assert line in out and f"starting, {runs.config.steps} steps" in out

    cold = first_state(runs.at(f"cold {devices}", mesh=mesh, init_from=None), devices)
    for ours, theirs in ((cold.frozen, frozen), (cold.params, params)):
        assert any(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)))


def metrics(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def warm(runs):
    """Two steps from the exported drafter, on each mesh."""
    configs = {name: runs.at(f"warm {name}", mesh=mesh) for name, (_, mesh) in MESHES.items()}
    for name, config in configs.items():
        run(config, MESHES[name][0])
    return configs


@pytest.fixture(scope="module")
def expected_loss(runs) -> float:
    return loss_of(runs.source, runs.config)


@pytest.mark.parametrize("name", MESHES)
def test_the_loss_of_step_1_is_that_of_the_exported_drafter(runs, warm, expected_loss, name):
    """On the run's own batch and anchors; the schedule begins anew."""
    first, second = metrics(Path(warm[name].workdir))
    assert first["loss/total"] == pytest.approx(expected_loss, rel=1e-5) != second["loss/total"]
    assert first["optimizer/learning_rate"] == metrics(runs.base / "source")[0]["optimizer/learning_rate"]


def test_a_trained_run_exports_the_transfer_space_it_started_from(runs, warm):
    params, frozen = parts(runs.source)
    after = parts(runs.base / "warm one device" / "drafter")
    tiny.assert_bit_equal(after[1], frozen)
    assert any(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(after[0]), jax.tree.leaves(params)))
    assert read_config(runs.base / "warm one device" / "config.json").init_from == str(runs.source)


def test_a_resumed_run_reads_its_checkpoint_and_not_the_drafter(runs, warm, tmp_path, capsys):
    """The second step once more, with a drafter that is gone, and with none given: the same file. The record of the start stays."""
    done = runs.base / "warm one device"
    for number, init_from in enumerate((str(runs.base / "gone"), None)):
        copy = shutil.copytree(done, tmp_path / str(number))
        shutil.rmtree(copy / "checkpoints" / "2")
        shutil.rmtree(copy / "drafter")
        config = dataclasses.replace(warm["one device"], workdir=str(copy), init_from=init_from)
        run(config, 1)
        note = f"init_from {init_from} is not read: {copy} goes on from its own step 1 (begun from {runs.source})"
        out = capsys.readouterr().out
        assert "resuming at step 1" in out and ((note in out) if init_from else ("init_from" not in out))
        assert (copy / "drafter" / "model.safetensors").read_bytes() == (done / "drafter" / "model.safetensors").read_bytes()
        assert read_config(copy / "config.json").init_from == str(runs.source)
    run(config, 1)
    assert "nothing to do" in capsys.readouterr().out


def shardings_of(config: TrainConfig):
    return tree_shardings(abstract_state(config)[1], make_mesh(MeshConfig(data=4, fsdp=2)))


@pytest.mark.parametrize("method", tiny.METHODS)
def test_a_bf16_export_gives_fp32_masters_of_the_same_values(method, tmp_path, capsys):
    config = tiny.resolved(tiny.train_config(method, drafter={"num_layers": 1}))
    s = tiny.setup(config)
    save_drafter(tmp_path / "half", nnx.merge(s.graphdef, s.state.params, s.state.frozen), dtype=jnp.bfloat16)
    shardings = shardings_of(config)
    params, frozen = load_start(str(tmp_path / "half"), config.drafter, tiny.TARGET, shardings)
    tiny.assert_bit_equal(params, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), s.state.params))
    tiny.assert_bit_equal(frozen, s.state.frozen)
    assert_shardings((params, frozen), (shardings.params, shardings.frozen))
    assert ("transfer space" in capsys.readouterr().out) == (method == "dspine")


# ---- drafters that are refused ------------------------------------------------------------------


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Drafters of both methods with random weights."""
    folders = {}
    for method in tiny.METHODS:
        s = tiny.setup(tiny.train_config(method))
        folders[method] = tmp_path_factory.mktemp("exports") / method
        save_drafter(folders[method], nnx.merge(s.graphdef, s.state.params, s.state.frozen))
    return folders


def refusal(folder, method: str, changes: dict) -> str:
    config = tiny.resolved(tiny.train_config(method, drafter=changes.get("drafter"), injection=changes.get("injection")))
    with pytest.raises(ValueError) as caught:
        load_start(str(folder), config.drafter, tiny.TARGET, shardings_of(config))
    return str(caught.value)


OTHERS = [
    (
        "drafter.num_layers is 2 there, 1 in this run; drafter.injection.layers is (0, 1) there, (0,) in this run",
        {"drafter": {"num_layers": 1}},
        "drafter.num_layers=2 drafter.injection.layers=(0,1)",
    ),
    ("drafter.mask_token_id is 3 there, 4 in this run", {"drafter": {"mask_token_id": 4}}, "drafter.mask_token_id=3"),
    ("drafter.target_layer_ids is (0, 1) there, (1,) in this run", {"drafter": {"target_layer_ids": (1,)}}, "drafter.target_layer_ids=(0,1)"),
    ("drafter.intermediate_size is 96 there, 32 in this run", {"drafter": {"intermediate_size": 32}}, "drafter.intermediate_size=96"),
    ("drafter.num_kv_heads is 2 there, 4 in this run", {"drafter": {"num_kv_heads": 4}}, "drafter.num_kv_heads=2"),
    ("drafter.rope_theta is 10000.0 there, 500.0 in this run", {"drafter": {"rope_theta": 500.0}}, "drafter.rope_theta=10000.0"),
    ("drafter.rms_norm_eps is 1e-06 there, 1e-05 in this run", {"drafter": {"rms_norm_eps": 1e-5}}, "drafter.rms_norm_eps=1e-06"),
    ("drafter.injection.transfer_size is 16 there, 8 in this run", {"injection": {"transfer_size": 8}}, "drafter.injection.transfer_size=16"),
    ("drafter.injection.layers is (0, 1) there, (1,) in this run", {"injection": {"layers": (1,)}}, "drafter.injection.layers=(0,1)"),
    ("drafter.injection.whiten is True there, False in this run", {"injection": {"whiten": False}}, "drafter.injection.whiten=True"),
]


@pytest.mark.parametrize(("words", "changes", "mend"), OTHERS, ids=[mend.partition("=")[0] for *_, mend in OTHERS])
def test_another_drafter_is_refused_with_the_field_both_values_and_the_mend(exports, words, changes, mend):
    assert refusal(exports["dspine"], "dspine", changes) == (
        f"init_from: {exports['dspine']} holds another drafter: {words}. Start from one like this run's, or set {mend}"
    )


def test_the_mend_is_what_the_command_line_takes(exports):
    """DFlash into DSpine and back, by name: what is to be set gives the drafter of the folder."""
    cases = ("dflash", "dspine", "None (DFlash) there, set (DSpine) in this run"), ("dspine", "dflash", "set (DSpine) there, None (DFlash) in this run")
    for theirs, ours, words in cases:
        error = refusal(exports[theirs], ours, {})
        assert f"drafter.injection is {words}" in error and "drafter.block_attention is " in error
        changed = tiny.resolved(apply_overrides(tiny.train_config(ours), error.partition(" or set ")[2].split()))
        load_start(str(exports[theirs]), changed.drafter, tiny.TARGET, shardings_of(changed))


def test_what_no_parameter_hangs_on_may_differ_and_is_said(exports, capsys):
    changes = {"drafter": {"block_size": 6, "template_mode": "thinking"}, "injection": {"num_candidates": 8, "message_init_std": 0.5}}
    config = tiny.resolved(tiny.train_config("dspine", **changes))
    load_start(str(exports["dspine"]), config.drafter, tiny.TARGET, shardings_of(config))
    said = capsys.readouterr().out.split("; ")[1:-1]
    assert said == [
        "drafter.block_size is 4 there, 6 in this run",
        "drafter.injection.message_init_std is 0.01 there, 0.5 in this run",
        "drafter.injection.num_candidates is 4 there, 8 in this run",
        "drafter.template_mode is None there, thinking in this run",
    ]


def damaged(folder, kind: str):
    """A folder with one thing wrong with it."""
    weights = folder / "model.safetensors"
    if kind == "no weights":
        weights.unlink()
    elif kind == "a pickle":
        weights.write_bytes(pickle.dumps({"fc.weight": [1.0]}))
    elif kind == "only a pickle":
        weights.rename(folder / "pytorch_model.bin")
    elif kind == "cut short":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "another layout":
        (folder / "config.json").write_text('{"architectures": ["DFlashDraftModel"], "block_size": 16}')
    elif kind == "another target":
        content = json.loads((folder / "config.json").read_text()) | {"hidden_size": 32}
        (folder / "config.json").write_text(json.dumps(content))
    elif kind == "no folder":
        shutil.rmtree(folder)


DAMAGE = {
    "no folder": "copy is not a folder; give that of an exported drafter",
    "no weights": "copy: neither model.safetensors nor model.safetensors.index.json is there",
    "a pickle": "copy/model.safetensors: not a whole safetensors file",
    "only a pickle": "such files are pickles, which run code when read: refused",
    "cut short": "copy/model.safetensors: not a whole safetensors file",
    "another layout": "copy/config.json: dflash_config is None, expected an object",
    "another target": "copy/config.json: drafter.hidden_size is 32 but the target has 64: this drafter belongs to another target",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_folder_of_no_use_is_one_line_before_the_target_is_read(kind, runs, exports, tmp_path, capsys, monkeypatch):
    copy = shutil.copytree(exports["dspine"], tmp_path / "copy")
    damaged(copy, kind)
    monkeypatch.setattr(loop, "load_target", None)
    config = dataclasses.replace(runs.at("refused", init_from=str(copy)), drafter=tiny.train_config("dspine").drafter)
    save_config(config, tmp_path / "config.json")
    (tmp_path / "config.py").write_text(f"from dspine_jax.config_io import read_config\nconfig = read_config({str(tmp_path / 'config.json')!r})\n")
    assert main([str(tmp_path / "config.py")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: init_from: ") and DAMAGE[kind] in error and error.count("\n") == 1, error


def test_an_empty_name_is_refused_and_none_means_random_weights():
    with pytest.raises(ValueError, match="init_from is empty; give a drafter folder, or init_from=none"):
        TrainConfig(init_from="")
    assert TrainConfig().init_from is None and config_to_dict(TrainConfig())["init_from"] is None
