"""The demo: train DFlash and DSpine on the embedded target for an equal short budget, score both, and decode with the shipped DSpine drafter.

    python -m serve.demo                    (make demo)

Written to --output: demo.json (figures), demo.png (training curves), and the folder demo/ with runs/ (workdirs) and eval/ (tables and every round).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import shutil
import statistics
import sys
import time
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "demo"
METHODS = ("dflash", "dspine")
EPILOG = """examples:
  python -m serve.demo                              minutes on two CPU cores
  python -m serve.demo --steps 1000 --output out/longer"""


def build_parser() -> argparse.ArgumentParser:
    """Every option of the demo."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m serve.demo", description=__doc__, epilog=EPILOG, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder to write (default out); its folder demo/ is made anew")
    parser.add_argument("--steps", type=int, default=None, help="training steps of each drafter (default: as configs/demo/dspine.py says)")
    parser.add_argument("--seed", type=int, default=0, help="of both trainings (default 0)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens of a decoded answer (default 128)")
    parser.add_argument("--repeats", type=int, default=3, help="timings of each decoder, in turns; their medians count (default 3)")
    return parser


def work_folder(args: argparse.Namespace) -> Path:
    """The folder that belongs to the demo alone."""
    return args.output / "demo"


def train(method: str, demo: Path, args: argparse.Namespace) -> Path:
    """Train one drafter from nothing. -> its workdir."""
    import jax

    from dspine_jax.config_io import load_config
    from train.loop import run

    config = load_config(CONFIGS / f"{method}.py")
    workdir = work_folder(args) / "runs" / method
    devices = jax.device_count()  # rows divide over all of them: on a machine with many the batch is a little larger
    rows = -(-config.data.batch_size // devices) * devices
    data = dataclasses.replace(config.data, path=str(demo / "data" / "train"), batch_size=rows)
    steps = config.steps if args.steps is None else args.steps
    run(dataclasses.replace(config, target=str(demo / "target"), data=data, workdir=str(workdir), steps=steps, seed=args.seed))
    return workdir


def score(drafters: dict[str, Path], demo: Path, output: Path) -> dict[str, float]:
    """tau of each drafter on the stored greedy answers; tables go to ``output``. Raises ValueError when the evaluation fails."""
    from serve.evaluate import main as evaluate

    options = ["--target", str(demo / "target"), "--data", str(demo / "data" / "evaluation"), "--output", str(output)]
    for label, folder in drafters.items():
        options += ["--drafter", f"{label}={folder}"]
    with contextlib.redirect_stdout(io.StringIO()):  # its tables are in results.md; two numbers are enough here
        code = evaluate(options)
    if code:
        raise ValueError(f"the evaluation ended with code {code}")
    methods = json.loads((output / "results.json").read_text())["temperatures"]["T0"]["methods"]
    return {label: method["full_average_tau"] for label, method in methods.items()}


def decode(demo: Path, args: argparse.Namespace) -> dict:
    """Decode the demo's prompts with the shipped DSpine drafter and plainly, in turns. -> texts, tau, whether all texts are equal, median speeds."""
    from dspine_jax.acceptance import acceptance_statistics
    from dspine_jax.speculative import Decoder
    from serve import generate

    given = generate.parse_args(["--prompts", str(demo / "prompts.jsonl"), "--batch-size", "1", "--max-new-tokens", str(args.max_new_tokens)])
    tokenizer, prompts, _, target, drafter, settings = generate.load(given)
    decoders = {
        "dspine": Decoder(target, drafter, settings),
        "plain": Decoder(target, None, dataclasses.replace(settings, num_draft_tokens=0)),
    }
    answers, speeds = {}, {name: [] for name in decoders}
    for _ in range(args.repeats):
        for name, decoder in decoders.items():
            answers[name], seconds = generate.decode(decoder, prompts, given, f"decoding, {name}")
            speeds[name].append(sum(len(answer.tokens) for answer in answers[name]) / seconds)
    texts = [tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers["dspine"]]
    compared = generate.compare(target, prompts, answers["dspine"], answers["plain"], given.dtype)
    ratios = [fast / plain for fast, plain in zip(speeds["dspine"], speeds["plain"])]
    return {
        "prompts": len(prompts),
        "tau": acceptance_statistics([answer.rounds for answer in answers["dspine"]], settings.num_draft_tokens)["tau_pooled"],
        "drafts": settings.num_draft_tokens,
        "tokens_per_s": statistics.median(speeds["dspine"]),
        "plain_tokens_per_s": statistics.median(speeds["plain"]),
        "speedup": statistics.median(ratios),
        "speedups": ratios,
        "texts": texts,
    } | compared


def run(args: argparse.Namespace) -> dict:
    """The whole demo. -> the content of demo.json."""
    from serve.assets import demo_folder
    from serve.environment import environment
    from train.plot import draw, read_metrics

    begin = time.perf_counter()
    demo = demo_folder()
    if not CONFIGS.is_dir():
        raise FileNotFoundError(f"{CONFIGS} does not exist: the demo trains in a checkout of the repository; an installed wheel decodes with dspine-generate")
    shutil.rmtree(work_folder(args), ignore_errors=True)  # a former demo's drafters are not to be taken for this one's
    workdirs = {}
    for index, method in enumerate(METHODS, start=1):
        print(f"\n[{index}/4] training {method}", flush=True)
        workdirs[method] = train(method, demo, args)
    curves = {method: read_metrics(workdir) for method, workdir in workdirs.items()}
    draw(curves, args.output / "demo.png")
    print("\n[3/4] acceptance length of what was just trained and of what ships", flush=True)
    drafters = {method: workdir / "drafter" for method, workdir in workdirs.items()}
    taus = score(drafters | {f"shipped_{method}": demo / method for method in METHODS}, demo, work_folder(args) / "eval")
    print("\n[4/4] decoding with the shipped DSpine drafter, and plainly", flush=True)
    decoding = decode(demo, args)
    for text in decoding["texts"][:2]:
        print("\n" + text)
    results = {method: {"tau": taus[method], "shipped_tau": taus[f"shipped_{method}"]} for method in METHODS}
    results |= {name: decoding[name] for name in ("matches_greedy", "speedup")}
    origin = {"steps": curves["dspine"][-1]["step"], "seed": args.seed, "environment": environment()}
    return results | {"seconds": time.perf_counter() - begin, "decoding": decoding} | origin


def summary(results: dict, output: Path) -> str:
    """The last lines for a person."""
    decoding = results["decoding"]
    lines = ["", f"{'':24}{'DFlash':>8}{'DSpine':>8}"]
    for title, name in (("tau, trained just now", "tau"), ("tau, shipped drafters", "shipped_tau")):
        lines.append(f"{title:24}{results['dflash'][name]:8.2f}{results['dspine'][name]:8.2f}")
    same = "identical to" if results["matches_greedy"] else "DIFFERENT from"
    lines += [
        f"decoded with the shipped DSpine drafter: {decoding['prompts']} texts {same} plain greedy decoding,",
        f"{decoding['tokens_per_s']:.0f} tokens/s against {decoding['plain_tokens_per_s']:.0f}: {results['speedup']:.2f}x at tau {decoding['tau']:.2f}",
        f"training curves: {output / 'demo.png'}   figures: {output / 'demo.json'}   tables: {output / 'demo' / 'eval' / 'results.md'}",
        f"{results['seconds']:.0f} s in all",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns 0, 1 when decoded text differs from plain greedy decoding, 2 for bad input, 130 for Ctrl-C."""
    parser = build_parser()
    args = parser.parse_args(argv)
    for name in ("steps", "max_new_tokens", "repeats"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        results = run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    (args.output / "demo.json").write_text(json.dumps(results, indent=2) + "\n")
    print(summary(results, args.output))
    return 0 if results["matches_greedy"] else 1


if __name__ == "__main__":
    sys.exit(main())
