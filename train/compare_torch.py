"""Our training step against one in PyTorch: same model, shapes, rows and GPU, in the same run.

    python -m train.compare_torch --json out/compare.json
    python -m train.compare_torch --shapes qwen3-4b --methods dspine --set data.batch_size=2 --width 2048 --steps 4 --json out/qwen3.json

Weights and rows are random; sizes are the models'. smollm2-135m is the recipe of configs/smollm2_135m_dspine.py (32 rows x 512 tokens, 48 anchors);
qwen3-4b is SpecForge's for DFlash (4 rows x 3072 tokens, 512 anchors). The PyTorch step (train/torch_reference, which says how it is made) needs torch
and is measured in the fastest of its forms: modes of torch.compile, chunks of the vocabulary, launched kernel by kernel or as one CUDA graph. Each
measurement has a process of its own, one after the other, on one GPU: median of --repeats x --steps steps. One that fails is recorded with its error, and
the rest go on. Exit 1 if any failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import multiprocessing
import operator
import os
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from dspine_jax.config import AnchorConfig, DataConfig, DrafterConfig, InjectionConfig, LossConfig, OptimizerConfig, TargetConfig, TrainConfig
from dspine_jax.config_io import apply_overrides, config_to_dict

ENGINES = ("jax", "torch")
METHODS = ("dspine", "dflash")
MODES = ("default", "max-autotune-no-cudagraphs", "eager")


@dataclasses.dataclass(frozen=True)
class Shape:
    """A target's sizes, its drafter's, and the rows of a step."""

    target: TargetConfig
    mask_token_id: int
    transfer_size: int
    rows: int
    width: int
    num_anchors: int
    vocab_chunk: int  # LossConfig's: slots of a row
    replacement: bool = False


SHAPES = {
    "smollm2-135m": Shape(
        TargetConfig(
            family="llama", vocab_size=49152, num_tokens=49152, hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
            intermediate_size=1536, rope_theta=1e5, rms_norm_eps=1e-5, tie_embeddings=True,
        ),
        mask_token_id=3, transfer_size=192, rows=32, width=512, num_anchors=48, vocab_chunk=240, replacement=True,
    ),
    "qwen3-4b": Shape(
        TargetConfig(
            family="qwen3", vocab_size=151936, num_tokens=151669, hidden_size=2560, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128,
            intermediate_size=9728, rope_theta=1e6, rms_norm_eps=1e-6, tie_embeddings=True,
        ),
        mask_token_id=151669, transfer_size=1024, rows=4, width=3072, num_anchors=512, vocab_chunk=512,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement, as it is sent to a process of its own; ``config`` resolved."""

    engine: str
    target: TargetConfig
    config: TrainConfig
    width: int
    steps: int
    repeats: int
    torch_modes: tuple[str, ...]
    torch_chunks: tuple[int, ...]


def build_parser() -> argparse.ArgumentParser:
    """Every option of the command."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m train.compare_torch", description=__doc__, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES), help="models (default: all)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="drafters (default: both)")
    parser.add_argument("--only", choices=ENGINES, help="measure one side alone")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a field of the training config, for both sides; repeatable")
    parser.add_argument("--width", type=positive, help="tokens of a row (default: the shape's)")
    parser.add_argument("--steps", type=positive, default=8, help="steps of one timing (default 8)")
    parser.add_argument("--repeats", type=positive, default=5, help="timings (default 5)")
    parser.add_argument("--torch-modes", nargs="+", choices=MODES, default=["default"], help="modes of torch.compile to try (default: default)")
    parser.add_argument("--torch-chunks", nargs="+", type=positive, default=[2048, 8192], help="positions of a vocabulary chunk to try (default 2048 8192)")
    parser.add_argument("--json", type=Path, help="file for the figures, written anew after each measurement")
    return parser


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def train_config(shape: Shape, method: str, overrides: list[str]) -> TrainConfig:
    """The resolved config of both sides. Raises ValueError for overrides that do not fit."""
    config = TrainConfig(
        drafter=DrafterConfig(mask_token_id=shape.mask_token_id, injection=InjectionConfig(transfer_size=shape.transfer_size) if method == "dspine" else None),
        data=DataConfig(batch_size=shape.rows),
        anchors=AnchorConfig(num_anchors=shape.num_anchors, replacement=shape.replacement),
        loss=LossConfig(vocab_chunk=shape.vocab_chunk),
        optimizer=OptimizerConfig(),
    )
    config = apply_overrides(config, overrides)
    return dataclasses.replace(config, drafter=config.drafter.resolve(shape.target))


def check_torch(config: TrainConfig) -> None:
    """Raise ValueError for settings that the PyTorch step does not compute: timing it beside ours would say nothing."""
    if config.drafter.method not in METHODS:
        raise ValueError(f"the PyTorch side has {' and '.join(METHODS)}, not {config.drafter.method}; measure ours alone with --only jax")
    plain = TrainConfig()
    for setting in ("drafter.label_shift", "loss.ce_weight", "loss.l1_weight", "loss.dpace_alpha", "loss.prefix_mask", "optimizer.ema_decay"):
        ours, theirs = (operator.attrgetter(setting)(c) for c in (config, plain))
        if ours != theirs:
            raise ValueError(f"the PyTorch side computes {setting} {theirs} alone, not {ours}; leave it out, or measure ours alone with --only jax")


def measure(case: Case) -> dict:
    """Figures of one side in this process."""
    return (measure_jax if case.engine == "jax" else measure_torch)(case)


def measure_torch(case: Case) -> dict:
    """The PyTorch step."""
    from train.torch_reference.timing import time_torch_step

    sizes = {"width": case.width, "steps": case.steps, "repeats": case.repeats}
    return time_torch_step(case.config, case.target, modes=case.torch_modes, chunks=case.torch_chunks, **sizes)


def measure_jax(case: Case) -> dict:
    """Our step with random weights, made on the devices in the layout and precision they are used in."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # the process has the GPU to itself
    import jax

    from dspine_jax.sharding import make_mesh
    from train.profile import time_step
    from train.step import initial_state

    mesh = make_mesh(case.config.mesh, jax.devices()[:1])
    with jax.set_mesh(mesh):
        target = random_target(case.target, case.config.compute_dtype, mesh)
        state = initial_state(case.config, mesh)
        if case.config.drafter.injection is not None:
            # Speed does not depend on the transfer space, and building a true one takes the host a while.
            state = dataclasses.replace(state, frozen=random_weights(state.frozen, mesh))
        return time_step(case.config, mesh, target, state, width=case.width, steps=case.steps, repeats=case.repeats)


def random_target(config: TargetConfig, dtype: str, mesh):
    """A target of N(0, 0.02) matrices and norms of 1 in ``dtype``."""
    import jax.numpy as jnp
    from flax import nnx

    from dspine_jax.target import Target

    abstract = nnx.eval_shape(lambda: Target(config, rngs=nnx.Rngs(0), param_dtype=jnp.dtype(dtype)))
    graphdef, state = nnx.split(abstract)
    return nnx.merge(graphdef, random_weights(state, mesh))


def random_weights(tree, mesh):
    """Arrays of the shapes, dtypes and planned layout of ``tree``: weights of norms 1, everything else N(0, 0.02)."""
    import jax
    import jax.numpy as jnp

    from dspine_jax.sharding import path_name, tree_shardings

    def draw(key, shape, dtype, is_norm):
        return jnp.ones(shape, dtype) if is_norm else (0.02 * jax.random.normal(key, shape)).astype(dtype)

    leaves, structure = jax.tree.flatten_with_path(tree)
    plans = jax.tree.leaves(tree_shardings(tree, mesh))
    drawn = [
        jax.jit(draw, static_argnums=(1, 2, 3), out_shardings=plan)(key, x.shape, x.dtype, path_name(path).endswith("weight"))
        for key, (path, x), plan in zip(jax.random.split(jax.random.key(0), len(leaves)), leaves, plans)
    ]
    return jax.tree.unflatten(structure, drawn)


def in_own_process(case: Case) -> dict:
    """``measure`` in a new process, whose memory is gone afterwards; {"error": text} if it fails, even by a crash."""
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(measure, case).result()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def line(label: str, report: dict, ratio: float | None = None) -> str:
    """One row of the table."""
    if "error" in report:
        return f"{label:28s} failed: {report['error'].splitlines()[0][:110]}"
    low, high = report["spread_ms"]
    peak = f"{report['peak_gib']:.2f}" if report["peak_gib"] is not None else "-"
    figures = (
        f"{report['step_ms']:9.2f} ms [{low:.2f}, {high:.2f}] {report['tokens_per_s']:12,.0f} tokens/s {peak:>7s} GiB {report['compile_s']:6.0f} s to compile"
    )
    form = " ".join(f"{name}={value}" for name, value in report.get("form", {}).items())
    return f"{label:28s} {figures}{f'  {ratio:.2f}x' if ratio else ''}  {form}".rstrip()


def main(argv: list[str] | None = None) -> int:
    """Returns 0, 1 if a measurement failed, or 2 for bad input."""
    args = build_parser().parse_args(argv)
    engines = (args.only,) if args.only else ENGINES
    try:
        if "torch" in engines and importlib.util.find_spec("torch") is None:
            raise ValueError("the PyTorch side needs torch (tested: 2.11 and 2.13), which is not installed; install it, or measure ours alone with --only jax")
        plans = [(name, method, train_config(SHAPES[name], method, args.set)) for name in args.shapes for method in args.methods]
        for _, _, config in plans if "torch" in engines else ():
            check_torch(config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results, lines = [], []
    for name, method, config in plans:
        shape, width = SHAPES[name], args.width or SHAPES[name].width
        rows, anchors = config.data.batch_size, config.anchors.num_anchors
        result = {"shape": name, "method": method, "rows": rows, "width": width, "num_anchors": anchors, "config": config_to_dict(config)}
        results.append(result)
        for engine in engines:
            print(f"measuring {name} {method} {engine}: {rows} rows x {width} tokens, {anchors} anchors", flush=True)
            result[engine] = in_own_process(
                Case(engine, shape.target, config, width, args.steps, args.repeats, tuple(args.torch_modes), tuple(args.torch_chunks))
            )
            if all("step_ms" in result.get(e, {}) for e in ENGINES):
                result["ratio"] = result["torch"]["step_ms"] / result["jax"]["step_ms"]
            lines.append(line(f"{name} {method} {engine}", result[engine], result.get("ratio")))
            print(lines[-1], flush=True)
            if args.json:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(["", *lines]))
    return int(any("error" in result[engine] for result in results for engine in engines))


if __name__ == "__main__":
    sys.exit(main())
