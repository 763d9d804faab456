"""Acceptance as a picture: tau by benchmark, our margin over the strongest rival, and conditional acceptance by slot."""

from __future__ import annotations

from pathlib import Path

from serve.scoring import in_order, slot_rates


def draw(content: dict, temperature: str, output: Path) -> None:
    """Write a PNG of one temperature's summary (``serve.scoring.summarise``). Benchmarks without a round are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    methods = content["methods"]
    first = next(iter(methods.values()))
    names = in_order(name for name, entry in first["benchmarks"].items() if entry["full"]["rounds"])
    size = (max(7.0, (0.5 + 0.3 * len(methods)) * (len(names) + 1) + 2), 9)
    figure, (bars, strip, slots) = plt.subplots(3, 1, figsize=size, height_ratios=(3, 1, 3), layout="constrained")
    width = 0.8 / len(methods)
    for index, (label, method) in enumerate(methods.items()):
        offset = (index - (len(methods) - 1) / 2) * width
        values = [method["benchmarks"][name]["full"]["tau_pooled"] for name in names] + ([method["full_average_tau"]] if names else [])
        drawn = bars.bar([i + offset for i in range(len(values))], values, width, label=label)
        bars.bar_label(drawn, fmt="%.2f", fontsize=7)
        rates = slot_rates(method, "cond_accept")
        known = [(k + 1, rate) for k, rate in enumerate(rates) if rate is not None]
        slots.plot([k for k, _ in known], [rate for _, rate in known], "o-", color=f"C{index}", label=label, markersize=3)
    ticks = dict(xticks=range(len(names) + 1), xticklabels=[*names, "average"])
    bars.set(**ticks, ylabel="tau, tokens a round", title=f"accepted length, temperature {temperature[1:]}, full text")
    bars.axhline(1.0, color="grey", linewidth=0.8)
    bars.legend(loc="upper left", bbox_to_anchor=(1, 1))  # beside the bars, not over them
    ours, strongest = content["ours"], content["strongest"]["full"]
    if strongest is not None:
        margin = content["comparisons"][f"{ours}_over_{strongest}"]["full"]
        margins = [*(margin["benchmarks"][name] for name in names), margin]
        middle = [100 * (m["ratio"] - 1) for m in margins]
        low, high = zip(*(m["ratio_interval"] for m in margins))
        spread = [[m - 100 * (edge - 1) for m, edge in zip(middle, low)], [100 * (edge - 1) - m for m, edge in zip(middle, high)]]
        # An estimate may lie outside its percentile interval by rounding.
        strip.errorbar(range(len(margins)), middle, [[max(0.0, x) for x in side] for side in spread], fmt="o", capsize=3, color="black")
    strip.set(**ticks, xlim=bars.get_xlim(), ylabel=f"{ours}, % over\n{strongest or 'no rival'}")
    strip.axhline(0.0, color="grey", linewidth=0.8)
    slots.set(xlabel="slot", ylabel="accepted, given all before", ylim=(0, 1))
    figure.savefig(output, dpi=130)
    plt.close(figure)
