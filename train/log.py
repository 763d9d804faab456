"""Where a run's numbers go: TensorBoard, metrics.jsonl, one live console line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboardX import SummaryWriter
from tqdm import tqdm

GIB = 2**30


def average_metrics(window: list[dict[str, tuple[Any, Any]]]) -> dict[str, float]:
    """Sums over sums of (sum, weight) pairs of several steps; per-slot pairs become '<name>/slot07'."""
    totals: dict[str, list[np.ndarray]] = {}
    for metrics in jax.device_get(window):
        for name, (value, weight) in metrics.items():
            total = totals.setdefault(name, [np.zeros_like(value, np.float64), np.zeros_like(weight, np.float64)])
            total[0] += value
            total[1] += weight
    scalars = {}
    for name, (value, weight) in totals.items():
        if np.ndim(value) == 0:
            scalars[name] = float(value / weight) if weight else 0.0
        else:
            for slot, (v, w) in enumerate(zip(value, weight), start=1):
                scalars[f"{name}/slot{slot:02d}"] = float(v / w) if w else 0.0
    return scalars


def peak_memory_gib() -> float | None:
    """Peak device memory of the first local device in GiB, or None where the backend does not tell (CPU)."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["peak_bytes_in_use"] / GIB if stats and "peak_bytes_in_use" in stats else None


class RunLog:
    """Writes scalars of a step everywhere; a resumed run continues its files without repeated steps."""

    def __init__(self, workdir: Path, *, start_step: int, total_steps: int):
        self._jsonl = workdir / "metrics.jsonl"
        if self._jsonl.exists():
            rows = [line for line in self._jsonl.read_text().split("\n") if line]
            kept = [line for line in rows if json.loads(line)["step"] <= start_step]
            self._jsonl.write_text("".join(line + "\n" for line in kept))
        self._file = self._jsonl.open("a")
        self._tensorboard = SummaryWriter(str(workdir / "tensorboard"), purge_step=start_step)
        # A log file gets a line every half minute, a terminal one live line.
        interval = 0.5 if sys.stderr.isatty() else 30.0
        self._bar = tqdm(total=total_steps, initial=start_step, unit="step", desc="train", mininterval=interval, dynamic_ncols=sys.stderr.isatty())

    def advance(self) -> None:
        """One more step dispatched."""
        self._bar.update(1)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Record the averages of the steps up to ``step``."""
        self._file.write(json.dumps({"step": step, **scalars}) + "\n")
        self._file.flush()
        for name, value in scalars.items():
            self._tensorboard.add_scalar(name, value, step)
        self._tensorboard.flush()
        tau = scalars.get("simulated_tau/conditioned", scalars.get("simulated_tau/base", 0.0))
        line = f"loss {scalars['loss/total']:.3f} tau~{tau:.2f} {scalars['speed/tokens_per_s'] / 1e3:.1f}k tok/s"
        if scalars["optimizer/skipped_steps"]:
            line += f" skipped {scalars['optimizer/skipped_steps']:.0f}"
        self._bar.set_postfix_str(line, refresh=False)

    def message(self, text: str) -> None:
        """A line of its own, above the live one."""
        self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Flush and leave the terminal clean."""
        self._bar.close()
        self._file.close()
        self._tensorboard.close()
