"""Score drafters on stored greedy continuations: exact acceptance length at temperature 0 by replay."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

EPILOG = """examples:
  dspine-evaluate --target SmolLM2-135M-Instruct.Q4_1.gguf --data data/smollm2_dev --drafter runs/dspine/drafter --output out/eval
  dspine-evaluate --target my-target/ --data data/dev --drafter dflash=runs/a/drafter --drafter dspine=runs/b/drafter --output out/eval
--data is a dataset folder of greedy continuations (docs/data.md) or a folder of such folders, one a benchmark.
With two or more drafters each is compared with the first by a paired bootstrap over prompts.
A label given twice (dspine=seed0 dspine=seed1) is one method with several seeds: their rounds are pooled.
Written to --output: results.json (with every round), results.md."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser("dspine-evaluate", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="HF folder or GGUF file")
    parser.add_argument("--drafter", required=True, action="append", metavar="[LABEL=]FOLDER", help="drafter folder; repeatable")
    parser.add_argument("--data", required=True, help="dataset folder of greedy continuations, or a folder of them")
    parser.add_argument("--output", required=True, help="folder for results.json and results.md")
    parser.add_argument("--prompts", type=int, default=None, help="score only the first N prompts of each benchmark")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="compute precision (default bfloat16)")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts at a time (default 8)")
    parser.add_argument("--anchors-per-chunk", type=int, default=16, help="anchors of a prompt whose logits exist at one time (default 16)")
    args = parser.parse_args(argv)
    for name in ("prompts", "batch_size", "anchors_per_chunk"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    return args


def split_label(text: str) -> tuple[str | None, Path]:
    """'label=folder' -> (label, folder); 'folder' -> (None, folder), also where the folder's own path holds a '='."""
    label, separator, folder = text.partition("=")
    return (label, Path(folder)) if separator and not Path(text).exists() else (None, Path(text))


def benchmark_folders(path: Path) -> list[Path]:
    """The dataset folder itself, or the dataset folders inside it in name order. Raises FileNotFoundError when there is none."""
    if (path / "manifest.json").is_file():
        return [path]
    found = sorted(p.parent for p in path.glob("*/manifest.json"))
    if not found:
        raise FileNotFoundError(f"{path} holds no dataset folder; make one with dspine-convert (docs/data.md)")
    return found


def answer_spans(loss_mask_nS: np.ndarray, lengths_n: np.ndarray) -> list[tuple[int, int]]:
    """(first, one past last) answer position of each row. Raises ValueError when an answer is not one run at the row's end."""
    spans = []
    for row, (mask_S, length) in enumerate(zip(loss_mask_nS, lengths_n)):
        start = int(np.argmax(mask_S != 0))
        if not (mask_S[start:length] != 0).all():
            raise ValueError(f"row {row}: the answer is not one run of tokens up to the row's end; replay needs single-turn continuations")
        spans.append((start, int(length)))
    return spans


def replay_benchmark(
    drafting, tokens_nS: np.ndarray, spans: list[tuple[int, int]], *, batch_size: int, width: int, num_anchors: int, progress
) -> list[np.ndarray]:
    """Drafts [answer-1, K-1] at every answer position of every row; shapes are equal for all batches."""
    drafts = []
    for begin in range(0, len(spans), batch_size):
        rows = range(begin, min(begin + batch_size, len(spans)))
        tokens_BS = np.zeros((batch_size, width), np.int32)
        anchors_BN = np.zeros((batch_size, num_anchors), np.int32)
        for b, row in enumerate(rows):
            start, stop = spans[row]
            tokens_BS[b, :stop] = tokens_nS[row, :stop]
            anchors_BN[b, : stop - 1 - start] = np.arange(start, stop - 1)
        drafts_BNJ = np.asarray(drafting(tokens_BS, anchors_BN))
        drafts.extend(drafts_BNJ[b, : spans[row][1] - 1 - spans[row][0]] for b, row in enumerate(rows))
        progress.update(len(rows))
    return drafts


def evaluate(args: argparse.Namespace) -> dict:
    """Run the replay of every drafter on every benchmark. -> the content of results.json."""
    import jax.numpy as jnp
    from tqdm import tqdm

    from dspine_jax.drafter_io import drafter_parameter_counts, load_drafter
    from dspine_jax.replay import loop_onset, make_drafting, walk_rounds
    from dspine_jax.target_io import load_target, read_target_config
    from serve.environment import environment
    from train.data import DatasetFolder

    dtype = jnp.dtype(args.dtype)
    config = read_target_config(args.target)
    folders = benchmark_folders(Path(args.data))
    drafters = [(label, folder, load_drafter(folder, config, dtype=dtype)) for label, folder in map(split_label, args.drafter)]
    if len({drafter.config.num_draft_tokens for _, _, drafter in drafters}) > 1:
        counts = ", ".join(f"{folder} {drafter.config.num_draft_tokens}" for _, folder, drafter in drafters)
        raise ValueError(f"drafters are compared only at an equal number of drafts a round, these have: {counts}; score them in separate runs")
    target = load_target(args.target, dtype=dtype)
    benchmarks = {}
    for folder in folders:
        data = DatasetFolder(folder, vocab_size=config.vocab_size)
        if data.manifest.name in benchmarks:
            raise ValueError(f"{folder}: a second dataset named {data.manifest.name!r} would replace the first; give each its own name in manifest.json")
        n = data.num_rows if args.prompts is None else min(args.prompts, data.num_rows)
        benchmarks[data.manifest.name] = (np.asarray(data.tokens[:n]), answer_spans(np.asarray(data.loss_mask[:n]), np.asarray(data.lengths[:n])))
    every_span = [span for _, spans in benchmarks.values() for span in spans]
    up = lambda value, step: -(-value // step) * step  # noqa: E731
    shape = dict(
        batch_size=args.batch_size,
        width=up(max(stop for _, stop in every_span), 64),
        num_anchors=up(max(stop - start for start, stop in every_span), args.anchors_per_chunk),
    )
    results: dict = {"target": str(args.target), "dtype": args.dtype, "environment": environment(), "methods": {}}
    with tqdm(total=len(drafters) * len(every_span), unit="prompt", desc="replay", mininterval=0.5 if sys.stderr.isatty() else 30) as progress:
        for label, folder, drafter in drafters:
            new_method = {"folders": [], "num_draft_tokens": drafter.config.num_draft_tokens, "benchmarks": {}}
            method = results["methods"].setdefault(label or drafter.config.method, new_method)
            method["folders"].append(str(folder))
            method["parameters"] = drafter_parameter_counts(drafter)
            drafting = make_drafting(drafter, target, dtype=dtype, anchors_per_chunk=args.anchors_per_chunk)
            for name, (tokens, spans) in benchmarks.items():
                drafts = replay_benchmark(drafting, tokens, spans, progress=progress, **shape)
                entry = method["benchmarks"].setdefault(name, {"seeds": []})
                answers = [tokens[row, start:stop] for row, (start, stop) in enumerate(spans)]
                onsets = [loop_onset(answer) for answer in answers]
                entry["loop_share"] = float(np.mean([onset < len(answer) for onset, answer in zip(onsets, answers)]))
                entry["seeds"].append(
                    {
                        "full": [walk_rounds(answer, draft) for answer, draft in zip(answers, drafts)],
                        "onset": [walk_rounds(answer, draft, onset) for answer, draft, onset in zip(answers, drafts, onsets)],
                    }
                )
    return summarise(results)


def summarise(results: dict) -> dict:
    """Statistics of the logged rounds, per benchmark and averaged, and comparisons with the first method."""
    from dspine_jax.acceptance import acceptance_statistics, paired_bootstrap

    totals: dict[str, dict] = {}
    for label, method in results["methods"].items():
        totals[label] = {}
        for scope in ("full", "onset"):
            for entry in method["benchmarks"].values():
                # Seeds of one prompt are pooled: the prompt stays the unit of the bootstrap.
                by_prompt = [[r for rounds in seeds for r in rounds] for seeds in zip(*(seed[scope] for seed in entry["seeds"]))]
                entry[scope] = acceptance_statistics(by_prompt, method["num_draft_tokens"])
                entry[f"{scope}_by_seed"] = [acceptance_statistics(seed[scope], method["num_draft_tokens"]).get("tau_pooled") for seed in entry["seeds"]]
                entry[f"{scope}_tokens_rounds"] = [[sum(r.tokens for r in rounds), len(rounds)] for rounds in by_prompt]
            # An answer that is over, or loops, at its first token has no round whatever the drafter: there is nothing in it to average or resample.
            scored = {name: entry for name, entry in method["benchmarks"].items() if entry[scope]["rounds"]}
            totals[label][scope] = {name: np.array([pair for pair in entry[f"{scope}_tokens_rounds"] if pair[1]]).T for name, entry in scored.items()}
            method[f"{scope}_average_tau"] = float(np.mean([entry[scope]["tau_pooled"] for entry in scored.values()])) if scored else None
            method[f"{scope}_average_tau_by_seed"] = [float(np.mean(taus)) for taus in zip(*(entry[f"{scope}_by_seed"] for entry in scored.values()))]
        for entry in method["benchmarks"].values():
            entry["rounds"] = [{scope: plain_rounds(by_prompt) for scope, by_prompt in seed.items()} for seed in entry.pop("seeds")]
    first, *others = results["methods"]
    results["comparisons"] = {
        f"{label}_over_{first}": {scope: paired_bootstrap(totals[label][scope], totals[first][scope]) for scope in ("full", "onset") if totals[first][scope]}
        for label in others
    }
    return results


def plain_rounds(by_prompt: list) -> list[list[list[int]]]:
    """Rounds as [anchor, proposed, accepted, tokens], by prompt, so that tau can be computed again from the log."""
    return [[[r.anchor, r.proposed, r.accepted, r.tokens] for r in rounds] for rounds in by_prompt]


def markdown(results: dict) -> str:
    """Tables of tau by benchmark (full text and to the loop onset), per-slot rates, and comparisons."""
    methods = results["methods"]
    names = list(next(iter(methods.values()))["benchmarks"])
    lines = []
    for scope, title in (("full", "full text"), ("onset", "to the loop onset")):
        lines += [f"### tau, temperature 0, {title} (pooled; per request in brackets)", ""]
        lines += ["| method | " + " | ".join(names) + " | average | tau - 1 |", "|---" * (len(names) + 3) + "|"]
        for label, method in methods.items():
            cells = [f"{s['tau_pooled']:.3f} ({s['tau_per_request']:.3f})" if s["rounds"] else "-" for s in (method["benchmarks"][n][scope] for n in names)]
            average = method[f"{scope}_average_tau"]
            lines.append(f"| {label} | " + " | ".join(cells) + (" | - | - |" if average is None else f" | **{average:.3f}** | {average - 1:.3f} |"))
        lines.append("")
    share = next(iter(methods.values()))["benchmarks"]
    lines += ["Answers that start to loop: " + ", ".join(f"{n} {share[n]['loop_share']:.0%}" for n in names) + ".", ""]
    for label, comparison in results["comparisons"].items():
        for scope, c in comparison.items():
            low, high = c["ratio_interval"]
            accepted = "tau - 1 without a ratio: nothing accepted"
            if c["ratio_accepted"] is not None:
                accepted = "tau - 1 x{:.3f} [{:.3f}, {:.3f}]".format(c["ratio_accepted"], *c["ratio_accepted_interval"])
            lines.append(
                f"{label}, {scope}: tau x{c['ratio']:.3f} [{low:.3f}, {high:.3f}], {accepted} (paired bootstrap over prompts, 95%)"
            )
    lines += ["", "### acceptance by slot, full text, mean over benchmarks", ""]
    slots = next(iter(methods.values()))["num_draft_tokens"]
    lines += ["| method | rate | " + " | ".join(str(k + 1) for k in range(slots)) + " |", "|---" * (slots + 2) + "|"]
    for label, method in methods.items():
        for rate, key in (("conditional", "cond_accept"), ("survival", "accept_rate")):
            columns = [[v for v in (method["benchmarks"][n]["full"].get(key, [None] * slots)[k] for n in names) if v is not None] for k in range(slots)]
            lines.append(f"| {label} | {rate} | " + " | ".join(f"{np.mean(c):.2f}" if c else "-" for c in columns) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Console entry point. Returns 0, or 2 for bad input."""
    args = parse_args(argv)
    output = Path(args.output)
    try:
        output.mkdir(parents=True, exist_ok=True)  # before the long work, whose result it must hold
        results = evaluate(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    (output / "results.json").write_text(json.dumps(results))
    (output / "results.md").write_text(markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
