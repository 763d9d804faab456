"""A resumed run is the same run, bit for bit: through ``train.main``, every resume in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny
from tensorboardX.proto import event_pb2

from dspine_jax.config import CheckpointConfig, DataConfig, LogConfig, MeshConfig, TrainConfig
from dspine_jax.config_io import config_from_dict, config_to_dict, save_config
from dspine_jax.drafter_io import load_drafter
from train.main import main

ROOT = Path(__file__).resolve().parents[1]
STEPS = 10
# What commit 0bf7183, the last one with DFlash and DSpine alone, keeps of a run beside its state.
BEFORE = json.loads((Path(__file__).parent / "fixtures" / "run_meta_0bf7183.json").read_text())

# Runs several commands; records what each step was fed and sends itself Ctrl-C in the middle of the step asked for.
DRIVER = """
import json, os, signal, sys
import jax, numpy as np
import train.loop as loop
from train.main import main
from train.step import step_anchors

make_step, make_rows, make_state = loop.make_train_step, loop.make_iterator, loop.initial_state
record, ids, compiled = {}, [], {}

def once(kind, config, make):
    # Runs of one method in one process share what takes seconds to compile; the workdir is all they differ in.
    key = (kind, config.drafter.method)
    if key not in compiled:
        compiled[key] = make()
    return compiled[key]

def watched_rows(*args, **kwargs):
    iterator = make_rows(*args, **kwargs)
    real = type(iterator).__next__
    class Recording(type(iterator)):
        def __next__(self):
            rows = real(self)
            ids.append(rows["row_ids"].tolist())
            return rows
    iterator.__class__ = Recording
    return iterator

def first_state(config, mesh):
    host = once("state", config, lambda: jax.device_get(make_state(config, mesh)))
    return jax.device_put(host, loop.tree_shardings(host, mesh))

def watched_step(config, *args):
    step = once("step", config, lambda: make_step(config, *args))
    def run(state, target_state, batch):
        number = int(state.step) + 1
        anchors, _ = step_anchors(state.rng, state.step, batch["loss_mask"], config)
        record[number] = {"anchors": np.asarray(anchors).tolist(), "row_ids": ids[-1]}
        result = step(state, target_state, batch)
        if number == stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        return result
    return run

loop.make_train_step, loop.make_iterator, loop.initial_state = watched_step, watched_rows, first_state
for name, stop_at, argv in json.loads(sys.argv[1]):
    record.clear(), ids.clear()
    code = main(argv)
    with open(sys.argv[2], "a") as file:
        file.write(json.dumps({"name": name, "code": code, "steps": record}) + "\\n")
"""


def drive(base: Path, jobs: list[tuple[str, int | None]], *sets: str) -> None:
    """Run jobs (workdir name, step in which Ctrl-C arrives or None) in one new process; the log of all goes to log.jsonl."""
    commands = []
    for name, stop_at in jobs:
        commands.append((name, stop_at, [str(base / f"{name.split('-')[0]}.py"), *(f"--set={text}" for text in (f"workdir={base / name}", *sets))]))
    # Unoptimised code compiles in half the time, and is as deterministic.
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", DRIVER, json.dumps(commands), str(base / "log.jsonl")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (base / "output.txt").open("a").write(done.stdout + done.stderr)


def rewrite_meta(workdir: Path, step: int, change) -> None:
    """Put ``change(meta)`` in the place of the JSON beside the state of a checkpoint."""
    path = workdir / "checkpoints" / str(step) / "meta" / "metadata"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def only_keys_of(old: dict, new: dict) -> dict:
    """``new`` without the keys that ``old`` does not have, at every depth."""
    return {key: only_keys_of(old[key], value) if isinstance(value, dict) else value for key, value in new.items() if key in old}


def as_written_before(meta: dict) -> dict:
    """A run's JSON as commit 0bf7183 would have written it."""
    return meta | {name: only_keys_of(BEFORE[name], meta[name]) for name in BEFORE}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict:
    """Ten steps in one go, 5 + 5 and 3 + 3 + 4, of both methods, in three processes (each resume in a later one).

    DFlash exports averaged weights. Between its halves dspine-5 is made what the trainer wrote when it knew DFlash and DSpine alone.
    The first resume of each chooses a kernel, which on a CPU is the default too.
    """
    base = tmp_path_factory.mktemp("runs")
    target, data = tiny.write_target(base / "target"), tiny.write_data(base / "data")
    for method, dtype in (("dspine", "bfloat16"), ("dflash", "float32")):
        config = tiny.train_config(
            method,
            drafter={"num_layers": 2 if method == "dspine" else 1},
            steps=STEPS,
            target=str(target),
            compute_dtype=dtype,
            data=DataConfig(path=str(data), batch_size=4),
            mesh=MeshConfig(data=2),
            checkpoint=CheckpointConfig(every=100, keep=3),
            log=LogConfig(every=1),
            optimizer={"ema_decay": 0.7} if method == "dflash" else None,
        )
        save_config(config, base / f"{method}.json")
        (base / f"{method}.py").write_text(f"from dspine_jax.config_io import read_config\nconfig = read_config({str(base / f'{method}.json')!r})\n")
    drive(base, [("dspine-whole", None), ("dflash-whole", None), ("dspine-5", 5), ("dflash-5", 5), ("dspine-3", 3)])
    rewrite_meta(base / "dspine-5", 5, as_written_before)
    drive(base, [("dspine-5", None), ("dflash-5", None), ("dspine-3", 6)], "kernels.block_attention=xla")
    before = tiny.fingerprints(base / "dflash-5")
    drive(base, [("dspine-3", None), ("dflash-5", None)])
    log: dict[str, list] = {}
    for line in (base / "log.jsonl").read_text().splitlines():
        entry = json.loads(line)
        log.setdefault(entry["name"], []).append(entry)
    return {"base": base, "log": log, "before": before, "after": tiny.fingerprints(base / "dflash-5")}


PAIRS = [("dspine-whole", "dspine-5"), ("dspine-whole", "dspine-3"), ("dflash-whole", "dflash-5")]


def metrics(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def final_arrays(workdir: Path) -> dict:
    """Every array of the last checkpoint by name."""
    with ocp.StandardCheckpointer() as reader:
        return reader.restore(workdir / "checkpoints" / str(STEPS) / "state")


def test_ctrl_c_saves_and_exits_130_and_the_same_command_goes_on(runs):
    codes = {name: [entry["code"] for entry in entries] for name, entries in runs["log"].items()}
    assert codes == {"dspine-whole": [0], "dflash-whole": [0], "dspine-5": [130, 0], "dflash-5": [130, 0, 0], "dspine-3": [130, 130, 0]}
    output = (runs["base"] / "output.txt").read_text()
    assert "interrupted at step 5: saving; run the same command again to go on" in output
    assert "resuming at step 5, 10 steps" in output and "resuming at step 6" in output


def test_each_step_is_computed_once(runs):
    steps = {name: [sorted(map(int, entry["steps"])) for entry in entries] for name, entries in runs["log"].items()}
    whole = list(range(1, 11))
    assert steps["dspine-5"] == [whole[:5], whole[5:]]
    assert steps["dflash-5"] == [whole[:5], whole[5:], []]  # after the final step: zero further ones
    assert steps["dspine-3"] == [whole[:3], whole[3:6], whole[6:]]
    for workdir in {name for pair in PAIRS for name in pair}:
        assert [record["step"] for record in metrics(runs["base"] / workdir)] == whole


@pytest.mark.parametrize(("whole", "parts"), PAIRS)
def test_anchors_and_rows_are_those_of_the_run_in_one_go(runs, whole, parts):
    """C07, C08. 13 rows in batches of 4: steps 3, 5 and 6 all end in the middle of an epoch."""
    expected = runs["log"][whole][0]["steps"]
    got = {step: fed for entry in runs["log"][parts] for step, fed in entry["steps"].items()}
    assert got == expected
    assert len({str(fed["anchors"]) for fed in expected.values()}) == STEPS, "anchors must be drawn afresh each step"
    first_epoch = sum((expected[str(step)]["row_ids"] for step in (1, 2, 3)), [])
    assert len(set(first_epoch)) == 12


@pytest.mark.parametrize(("whole", "parts"), PAIRS)
def test_losses_and_learning_rates_are_those_of_the_run_in_one_go(runs, whole, parts):
    keep = lambda records: [{k: v for k, v in record.items() if not k.startswith("speed/")} for record in records]  # noqa: E731
    expected = keep(metrics(runs["base"] / whole))
    assert keep(metrics(runs["base"] / parts)) == expected
    assert all("loss/total" in record and "optimizer/learning_rate" in record for record in expected)
    assert len({record["loss/total"] for record in expected}) == STEPS


@pytest.mark.parametrize(("whole", "parts"), PAIRS)
def test_parameters_moments_and_counters_are_equal_bit_for_bit(runs, whole, parts):
    expected, got = final_arrays(runs["base"] / whole), final_arrays(runs["base"] / parts)
    tiny.assert_bit_equal(got, expected)
    assert int(got["step"]) == int(got["updates"]) == STEPS
    for kind in ("params/", "opt_state/1/0/mu/", "opt_state/1/0/nu/"):
        arrays = [x for name, x in got.items() if name.startswith(kind)]
        assert arrays and {str(x.dtype) for x in arrays} == {"float32"}, kind
        assert all(np.any(np.asarray(x)) for x in arrays)
    for name in ("config.json", "model.safetensors"):
        assert (runs["base"] / parts / "drafter" / name).read_bytes() == (runs["base"] / whole / "drafter" / name).read_bytes()


def test_a_resume_after_the_final_step_changes_no_file(runs):
    """C08: zero further steps, exit 0."""
    assert runs["after"] == runs["before"]
    assert "already at step 10 of 10: nothing to do" in (runs["base"] / "output.txt").read_text()


@pytest.mark.parametrize("method", tiny.METHODS)
def test_the_exported_drafter_is_the_one_in_the_checkpoint(runs, method):
    """The last weights, or their mean where the run averages (DFlash here)."""
    workdir = runs["base"] / f"{method}-whole"
    drafter, arrays = load_drafter(workdir / "drafter", tiny.TARGET), final_arrays(workdir)
    assert any(name.startswith("averaged/") for name in arrays) == (method == "dflash")
    np.testing.assert_array_equal(drafter.fc.kernel[...], arrays["averaged/fc/kernel" if method == "dflash" else "params/fc/kernel"])
    if method == "dflash":
        assert np.any(arrays["averaged/fc/kernel"] != arrays["params/fc/kernel"])
    if method == "dspine":
        np.testing.assert_array_equal(drafter.transfer.basis[...], arrays["frozen/transfer/basis"])
        assert np.any(arrays["frozen/transfer/basis"])


# ---- which run a workdir holds ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["seed=1"], ["seed: 0 saved, 1 now"]),
        (["optimizer.learning_rate=0.5", "drafter.block_size=8"], ["optimizer.learning_rate: 0.01 saved, 0.5 now", "drafter.block_size: 4 saved, 8 now"]),
        (["steps=20"], ["steps: 10 saved, 20 now"]),
        (["data.batch_size=8"], ["data.batch_size: 4 saved, 8 now"]),
        (["data.path=other"], ["data.path: ", "does not hold the rows this run was started with"]),
        (["target=other"], ["target.rms_norm_eps: 1e-06 saved, 1e-05 now"]),
    ],
)
def test_the_workdir_of_another_run_is_refused_naming_the_fields(runs, tmp_path, capsys, overrides, words):
    base = runs["base"]
    if overrides == ["data.path=other"]:
        overrides = [f"data.path={tiny.write_data(tmp_path / 'other', count=12)}"]
    if overrides == ["target=other"]:
        other = shutil.copytree(base / "target", tmp_path / "target")
        changed = json.loads((other / "config.json").read_text()) | {"rms_norm_eps": 1e-5}
        (other / "config.json").write_text(json.dumps(changed))
        overrides = [f"target={other}", "drafter.rms_norm_eps=1e-6"]
    before = tiny.fingerprints(base / "dflash-5")
    sets = [f"workdir={base / 'dflash-5'}", "mesh.data=-1", "mesh.fsdp=2", "mesh.tensor=2", *overrides]
    code = main([str(base / "dflash.py"), *(part for text in sets for part in ("--set", text))])
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1 and "holds another run" in error
    assert all(word in error for word in words), error
    assert "mesh" not in error
    assert tiny.fingerprints(base / "dflash-5") == before


def test_a_run_from_before_a_setting_existed_goes_on_with_its_default_and_with_no_other_value(runs, tmp_path, capsys):
    """That it goes on bit for bit: dspine-5 above. An unknown setting stays an error, and so does a new one that changes what is computed."""
    now = config_to_dict(config_from_dict(TrainConfig, BEFORE["config"]))
    added = {"drafter": {"convolution": None, "gru": None, "confidence": False}, "loss": {"l1_weight": 0.0, "dpace_alpha": None}}
    added |= {"optimizer": {"ema_decay": 0.0}}
    for group, fields in added.items():
        assert not fields.keys() & BEFORE["config"][group].keys() and {key: now[group][key] for key in fields} == fields
    base = runs["base"]
    command = [str(base / "dspine.py"), "--set", f"workdir={tmp_path / 'run'}", "--set", "mesh.data=4", "--set", "mesh.tensor=2"]
    shutil.copytree(base / "dspine-5", tmp_path / "run")
    rewrite_meta(tmp_path / "run", STEPS, as_written_before)
    assert main(command) == 0 and "nothing to do" in capsys.readouterr().out
    assert main([*command, "--set", "loss.l1_weight=0.5", "--set", "optimizer.ema_decay=0.9"]) == 2
    error = capsys.readouterr().err
    assert "loss.l1_weight: 0.0 saved, 0.5 now" in error and "optimizer.ema_decay: 0.0 saved, 0.9 now" in error
    rewrite_meta(tmp_path / "run", STEPS, lambda meta: meta | {"config": meta["config"] | {"optimizer": meta["config"]["optimizer"] | {"momentum": 0.9}}})
    assert main(command) == 2
    assert "holds a run that this version cannot read: unknown key optimizer.momentum" in capsys.readouterr().err


def test_a_copied_run_may_resume_with_another_mesh_paths_and_periods(runs, tmp_path, capsys):
    """What does not change the numbers is no other run; here nothing is left to do, so no step is computed."""
    base = runs["base"]
    shutil.copytree(base / "dflash-5", tmp_path / "run")
    shutil.copytree(base / "data", tmp_path / "data")
    sets = [f"workdir={tmp_path / 'run'}", f"data.path={tmp_path / 'data'}", "mesh.data=4", "mesh.fsdp=1", "mesh.tensor=2", "remat=true", "log.every=7"]
    sets += ["checkpoint.keep=1", "optimizer.on_nonfinite=stop", "optimizer.max_consecutive_skips=3"]
    assert main([str(base / "dflash.py"), *(part for text in sets for part in ("--set", text))]) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_kernels_are_no_part_of_a_run_or_a_drafter(runs):
    """Another choice goes on, above; what a run is compared by and what is exported never names one, so that a kernel may come and go."""
    workdir = runs["base"] / "dspine-5"
    assert json.loads((workdir / "config.json").read_text())["kernels"]["block_attention"] == "xla"
    meta = json.loads((workdir / "checkpoints" / str(STEPS) / "meta" / "metadata").read_text())
    assert meta["config"]["steps"] == STEPS and "kernels" not in meta["config"]
    assert "kernels" not in (workdir / "drafter" / "config.json").read_text()


# ---- TensorBoard --------------------------------------------------------------------------------


def events(workdir: Path) -> dict[str, dict[int, float]]:
    """Scalars of all event files: tag -> step -> value."""
    found: dict[str, dict[int, float]] = {}
    for path in sorted((workdir / "tensorboard").iterdir()):
        raw, at = path.read_bytes(), 0
        while at < len(raw):  # records: length u64, its checksum u32, payload, checksum u32
            (size,) = struct.unpack_from("<Q", raw, at)
            event = event_pb2.Event.FromString(raw[at + 12 : at + 12 + size])
            at += 16 + size
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


@pytest.mark.parametrize("method", tiny.METHODS)
def test_tensorboard_holds_the_promised_curves(runs, method):
    workdir = runs["base"] / f"{method}-5"
    scalars = events(workdir)
    paths = ["base", "conditioned"] if method == "dspine" else ["base"]
    expected = {"loss/total", "supervised_tokens", "speed/tokens_per_s", "speed/step_s"}
    expected |= {f"optimizer/{name}" for name in ("learning_rate", "gradient_norm", "skipped_steps", "consecutive_skips")}
    for path in paths:
        expected |= {f"loss/ce_{path}", f"simulated_tau/{path}"} | {f"accuracy_{path}/slot{slot:02d}" for slot in (1, 2, 3)}
    if method == "dspine":
        expected |= {"loss/feature", "loss/feature_layer0", "loss/feature_layer1"}
    assert set(scalars) == expected  # memory/peak_gib only where the device tells
    records = metrics(workdir)
    for tag in expected:
        assert sorted(scalars[tag]) == list(range(1, 11)), tag
        for record in records:
            assert scalars[tag][record["step"]] == pytest.approx(record[tag], rel=1e-6)
