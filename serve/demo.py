"""The demo: train DFlash and DSpine for the embedded target at an equal short budget, compare them, decode with the shipped drafter.

    python -m serve.demo                 writes out/: demo.json, curves.png, results.md
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path

METHODS = ("dflash", "dspine")
CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "demo"


def build_parser() -> argparse.ArgumentParser:
    """Every option of the demo."""
    parser = argparse.ArgumentParser("python -m serve.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder to write (default out)")
    parser.add_argument("--steps", type=int, default=300, help="training steps of each drafter (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument("--num-draft-tokens", type=int, help="drafts a round in real decoding (default: what the drafter was trained for)")
    parser.add_argument("--prompts", type=int, default=4, help="prompts to decode (default 4)")
    return parser


def train(method: str, demo: Path, args: argparse.Namespace) -> Path:
    """Train one drafter from nothing. -> its folder."""
    from dspine_jax.config_io import apply_overrides, load_config
    from train.loop import run

    workdir = args.output / f"{method}-seed{args.seed}-{args.steps}steps"
    overrides = [f"workdir={workdir}", f"target={demo / 'target'}", f"data.path={demo / 'data' / 'train'}", f"steps={args.steps}", f"seed={args.seed}"]
    return run(apply_overrides(load_config(CONFIGS / f"{method}.py"), overrides))


def run_demo(args: argparse.Namespace) -> dict:
    """Train, compare, decode. -> the content of demo.json. Raises ValueError or OSError."""
    from serve import evaluate, generate
    from serve.assets import demo_folder
    from train import plot

    begin = time.perf_counter()
    demo = demo_folder()
    args.output.mkdir(parents=True, exist_ok=True)
    drafters = {method: train(method, demo, args) for method in METHODS}
    plot.draw({method: plot.read_metrics(folder.parent) for method, folder in drafters.items()}, args.output / "curves.png")
    given = ["--target", str(demo / "target"), "--data", str(demo / "data" / "evaluation"), "--output", str(args.output / "evaluation"), "--dtype", "float32"]
    for method, folder in drafters.items():
        given += ["--drafter", f"{method}={folder}"]
    with contextlib.redirect_stdout(sys.stderr):
        if evaluate.main(given):
            raise ValueError("the evaluation failed; its message is above")
    scored = json.loads((args.output / "evaluation" / "results.json").read_text())["temperatures"]["T0"]["methods"]
    given = ["--target", str(demo / "target"), "--drafter", str(demo / "dspine"), "--dtype", "float32", "--prompts", str(demo / "prompts.jsonl"), "--check"]
    given += ["--max-new-tokens", "128"] + (["--num-draft-tokens", str(args.num_draft_tokens)] if args.num_draft_tokens else [])
    report, _ = generate.run(generate.parse_args(given))
    return {
        **{method: {"tau": scored[method]["full_average_tau"], "tau_to_onset": scored[method]["onset_average_tau"]} for method in METHODS},
        "steps": args.steps,
        "matches_greedy": report["matches_greedy"],
        "decoding_tau": report["tau"],
        "tokens_per_s": report["tokens_per_s"],
        "plain_tokens_per_s": report["plain_tokens_per_s"],
        "speedup": report["speedup"],
        "seconds": time.perf_counter() - begin,
    }


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns 0, 1 when decoded text differs from plain greedy decoding, 2 for bad input, 130 for Ctrl-C."""
    args = build_parser().parse_args(argv)
    try:
        result = run_demo(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from the last checkpoints", file=sys.stderr)
        return 130
    (args.output / "demo.json").write_text(json.dumps(result, indent=2) + "\n")
    dflash, dspine = (result[method] for method in METHODS)
    print(f"\nafter {args.steps} steps each, tau on held-out prompts: DFlash {dflash['tau']:.3f}, DSpine {dspine['tau']:.3f}")
    same = "identical to plain greedy decoding" if result["matches_greedy"] else "DIFFERENT from plain greedy decoding"
    speeds = f"{result['tokens_per_s']:.0f} tokens/s against {result['plain_tokens_per_s']:.0f}: {result['speedup']:.2f}x"
    print(f"the shipped DSpine drafter: {speeds}, text {same}")
    print(f"{result['seconds']:.0f} s in all; curves and tables in {args.output}")
    return int(not result["matches_greedy"])


if __name__ == "__main__":
    sys.exit(main())
