"""Acceptance as a picture: tau by benchmark with margins, and conditional acceptance by slot."""

from __future__ import annotations

from pathlib import Path

from serve.scoring import slot_rates


def draw(content: dict, temperature: str, output: Path) -> None:
    """Write a PNG of one temperature's summary (``serve.scoring.summarise``). Benchmarks without a round are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    methods = content["methods"]
    first = next(iter(methods.values()))
    names = [name for name, entry in first["benchmarks"].items() if entry["full"]["rounds"]]
    figure, (bars, strip, slots) = plt.subplots(3, 1, figsize=(max(7.0, 1.3 * len(names) + 2), 9), height_ratios=(3, 1, 3), layout="constrained")
    width = 0.8 / len(methods)
    for index, (label, method) in enumerate(methods.items()):
        offset = (index - (len(methods) - 1) / 2) * width
        values = [method["benchmarks"][name]["full"]["tau_pooled"] for name in names]
        drawn = bars.bar([i + offset for i in range(len(names))], values, width, label=label)
        bars.bar_label(drawn, fmt="%.2f", fontsize=7)
        if index:
            base = [first["benchmarks"][name]["full"]["tau_pooled"] for name in names]
            strip.plot(range(len(names)), [100 * (v / b - 1) for v, b in zip(values, base)], "o-", color=f"C{index}", label=label)
        rates = slot_rates(method, "cond_accept")
        known = [(k + 1, rate) for k, rate in enumerate(rates) if rate is not None]
        slots.plot([k for k, _ in known], [rate for _, rate in known], "o-", color=f"C{index}", label=label, markersize=3)
    bars.set(xticks=range(len(names)), xticklabels=names, ylabel="tau, tokens a round", title=f"accepted length, temperature {temperature[1:]}, full text")
    bars.axhline(1.0, color="grey", linewidth=0.8)
    bars.legend()
    strip.set(xticks=range(len(names)), xticklabels=names, ylabel=f"% over {next(iter(methods))}")
    strip.axhline(0.0, color="grey", linewidth=0.8)
    slots.set(xlabel="slot", ylabel="accepted, given all before", ylim=(0, 1))
    slots.legend()
    figure.savefig(output, dpi=130)
    plt.close(figure)
