"""Look into a drafter: what its layers know, what early features are worth, and how far it could get.

    python -m serve.probe                    (the embedded demo's DSpine drafter)

Blocks are run at anchors along stored greedy answers of the target, as in the replay of dspine-evaluate; docs/probes.md says what each probe asks.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

PROBES = ("readout", "prefix", "predecessor", "injection", "tau")
EPILOG = """examples:
  python -m serve.probe                                                  the embedded demo: DSpine drafter, 64 stored answers
  python -m serve.probe --target t/ --drafter runs/dflash/drafter --data dev/ --output out/dflash
  python -m serve.probe --target t/ --drafter d/ --data dev/ --layers first=0,1 --layers middle=1,3 --layers last=3,4
  python -m serve.probe --target t/ --drafter d/ --data dev/ --probes tau --tree-nodes 16 32 64 128
probes: readout (any drafter with layers); prefix, predecessor (same-position layout); injection (DSpine); tau: acceptance lengths of the product,
with true features at sets of layers (DSpine), and of best-first trees read from the table of pairs (DSpine, DFlash2). What a drafter cannot be
asked is left out and said.
Sets of one size can be compared: the same number of deliveries, earlier or later. Written to --output: probe.json, probe.md, probe.png, and parts/:
finished probes, which a second run of the same command takes over."""


def layer_set(text: str) -> tuple[str, tuple[int, ...]]:
    """'early=0,1' -> ("early", (0, 1)); '0,1' is its own label."""
    label, separator, layers = text.rpartition("=")
    try:
        numbers = tuple(sorted(int(layer) for layer in layers.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no set of layers; write LABEL=0,1 or 0,1") from None
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"{text!r} names a layer twice")
    if separator and not label:
        raise argparse.ArgumentTypeError(f"{text!r} has an empty label; write LABEL=0,1 or 0,1")
    return label or layers, numbers


def build_parser() -> argparse.ArgumentParser:
    """Every option."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m serve.probe", description=__doc__, epilog=EPILOG, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("--target", help="HF folder or GGUF file (default: the embedded demo, with its DSpine drafter and its data)")
    parser.add_argument("--drafter", help="drafter folder (default: the demo's DSpine drafter)")
    parser.add_argument("--data", type=Path, help="dataset folder of greedy continuations, or a folder of them (default: the demo's)")
    parser.add_argument("--output", type=Path, default=Path("out/probe"), help="folder for results (default out/probe); one for each drafter")
    parser.add_argument("--probes", nargs="+", choices=PROBES, default=list(PROBES), help="what to ask (default: all)")
    parser.add_argument(
        "--layers", type=layer_set, action="append", metavar="[LABEL=]0,1", help="a set of layers, repeatable (default: early and late half, and all)"
    )
    parser.add_argument("--tree-nodes", type=int, nargs="+", default=[32, 64], metavar="N", help="sizes of trees in tau (default 32 64)")
    parser.add_argument("--prompts", type=int, help="only the first N prompts of each dataset")
    parser.add_argument("--every", type=int, default=4, help="all probes but tau ask at every n-th token of an answer (default 4)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="compute precision (default bfloat16; float32 on a CPU)")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts at a time (default 8)")
    parser.add_argument("--anchors-per-chunk", type=int, default=16, help="anchors of a prompt whose blocks are run at one time (default 16)")
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line; without --target the demo is meant."""
    parser = build_parser()
    args = parser.parse_args(argv)
    for name in ("prompts", "every", "batch_size", "anchors_per_chunk"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if min(args.tree_nodes) < 1:
        parser.error(f"--tree-nodes {min(args.tree_nodes)} must be at least 1; the anchor is not counted")
    labels = [label for label, _ in args.layers or ()]
    if len(set(labels)) < len(labels):
        parser.error(f"--layers gives one label twice: {', '.join(labels)}")
    if args.target is None:
        from serve.assets import demo_folder

        try:
            demo = demo_folder()
        except FileNotFoundError as error:
            parser.error(str(error))
        args.target, args.drafter = str(demo / "target"), args.drafter or str(demo / "dspine")
        args.data = args.data or demo / "data" / "evaluation"
    for name in ("drafter", "data"):
        if getattr(args, name) is None:
            parser.error(f"--{name} is needed with --target; only the demo brings its own")
    if args.output.is_file():
        parser.error(f"--output {args.output} is a file; give a folder")
    return args


def default_sets(num_layers: int) -> dict[str, tuple[int, ...]]:
    """The first and the last half of the layers, equally many, and all."""
    half = num_layers // 2
    sets = {"early": tuple(range(half)), "late": tuple(range(num_layers - half, num_layers))} if half else {}
    return sets | {"all": tuple(range(num_layers))}


class Probing:
    """A target, a drafter and stored answers, ready to be asked."""

    def __init__(self, args: argparse.Namespace):
        """Load everything and refuse what does not fit. Raises ValueError or OSError."""
        import jax.numpy as jnp

        from dspine_jax.chat import agreed_template_mode
        from dspine_jax.probes import check_sets
        from dspine_jax.prompt_lookup import PromptLookup
        from dspine_jax.target_io import load_target, read_target_config
        from serve import probe_scores
        from serve.benchmarks import stored_benchmarks
        from serve.drafters import open_drafter
        from serve.environment import default_dtype
        from serve.evaluate import Parts, content_hash

        self.args, self.scores = args, probe_scores
        args.dtype = args.dtype or default_dtype()
        config = read_target_config(args.target)
        self.drafter = open_drafter(args.drafter, config, dtype=jnp.dtype(args.dtype))
        if isinstance(self.drafter, PromptLookup):
            raise ValueError("prompt-lookup has no layers to look into; give a drafter folder")
        self.sets = dict(args.layers) if args.layers else default_sets(self.drafter.config.num_layers)
        check_sets(tuple(self.sets.values()), self.drafter.config.num_layers)
        benchmarks = stored_benchmarks(args.data, config.vocab_size, args.prompts)
        modes = {f"the data {b.name}": b.template_mode for b in benchmarks}
        agreed_template_mode(None, {f"the drafter {args.drafter}": self.drafter.config.template_mode} | modes)
        self.rows = [(b.name, prompt, answer) for b in benchmarks for prompt, answer in zip(b.prompts, b.answers)]
        if not self.rows:
            raise ValueError(f"{args.data} holds no row")
        self.prompts, self.answers = ([row[i] for row in self.rows] for i in (1, 2))
        self.num_drafts = self.drafter.config.num_draft_tokens
        self.target = load_target(args.target, dtype=jnp.dtype(args.dtype))
        self.models = self.drafter, self.target
        self.options = dict(dtype=jnp.dtype(args.dtype), anchors_per_chunk=args.anchors_per_chunk)
        self.valid = [probe_scores.valid_labels(len(answer), self.num_drafts, args.every) for answer in self.answers]
        self.parts = Parts(args.output / "parts")
        text = [(name, prompt, answer.tolist()) for name, prompt, answer in self.rows]
        self.origin = (content_hash(Path(args.target)), content_hash(Path(args.drafter)), args.dtype, text)

    def replay(self, make_judging, *extra, name: str, every: int = 1) -> list:
        """What a judging says along the answers, a tree of arrays a row."""
        from tqdm import tqdm

        from dspine_jax.replay import replay_rows, replay_shape

        judging = make_judging(*self.models, *extra, **self.options)
        shape = replay_shape(self.prompts, self.answers, batch_size=self.args.batch_size, anchors_per_chunk=self.args.anchors_per_chunk, every=every)
        with tqdm(total=len(self.rows), desc=name, unit="prompt", mininterval=0.5 if sys.stderr.isatty() else 30) as progress:
            return replay_rows(judging, self.prompts, self.answers, on_rows=progress.update, **shape)

    def readout(self) -> dict:
        """Accuracy of every layer's stream, by draft."""
        from dspine_jax.probes import make_readout_probe

        right = self.replay(make_readout_probe, name="readout", every=self.args.every)
        anchors = [int(n) for n in sum(keep.sum(axis=0) for keep in self.valid)]
        return {"readout": {"accuracy": self.scores.by_layer_and_draft(right, self.valid), "anchors": anchors}}

    def known_tokens(self) -> dict:
        """Both probes of known tokens, which share their runs."""
        from dspine_jax.probes import make_context_probe

        seen = self.replay(make_context_probe, tuple(self.sets.values()), name="prefix and predecessor", every=self.args.every)
        gains = {"prefix": self.scores.prefix_gains, "predecessor": self.scores.predecessor_gains}
        return {name: gains_of(seen, self.valid, list(self.sets)) for name, gains_of in gains.items()}

    def injection(self) -> dict:
        """Gates, writes and predicted features, by injected layer and slot."""
        from dspine_jax.probes import make_injection_probe

        seen = self.replay(make_injection_probe, name="injection", every=self.args.every)
        views = {name: self.scores.by_layer_and_draft([row[name] for row in seen], self.valid) for name in ("gate", "write", "cosine", "nearest")}
        return {"injection": {"layers": list(self.drafter.config.injection_layers)} | views}

    def left_out(self) -> dict[str, str]:
        """What of --probes this drafter cannot be asked, and why; "bound" and "tree" are parts of tau."""
        from dspine_jax.probes import refusal

        config, asked, reasons = self.drafter.config, self.args.probes, {}
        if reason := refusal(config):
            reasons |= dict.fromkeys(("prefix", "predecessor"), reason)
        if config.injection is None:
            reasons |= {"injection": f"a {config.method} drafter injects nothing", "bound": f"a {config.method} drafter reads no features that could be true"}
        if not config.scores_pairs:
            reasons["tree"] = f"this {config.method} drafter has no table of pairs to read a tree from"
        return {name: reason for name, reason in reasons.items() if ("tau" if name in ("bound", "tree") else name) in asked}

    def run(self) -> dict:
        """Every probe that was asked for, those of an earlier run with the same inputs taken over. -> the content of probe.json."""
        from serve.environment import environment

        args, left_out, found = self.args, self.left_out(), {}
        every, sets = args.every, self.sets
        known = self.known_tokens, (every, sets)
        makers = {"prefix": known, "predecessor": known, "readout": (self.readout, every), "injection": (self.injection, every)}
        makers["tau"] = self.tau, (sets, args.tree_nodes)
        for name in PROBES:
            if name in args.probes and name not in left_out:
                make, inputs = makers[name]
                found[name] = self.parts.get(make.__name__, (self.origin, inputs), make)[name]
        head = {name: str(getattr(args, name)) for name in ("target", "drafter", "data", "dtype")} | {"method": self.drafter.config.method}
        head |= {"prompts": len(self.rows), "every": args.every, "num_draft_tokens": self.num_drafts, "environment": environment()}
        return head | {"sets": {label: list(layers) for label, layers in self.sets.items()}, "probes": found, "left_out": left_out}

    def bound_sets(self) -> dict[str, tuple[int, ...]]:
        """Where the bound reads true features: nowhere, in the last write alone (the product's own path), at the injecting layers of each set, and there and
        in the last write."""
        config = self.drafter.config
        if config.injection is None:
            return {}
        sets: dict[str, tuple[int, ...]] = {"predicted features": ()}
        last = (config.num_layers - 1,) if config.redoes_last_write else ()
        if last:
            sets["true, last write"] = last
        for label, chosen in self.sets.items():
            layers = tuple(layer for layer in chosen if layer in config.injection_layers)
            if layers:
                sets[f"true, {label}"] = layers
                if not set(last) <= set(layers):
                    sets[f"true, {label} and last write"] = layers + last
        return sets

    def tau(self) -> dict:
        """Acceptance lengths of the product, the bound and the trees, of what the drafter has."""
        import numpy as np

        from dspine_jax.bounds import make_tree_replay, make_true_feature_drafting
        from dspine_jax.replay import loop_onset, make_drafting, text_after_anchors, walk_judged

        J, sets, sizes = self.num_drafts, self.bound_sets(), self.args.tree_nodes
        text = [text_after_anchors(answer, max(len(answer) - 1, 0), J) for answer in self.answers]
        drafts = self.replay(make_drafting, name="tau: product")
        accepted = {"product": [ours == text_TJ for ours, text_TJ in zip(drafts, text)]}  # by way: [answer-1, J] bool a row
        if sets:
            drafts = self.replay(make_true_feature_drafting, tuple(sets.values()), name="tau: true features")
            accepted |= {label: [ours[:, z] == text_TJ for ours, text_TJ in zip(drafts, text)] for z, label in enumerate(sets)}
        if self.drafter.config.scores_pairs:
            depths = self.replay(make_tree_replay, tuple(sizes), name="tau: trees")
            accepted |= {f"tree of {size}": [np.arange(J) < depth[:, z, None] for depth in depths] for z, size in enumerate(sizes)}
        found: dict = {"bound_layers": {label: list(layers) for label, layers in sets.items()}}
        for scope in ("full", "onset"):
            rounds: dict = {way: {} for way in accepted}
            for way, rows in accepted.items():
                for (name, _, answer), accept_TJ in zip(self.rows, rows):
                    end = loop_onset(answer) if scope == "onset" else None
                    walk = walk_judged(len(answer), accept_TJ, end, np.full(len(accept_TJ), J))
                    rounds[way].setdefault(name, []).append(walk)
            found[scope] = self.scores.taus(rounds, J, "product")
        return {"tau": found}


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns 0, 2 for bad input, 130 for Ctrl-C."""
    args = parse_args(argv)
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        results = Probing(args).run()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    from serve.probe_plots import draw
    from serve.probe_scores import markdown

    (args.output / "probe.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.output / "probe.md").write_text(markdown(results))
    if results["probes"]:
        draw(results, args.output / "probe.png")
    print(markdown(results), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
