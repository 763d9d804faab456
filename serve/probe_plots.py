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


def prefix(axes, found: dict, results: dict) -> None:
    lengths = [entry["known"] for entry in found["by_length"]]
    for label, layers in results["sets"].items():
        values = [entry["sets"][label]["gain_tokens"] for entry in found["by_length"]]
        axes.plot(*known(lengths, values), "o-", markersize=3, label=f"{label} ({','.join(map(str, layers))})")
    axes.axhline(0.0, color="grey", linewidth=0.8)
    axes.set(title="correct prefix filled at layers", xlabel="tokens in the prefix", ylabel="gain, correct tokens in a row")
    axes.legend(fontsize=7)


def predecessor(axes, found: dict, results: dict) -> None:
    slots = [entry["slot"] for entry in found["by_slot"]]
    for name, style in (("correct", "k-"), ("drafted", "k:"), ("undecided", "k--")):
        axes.plot(*known(slots, [entry[f"{name}_percent"] for entry in found["by_slot"]]), style, label=name)
    for label in results["sets"]:
        axes.plot(*known(slots, [entry["sets"][label]["percent"] for entry in found["by_slot"]]), "o-", markersize=3, label=f"supplied, {label}")
    axes.set(title="the slot before, earlier history correct", xlabel="slot", ylabel="accuracy, percent")
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
    "predecessor": [predecessor],
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
    rows = -(-len(panels) // 2)
    figure, grid = plt.subplots(rows, 2, figsize=(12, 3.8 * rows), layout="constrained", squeeze=False)
    for axes, (panel, found) in zip(grid.flat, panels):
        panel(axes, found, results)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(f"{results['method']} {results['drafter']}")
    figure.savefig(output, dpi=120)
    plt.close(figure)
