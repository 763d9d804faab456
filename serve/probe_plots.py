"""Probes as one picture."""

from __future__ import annotations

from pathlib import Path


def known(xs, ys) -> tuple[list, list]:
    """The points that have a value."""
    pairs = [(x, y) for x, y in zip(xs, ys) if y is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]


def readout(axes, found: dict, results: dict) -> None:
    for layer, row in enumerate(found["accuracy"]):
        axes.plot(*known(range(1, len(row) + 1), [None if x is None else 100 * x for x in row]), "o-", markersize=3, label=f"layer {layer}")
    axes.set(title="readout", xlabel="draft", ylabel="accuracy, percent")
    axes.legend(fontsize=7)


def gains(axes, entries: list[dict], places: str, key: str, results: dict) -> None:
    """A gain of every set of layers along ``places``."""
    for label, layers in results["sets"].items():
        values = [entry["sets"][label][key] for entry in entries]
        axes.plot(*known([entry[places] for entry in entries], values), "o-", markersize=3, label=f"{label} ({','.join(map(str, layers))})")
    axes.axhline(0.0, color="grey", linewidth=0.8)


def prefix(axes, found: dict, results: dict) -> None:
    gains(axes, found["by_length"], "known", "gain_tokens", results)
    axes.set(title="correct prefix filled at layers", xlabel="tokens in the prefix", ylabel="gain, correct tokens in a row")
    axes.legend(fontsize=7)


def predecessor(axes, found: dict, results: dict) -> None:
    slots = [entry["slot"] for entry in found["by_slot"]]
    for name, style in (("correct", "-"), ("drafted", ":"), ("undecided", "--")):
        axes.plot(*known(slots, [entry[f"{name}_percent"] for entry in found["by_slot"]]), f"k{style}", label=name)
    axes.set(title="accuracy by the slot before, earlier history correct", xlabel="slot", ylabel="accuracy, percent")
    axes.legend(fontsize=7)


def supplied(axes, found: dict, results: dict) -> None:
    gains(axes, found["by_slot"], "slot", "gain_points", results)
    slots, losses = known([entry["slot"] for entry in found["by_slot"]], [entry["loss_points"] for entry in found["by_slot"]])
    axes.plot(slots, [-loss for loss in losses], "k:", label="as drafted, against correct")
    axes.set(title="correct predecessor supplied at layers, against undecided", xlabel="slot", ylabel="difference, points")
    axes.legend(fontsize=7)


def view(name: str, title: str):
    """A panel of one figure by injected layer and slot."""

    def draw_view(axes, found: dict, results: dict) -> None:
        for layer, row in zip(found["layers"], found[name]):
            axes.plot(*known(range(1, len(row) + 1), row), "o-", markersize=3, label=f"layer {layer}")
        axes.set(title=title, xlabel="slot")
        axes.legend(fontsize=7)

    return draw_view


def tau(axes, found: dict, results: dict) -> None:
    ways = list(found["full"])
    for offset, scope in ((-0.2, "full"), (0.2, "onset")):
        bars = axes.barh([i + offset for i in range(len(ways))], [found[scope][way]["tau"] or 0.0 for way in ways], 0.4, label=scope)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set(title="acceptance length", xlabel="tau, tokens a round", yticks=range(len(ways)), yticklabels=ways)
    axes.invert_yaxis()
    axes.legend(fontsize=7)


PANELS = {
    "readout": [readout],
    "prefix": [prefix],
    "predecessor": [predecessor, supplied],
    "injection": [view("gate", "gate, mean over channels"), view("write", "write over stream"), view("cosine", "cosine of predicted feature and T"),
                  view("nearest", "true token nearest to predicted feature")],
    "tau": [tau],
}  # fmt: skip


def draw(results: dict, output: Path) -> None:
    """Write a PNG of all probes in ``results`` (``serve.probe``)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [(panel, found) for name, found in results["probes"].items() for panel in PANELS[name]]
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(5 * columns, 3.6 * rows), layout="constrained", squeeze=False)
    for axes, (panel, found) in zip(grid.flat, panels):
        panel(axes, found, results)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(f"{results['method']} {Path(results['drafter']).name}, {results['prompts']} prompts")
    figure.savefig(output, dpi=80)
    plt.close(figure)
