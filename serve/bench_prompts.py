"""Batch after batch against continuous refill on a file of prompts, plainly and with a drafter: a table, and JSON with --output.

  python -m serve.bench_prompts --prompts prompts.jsonl --batch-size 16                       the embedded demo
  python -m serve.bench_prompts --prompts prompts.jsonl --batch-size 256 --target my-target/ --drafter my-drafter/ --output out/prompts.json

The four runs take turns; programs are compiled before. Medians count. Options that are not listed here are those of dspine-generate.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path


def parse_args(argv: list[str] | None = None) -> tuple[argparse.Namespace, argparse.Namespace]:
    """-> (own options, options of dspine-generate)."""
    from serve import generate

    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("bench_prompts", description=__doc__, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("--repeats", type=int, default=3, help="timings of each run (default 3)")
    parser.add_argument("--limit", type=int, help="use this many prompts (default: all)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    own, rest = parser.parse_known_args(argv)
    args = generate.parse_args(rest)
    if args.prompts is None:
        parser.error("give a file with --prompts")
    for name in ("repeats", "limit"):
        if getattr(own, name) is not None and getattr(own, name) < 1:
            parser.error(f"--{name} {getattr(own, name)} must be at least 1")
    return own, args


def measure(own: argparse.Namespace, args: argparse.Namespace) -> dict:
    """Run the benchmark. -> the report, an entry of "runs" for each decoder and way."""
    from dspine_jax.acceptance import acceptance_statistics
    from dspine_jax.generation import generate, generate_batches
    from dspine_jax.refill import answer_prompts, warm_up
    from dspine_jax.speculative import Decoder
    from serve.environment import environment, peak_memory_gib
    from serve.generate import choose_batch_size, load

    _, prompts, _, target, drafter, settings = load(args)
    prompts = prompts[: own.limit]
    batch_size = choose_batch_size(target, drafter, settings, prompts, args)
    decoders = {"plain": Decoder(target, None, dataclasses.replace(settings, num_draft_tokens=0, policy="own"))}
    if drafter is not None:
        decoders["drafter"] = Decoder(target, drafter, settings)
    sizes = dict(max_new_tokens=args.max_new_tokens, max_length=target.config.max_position_embeddings)

    def batches(decoder):
        return [answer for batch in generate_batches(decoder, prompts, batch_size, seed=args.seed, **sizes) for answer in batch]

    def refill(decoder):
        answers = dict(answer_prompts(decoder, prompts, batch_size=batch_size, seed=args.seed, **sizes))
        return [answers[index] for index in range(len(prompts))]

    begin = time.perf_counter()
    for decoder in decoders.values():
        warm_up(decoder, prompts, batch_size=batch_size, **sizes)
        generate(decoder, [[0]], **sizes | {"max_length": 1}, width=max(map(len, prompts)), batch_size=batch_size)  # no room for a token: finished at once
    report = {"compile_s": time.perf_counter() - begin, "batch_size": batch_size, "prompts": len(prompts), "runs": []}
    clocks: dict = {(name, way): [] for name in decoders for way in (batches, refill)}
    answers = {}
    for _ in range(own.repeats):
        for name, way in clocks:
            wall, busy = time.perf_counter(), time.process_time()
            answers[name, way] = way(decoders[name])
            clocks[name, way].append((time.perf_counter() - wall, time.process_time() - busy))
    for (name, way), pairs in clocks.items():
        seconds, cpu = ([pair[i] for pair in pairs] for i in (0, 1))
        found, tokens = answers[name, way], sum(len(answer.tokens) for answer in answers[name, way])
        entry = {"decoder": name, "way": way.__name__, "seconds": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}
        entry |= {"cpu_s": statistics.median(cpu), "tokens": tokens, "tokens_per_s": tokens / statistics.median(seconds)}
        entry["tau"] = acceptance_statistics([answer.rounds for answer in found], max(settings.num_draft_tokens, 1)).get("tau_pooled")
        entry["same_texts"] = sum(a.tokens == b.tokens for a, b in zip(found, answers[name, batches]))
        report["runs"].append(entry)
    report |= environment() | {"peak_gib": peak_memory_gib()}
    return report | {name: str(value) if isinstance(value, Path) else value for name, value in (vars(own) | vars(args)).items() if name not in report}


def table(report: dict) -> str:
    """The report for people."""
    rows = [("decoder", "way", "seconds (least, most)", "CPU s", "tokens/s", "tau", f"texts as in batches, of {report['prompts']}")]
    for r in report["runs"]:
        seconds = f"{r['seconds']:.2f} ({r['least']:.2f}, {r['most']:.2f})"
        rows.append((r["decoder"], r["way"], seconds, f"{r['cpu_s']:.1f}", f"{r['tokens_per_s']:.0f}", f"{r['tau'] or 1:.2f}", str(r["same_texts"])))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 2 for bad input."""
    own, args = parse_args(argv)
    try:
        report = measure(own, args)
        if own.output is not None:
            own.output.parent.mkdir(parents=True, exist_ok=True)
            own.output.write_text(json.dumps(report, indent=1) + "\n")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{report['prompts']} prompts, batch {report['batch_size']}, {report['hardware']}; compiled in {report['compile_s']:.0f} s")
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
