"""Score drafters: acceptance length by replay, exact and fast, and speed by real decoding, side by side."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import sys
import zlib
from pathlib import Path

import numpy as np

from dspine_jax.chat import TEMPLATE_MODES, agreed_template_mode
from serve.kernel_choice import add_kernel_option

EPILOG = """examples:
  dspine-evaluate --target SmolLM2-135M-Instruct.Q4_1.gguf --data data/smollm2_dev --drafter runs/dspine/drafter --output out/eval
  dspine-evaluate --target my-target/ --benchmarks prompts/ --drafter dflash=runs/a/drafter --drafter dspine=runs/b/drafter \\
      --temperature 0 1 --decode 8 --output out/eval
  dspine-evaluate ... --decode 8 --kernel injection=xla       this implementation and no other
--data is a dataset folder of greedy continuations (docs/data.md) or a folder of such folders, one a benchmark; --benchmarks a JSONL file of prompts or
a folder of such files. What is not stored is generated: greedy continuations of --benchmarks, sampled ones for every temperature above 0.
With two or more drafters each is compared with the first by a paired bootstrap over prompts, and dspine (where none has that label: the last one)
with each of the others and with the strongest; a label that holds its name (dspine-last) is a variant of it and no rival.
--drafter prompt-lookup is a drafter without a model, which copies what followed the text's last tokens before.
A label given twice (dspine=seed0 dspine=seed1) is one method with several seeds: their rounds are pooled.
At temperature > 0 each drafter is scored under every policy it can serve (docs/lossless.md); its best one counts in comparisons.
Written to --output: results.json (with every round), results.md, a PNG for each temperature, and parts/: finished parts, which a second run takes over.
Exit code 1: real decoding gave other text than plain greedy decoding where no near tie explains it."""


def build_parser() -> argparse.ArgumentParser:
    """Every option of ``dspine-evaluate``."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("dspine-evaluate", description=__doc__, epilog=EPILOG, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("--target", required=True, help="HF folder or GGUF file")
    parser.add_argument("--drafter", required=True, action="append", metavar="[LABEL=]FOLDER", help="drafter folder, or prompt-lookup; repeatable")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="dataset folder of greedy continuations, or a folder of them")
    source.add_argument("--benchmarks", type=Path, help="JSONL file of prompts, or a folder of them")
    parser.add_argument("--output", required=True, type=Path, help="folder for results")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json for --benchmarks, where the target has none")
    parser.add_argument("--template-mode", choices=TEMPLATE_MODES, help="chat template mode of --benchmarks (default: as the drafters were trained)")
    parser.add_argument("--prompts", type=int, help="score only the first N prompts of each benchmark")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="temperatures to score (default 0)")
    parser.add_argument("--top-k", type=int, default=0, help="at temperature > 0; 0 is off")
    parser.add_argument("--top-p", type=float, default=1.0, help="at temperature > 0; 1 is off")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="length of generated continuations and of real decoding (default 256)")
    parser.add_argument("--seed", type=int, default=0, help="of sampled continuations and acceptance (default 0)")
    parser.add_argument("--decode", type=int, default=0, metavar="N", help="also decode the first N prompts of each benchmark for real and time it (default 0)")
    parser.add_argument("--decode-batch-size", type=int, help="prompts decoded together (default 1)")
    parser.add_argument("--decode-drafts", type=int, nargs="+", metavar="J", help="draft lengths to decode with (default: what the drafters were trained for)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="compute precision (default bfloat16; float32 on a CPU)")
    add_kernel_option(parser)
    parser.add_argument("--batch-size", type=int, default=8, help="prompts at a time in replay and generation (default 8)")
    parser.add_argument("--anchors-per-chunk", type=int, default=16, help="anchors of a prompt whose logits exist at one time (default 16)")
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = build_parser()
    args = parser.parse_args(argv)
    for name in ("prompts", "batch_size", "anchors_per_chunk", "max_new_tokens", "decode_batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    for name in ("tokenizer", "template_mode"):
        if args.data and getattr(args, name) is not None:
            parser.error(f"--{name.replace('_', '-')} is for the text of --benchmarks; the rows of --data are token ids already")
    for name in ("decode_batch_size", "decode_drafts"):
        if not args.decode and getattr(args, name) is not None:
            parser.error(f"--{name.replace('_', '-')} has an effect only with --decode N")
    if args.decode < 0:
        parser.error(f"--decode {args.decode} must be 0 (replay only) or positive")
    if len(set(args.temperature)) < len(args.temperature):
        parser.error(f"--temperature {' '.join(map(str, args.temperature))} names one temperature twice")
    return args


def split_label(text: str) -> tuple[str | None, Path]:
    """'label=folder' -> (label, folder); 'folder' -> (None, folder), also where the folder's own path holds a '='."""
    label, separator, folder = text.partition("=")
    return (label, Path(folder)) if separator and not Path(text).exists() else (None, Path(text))


class Parts:
    """Finished parts of an evaluation on disk; a part made from other inputs is made again."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, inputs: object, make):
        """The stored content of a part made from equal ``inputs``, else ``make()``, stored whole or not at all."""
        path, key = self.folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.json", hashlib.sha256(repr(inputs).encode()).hexdigest()
        if path.is_file():
            stored = json.loads(path.read_text())
            if stored["key"] == key:
                return stored["content"]
        content = make()
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"key": key, "content": content}))
        os.replace(partial, path)
        return content


def content_hash(path: Path) -> str:
    """sha256 of a file, or of the weights and config in a folder."""
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".json"))
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


class Evaluation:
    """One target, its drafters and benchmarks, scored temperature by temperature; finished parts are kept."""

    def __init__(self, args: argparse.Namespace, *, continuations: Path | None = None, lookup_drafts: int | None = None):
        """Load everything and refuse what cannot be compared. Raises ValueError or OSError.

        continuations: folder of generated continuations, where several evaluations share them; lookup_drafts: drafts a round of a prompt
        lookup that is scored alone.
        """
        import jax.numpy as jnp

        from dspine_jax.sampling import SamplingConfig
        from dspine_jax.target_io import load_target, read_target_config
        from serve.benchmarks import prompt_benchmarks, stored_benchmarks
        from serve.environment import default_dtype
        from serve.kernel_choice import kernels_of

        args.dtype = args.dtype or default_dtype()
        self.args, self.dtype, self.kernels = args, jnp.dtype(args.dtype), kernels_of(args.kernel)
        self.samplings = [SamplingConfig(t, args.top_k if t else 0, args.top_p if t else 1.0) for t in args.temperature]
        self.config = read_target_config(args.target)
        self.drafters, self.lookup_drafts = [], lookup_drafts
        for label, folder in map(split_label, args.drafter):
            drafter, weights = self.load_drafter(folder)
            self.drafters.append((label or drafter.config.method, folder, drafter, weights))
        counts = [drafter.config.num_draft_tokens for _, _, drafter, _ in self.drafters]
        self.num_drafts = counts[0]
        if len(set(counts)) > 1:
            listing = ", ".join(f"{folder} {count}" for (_, folder, _, _), count in zip(self.drafters, counts))
            raise ValueError(f"drafters are compared only at an equal number of drafts a round, these have: {listing}; score them in separate runs")
        self.decode_drafts = args.decode_drafts or [self.num_drafts]
        self.decode_batch_size = args.decode_batch_size or 1
        if min(self.decode_drafts) < 1 or max(self.decode_drafts) > self.num_drafts:
            raise ValueError(f"--decode-drafts {' '.join(map(str, self.decode_drafts))} must lie in 1..{self.num_drafts}, what the drafters were trained for")
        modes = {f"the drafter {folder}": drafter.config.template_mode for _, folder, drafter, _ in self.drafters}
        if args.data:
            self.benchmarks = stored_benchmarks(args.data, self.config.vocab_size, args.prompts)
            agreed_template_mode(None, modes | {f"the data {b.name}": b.template_mode for b in self.benchmarks})
        else:
            mode = agreed_template_mode(args.template_mode, modes)
            self.benchmarks = prompt_benchmarks(args.benchmarks, args.target, args.tokenizer, mode, args.prompts)
        self.target = load_target(args.target, dtype=self.dtype, kernels=self.kernels)
        self.parts = Parts(args.output / "parts")
        self.generated = self.parts if continuations is None else Parts(continuations)
        # What every part depends on beside its own inputs.
        self.origin = (content_hash(Path(args.target)), args.dtype, args.max_new_tokens, args.seed, *self.kernels.chosen.items())

    def load_drafter(self, folder: Path) -> tuple:
        """(the drafter, what its results depend on). A prompt lookup drafts as many tokens as the drafters named before it, ``lookup_drafts`` or 15."""
        from dspine_jax.prompt_lookup import PromptLookup
        from serve.drafters import open_drafter

        named_before = self.drafters[0][2].config.num_draft_tokens if self.drafters else self.lookup_drafts
        drafter = open_drafter(folder, self.config, dtype=self.dtype, num_draft_tokens=named_before, kernels=self.kernels)
        return drafter, repr(drafter.config) if isinstance(drafter, PromptLookup) else content_hash(folder)

    def policies(self, drafter, sampling) -> tuple[str, ...]:
        """The policies a drafter is scored under."""
        return ("greedy",) if sampling.greedy else drafter.config.policies

    def run(self) -> dict:
        """Everything that was asked for. -> the content of results.json."""
        from tqdm import tqdm

        from serve.environment import environment

        count = sum(len(b.prompts) for b in self.benchmarks)
        work = sum(count * len(self.policies(drafter, sampling)) for sampling in self.samplings for _, _, drafter, _ in self.drafters)
        work += sum(count for sampling in self.samplings if not (sampling.greedy and self.args.data))
        decoded = sum(len(b.prompts[: self.args.decode]) for b in self.benchmarks)
        by_method = {label: drafter for label, _, drafter, _ in self.drafters}
        runs = [len(self.decode_drafts) * sum(len(self.policies(drafter, s)) for drafter in by_method.values()) + 1 for s in self.samplings]
        work += decoded * sum(runs)
        head = {"target": str(self.args.target), "dtype": self.args.dtype, "environment": environment(), "max_new_tokens": self.args.max_new_tokens}
        head |= {"kernels": self.kernels.chosen} if self.kernels.chosen else {}
        with tqdm(total=work, unit="prompt", mininterval=0.5 if sys.stderr.isatty() else 30) as self.progress:
            return head | {"temperatures": {f"T{sampling.temperature:g}": self.score(sampling) for sampling in self.samplings}}

    def part(self, name: str, inputs: tuple, make, prompts: int = 0, *, parts: Parts | None = None):
        """A part's stored or newly made content; the progress bar counts a stored one as done."""
        made = []
        content = (parts or self.parts).get(name, (*self.origin, *inputs), lambda: made.append(True) or make())
        if not made:
            self.progress.update(prompts)
        return content

    def continuations(self, benchmark, sampling) -> list[np.ndarray]:
        """The target's answers to a benchmark: the stored greedy ones, or made here by plain decoding."""
        from dspine_jax.generation import generate_batches
        from dspine_jax.speculative import Decoder, DecodeSettings

        if sampling.greedy and benchmark.answers is not None:
            return benchmark.answers

        def make() -> list[list[int]]:
            self.progress.set_description(f"T{sampling.temperature:g} continuations {benchmark.name}")
            plain = Decoder(self.target, None, DecodeSettings(0, sampling, "own", self.config.eos_token_ids, self.args.dtype))
            options = dict(max_new_tokens=self.args.max_new_tokens, max_length=self.config.max_position_embeddings, seed=self.args.seed)
            answers = []
            for batch in generate_batches(plain, benchmark.prompts, self.args.batch_size, **options):
                answers += [answer.tokens for answer in batch]
                self.progress.update(len(batch))
            return answers

        name, inputs = f"T{sampling.temperature:g}-continuations-{benchmark.name}", (sampling, benchmark.prompts)
        return [np.array(tokens, np.int64) for tokens in self.part(name, inputs, make, len(benchmark.prompts), parts=self.generated)]

    def score(self, sampling) -> dict:
        """Replay, and real decoding where asked, at one temperature."""
        from dspine_jax.drafter_io import drafter_parameter_counts
        from dspine_jax.replay import loop_onset, replay_shape
        from serve.decoding import compare_decoding
        from serve.scoring import summarise

        answers = {b.name: self.continuations(b, sampling) for b in self.benchmarks}
        # So that evaluations of one drafter each can be joined only where they scored the same texts.
        texts = {b.name: hashlib.sha256(repr((b.prompts, [a.tolist() for a in answers[b.name]])).encode()).hexdigest() for b in self.benchmarks}
        onsets = {name: [loop_onset(answer) for answer in given] for name, given in answers.items()}
        rows = [(prompt, answer) for b in self.benchmarks for prompt, answer in zip(b.prompts, answers[b.name])]
        shape = replay_shape(*zip(*rows), batch_size=self.args.batch_size, anchors_per_chunk=self.args.anchors_per_chunk)
        variants: dict = {}
        for label, folder, drafter, weights in self.drafters:
            for policy in self.policies(drafter, sampling):
                new = {"folders": [], "num_draft_tokens": self.num_drafts, "parameters": drafter_parameter_counts(drafter), "benchmarks": {}}
                variant = variants.setdefault(label, {}).setdefault(policy, new)
                variant["folders"].append(str(folder))
                for b in self.benchmarks:
                    given = answers[b.name]
                    entry = variant["benchmarks"].setdefault(b.name, {"rounds": [], "texts_sha256": texts[b.name]})
                    entry["loop_share"] = float(np.mean([onset < len(answer) for onset, answer in zip(onsets[b.name], given)]))
                    entry["cap_share"] = float(np.mean([len(a) == 0 or int(a[-1]) not in self.config.eos_token_ids for a in given]))
                    inputs = (sampling, policy, weights, b.prompts, [answer.tolist() for answer in given])
                    make = functools.partial(self.replay, drafter, sampling, policy, b, given, onsets[b.name], shape)
                    name = f"T{sampling.temperature:g}-replay-{label}-{len(variant['folders']) - 1}-{policy}-{b.name}"
                    entry["rounds"].append(self.part(name, inputs, make, len(b.prompts)))
        content = summarise(variants)
        if self.args.decode:
            content["decoding"] = compare_decoding(self, sampling)
        return content

    def replay(self, drafter, sampling, policy: str, benchmark, answers: list[np.ndarray], onsets: list[int], shape: dict) -> dict[str, list]:
        """Rounds of one drafter over a benchmark's answers, in full and to the loop onset, as plain lists."""
        from dspine_jax.replay import make_accept_odds, make_drafting, replay_rows, walk_rounds, walk_sampled_rounds
        from serve.scoring import plain_rounds

        self.progress.set_description(f"T{sampling.temperature:g} replay {benchmark.name} {policy}")
        options = dict(dtype=self.dtype, anchors_per_chunk=self.args.anchors_per_chunk)
        if sampling.greedy:
            judging = make_drafting(drafter, self.target, **options)
        else:
            judging = make_accept_odds(drafter, self.target, sampling, policy, **options)
        judged = replay_rows(judging, benchmark.prompts, answers, on_rows=self.progress.update, **shape)
        scopes: dict[str, list] = {"full": [], "onset": []}
        for row, (answer, judged_TJ, onset) in enumerate(zip(answers, judged, onsets)):
            # The same uniforms for every drafter and policy: they are compared in pairs.
            uniforms_T = np.random.default_rng([self.args.seed, zlib.crc32(benchmark.name.encode()), row]).uniform(size=len(answer))
            for scope, end in (("full", None), ("onset", onset)):
                walk = walk_rounds(answer, judged_TJ, end) if sampling.greedy else walk_sampled_rounds(judged_TJ, uniforms_T, len(answer), end)
                scopes[scope].append(walk)
        return {scope: plain_rounds(by_prompt) for scope, by_prompt in scopes.items()}


def write_results(results: dict, output: Path, heading: str = "") -> str:
    """results.json, results.md and a PNG for each temperature in ``output``. -> the Markdown, which begins with ``heading``."""
    from serve.plots import draw
    from serve.scoring import markdown

    (output / "results.json").write_text(json.dumps(results))
    text = heading + markdown(results)
    (output / "results.md").write_text(text)
    for temperature, content in results["temperatures"].items():
        draw(content, temperature, output / f"acceptance_{temperature}.png")
    return text


def main(argv: list[str] | None = None) -> int:
    """Console entry point. Returns 0, 1 when decoded text differs without a near tie, 2 for bad input, 130 for Ctrl-C."""
    args = parse_args(argv)
    try:
        args.output.mkdir(parents=True, exist_ok=True)  # before the long work, whose result it must hold
        results = Evaluation(args).run()
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command goes on from the finished parts in {args.output / 'parts'}", file=sys.stderr)
        return 130
    print(write_results(results, args.output))
    states = [entry["state"] for content in results["temperatures"].values() for entry in content.get("decoding", []) if "state" in entry]
    if "differs" in states:
        print("error: text other than that of plain greedy decoding, and no near tie explains it: see 'differs' in results.md", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
