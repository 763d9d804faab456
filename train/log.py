"""Where a run's numbers go: TensorBoard, metrics.jsonl, one live console line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboardX import SummaryWriter
from tqdm import tqdm


def average_metrics(window: list[dict[str, tuple[Any, Any]]]) -> dict[str, float]:
    """Sums over sums of (sum, weight) pairs of several steps; per-slot pairs become '<name>/slot07'.

    What weighs nothing in all of them (only skipped steps, a slot never supervised) is left out.
    """
    totals: dict[str, list[np.ndarray]] = {}
    for metrics in jax.device_get(window):
        for name, (value, weight) in metrics.items():
            total = totals.setdefault(name, [np.zeros_like(value, np.float64), np.zeros_like(weight, np.float64)])
            total[0] += value
            total[1] += weight
    scalars = {}
    for name, (value, weight) in totals.items():
        slots = [name] if np.ndim(value) == 0 else [f"{name}/slot{slot:02d}" for slot in range(1, len(value) + 1)]
        for slot, v, w in zip(slots, np.atleast_1d(value), np.atleast_1d(weight)):
            if w:
                scalars[slot] = float(v / w)
    return scalars


class RunLog:
    """Writes scalars of a step everywhere; a resumed run continues its files without repeated steps."""

    def __init__(self, workdir: Path, *, start_step: int, total_steps: int):
        jsonl = workdir / "metrics.jsonl"
        if jsonl.exists():
            # A killed run may leave half a line at the end: only lines with their newline count.
            whole = jsonl.read_text().split("\n")[:-1]
            temporary = workdir / ".metrics.jsonl.tmp"
            temporary.write_text("".join(line + "\n" for line in whole if json.loads(line)["step"] <= start_step))
            os.replace(temporary, jsonl)
        self._file = jsonl.open("a")
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
        line = f"loss {scalars.get('loss/total', float('nan')):.3f} tau~{tau:.2f} {scalars['speed/tokens_per_s'] / 1e3:.1f}k tok/s"
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
