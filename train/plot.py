"""Draw the training curves of one or more runs: ``python -m train.plot runs/a runs/b --output curves.png``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

PANELS = (
    ("loss/ce_base", "cross-entropy, base path"),
    ("loss/ce_conditioned", "cross-entropy, true predecessor"),
    ("loss/feature", "feature loss, 1 - cos"),
    ("simulated_tau/base", "simulated tau, base path"),
    ("simulated_tau/conditioned", "simulated tau, conditioned path"),
    ("accuracy", "accuracy by slot, last record (DSpine: true predecessor)"),
)


def read_metrics(run: Path) -> list[dict]:
    """Records of a run's metrics.jsonl (the file itself, or the workdir that holds it). Raises FileNotFoundError or ValueError naming the file."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give a training workdir or a metrics.jsonl")
    records = []
    for number, line in enumerate(path.read_text().split("\n"), start=1):
        if line:
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
    if not records:
        raise ValueError(f"{path} holds no record yet")
    return records


def slot_accuracies(record: dict) -> list[float]:
    """Accuracy of slots 1..K-1 on the path that drafts: conditioned where there is one, else base."""
    path = "conditioned" if any(name.startswith("accuracy_conditioned/") for name in record) else "base"
    return [record[name] for name in sorted(record) if name.startswith(f"accuracy_{path}/slot")]


def draw(runs: dict[str, list[dict]], output: Path) -> None:
    """One panel a curve, one colour a run, written as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(15, 8), constrained_layout=True)
    for axis, (name, title) in zip(axes.flat, PANELS):
        axis.set_title(title)
        axis.grid(alpha=0.3)
        for index, (label, records) in enumerate(runs.items()):
            colour = f"C{index}"  # one a run, also where a run lacks a curve
            if name == "accuracy":
                values = slot_accuracies(records[-1])
                axis.plot(range(1, len(values) + 1), values, marker="o", color=colour, label=label)
                continue
            points = [(record["step"], record[name]) for record in records if name in record]
            if points:
                axis.plot(*zip(*points), color=colour, label=label)
        axis.set_xlabel("slot" if name == "accuracy" else "step")
        if name.startswith("loss/ce"):
            axis.set_yscale("log")
    axes.flat[0].legend()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=80)


def main(argv: list[str] | None = None) -> int:
    """Console entry point. Returns 0, or 2 for bad input."""
    parser = argparse.ArgumentParser("python -m train.plot", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]RUN", help="workdir or metrics.jsonl")
    parser.add_argument("--output", type=Path, required=True, help="PNG to write")
    args = parser.parse_args(argv)
    try:
        runs = {}
        for text in args.runs:
            label, separator, path = text.rpartition("=")
            runs[label if separator else Path(path).name] = read_metrics(Path(path))
        draw(runs, args.output)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"curves of {', '.join(runs)} written to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
