"""The training step and the command around it: non-finite steps, optimiser, memory, live settings, refusals, learning."""

from __future__ import annotations

import dataclasses
import functools
import json
import signal
import subprocess
import sys
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tiny
from flax import nnx

from dspine_jax.anchors import make_blocks
from dspine_jax.config import (
    AnchorConfig,
    CheckpointConfig,
    DataConfig,
    KernelConfig,
    LogConfig,
    LossConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
)
from dspine_jax.config_io import apply_overrides, config_to_dict, save_config
from dspine_jax.drafter import Drafter
from dspine_jax.losses import cross_entropy, cross_entropy_dense
from dspine_jax.objective import row_context, run_blocks
from dspine_jax.selection import anchor_features, transition_cache
from dspine_jax.sharding import make_mesh
from dspine_jax.target import Target
from train.checkpoint import Checkpointer
from train.data import DatasetFolder, Manifest, make_iterator, write_dataset
from train.main import main
from train.step import TrainState, _initial_state, abstract_state, learning_rate_schedule, make_optimizer, make_train_step

# train.loop and train.log are imported where they are used: the tests marked gpu need no logging packages.

ROOT = Path(__file__).resolve().parents[1]


# ---- R09: non-finite steps ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """(target folder, dataset folder)."""
    base = tmp_path_factory.mktemp("inputs")
    return tiny.write_target(base / "target"), tiny.write_data(base / "data")


@pytest.fixture(scope="module")
def train(folders, tmp_path_factory):
    """Run the trainer in this process; at the steps given the target's features turn infinite."""
    import train.loop as loop

    make_step, make_state, compiled = loop.make_train_step, loop.initial_state, {}
    base = tmp_path_factory.mktemp("runs")

    def run(name: str, bad_steps=(), **optimizer) -> tuple[int, Path]:
        def poisoned(config, *args):
            # All runs here compute the same step: compile it once.
            step = compiled.setdefault("step", make_step(config, *args))

            def call(state, target_state, batch):
                if int(state.step) + 1 in bad_steps:
                    poison = lambda x: x.replace(x.get_value().at[0].set(jnp.inf))  # noqa: E731
                    target_state = nnx.from_flat_state([(p, poison(x) if p[-1] == "weight" else x) for p, x in nnx.to_flat_state(target_state)])
                return step(state, target_state, batch)

            return call

        def state_of(config, mesh):
            if "state" not in compiled:
                compiled["state"] = jax.device_get(make_state(config, mesh))
            return jax.device_put(compiled["state"], loop.tree_shardings(compiled["state"], mesh))

        config = tiny.train_config(
            "dspine",
            drafter={"num_layers": 1},
            steps=5,
            workdir=str(base / name),
            target=str(folders[0]),
            data=DataConfig(path=str(folders[1]), batch_size=8),
            checkpoint=CheckpointConfig(every=1, keep=9),
            optimizer=optimizer,
        )
        path = base / f"{name}.py"
        save_config(config, path.with_suffix(".json"))
        path.write_text(f"from dspine_jax.config_io import read_config\nconfig = read_config({str(path.with_suffix('.json'))!r})\n")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "make_train_step", poisoned)
            patch.setattr(loop, "initial_state", state_of)
            return main([str(path)]), base / name

    return run


def saved_arrays(workdir: Path, step: int) -> dict[str, np.ndarray]:
    with ocp.StandardCheckpointer() as reader:
        return reader.restore(workdir / "checkpoints" / str(step) / "state")


def saved_steps(workdir: Path) -> list[int]:
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


def records(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def assert_all_finite(arrays: dict[str, np.ndarray]) -> None:
    for name, x in arrays.items():
        assert np.isfinite(np.asarray(x)).all(), name


def test_a_non_finite_step_changes_nothing_and_is_counted(train):
    """R09: infinite features at step 3 of 5."""
    code, workdir = train("skip", bad_steps=(3,))
    assert code == 0 and saved_steps(workdir) == [1, 2, 3, 4, 5]
    before, after, following = (saved_arrays(workdir, step) for step in (2, 3, 4))
    trained = {name for name in before if name.startswith(("params/", "opt_state/", "updates"))}
    assert len(trained) > 20
    tiny.assert_bit_equal({k: after[k] for k in trained}, {k: before[k] for k in trained})
    assert (int(before["skipped"]), int(after["skipped"]), int(following["skipped"])) == (0, 1, 1)
    assert (int(after["consecutive_skips"]), int(following["consecutive_skips"])) == (1, 0)
    assert (int(following["step"]), int(following["updates"])) == (4, 3)
    assert_all_finite(following)
    assert np.any(following["params/fc/kernel"] != after["params/fc/kernel"])
    log = records(workdir)
    assert [record["optimizer/skipped_steps"] for record in log] == [0, 0, 1, 1, 1]
    assert "loss/total" not in log[2] and np.isfinite(log[3]["loss/total"]) and log[3]["loss/total"] > 0
    # A skipped step is no update: the schedule stands still.
    assert log[3]["optimizer/learning_rate"] == log[2]["optimizer/learning_rate"]


def test_averaged_weights_are_the_weighted_mean_of_all_updates():
    """After n updates update i weighs decay^(n - i), the random start nothing; a skipped step is no update."""
    decay, visited = 0.6, []
    s = tiny.setup(tiny.train_config("dflash", drafter={"num_layers": 1}, optimizer={"ema_decay": decay}))
    tokens, mask, _ = tiny.rows(8)
    bad = nnx.from_flat_state([(p, x.replace(jnp.full_like(x.get_value(), jnp.inf)) if p[-1] == "weight" else x) for p, x in nnx.to_flat_state(s.target_state)])
    state = s.state
    with jax.set_mesh(s.mesh):
        for number in range(5):
            before = jax.device_get(state)
            state, _ = s.step(state, bad if number == 2 else s.target_state, s.batch(tokens, mask))
            if number == 2:
                tiny.assert_bit_equal((state.params, state.averaged), (before.params, before.averaged))
                continue
            visited.append([np.asarray(x, np.float64) for x in jax.tree.leaves(jax.device_get(state.params))])
            shares = decay ** np.arange(len(visited))[::-1]
            for leaf, kept in enumerate(jax.tree.leaves(state.averaged)):
                expected = sum(share * values[leaf] for share, values in zip(shares, visited)) / shares.sum()
                assert kept.dtype == jnp.float32 and tiny.relative_l2(kept, expected) <= 1e-6
            if number == 0:
                tiny.assert_bit_equal(state.averaged, state.params)
    assert state.exported is state.averaged and dataclasses.replace(state, averaged=None).exported is state.params


def test_stop_ends_the_run_with_code_3_and_good_checkpoints_and_resumes(train, capsys):
    """R09 with on_nonfinite='stop': no checkpoint holds a non-finite value; cured, the same command goes on."""
    code, workdir = train("stop", bad_steps=(3,), on_nonfinite="stop")
    error = capsys.readouterr().err
    assert code == 3 and "stopped: step 3: loss or gradient is not finite" in error
    assert saved_steps(workdir) == [1, 2]
    for step in (1, 2):
        assert_all_finite(saved_arrays(workdir, step))
    assert not (workdir / "drafter").exists()
    code, workdir = train("stop", on_nonfinite="skip")
    assert code == 0 and [record["step"] for record in records(workdir)] == [1, 2, 3, 4, 5]
    assert int(saved_arrays(workdir, 5)["skipped"]) == 0


def test_too_many_skips_in_a_row_stop_the_run(train, capsys):
    code, workdir = train("many", bad_steps=(2, 3, 4), max_consecutive_skips=2)
    assert code == 3 and "step 3: 2 non-finite steps in a row (optimizer.max_consecutive_skips)" in capsys.readouterr().err
    assert saved_steps(workdir) == [1, 2]
    assert_all_finite(saved_arrays(workdir, 2))


# ---- optimiser ----------------------------------------------------------------------------------


def adam_after_100_steps(dtype) -> float:
    """A weight of 1.0 under a constant gradient of 0.01 at learning rate 1e-4."""
    config = OptimizerConfig(learning_rate=1e-4, warmup_fraction=0.0, final_fraction=1.0, clip_norm=1e9)
    optimizer = make_optimizer(config, 100)
    weight = jnp.ones((1,), dtype)

    def one(carry, _):
        weight, state = carry
        updates, state = optimizer.update(jnp.full((1,), 0.01, dtype), state, weight)
        return (optax.apply_updates(weight, updates), state), None

    (weight, _), _ = jax.lax.scan(one, (weight, optimizer.init(weight)), length=100)
    return float(weight[0])


def test_small_updates_of_a_weight_near_one_are_not_lost():
    """R10: fp32 masters reach 0.9900; weights kept in bf16 would not have moved at all."""
    assert adam_after_100_steps(jnp.float32) == pytest.approx(0.99, abs=1e-4)
    assert adam_after_100_steps(jnp.bfloat16) == 1.0


def test_the_learning_rate_warms_up_peaks_and_falls_to_its_final_fraction():
    config = OptimizerConfig(learning_rate=0.5, warmup_fraction=0.1, final_fraction=0.02)
    rates = np.array([float(learning_rate_schedule(config, 100)(step)) for step in range(101)])
    np.testing.assert_allclose(rates[:11], 0.5 * np.linspace(1 / 11, 1, 11), rtol=1e-5)  # never a wasted step at 0
    assert rates.argmax() == 10 and (np.diff(rates[10:]) < 0).all()
    assert rates[55] == pytest.approx(0.5 * (0.02 + 0.98 * 0.5), rel=1e-5)  # half way down the cosine
    assert rates[100] == pytest.approx(0.01, rel=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 1000])
def test_a_schedule_without_warm_up_starts_at_its_peak(steps):
    config = OptimizerConfig(learning_rate=0.5, warmup_fraction=0.0, final_fraction=0.5)
    schedule = learning_rate_schedule(config, steps)
    assert float(schedule(0)) == 0.5 and float(schedule(steps)) == pytest.approx(0.25)


def test_gradients_are_clipped_by_their_global_norm():
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1.0, clip_norm=1.0, beta1=0.9), 10)
    gradients = {"a": jnp.array([30.0]), "b": jnp.array([40.0])}
    _, state = optimizer.update(gradients, optimizer.init(gradients), gradients)
    np.testing.assert_allclose([float(state[1][0].mu[k][0]) for k in "ab"], [0.06, 0.08], rtol=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [("learning_rate", 0.0), ("clip_norm", 0.0), ("weight_decay", -1.0), ("beta1", 1.0), ("beta2", -0.1), ("warmup_fraction", 1.1), ("final_fraction", -1.0)]
    + [("max_consecutive_skips", 0)],
)
def test_impossible_optimiser_settings_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"optimizer.{field}"):
        OptimizerConfig(**{field: value})


# ---- memory of the whole step -------------------------------------------------------------------


def abstract_step(config: TrainConfig, target_config=tiny.TARGET):
    """The lowered step of a resolved config, without allocating or compiling anything."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    target = nnx.eval_shape(lambda: Target(target_config, rngs=nnx.Rngs(0)))
    graphdef, state = abstract_state(config)
    S = config.data.max_length or tiny.WIDTH
    shape = (config.data.batch_size, S)
    batch = {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32), "loss_mask": jax.ShapeDtypeStruct(shape, bool)}
    with jax.set_mesh(mesh):
        return make_train_step(config, mesh, graphdef, target).lower(state, nnx.split(target)[1], batch)


@pytest.mark.parametrize("method", tiny.METHODS)
def test_the_step_never_holds_the_logits_of_all_slots(method):
    """R13 for the whole step; one chunk as long as a row shows what the bound would catch."""
    V, B, N, K = 8192, 2, 16, 8
    target = dataclasses.replace(tiny.TARGET, vocab_size=V, num_tokens=V, hidden_size=16, intermediate_size=16)

    def temporary_bytes(chunk: int) -> int:
        config = tiny.train_config(
            method,
            drafter={"num_layers": 1, "block_size": K},
            data=DataConfig(batch_size=B),
            anchors=AnchorConfig(num_anchors=N),
            loss=LossConfig(vocab_chunk=chunk),
        )
        return abstract_step(tiny.resolved(config, target), target).compile().memory_analysis().temp_size_in_bytes

    logits = B * N * (K - 1) * V * 4
    assert temporary_bytes(8) < logits / 2
    assert temporary_bytes(N * (K - 1)) > logits


# ---- G01: every setting does something ----------------------------------------------------------


@functools.cache
def baseline(method: str) -> TrainConfig:
    return tiny.resolved(tiny.train_config(method, drafter={"num_layers": 1}, optimizer={"weight_decay": 0.1}))


@functools.cache
def step_text(config: TrainConfig) -> str:
    return abstract_step(config).as_text()


def start_text(config: TrainConfig) -> str:
    return jax.jit(lambda: _initial_state(config)).lower().as_text()


def transfer_values(config: TrainConfig) -> bytes:
    target = _target()
    frozen = nnx.split(Drafter(config.drafter, rngs=nnx.Rngs(0)), nnx.Param, ...)[2]
    return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tiny.transfer_of(config, target, frozen)))


@functools.cache
def _target() -> Target:
    return tiny.tiny_target()


def table_shape(config: TrainConfig) -> tuple:
    """Shape of the decoding table."""
    c = config.drafter

    def make():
        drafter, target = Drafter(c, rngs=nnx.Rngs(0)), Target(tiny.TARGET, rngs=nnx.Rngs(0))
        empty = jnp.zeros((1, 1, tiny.TARGET.num_kv_heads, tiny.TARGET.head_dim))
        feature = jnp.zeros((1, 1, c.injection.transfer_size))
        keys = (empty,) * c.num_layers
        block = drafter(jnp.zeros((1, 1, c.block_size, 64)), keys, keys, jnp.zeros((1, 1), int), jnp.zeros((1, 1, c.block_size), int), feature)
        return transition_cache(drafter, block, target.output_embedding_VD, feature, num_tokens=tiny.TARGET.num_tokens)[0]

    return nnx.eval_shape(make).shape


def batches(config: TrainConfig, folder: Path) -> str:
    iterator = make_iterator(DatasetFolder(folder), data_config=config.data, seed=config.seed)
    if config.data.num_workers:
        return str(type(iterator))
    return str(type(iterator)) + str({name: x.shape for name, x in next(iterator).items()})


def planned_steps(config: TrainConfig, folder: Path) -> int:
    from train.loop import with_steps_of_epochs

    return with_steps_of_epochs(config, DatasetFolder(folder)).steps


def mesh_shape(config: TrainConfig) -> dict:
    return dict(make_mesh(config.mesh).shape)


def refusal(config: TrainConfig) -> str:
    """What the command says of the config, up to the first missing file."""
    from train.loop import run

    with pytest.raises((ValueError, OSError)) as caught:
        run(config)
    return str(caught.value)


def fits_the_target(config: TrainConfig) -> str:
    """Sizes that must equal the target's: another value is refused by name."""
    try:
        config.drafter.resolve(tiny.TARGET)
    except ValueError as error:
        return str(error)
    return "resolved"


def reaction_to_two_skips(config: TrainConfig) -> str:
    from train.loop import NonFiniteError, _check_finite

    try:
        _check_finite({"optimizer/consecutive_skips": (jnp.float32(2), 1)}, config, 5)
    except NonFiniteError as error:
        return str(error)
    return "goes on"


def files_of_a_run(config: TrainConfig, tmp_path: Path) -> str:
    """The loop itself around a step that only counts: which steps are logged and kept."""
    return str(counting_run(config, tmp_path)[:2])


def counting_run(config: TrainConfig, workdir: Path, step=None) -> tuple[list[int], list[int], TrainState]:
    from train.loop import _train

    workdir.mkdir(parents=True)
    zero = jnp.zeros((), jnp.int32)
    state = TrainState({}, None, {}, (), zero, zero, zero, zero, jnp.zeros(2, jnp.uint32))
    one = (np.float32(1), np.float32(1))
    metrics = {"loss/total": one, "optimizer/skipped_steps": one, "optimizer/consecutive_skips": (np.float32(0), np.float32(1))}
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    state = jax.device_put(state, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    rows = iter(grain.MapDataset.source(_Rows()).repeat(None).batch(2).to_iter_dataset())

    def count(state, target_state, batch):
        return dataclasses.replace(state, step=state.step + 1), metrics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.loop.make_train_step", lambda *_: step or count)
        patch.setattr("train.loop.assert_shardings", lambda *_: None)
        state = _train(config, mesh, None, nnx.Module(), state, rows, Checkpointer(workdir / "checkpoints", keep=config.checkpoint.keep), {}, workdir)
    return [record["step"] for record in records(workdir)], saved_steps(workdir), state


class _Rows:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"tokens": np.zeros(4, np.int32), "loss_mask": np.ones(4, bool), "lengths": np.int32(4)}


# Field -> (another value, what it must change).
LIVE = {
    "workdir": ("x", refusal),
    "target": ("x", refusal),
    "init_from": ("x", refusal),  # what it does to the weights: tests/test_warm_start.py
    "steps": (77, step_text),
    "epochs": (5, planned_steps),
    "seed": (1, start_text),
    "compute_dtype": ("bfloat16", step_text),
    "remat": (True, step_text),
    "drafter.mask_token_id": (5, step_text),
    "drafter.block_size": (5, step_text),
    "drafter.num_layers": (2, step_text),
    "drafter.target_layer_ids": ("(0,)", step_text),
    "drafter.block_attention": ("causal", step_text),
    "drafter.injection.layers": ("(0,)", step_text),
    "drafter.injection.transfer_size": (8, step_text),
    "drafter.injection.whiten": (False, transfer_values),
    "drafter.injection.message_init_std": (0.5, start_text),
    "drafter.injection.num_candidates": (8, table_shape),
    "drafter.label_shift": ("shifted", step_text),
    "drafter.convolution": ("{}", step_text),
    "drafter.selector": ("{}", step_text),
    "drafter.markov": ("{}", step_text),
    "drafter.confidence": (True, step_text),
    "drafter.confidence_with_markov": (True, step_text),
    "drafter.gru": ("{}", step_text),
    "drafter.num_heads": (2, step_text),
    "drafter.num_kv_heads": (1, step_text),
    "drafter.head_dim": (8, step_text),
    "drafter.intermediate_size": (32, step_text),
    "drafter.rope_theta": (500.0, step_text),
    "drafter.rms_norm_eps": (1e-5, step_text),
    "drafter.hidden_size": (32, fits_the_target),
    "drafter.vocab_size": (32, fits_the_target),
    "drafter.num_target_layers": (9, fits_the_target),
    "data.path": ("x", refusal),
    "data.batch_size": (4, batches),
    "data.max_length": (9, batches),
    "data.num_workers": (1, batches),
    "anchors.num_anchors": (3, step_text),
    "anchors.replacement": (True, step_text),
    "loss.loss_decay_gamma": (2.0, step_text),
    "loss.base_weight": (0.25, step_text),
    "loss.feature_weight": (0.25, step_text),
    "loss.vocab_chunk": (5, step_text),
    "loss.ce_weight": (0.25, step_text),
    "loss.l1_weight": (0.25, step_text),
    "loss.prefix_mask": (True, step_text),
    "loss.dpace_alpha": (0.5, step_text),
    "loss.selector_weight": (0.25, step_text),
    "loss.confidence_weight": (0.25, step_text),
    "loss.base_decay_fraction": (0.25, step_text),
    "optimizer.learning_rate": (0.1, step_text),
    "optimizer.beta1": (0.5, step_text),
    "optimizer.beta2": (0.5, step_text),
    "optimizer.weight_decay": (0.5, step_text),
    "optimizer.warmup_fraction": (0.5, step_text),
    "optimizer.final_fraction": (0.5, step_text),
    "optimizer.clip_norm": (0.5, step_text),
    "optimizer.ema_decay": (0.5, step_text),
    "optimizer.on_nonfinite": ("stop", reaction_to_two_skips),
    "optimizer.max_consecutive_skips": (2, reaction_to_two_skips),
    "mesh.data": (4, mesh_shape),
    "mesh.fsdp": (2, mesh_shape),
    "mesh.tensor": (2, mesh_shape),
    "checkpoint.every": (2, files_of_a_run),
    "checkpoint.keep": (1, files_of_a_run),
    "log.every": (2, files_of_a_run),
}
# Settings that another drafter than DSpine has, and which.
OF_OTHERS = dict.fromkeys(
    (f"drafter.{part}" for part in ("block_attention", "label_shift", "convolution", "selector", "markov", "confidence", "gru")), "dflash"
)
OF_OTHERS |= {"drafter.confidence_with_markov": "dspark gated", "loss.selector_weight": "dflash2", "loss.confidence_weight": "dspark"}
OF_OTHERS |= {"loss.base_decay_fraction": "domino"}
# Both values of these must be written, or the mesh would not have eight devices.
TOGETHER = {"mesh.data": ["mesh.fsdp=2"]}


def leaves(data: dict, prefix: str = "") -> list[str]:
    return [name for key, value in data.items() for name in (leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"])]


def test_every_training_setting_has_a_row():
    """G01: a new field without a row fails here."""
    elsewhere = {"drafter.template_mode"}  # tests/test_template_mode.py
    elsewhere |= {f"kernels.{field.name}" for field in dataclasses.fields(KernelConfig)}  # tests/test_command_lines.py, tests/test_kernel_choice.py
    assert set(leaves(config_to_dict(baseline("dspine")))) == LIVE.keys() | elsewhere


@pytest.mark.parametrize("field", LIVE)
def test_every_training_setting_changes_something(field, folders, tmp_path):
    """G01: accepted and never read is the failure."""
    value, observe = LIVE[field]
    config = baseline(OF_OTHERS.get(field, "dspine"))
    if field == "drafter.injection.layers":
        config = dataclasses.replace(config, drafter=tiny.train_config("dspine").drafter.resolve(tiny.TARGET))
    if observe is refusal:
        config = dataclasses.replace(config, workdir=str(tmp_path / "a"), target=str(folders[0]), data=DataConfig(path=str(tmp_path / "none"), batch_size=8))
        value = "" if field == "workdir" else str(tmp_path / "another")
    if field == "init_from":
        config = dataclasses.replace(config, init_from=str(tmp_path / "none"), data=DataConfig(path=str(folders[1]), batch_size=8))
    if observe is files_of_a_run:
        config = dataclasses.replace(config, steps=5, checkpoint=CheckpointConfig(every=1, keep=3))
    changed = apply_overrides(config, [f"{field}={value}", *TOGETHER.get(field, [])])
    assert changed != config
    arguments = {batches: [(folders[1],)] * 2, planned_steps: [(folders[1],)] * 2, files_of_a_run: [(tmp_path / "run a",), (tmp_path / "run b",)]}
    extra = arguments.get(observe, [(), ()])
    assert observe(config, *extra[0]) != observe(changed, *extra[1])


def test_epochs_are_counted_over_the_rows_that_can_give_loss(tmp_path):
    """13 rows, one of which has no two neighbouring answer tokens: three epochs of 12 in batches of 8 are 4 steps, less than a batch is one."""
    tokens, mask, lengths = tiny.rows(13)
    mask[4] = False
    write_dataset(tmp_path, tokens, mask, lengths, Manifest(name="tiny", source="random"))
    config = dataclasses.replace(baseline("dflash"), epochs=3)
    assert (config.data.batch_size, planned_steps(config, tmp_path)) == (8, 4)
    assert planned_steps(apply_overrides(config, ["data.batch_size=64", "epochs=1"]), tmp_path) == 1
    assert planned_steps(dataclasses.replace(config, epochs=None), tmp_path) == config.steps


def test_the_text_of_a_step_is_reproducible():
    """Or the rows above would prove nothing."""
    assert abstract_step(baseline("dspine")).as_text() == step_text(baseline("dspine"))


# ---- the loop -----------------------------------------------------------------------------------


def test_steps_are_logged_and_kept_as_asked_and_the_last_always(tmp_path):
    config = dataclasses.replace(baseline("dflash"), steps=7, log=LogConfig(every=3), checkpoint=CheckpointConfig(every=2, keep=3))
    assert counting_run(config, tmp_path / "run")[:2] == ([3, 6, 7], [4, 6, 7])


def test_a_failing_save_stops_the_run(tmp_path, monkeypatch):
    """C05 c at the trainer: not one more step is computed, and the error comes out."""
    steps = []

    def counting(state, target_state, batch):
        steps.append(1)
        one = (np.float32(1), np.float32(1))
        metrics = {"loss/total": one, "optimizer/skipped_steps": one, "optimizer/consecutive_skips": (np.float32(0), one[1])}
        return dataclasses.replace(state, step=state.step + 1), metrics

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(Checkpointer, "save", full)
    config = dataclasses.replace(baseline("dflash"), steps=7, checkpoint=CheckpointConfig(every=2))
    with pytest.raises(OSError, match="no space left"):
        counting_run(config, tmp_path / "run", counting)
    assert len(steps) == 2


def test_ctrl_c_in_a_step_that_is_also_saved_saves_it_once(tmp_path):
    config = dataclasses.replace(baseline("dflash"), steps=7, checkpoint=CheckpointConfig(every=2))
    one = (np.float32(1), np.float32(1))
    metrics = {"loss/total": one, "optimizer/skipped_steps": one, "optimizer/consecutive_skips": (np.float32(0), one[1])}

    def interrupted(state, target_state, batch):
        if int(state.step) == 3:
            signal.raise_signal(signal.SIGINT)
        return dataclasses.replace(state, step=state.step + 1), metrics

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        counting_run(config, tmp_path / "run", interrupted)
    assert saved_steps(tmp_path / "run") == [2, 4]
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_log_of_the_same_run_does_not_lose_the_first(tmp_path):
    config = dataclasses.replace(baseline("dflash"), steps=3)
    counting_run(config, tmp_path / "run")
    from train.log import RunLog

    log = RunLog(tmp_path / "run", start_step=3, total_steps=3)
    log.close()
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 3]


# ---- the command --------------------------------------------------------------------------------

GOOD = """from dspine_jax.config import *
drafter = DrafterConfig(mask_token_id=3, target_layer_ids=(0, 1))
config = TrainConfig(workdir={workdir!r}, target={target!r}, drafter=drafter, data=DataConfig(path={data!r}, batch_size=8))
"""


@pytest.fixture
def config_file(tmp_path, folders) -> Path:
    path = tmp_path / "config.py"
    path.write_text(GOOD.format(workdir=str(tmp_path / "run"), target=str(folders[0]), data=str(folders[1])))
    return path


def failure(capsys, *argv: str) -> str:
    """The one line of a refused command."""
    assert main([str(part) for part in argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured.err
    return captured.err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.learning_rat=1", ["unknown key optimizer.learning_rat", "did you mean optimizer.learning_rate"]),
        ("learning_rate=1", ["did you mean optimizer.learning_rate"]),
        ("steps=many", ["steps: many is not of type int"]),
        ("steps=0", ["steps is 0"]),
        ("steps", ["not of the form key=value"]),
        ("optimizer.on_nonfinite=ignore", ["optimizer.on_nonfinite: ignore is not of type 'skip' or 'stop'"]),
        ("target=", ["target is not set"]),
        ("target=nowhere/model", ["nowhere/model: no such file or folder"]),
        ("data.path=", ["data.path is not set", "dspine-prepare or dspine-convert"]),
        ("data.path=nowhere/data", ["dataset folder 'nowhere/data' does not exist", "dspine-prepare or dspine-convert"]),
        ("init_from=nowhere/drafter", ["init_from: nowhere/drafter is not a folder"]),
        ("init_from=", ["init_from is empty"]),
        ("workdir=", ["workdir is not set"]),
        ("drafter.mask_token_id=none", ["drafter.mask_token_id is not set"]),
        ("drafter.mask_token_id=128", ["drafter.mask_token_id 128 is outside"]),
        ("drafter.mask_token_id=2", ["drafter.mask_token_id 2 is an end token"]),
        ("drafter.target_layer_ids=(0,2)", ["id 2 is the last layer"]),
        ("data.batch_size=3", ["data.batch_size 3 does not divide", "mesh.data"]),
        ("mesh.data=3", ["mesh", "does not use exactly 8 devices"]),
        ("data.max_length=1", ["data.max_length 1"]),
        ("mesh.tensor=4", ["axis 'kv_heads' of size 2 does not divide by mesh.tensor = 4"]),
    ],
)
def test_bad_settings_end_with_code_2_and_one_line(config_file, capsys, override, words):
    """R12 and M01 are among them: refused before any step is computed."""
    error = failure(capsys, config_file, "--set", override)
    assert all(word in error for word in words), error


def test_ids_on_padded_rows_of_the_table_are_refused(config_file, tmp_path, capsys):
    """Their logits are masked: such a label would have a loss of 1e30."""
    tokens, mask, lengths = tiny.rows(9)
    tokens[4, 3] = tiny.TARGET.num_tokens
    write_dataset(tmp_path / "padded", tokens, mask, lengths, Manifest(name="tiny", source="random"))
    assert "row 4 holds token id 120, outside 0..119" in failure(capsys, config_file, "--set", f"data.path={tmp_path / 'padded'}")


def test_a_mask_token_that_occurs_in_the_data_is_warned_of(tmp_path, folders):
    from train.loop import describe

    config, mesh = tiny.resolved(tiny.train_config("dflash")), make_mesh(MeshConfig(), jax.devices()[:1])
    data, drafter = DatasetFolder(folders[1]), nnx.eval_shape(lambda: Drafter(config.drafter, rngs=nnx.Rngs(0)))
    assert "warning" not in describe(config, mesh, data, drafter, None)
    common = dataclasses.replace(config, drafter=dataclasses.replace(config.drafter, mask_token_id=int(data.tokens[0, 0])))
    assert f"warning: the mask token {common.drafter.mask_token_id} occurs in" in describe(common, mesh, data, drafter, None)


def test_bad_config_files_are_named(tmp_path, config_file, capsys):
    assert "missing.py does not exist" in failure(capsys, tmp_path / "missing.py")
    broken = tmp_path / "broken.py"
    cases = {"x = (": "broken.py, line 1: SyntaxError", "x = 1\ny = x / 0": "broken.py, line 2: ZeroDivisionError", "x = 1": "defines no `config`"}
    for text, words in cases.items():
        broken.write_text(text)
        assert words in failure(capsys, broken)


def test_a_workdir_that_is_a_file_is_one_line_too(config_file, tmp_path, capsys):
    (tmp_path / "run").write_text("")
    assert str(tmp_path / "run") in failure(capsys, config_file)


def test_print_config_shows_overrides_and_computes_nothing(config_file, tmp_path, capsys):
    assert main([str(config_file), "--print-config", "--set", "optimizer.learning_rate=0.25"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["optimizer"]["learning_rate"] == 0.25 and shown["drafter"]["mask_token_id"] == 3
    assert set(leaves(shown)) >= LIVE.keys() - {name for name in LIVE if "injection" in name}
    assert not (tmp_path / "run").exists()


def test_help_answers_without_jax():
    code = "import sys, train.main\ntry: train.main.main(['--help'])\nexcept SystemExit as stop: assert stop.code == 0\nassert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--set KEY=VALUE" in done.stdout and "--print-config" in done.stdout and "resumes at the last complete checkpoint" in done.stdout
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2


# ---- learning -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*tiny.METHODS, "dflash2", "dspark rnn", "domino"])
def test_a_few_sequences_are_learnt_by_heart(method):
    """The real step reaches 90 % first-slot accuracy on eight fixed rows: features, masks, labels and optimiser pull one way."""
    optimizer = {"learning_rate": 1e-2, "warmup_fraction": 0.05}
    config = tiny.train_config(method, drafter={"num_layers": 1}, steps=80, anchors=AnchorConfig(num_anchors=8), optimizer=optimizer)
    s = tiny.setup(config)
    tokens, mask, _ = tiny.rows(8)
    state = s.state
    accuracy = []
    with jax.set_mesh(s.mesh):
        batch = s.batch(tokens, mask)
        for _ in range(80):
            state, metrics = s.step(state, s.target_state, batch)
            hits, total = metrics["accuracy_base" if method == "dflash" else "accuracy_conditioned"]
            accuracy.append(float(hits[0] / total[0]))
    assert accuracy[0] < 0.2
    assert np.mean(accuracy[-5:]) > 0.9, accuracy[::8]


# ---- real devices -------------------------------------------------------------------------------


def cpu() -> list[jax.Device]:
    try:
        return jax.devices("cpu")[:1]
    except RuntimeError as error:
        pytest.skip(f"the CPU backend is the reference here: {error}")


@pytest.mark.gpu
@pytest.mark.parametrize("method", tiny.METHODS)
def test_two_steps_on_a_gpu_equal_the_cpu(method):
    """Loss, gradients of the first step (first moment / (1 - beta1)) and everything finite."""
    results = []
    for devices in (jax.devices()[:1], cpu()):
        s = tiny.setup(tiny.train_config(method, optimizer={"clip_norm": 1e9}), devices)
        tokens, mask, _ = tiny.rows(8)
        with jax.set_mesh(s.mesh):
            batch = s.batch(tokens, mask)
            state, first = s.step(s.state, s.target_state, batch)
            gradients = jax.device_get(state.opt_state[1][0].mu)
            state, second = s.step(state, s.target_state, batch)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get((state, second))))
        results.append((first, gradients, second))
    (gpu_first, gpu_gradients, gpu_second), (cpu_first, cpu_gradients, cpu_second) = results
    assert float(gpu_first["loss/total"][0]) == pytest.approx(float(cpu_first["loss/total"][0]), rel=1e-5)
    for a, b in zip(jax.tree.leaves(gpu_gradients), jax.tree.leaves(cpu_gradients)):
        assert tiny.relative_l2(a, b) <= 1e-5
    # Adam's first update is close to the sign of the gradient, which turns rounding of tiny entries into whole steps.
    assert float(gpu_second["loss/total"][0]) == pytest.approx(float(cpu_second["loss/total"][0]), rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [128, 100])
def test_chunked_cross_entropy_on_a_gpu_equals_all_logits(chunk):
    """1,024 rows: chunks of 100 leave a rest."""
    rng = np.random.default_rng(0)
    hidden, rows = jnp.asarray(rng.normal(size=(1, 1024, 64)), jnp.float32), jnp.asarray(rng.normal(size=(4096, 64)), jnp.float32)
    labels, weights = jnp.asarray(rng.integers(0, 4000, (1, 1024))), jnp.asarray(rng.uniform(size=(1, 1024)), jnp.float32)
    chunked = jax.jit(jax.value_and_grad(lambda h: jnp.sum(cross_entropy(h, rows, labels, 4000, chunk)[0] * weights)))(hidden)
    dense = jax.jit(jax.value_and_grad(lambda h: jnp.sum(cross_entropy_dense(h, rows, labels, 4000)[0] * weights)))(hidden)
    assert tiny.relative_l2(chunked[0], dense[0]) <= 1e-5 and tiny.relative_l2(chunked[1], dense[1]) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("method", tiny.METHODS)
def test_training_and_decoding_blocks_are_equal_on_a_gpu(method):
    """R03 on the device: whole rows against a cache that stands at the anchor."""
    config = tiny.resolved(tiny.train_config(method))
    target, drafter = tiny.tiny_target(), Drafter(config.drafter, rngs=nnx.Rngs(0))
    tiny.randomise(drafter, 2)
    if method == "dspine":
        nnx.update(drafter.transfer, tiny.transfer_of(config, target, nnx.state(drafter.transfer)))
    c, tokens = config.drafter, jnp.asarray(tiny.rows(2)[0])
    anchors_B = jnp.array([4, 9])

    @nnx.jit
    def both(drafter, target):
        taps = target(tokens, target_layer_ids=c.target_layer_ids).tapped_BTE
        keep = jnp.ones((2, 1), bool)
        blocks = make_blocks(tokens, jnp.ones_like(tokens, bool), anchors_B[:, None], keep, block_size=c.block_size, mask_token_id=c.mask_token_id)
        trained, _ = run_blocks(drafter, target, row_context(drafter, taps), blocks, jnp.float32)
        out = target.prefill(tokens, anchors_B, capacity=32, target_layer_ids=c.target_layer_ids)
        cache = drafter.extend_cache(drafter.empty_cache(2, 32, jnp.float32), out.tapped_BTE, anchors_B)
        noise = jnp.take(target.input_embedding_VD, blocks.noise_ids_BNK, axis=0)
        feature = anchor_features(drafter, target.output_embedding_VD, blocks.noise_ids_BNK[..., 0])
        decoded = drafter(noise, cache.keys, cache.values, cache.lengths_B[:, None], blocks.positions_BNK, feature)
        return target.logits(trained.hidden_BNKD), target.logits(decoded.hidden_BNKD)

    trained, decoded = both(drafter, target)
    assert tiny.relative_l2(decoded[..., : target.config.num_tokens], trained[..., : target.config.num_tokens]) <= 1e-5
