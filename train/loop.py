"""The training loop: build or resume, step, log, save, export."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dspine_jax.config import TargetConfig, TrainConfig
from dspine_jax.config_io import config_from_dict, config_to_dict, save_config
from dspine_jax.drafter_io import drafter_parameter_counts, save_drafter
from dspine_jax.objective import block_objective
from dspine_jax.sharding import assert_shardings, batch_sharding, check_batch, make_mesh, path_name, tree_shardings
from dspine_jax.target import Target
from dspine_jax.target_io import load_target, read_target_config
from dspine_jax.transfer import build_transfer_space
from pallas_kernels.dispatch import check_here
from serve.environment import GIB, peak_memory_gib
from train.chat_rows import check_template_mode
from train.checkpoint import Checkpointer
from train.data import DatasetFolder, make_iterator, rows_holding, token_frequencies, trainable_rows
from train.log import RunLog, average_metrics
from train.step import TrainState, abstract_state, initial_state, make_train_step
from train.warm_start import load_start

# What may differ between a run and its resumption: none of it changes what a finite step computes.
RESUMABLE_CHANGES = (
    "workdir",
    "target",
    "init_from",
    "mesh",
    "log",
    "checkpoint",
    "remat",
    "kernels",
    "data.path",
    "optimizer.on_nonfinite",
    "optimizer.max_consecutive_skips",
)


class NonFiniteError(RuntimeError):
    """Training met a non-finite loss or gradient it was told not to skip."""


def run(config: TrainConfig, objective: Callable = block_objective) -> Path:
    """Train to ``config.steps`` and return the exported drafter's folder. ``objective`` is called as ``block_objective``.

    A workdir with checkpoints is resumed at its last complete step: parameters, moments, anchors and
    batches continue bit for bit, on any mesh; ``init_from`` has no say then. Raises ValueError for an impossible config (before any
    weight is read where possible), NotImplementedError for kernels that cannot run, NonFiniteError as ``optimizer.on_nonfinite`` says.
    """
    check_here(config.kernels.chosen)
    mesh = make_mesh(config.mesh)
    check_batch(config.data.batch_size, mesh)
    config, target_config, data = prepare_run(config)
    workdir = Path(config.workdir)
    workdir.mkdir(parents=True, exist_ok=True)

    checkpointer = Checkpointer(workdir / "checkpoints", keep=config.checkpoint.keep)
    iterator = make_iterator(data, data_config=config.data, seed=config.seed, process_index=jax.process_index(), process_count=jax.process_count())
    resume_step = checkpointer.latest_step()
    if resume_step is not None:
        meta = checkpointer.read_meta(resume_step)
        check_same_run(meta, config, target_config, data.manifest.sha256, workdir)
        started_from = meta["config"].get("init_from")
        if config.init_from is not None:
            begun = started_from or "random weights"
            print(f"init_from {config.init_from} is not read: {workdir} goes on from its own step {resume_step} (begun from {begun})")
        config = dataclasses.replace(config, init_from=started_from)  # the record of how the run began stays
        if resume_step >= config.steps and (workdir / "drafter" / "model.safetensors").is_file():
            print(f"{workdir} is already at step {resume_step} of {config.steps}: nothing to do")
            checkpointer.close()
            return workdir / "drafter"
    save_config(config, workdir / "config.json")
    identity = identity_of(config, target_config, data)

    with jax.set_mesh(mesh):
        graphdef, abstract = abstract_state(config)
        shardings = tree_shardings(abstract, mesh)
        start = None
        if resume_step is None and config.init_from is not None:  # refused, if at all, before the target is read
            start = load_start(config.init_from, config.drafter, target_config, shardings)
        target = load_sharded_target(config, target_config, mesh)
        if resume_step is not None:
            state = checkpointer.restore(resume_step, abstract, shardings, iterator)
        else:
            state = initial_state(config, mesh)
            if start is not None:
                averaged = None if state.averaged is None else jax.tree.map(jnp.copy, start[0])
                state = dataclasses.replace(state, params=start[0], averaged=averaged, frozen=start[1])
            elif config.drafter.injection is not None:
                state = with_transfer_space(state, target, token_frequencies(data, target_config.vocab_size), config)
        assert_shardings(state, shardings)
        print(describe(config, mesh, data, nnx.merge(graphdef, state.params, state.frozen), resume_step))
        state = _train(config, mesh, graphdef, target, state, iterator, checkpointer, identity, workdir, objective)
        replicated = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))((state.exported, state.frozen))
        if jax.process_index() == 0:
            save_drafter(workdir / "drafter", nnx.merge(graphdef, *replicated))
    return workdir / "drafter"


def prepare_run(config: TrainConfig) -> tuple[TrainConfig, TargetConfig, DatasetFolder]:
    """The config as it is trained (sizes, template mode and steps settled), its target's config and its data; no weight is read. Raises ValueError."""
    for name in ("workdir", "target"):
        if not getattr(config, name):
            raise ValueError(f"{name} is not set; give it in the config file or with --set {name}=...")
    if not config.data.path:
        raise ValueError("data.path is not set; give a dataset folder with --set data.path=... (dspine-prepare or dspine-convert makes one)")
    target_config = read_target_config(config.target)
    config = dataclasses.replace(config, drafter=config.drafter.resolve(target_config))
    data = DatasetFolder(config.data.path, vocab_size=target_config.num_tokens)  # a label on a padded row of the table has no finite loss
    if config.drafter.template_mode is not None:
        check_template_mode(data.manifest, config.drafter.template_mode, config.data.path)
    # The mode travels with the drafter, so that decoding renders prompts as training saw them.
    config = dataclasses.replace(config, drafter=dataclasses.replace(config.drafter, template_mode=data.manifest.template_mode))
    return with_steps_of_epochs(config, data), target_config, data


def identity_of(config: TrainConfig, target: TargetConfig, data: DatasetFolder) -> dict:
    """What ``check_same_run`` compares, as plain values. Kernels are left out: a run must stay readable where a kernel of its time is gone."""
    compared = {name: value for name, value in config_to_dict(config).items() if name != "kernels"}
    return {"config": compared, "target": config_to_dict(target), "data": data.manifest.sha256}


def _train(config, mesh, graphdef, target, state, iterator, checkpointer, identity, workdir, objective=block_objective) -> TrainState:
    train_step = make_train_step(config, mesh, graphdef, target, objective)
    target_state = nnx.split(target)[1]
    start = int(state.step)
    log = RunLog(workdir, start_step=start, total_steps=config.steps)
    window: list[dict] = []
    tokens, clock, planned = 0, time.perf_counter(), tree_shardings(state, mesh)
    step = saved = start
    with StopRequest() as stop:
        try:
            while step < config.steps and not stop.requested:
                rows = next(iterator)
                tokens += int(rows["lengths"].sum()) * jax.process_count()
                batch = {name: jax.make_array_from_process_local_data(batch_sharding(mesh), rows[name]) for name in ("tokens", "loss_mask")}
                state, metrics = train_step(state, target_state, batch)
                step += 1
                log.advance()
                if step == start + 1:
                    assert_shardings(state, planned)
                if window:  # a step late, so reading never holds up the device
                    _check_finite(window[-1], config, step - 1)
                window.append(metrics)
                logs, saves = step % config.log.every == 0 or step == config.steps, step % config.checkpoint.every == 0 or step == config.steps
                if logs or saves or stop.requested:
                    _check_finite(metrics, config, step)
                if logs:
                    scalars = average_metrics(window)
                    now = time.perf_counter()
                    scalars["speed/step_s"] = (now - clock) / len(window)
                    scalars["speed/tokens_per_s"] = tokens / (now - clock)
                    if (memory := peak_memory_gib()) is not None:
                        scalars["memory/peak_gib"] = memory
                    log.write(step, scalars)
                    window, tokens, clock = [], 0, now
                if saves:
                    checkpointer.save(step, state, iterator, identity)
                    saved = step
            if step < config.steps:
                log.message(f"interrupted at step {step}: saving; run the same command again to go on")
                if step != saved:
                    checkpointer.save(step, state, iterator, identity)
        finally:
            log.close()
            checkpointer.close()
    if step < config.steps:
        raise KeyboardInterrupt
    return state


class StopRequest:
    """Ctrl-C or SIGTERM (a preempted machine) ends the run after the step in progress; a second one at once.

    Raising in the middle of a step would leave a state whose buffers the step has already taken
    over: nothing could be saved.
    """

    def __init__(self):
        self.requested = False

    def __enter__(self) -> StopRequest:
        self._previous = {}
        if threading.current_thread() is threading.main_thread():  # Python allows handlers there only
            self._previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _handle(self, number: int, _) -> None:
        self.requested = True
        signal.signal(number, signal.default_int_handler)

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _check_finite(metrics: dict, config: TrainConfig, step: int) -> None:
    skips = int(metrics["optimizer/consecutive_skips"][0])
    if skips and config.optimizer.on_nonfinite == "stop":
        raise NonFiniteError(
            f"step {step}: loss or gradient is not finite; the last checkpoint is good. Go on with optimizer.on_nonfinite='skip', "
            "or start a new workdir with a lower optimizer.learning_rate"
        )
    if skips >= config.optimizer.max_consecutive_skips:
        raise NonFiniteError(f"step {step}: {skips} non-finite steps in a row (optimizer.max_consecutive_skips); the last checkpoint is good")


def check_same_run(meta: dict, config: TrainConfig, target: TargetConfig, data_sha256: dict, workdir: Path) -> None:
    """Refuse to resume a run as another one. Raises ValueError naming each field that differs."""
    differing = []
    # A setting that came after the run began has the default that keeps what was computed then; an unknown one is refused.
    try:
        saved, saved_target = config_from_dict(TrainConfig, meta["config"]), config_from_dict(TargetConfig, meta["target"], "target.")
    except ValueError as error:
        raise ValueError(f"{workdir} holds a run that this version cannot read: {error}") from error

    def compare(old, new, prefix=""):
        for key in sorted(old.keys() | new.keys()):
            if f"{prefix}{key}" in RESUMABLE_CHANGES:
                continue
            a, b = old.get(key), new.get(key)
            if isinstance(a, dict) and isinstance(b, dict):
                compare(a, b, f"{prefix}{key}.")
            elif a != b:
                differing.append(f"{prefix}{key}: {a} saved, {b} now")

    compare(config_to_dict(saved), config_to_dict(config))
    compare(config_to_dict(saved_target), config_to_dict(target), "target.")
    if meta["data"] != data_sha256:
        differing.append(f"data.path: {config.data.path} does not hold the rows this run was started with")
    if differing:
        raise ValueError(f"{workdir} holds another run; use a new workdir or restore these settings: " + "; ".join(differing))


def with_steps_of_epochs(config: TrainConfig, data: DatasetFolder) -> TrainConfig:
    """The config with ``steps`` as its epochs ask for, where it has any: batches are cut from one stream of epochs, so they divide as a whole."""
    if config.epochs is None:
        return config
    rows = len(trainable_rows(data, config.data.max_length))
    return dataclasses.replace(config, steps=max(1, config.epochs * rows // config.data.batch_size))


def load_sharded_target(config: TrainConfig, target_config: TargetConfig, mesh: Mesh) -> Target:
    """The frozen target in the compute dtype, each tensor placed by the rules table as it is read."""
    abstract = nnx.eval_shape(lambda: Target(target_config, rngs=nnx.Rngs(0)))
    planned = dict(nnx.to_flat_state(tree_shardings(nnx.split(abstract)[1], mesh)))
    return load_target(config.target, dtype=jnp.dtype(config.compute_dtype), sharding=lambda path: planned[path].get_value())


def with_transfer_space(state: TrainState, target: Target, counts_V: np.ndarray, config: TrainConfig) -> TrainState:
    """Build the transfer space from the target's head and the answers' token counts [V], and place it in the state."""
    everywhere = jax.jit(lambda x: x.astype(jnp.float32), out_shardings=NamedSharding(jax.tree.leaves(state)[0].sharding.mesh, P()))
    rows_VD = np.asarray(everywhere(target.output_embedding_VD))
    injection = config.drafter.injection
    mean, basis = build_transfer_space(
        rows_VD,
        counts_V,
        injection.transfer_size,
        whiten=injection.whiten,
        num_tokens=target.config.num_tokens,
    )
    built = {"transfer/mean": mean, "transfer/basis": basis}
    frozen = jax.tree_util.tree_map_with_path(lambda path, old: jax.device_put(built[path_name(path)], old.sharding), state.frozen)
    return dataclasses.replace(state, frozen=frozen)


def describe(config: TrainConfig, mesh: Mesh, data: DatasetFolder, drafter, resume_step: int | None) -> str:
    """What is about to run, in a few lines."""
    counts = drafter_parameter_counts(drafter)
    c = config.drafter
    per_step = config.data.batch_size * config.anchors.num_anchors
    chunk = config.data.batch_size * min(config.loss.vocab_chunk, config.anchors.num_anchors * c.num_predicting_slots) * c.vocab_size * 4
    masked = rows_holding(data, c.mask_token_id)
    warning = f"warning: the mask token {c.mask_token_id} occurs in {masked} rows of {config.data.path}; choose one that the text never holds\n"
    return (warning if masked else "") + "\n".join(
        [
            f"{c.method}: {counts['total'] / 1e6:.2f}M trained parameters ({counts['head'] / 1e6:.2f}M beyond DFlash's), "
            f"{c.num_layers} layers, block {c.block_size}, taps {c.target_layer_ids}",
            f"data: {data.num_rows} rows of {data.width} tokens from {config.data.path}; "
            f"{config.data.batch_size} rows x {config.anchors.num_anchors} anchors = {per_step} blocks a step",
            f"mesh: {dict(mesh.shape)} on {jax.devices()[0].device_kind}; "
            f"{config.compute_dtype} compute, fp32 masters; logits of one chunk {chunk / GIB:.2f} GiB",
            f"workdir: {config.workdir}; {'starting' if resume_step is None else f'resuming at step {resume_step}'}, {config.steps} steps",
        ]
    )
