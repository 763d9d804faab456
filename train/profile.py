"""Time the training step of a config on synthetic rows, and show where its device time goes.

    python -m train.profile configs/smollm2_135m_dspine.py --set target=SmolLM2-135M-Instruct.Q4_1.gguf
    python -m train.profile configs/smollm2_135m_dspine.py --set target=... --set data.batch_size=64 --trace out/trace --json out/step.json

Rows are random ids of ``--width`` tokens, each supervised from a quarter of its width on; weights are the target's and a new drafter's. A step waits for
nothing but the device. With --trace three steps are traced: device time by line of source (of the fused operation's root) and by kernel; kernels are then
launched one by one, since in a recorded command buffer they lose their operation's name, so such a step is a little slower.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

TRACED_STEPS = 3
BATCHES = 4


def build_parser() -> argparse.ArgumentParser:
    """Every option of the command."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m train.profile", description=__doc__, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("config", type=Path, help="training config")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a field, as in dspine-train; repeatable")
    parser.add_argument("--width", type=int, default=512, help="tokens of a row (default 512)")
    parser.add_argument("--steps", type=int, default=8, help="steps of one timing (default 8)")
    parser.add_argument("--repeats", type=int, default=5, help="timings (default 5)")
    parser.add_argument("--trace", type=Path, help="folder for a trace of three more steps (XProf, Perfetto), summed up on standard output")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser


def synthetic_batches(config, vocab_size: int, width: int) -> list[dict]:
    """Random rows: {"tokens": int32 [B,S], "loss_mask": bool [B,S]}."""
    import numpy as np

    rng, B = np.random.default_rng(0), config.data.batch_size
    mask = np.broadcast_to(np.arange(width) >= width // 4, (B, width))
    return [{"tokens": rng.integers(0, vocab_size, (B, width)).astype(np.int32), "loss_mask": mask} for _ in range(BATCHES)]


def measure(args: argparse.Namespace) -> dict:
    """Build the step of the config on its target and time it. -> the figures. Raises ValueError or OSError for bad input."""
    import jax
    import numpy as np

    from dspine_jax.config_io import apply_overrides, load_config
    from dspine_jax.sharding import check_batch, make_mesh
    from dspine_jax.target_io import read_target_config
    from pallas_kernels.dispatch import check_here
    from train.loop import load_sharded_target, with_transfer_space
    from train.step import initial_state

    config = apply_overrides(load_config(args.config), args.set)
    check_here(config.kernels.chosen)
    mesh = make_mesh(config.mesh)
    check_batch(config.data.batch_size, mesh)
    target_config = read_target_config(config.target)
    config = dataclasses.replace(config, drafter=config.drafter.resolve(target_config))
    with jax.set_mesh(mesh):
        target = load_sharded_target(config, target_config, mesh)
        state = initial_state(config, mesh)
        if config.drafter.injection is not None:
            state = with_transfer_space(state, target, np.ones(target_config.vocab_size), config)
        return time_step(config, mesh, target, state, width=args.width, steps=args.steps, repeats=args.repeats, trace=args.trace)


def time_step(config, mesh, target, state, *, width: int, steps: int, repeats: int, trace: Path | None = None) -> dict:
    """Compile the step, time it, trace it. -> the figures; the state is used up.

    ``config`` resolved; ``target`` and ``state`` (train.step.TrainState) laid out on ``mesh``, which is the current one.
    """
    import jax
    from flax import nnx

    from dspine_jax.sharding import batch_sharding
    from serve.environment import environment, peak_memory_gib
    from train.step import abstract_state, make_train_step

    step, target_state = make_train_step(config, mesh, abstract_state(config)[0], target), nnx.split(target)[1]
    rows = synthetic_batches(config, target.config.num_tokens, width)
    batches = [{name: jax.device_put(x, batch_sharding(mesh)) for name, x in batch.items()} for batch in rows]
    begin = time.perf_counter()
    compiled = step.lower(state, target_state, batches[0]).compile()
    compile_s = time.perf_counter() - begin

    def run(count: int):
        nonlocal state
        for i in range(count):
            state, metrics = compiled(state, target_state, batches[i % BATCHES])
        jax.block_until_ready(state)
        return metrics

    metrics, seconds = run(steps), []
    for _ in range(repeats):
        begin = time.perf_counter()
        metrics = run(steps)
        seconds.append((time.perf_counter() - begin) / steps)
    memory = compiled.memory_analysis()
    report = {
        "method": config.drafter.method, **timing(seconds, config.data.batch_size * width), "loss": float(metrics["loss/total"][0]), "compile_s": compile_s,
        "peak_gib": peak_memory_gib(), "temporaries_gib": memory.temp_size_in_bytes / 2**30 if memory else None, "environment": environment(),
    }  # fmt: skip
    if trace:
        jax.profiler.start_trace(str(trace))
        run(TRACED_STEPS)
        jax.profiler.stop_trace()
        report["device_ms_by_source"], report["device_ms_by_kernel"] = device_time(trace, compiled.as_text())
    return report


def timing(seconds: list[float], tokens: int) -> dict:
    """Figures of timings of one step of ``tokens`` tokens: {"step_ms" (median), "spread_ms" [least, most], "tokens_per_s"}."""
    median = statistics.median(seconds)
    return {"step_ms": 1e3 * median, "spread_ms": [1e3 * min(seconds), 1e3 * max(seconds)], "tokens_per_s": tokens / median}


def source_lines(hlo: str) -> dict[str, str]:
    """Instruction name (dots and dashes as underscores) -> 'folder/file:line' of the compiled HLO's metadata, or the end of its JAX name."""
    tables = {name: dict(re.findall(r"^(\d+) (.*)$", rows, flags=re.M)) for name, rows in re.findall(r"^(\w+)\n((?:\d+ .*\n)+)", hlo, flags=re.M)}

    def place_of(frame: str) -> str:
        location = re.search(r"file_location_id=(\d+)", tables["StackFrames"][frame])
        fields = dict(re.findall(r"(\w+)=(\d+)", tables["FileLocations"][location[1]]))
        file = Path(tables["FileNames"][fields["file_name_id"]].strip('"'))
        return f"{file.parent.name}/{file.name}:{fields['line']}"

    found = {}
    for line in hlo.splitlines():
        name = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = ", line)
        op = re.search(r'op_name="([^"]+)"', line)
        if not name or not op:
            continue
        frame = re.search(r"stack_frame_id=(\d+)", line)
        place = place_of(frame[1]) if frame and frame[1] in tables.get("StackFrames", {}) else op[1][-60:]
        found[_plain(name[1])] = place + (" backward" if "transpose(" in op[1] else "")
    return found


def _plain(name: str) -> str:
    return re.sub(r"[.-]", "_", name)


def device_time(folder: Path, hlo: str) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds a step of the newest trace in ``folder``, by line of source and by kernel, largest first."""
    import jax

    file = max(folder.glob("**/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    places, by_source, by_kernel = source_lines(hlo), Counter(), Counter()
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if "/device:" not in plane.name:
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                # Library kernels have names of their own; the instruction is then among the event's statistics.
                names = [_plain(str(value)) for key, value in event.stats if key == "hlo_op"] + [_plain(event.name)]
                place = next((places[name] for name in names if name in places), "unknown")
                by_source[place] += event.duration_ns
                by_kernel[f"{event.name} [{place}]"] += event.duration_ns
    scale = 1e-6 / TRACED_STEPS
    return tuple({name: ns * scale for name, ns in counter.most_common(60)} for counter in (by_source, by_kernel))


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 2 for bad input."""
    args = build_parser().parse_args(argv)
    if args.trace:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=".strip()
    try:
        report = measure(args)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    low, high = report["spread_ms"]
    peak = f", peak {report['peak_gib']:.2f} GiB" if report["peak_gib"] is not None else ""
    speed = f"{report['step_ms']:.2f} ms [{low:.2f}, {high:.2f}], {report['tokens_per_s']:,.0f} tokens/s"
    print(f"{report['method']}: {speed}{peak}, compiled in {report['compile_s']:.0f} s")
    for title in ("device_ms_by_source", "device_ms_by_kernel"):
        if title in report:
            print(f"{title}, {sum(report[title].values()):.2f} ms in all")
            for name, ms in list(report[title].items())[:40]:
                print(f"  {ms:8.3f}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
