"""Keep measured figures in docs/results.json and generate the README's tables from it.

    python -m serve.report                      write the tables between the markers of README.md
    python -m serve.report --check              fail when they are out of date
    python -m serve.report --record out/eval/results.json --run dflash=runs/a --run dspine=runs/b \\
        --target smollm2-135m --steps 1500 --command "bash configs/smollm2_lab.sh ..."
    python -m serve.report --demo out/demo.json out/again/demo.json --command "make demo"
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
NAMES = {
    "dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark", "domino": "Domino", "dspine": "DSpine", "prompt-lookup": "prompt lookup",
    "dflash-wide": "DFlash, as large as DSpine", "dspine-last": "DSpine, last layer only, as large",
}  # fmt: skip
DEMO_METHODS = ("dflash", "dspine")
BENCHMARKS = ("gsm8k", "math500", "humaneval", "mbpp", "livecodebench", "mt-bench", "arena-hard-v2")


def newest(entries: list[dict]) -> dict[str, dict]:
    """The last entry of each id: newer figures stand after older ones, which stay."""
    return {entry["id"]: entry for entry in entries}


def evaluation_entries(results: dict, *, target: str, steps: int, note: str) -> list[tuple[str, float, str, int, list[float] | None, str]]:
    """(id, value, unit, runs, spread, note) of an evaluation: tau by benchmark and average, margins over the first method, decoding speed."""
    rows = []
    for temperature, content in results["temperatures"].items():
        for method, variant in content["methods"].items():
            rows += _tau_entries(variant, f"tau/{target}/{method}@{steps}", temperature, f"policy {variant['policy']}; {note}")
            for policy, other in variant.get("other_policies", {}).items():
                rows += _tau_entries(other, f"tau/{target}/{method}-{policy}@{steps}", temperature, f"policy {policy}; {note}")
            for part, count in variant["parameters"].items():
                rows.append((f"parameters/{target}/{method}/{part}", count, "parameters", 1, None, "trained"))
        for pair, scopes in content["comparisons"].items():
            for scope, c in scopes.items():
                interval = "spread is the 95% interval of a paired bootstrap over prompts; " + note
                shifted = [edge - 1 for edge in c["ratio_interval"]]
                rows.append((f"margin/{target}@{steps}/{pair}/{temperature}/{scope}", c["ratio"] - 1, "ratio of average tau minus 1", 1, shifted, interval))
                if c["ratio_accepted"] is not None:
                    accepted = (c["ratio_accepted"], "ratio of average (tau - 1)", 1, c["ratio_accepted_interval"], interval)
                    rows.append((f"ratio_accepted/{target}@{steps}/{pair}/{temperature}/{scope}", *accepted))
        for entry in content.get("decoding", []):
            rows += _decoding_entries(entry, target, temperature, f"{results['dtype']}, {entry['prompts']} prompts, {entry['tokens']} tokens; {note}")
    return rows


def _tau_entries(variant: dict, prefix: str, temperature: str, note: str) -> list[tuple]:
    rows = []
    seeds = len(variant["folders"])
    for scope in ("full", "onset"):
        scored = {name: entry for name, entry in variant["benchmarks"].items() if "tau_pooled" in entry[scope]}
        for name, entry in scored.items():
            taus = entry[f"{scope}_by_seed"]
            rows.append((f"{prefix}/{name}/{temperature}/{scope}", entry[scope]["tau_pooled"], "tokens/round", seeds, [min(taus), max(taus)], note))
        if scored:  # otherwise no answer has a round in this scope
            taus = variant[f"{scope}_average_tau_by_seed"]
            rows.append((f"{prefix}/avg/{temperature}/{scope}", variant[f"{scope}_average_tau"], "tokens/round", seeds, [min(taus), max(taus)], note))
    return rows


def _decoding_entries(entry: dict, target: str, temperature: str, note: str) -> list[tuple]:
    name = entry["method"] if entry["method"] == "plain" else f"{entry['method']}-{entry['drafts']}drafts-{entry['policy']}"
    prefix = f"decode/{target}/b{entry['batch_size']}/{name}/{temperature}"
    text = f"text {entry['state']}" + (f" ({entry['identical']}/{entry['prompts']} equal)" if entry["identical"] is not None else "")
    figures = [("tokens_per_s", "tokens/s"), ("speedup", "times plain decoding"), ("tau", "tokens/round")]
    return [(f"{prefix}/{key}", entry[key], unit, 1, None, f"{text}; {note}") for key, unit in figures if entry[key] is not None]


def run_entries(label: str, run: Path, *, target: str, note: str) -> list[tuple[str, float, str, int, list[float] | None, str]]:
    """Step time, token rate and peak memory of a run: medians over the records after the first, which holds compilation."""
    from train.plot import read_metrics

    records = read_metrics(run)[1:]
    rows = []
    for key, name, unit in (("speed/step_s", "step_s", "s"), ("speed/tokens_per_s", "tokens_per_s", "tokens/s"), ("memory/peak_gib", "peak_gib", "GiB")):
        values = [record[key] for record in records if key in record]
        if values:
            rows.append((f"train/{target}/{label}/{name}", statistics.median(values), unit, len(values), [min(values), max(values)], note))
    return rows


def demo_entries(runs: list[dict], *, note: str) -> list[tuple[str, float, str, int, list[float] | None, str]]:
    """Medians over several runs of the demo, with the lowest and the highest as spread."""
    equal = sum(run["matches_greedy"] for run in runs)
    found = [(f"demo/{method}/{key}", [run[method][key] for run in runs], "tokens/round") for method in DEMO_METHODS for key in ("tau", "shipped_tau")]
    found += [(f"demo/{key}", [run[key] for run in runs], unit) for key, unit in (("speedup", "times plain decoding"), ("seconds", "s"))]
    found += [(f"demo/{key}", [run["decoding"][key] for run in runs], unit) for key, unit in (("tokens_per_s", "tokens/s"), ("tau", "tokens/round"))]
    above = sum(run["dspine"]["tau"] > run["dflash"]["tau"] for run in runs)
    note = f"text equal to plain greedy decoding in {equal} of {len(runs)} runs; DSpine above DFlash in {above} of {len(runs)}; {note}"
    return [(id_, statistics.median(values), unit, len(values), [min(values), max(values)], note) for id_, values, unit in found]


def record(args: argparse.Namespace, path: Path) -> int:
    """Append the figures of an evaluation and its runs, or of runs of the demo, to results.json. Returns how many."""
    results = [json.loads(Path(file).read_text()) for file in args.demo or [args.record]]
    origin = {"command": args.command, **results[0].get("environment", {}), **json.loads(args.environment or "{}")}
    missing = [key for key in ("hardware", "versions", "commit", "date") if not origin.get(key) or origin[key] == "unknown"]
    if missing:
        raise ValueError(f"{(args.demo or [args.record])[0]} does not say {', '.join(missing)}; give it with --environment '{{\"{missing[0]}\": ...}}'")
    rows = demo_entries(results, note=args.note) if args.demo else evaluation_entries(results[0], target=args.target, steps=args.steps, note=args.note)
    for text in args.run:
        label, _, run = text.partition("=")
        rows += run_entries(label, Path(run), target=args.target, note="medians over logged windows, input pipeline included; " + args.note)
    rows = [row for row in rows if row[0].startswith(tuple(args.only) or "")]
    entries = json.loads(path.read_text()) if path.is_file() else []
    for id_, value, unit, runs, spread, note in rows:
        entry = {"id": id_, "value": round(value, 6), "unit": unit, **origin, "runs": runs, "note": note}
        if spread is not None:
            entry["spread"] = [round(edge, 6) for edge in spread]
        entries.append(entry)
    path.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n")
    return len(rows)


def acceptance_tables(figures: dict[str, dict]) -> list[str]:
    """Markdown of every target and step count that has tau figures at temperature 0."""
    groups = sorted({(m[1], int(m[2])) for m in (re.match(r"tau/([^/]+)/[^/@]+@(\d+)/avg/T0/full$", id_) for id_ in figures) if m})
    lines = []
    for target, steps in groups:
        methods = [m for m in NAMES if f"tau/{target}/{m}@{steps}/avg/T0/full" in figures]
        sample = figures[f"tau/{target}/{methods[0]}@{steps}/avg/T0/full"]
        lines += [f"**{target}, {steps} steps, temperature 0.** {sample['note']} Mean of the benchmarks' pooled tau; brackets: lowest and highest seed.", ""]
        lines += ["| text | method | " + " | ".join(BENCHMARKS) + " | average | tau - 1 |", "|---" * (len(BENCHMARKS) + 4) + "|"]
        for scope, title in (("full", "full"), ("onset", "to loop onset")):
            for method in methods:
                tau = lambda name: figures[f"tau/{target}/{method}@{steps}/{name}/T0/{scope}"]  # noqa: B023, E731
                average, (low, high) = tau("avg")["value"], tau("avg")["spread"]
                cells = " | ".join(f"{tau(name)['value']:.2f}" for name in BENCHMARKS)
                lines.append(f"| {title} | {NAMES[method]} | {cells} | **{average:.3f}** [{low:.3f}, {high:.3f}] | {average - 1:.3f} |")
        lines.append("")
        for rival, scope, title in ((r, *s) for r in methods for s in (("full", "full text"), ("onset", "to the loop onset"))):
            margin = figures.get(f"margin/{target}@{steps}/dspine_over_{rival}/T0/{scope}")
            accepted = figures.get(f"ratio_accepted/{target}@{steps}/dspine_over_{rival}/T0/{scope}")
            if margin and accepted:
                (low, high), (alow, ahigh) = margin["spread"], accepted["spread"]
                lines.append(
                    f"* DSpine over {NAMES[rival]}, {title}: tau {margin['value']:+.1%} [{low:+.1%}, {high:+.1%}], "
                    f"tau - 1 x{accepted['value']:.3f} [{alow:.3f}, {ahigh:.3f}] (paired bootstrap over prompts, 95%)"
                )
        lines += ["", "| method | trained parameters | of them injection | step | text tokens/s | peak memory |", "|---|---|---|---|---|---|"]
        for method in methods:
            cell = lambda key, form, scale=1.0: form.format(scale * figures[key]["value"]) if key in figures else "-"  # noqa: E731
            cells = [cell(f"parameters/{target}/{method}/{part}", "{:.2f}M", 1e-6) for part in ("total", "injection")]
            costs = (("step_s", "{:.1f} ms", 1e3), ("tokens_per_s", "{:.0f}k", 1e-3), ("peak_gib", "{:.1f} GiB", 1.0))
            cells += [cell(f"train/{target}/{method}/{name}", form, scale) for name, form, scale in costs]
            lines.append(f"| {NAMES[method]} | " + " | ".join(cells) + " |")
        lines += ["", _origin(sample), ""]
    return lines


def sampled_tables(figures: dict[str, dict]) -> list[str]:
    """Markdown of tau at temperature 1, every target, method and policy that has figures."""
    found = [(m[1], int(m[3]), m[2]) for m in (re.match(r"tau/([^/]+)/([^/@]+)@(\d+)/avg/T1/full$", id_) for id_ in figures) if m]
    lines = []
    for target, steps in sorted({(target, steps) for target, steps, _ in found}):
        methods = [method for t, s, method in found if (t, s) == (target, steps)]
        sample = figures[f"tau/{target}/{methods[0]}@{steps}/avg/T1/full"]
        lines += [f"**{target}, {steps} steps, temperature 1.** {sample['note'].partition('; ')[2]}", ""]
        lines += ["| method, policy | " + " | ".join(BENCHMARKS) + " | average | tau - 1 |", "|---" * (len(BENCHMARKS) + 3) + "|"]
        for method in methods:
            tau = lambda name: figures[f"tau/{target}/{method}@{steps}/{name}/T1/full"]  # noqa: B023, E731
            policy = tau("avg")["note"].partition(";")[0].removeprefix("policy ")
            cells = " | ".join(f"{tau(name)['value']:.2f}" for name in BENCHMARKS)
            name = next((NAMES[m] for m in sorted(NAMES, key=len, reverse=True) if method == m or method.startswith(f"{m}-")), method)
            lines.append(f"| {name}, {policy} | {cells} | **{tau('avg')['value']:.3f}** | {tau('avg')['value'] - 1:.3f} |")
        lines += ["", _origin(sample), ""]
    return lines


def decoding_tables(figures: dict[str, dict]) -> list[str]:
    """Markdown of measured decoding speed: every target, temperature and batch size that has figures."""
    found = [m.groups() for m in (re.match(r"decode/([^/]+)/b(\d+)/([^/]+)/T([^/]+)/tokens_per_s$", id_) for id_ in figures) if m]
    lines = []
    for target in dict.fromkeys(target for target, *_ in found):
        lines += [f"**{target}, real decoding.** Plain decoding runs in the same loop; drafts a round and policy in the method's name.", ""]
        lines += ["| temperature | batch | method | tau | tokens/s | speed-up | measured |", "|---" * 7 + "|"]
        origins: list[str] = []
        for temperature, batch, method in sorted((float(t), int(b), method) for name, b, method, t in found if name == target):
            prefix = f"decode/{target}/b{batch}/{method}/T{temperature:g}"
            speed = figures[f"{prefix}/tokens_per_s"]
            value = lambda key, form: format(figures[f"{prefix}/{key}"]["value"], form) if f"{prefix}/{key}" in figures else "-"  # noqa: B023, E731
            if _origin(speed) not in origins:
                origins.append(_origin(speed))
            cells = [f"{temperature:g}", batch, method, value("tau", ".2f"), value("tokens_per_s", ".0f"), value("speedup", ".2f")]
            note = speed["note"].partition(";")[0].removeprefix("text ")
            lines.append("| " + " | ".join(map(str, cells)) + f" | {note} [{origins.index(_origin(speed)) + 1}] |")
        lines += [""] + [f"[{number}] {origin}" for number, origin in enumerate(origins, start=1)] + [""]
    return lines


def demo_table(figures: dict[str, dict]) -> list[str]:
    """Markdown of ``make demo``, or nothing where it has no figures."""
    if "demo/seconds" not in figures:
        return []
    cell = lambda id_: "{:.2f} [{:.2f}, {:.2f}]".format(figures[id_]["value"], *figures[id_]["spread"])  # noqa: E731
    seconds, sample = figures["demo/seconds"], figures["demo/speedup"]
    lines = [f"**The demo's target, `make demo`.** Median of {sample['runs']} runs, lowest and highest in brackets; {sample['note']}.", ""]
    lines += ["| tau on 64 held-out prompts, 7 drafts | DFlash | DSpine |", "|---|---|---|"]
    for title, key in (("trained by the demo", "tau"), ("shipped drafters", "shipped_tau")):
        lines.append(f"| {title} | {cell(f'demo/dflash/{key}')} | {cell(f'demo/dspine/{key}')} |")
    speed = f"{figures['demo/tokens_per_s']['value']:.0f} tokens/s, {cell('demo/speedup')} times plain decoding at tau {figures['demo/tau']['value']:.2f}"
    lines += ["", f"Decoding with the shipped DSpine drafter, batch 1: {speed}. In all {seconds['value']:.0f} s.", "", _origin(sample), ""]
    return lines


def _origin(entry: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
    return f"{entry['hardware']}, commit {entry['commit']}, {entry['date']}, {versions}. Reproduce: `{entry['command']}`"


def updated_readme(text: str, entries: list[dict]) -> str:
    """README text with the tables between the markers. Raises ValueError when the markers are missing."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"README.md must hold each of {BEGIN} and {END} once")
    head, rest = text.split(BEGIN)
    figures = newest(entries)
    tables = demo_table(figures) + acceptance_tables(figures) + sampled_tables(figures) + decoding_tables(figures)
    return head + BEGIN + "\n" + "\n".join(tables) + END + rest.split(END)[1]


def main(argv: list[str] | None = None) -> int:
    """Console entry point. Returns 0, 1 when --check finds stale tables, 2 for bad input."""
    parser = argparse.ArgumentParser("python -m serve.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--record", metavar="RESULTS.json", help="an evaluation's results.json to add to docs/results.json first")
    parser.add_argument("--demo", nargs="+", metavar="DEMO.json", help="demo.json of one or more runs of the demo to add to docs/results.json first")
    parser.add_argument("--run", action="append", default=[], metavar="METHOD=RUN", help="training workdir or metrics.jsonl whose speed to record; repeatable")
    parser.add_argument("--only", action="append", default=[], metavar="PREFIX", help="record only ids that start with this, such as decode/; repeatable")
    parser.add_argument("--target", help="name of the target in ids, such as smollm2-135m")
    parser.add_argument("--steps", type=int, help="training steps, part of the ids")
    parser.add_argument("--command", help="command that reproduces the figures")
    parser.add_argument("--note", default="", help="data, prompts and cap, in a sentence")
    parser.add_argument("--environment", help="JSON with hardware, versions, commit or date where the evaluation does not know them")
    parser.add_argument("--root", type=Path, default=ROOT, help="repository root (default: this one)")
    args = parser.parse_args(argv)
    path, readme = args.root / "docs" / "results.json", args.root / "README.md"
    try:
        if args.record:
            absent = [name for name in ("target", "steps", "command") if not getattr(args, name)]
            if absent:
                parser.error(f"--record needs --{' and --'.join(absent)}")
        if args.demo and (args.record or not args.command):
            parser.error("--demo needs --command, and is recorded by itself, without --record")
        if args.record or args.demo:
            print(f"{record(args, path)} figures added to {path}")
        old = readme.read_text()
        new = updated_readme(old, json.loads(path.read_text()))
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.check:
        if old != new:
            print("README.md is out of date: run python -m serve.report", file=sys.stderr)
        return int(old != new)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
