"""Generate text with a drafter and its target, losslessly, and show what each round accepted."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from dspine_jax.chat import TEMPLATE_MODES
from serve.kernel_choice import add_kernel_option

EPILOG = """examples:
  dspine-generate "Why is the sky blue?"                                 the embedded demo: a small target and its DSpine drafter
  dspine-generate --target SmolLM2-135M-Instruct.Q4_1.gguf --drafter runs/dspine/drafter "Why is the sky blue?"
  dspine-generate --target my-target/ --drafter my-drafter/ --prompts questions.jsonl --batch-size 256 --json
  dspine-generate --target my-target/ "Why is the sky blue?"            plain decoding, no drafter
  dspine-generate ... --temperature 0.7 --top-p 0.9 --seed 1 "..."       follows the target's law exactly
  dspine-generate ... --check "..."                                     compare with plain greedy, token for token
  dspine-generate ... --kernel injection=xla --kernel topk_logits=chunks "..."   these implementations and no other
--prompts holds one JSON object a line with "prompt" (text), "turns" (list of user texts; the first is used) or "messages".
A row of the batch whose answer is done goes on with the next prompt. Texts are printed at the end, in the order of the file; Ctrl-C prints what there
is by then, and --json names the line of each.
In a terminal each round's tokens are shown in one colour: accepted drafts bright, the target's own token dim."""

# Known from other tools, not computed here: refused by name, because ignoring them would change the law of the text without a word.
UNSUPPORTED = (
    "--min-p --typical-p --repetition-penalty --presence-penalty --frequency-penalty --logit-bias --logprobs --num-beams --best-of --n "
    "--grammar --json-schema --regex --no-repeat-ngram-size --mirostat --stop"
).split()


def build_parser() -> argparse.ArgumentParser:
    """Every option of ``dspine-generate``."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("dspine-generate", description=__doc__, epilog=EPILOG, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("prompt", nargs="?", help="the user's message")
    parser.add_argument("--prompts", type=Path, help="JSONL file of prompts")
    parser.add_argument("--target", help="HF folder or GGUF file (default: the embedded demo, with its DSpine drafter)")
    parser.add_argument("--drafter", help="drafter folder, or prompt-lookup (copies what followed the same words before); without one the target decodes alone")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json, where the target has none")
    parser.add_argument("--template-mode", choices=TEMPLATE_MODES, help="what the chat template is told of reasoning (default: as the drafter was trained)")
    parser.add_argument("--raw", action="store_true", help="take the text as it is, without the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default 256")
    parser.add_argument("--num-draft-tokens", type=int, help="drafts a round, up to what the drafter was trained for (default: all; prompt-lookup: 15)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, help="0 is off")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 is off")
    parser.add_argument("--policy", choices=("own", "tail_mixed", "point_mass"), help="what is drafted at temperature > 0 (default own; docs/lossless.md)")
    parser.add_argument("--confidence-threshold", type=float, default=0.0, help="end a proposal before the first draft less sure than this (default 0: never)")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument("--batch-size", type=int, help="prompts decoded together (default: as many as fit the device, up to 1024; 32 on a CPU)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="compute precision (default bfloat16; float32 on a CPU)")
    add_kernel_option(parser)
    parser.add_argument("--check", action="store_true", help="also decode plainly at temperature 0 and compare; exit 1 on a difference")
    parser.add_argument("--no-baseline", action="store_true", help="skip the plain run that the speed-up is measured against")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on standard output")
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; sampling options that are not computed are refused by name."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    for option in unknown:
        name = option.split("=")[0]
        if name in UNSUPPORTED:
            parser.error(f"{name} is not supported: verification would no longer follow the law it promises; leave it out")
        parser.error(f"unrecognized argument {option}")
    if (args.prompt is None) == (args.prompts is None):
        parser.error("give one prompt, or a file with --prompts")
    if args.target is None:
        from serve.assets import demo_folder

        try:
            args.target = str(demo_folder() / "target")
        except FileNotFoundError as error:
            parser.error(str(error))
        args.drafter = args.drafter or str(demo_folder() / "dspine")
    if args.policy and args.drafter is None:
        parser.error(f"--policy {args.policy} says what a drafter drafts; give --drafter, or leave --policy out")
    if args.raw and args.template_mode:
        parser.error(f"--template-mode {args.template_mode} speaks of the chat template, which --raw leaves out; give one of the two")
    if args.check and args.drafter is None:
        parser.error("--check compares a drafter's text with plain decoding; give --drafter, or leave --check out")
    if args.check and args.temperature > 0:
        parser.error(f"--check compares with plain greedy decoding; it needs --temperature 0, not {args.temperature}")
    for name in ("max_new_tokens", "batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    return args


ROUNDS_PER_CALL = 32  # rounds between two looks at the keyboard


class Stream:
    """Prints one answer as it grows: each round in its own colour, its accepted drafts bright, the target's token dim."""

    COLOURS = (36, 33, 35, 32, 34)

    def __init__(self, tokenizer, out, colour: bool):
        self.tokenizer, self.out, self.colour = tokenizer, out, colour
        self.rounds = self.written = 0

    def __call__(self, answers: list) -> None:
        """Print what is new of the first row."""
        answer = answers[0]
        if not self.written and answer.tokens:
            self._write(answer.tokens, 0, 1, 0, False)
        for index in range(self.rounds, len(answer.rounds)):
            r = answer.rounds[index]
            colour = self.COLOURS[index % len(self.COLOURS)]
            begin = r.anchor + 1
            self._write(answer.tokens, begin, begin + r.accepted, colour, True)
            self._write(answer.tokens, begin + r.accepted, begin + r.tokens, colour, False)
        self.rounds = len(answer.rounds)
        if answer.finish_reason != "unfinished":  # a limit may cut a character, whose beginning is shown as U+FFFD
            self.out.write(self.tokenizer.decode(answer.tokens, skip_special_tokens=True)[self.written :])
        self.out.flush()

    def _write(self, tokens: list[int], begin: int, end: int, colour: int, bright: bool) -> None:
        # Decoding prefixes keeps characters that several tokens share, and the spaces before words.
        text = self.tokenizer.decode(tokens[:end], skip_special_tokens=True)
        piece = text[self.written :] if not text.endswith("\ufffd") else ""
        self.written += len(piece)
        if piece and self.colour and colour:
            piece = f"\x1b[{'1' if bright else '2'};{colour}m{piece}\x1b[0m"
        self.out.write(piece)


class Interrupted(Exception):
    """Ctrl-C; holds the answers, whole or begun, that there were by then, by the number of their prompt."""

    def __init__(self, answers: dict):
        super().__init__("interrupted")
        self.answers = answers


def decode(decoder, prompts: list[list[int]], args: argparse.Namespace, words: str) -> tuple[list, float]:
    """All answers and the seconds they took, compilation not counted; ``words`` head the progress bar. Raises Interrupted on Ctrl-C."""
    if len(prompts) == 1:
        return decode_one(decoder, prompts[0], args)
    from tqdm import tqdm

    from dspine_jax.refill import answer_prompts, warm_up

    answers, tokens = {}, 0
    sizes = dict(batch_size=args.batch_size, max_new_tokens=args.max_new_tokens, max_length=decoder.target.config.max_position_embeddings)
    try:
        warm_up(decoder, prompts, **sizes)
        begin = time.perf_counter()
        with tqdm(total=len(prompts), unit="prompt", desc=words, disable=None) as progress:
            for index, answer in answer_prompts(decoder, prompts, seed=args.seed, **sizes):
                answers[index] = answer
                tokens += len(answer.tokens)
                progress.set_postfix_str(f"{tokens / (time.perf_counter() - begin):,.0f} tokens/s", refresh=False)
                progress.update(answer.finish_reason != "unfinished")
        return [answers[index] for index in range(len(prompts))], time.perf_counter() - begin
    except KeyboardInterrupt:
        raise Interrupted(answers) from None


def decode_one(
    decoder, prompt: list[int], args: argparse.Namespace, on_progress=None, rounds_per_call: int = ROUNDS_PER_CALL
) -> tuple[list, float]:
    """The one answer, in a list, and its seconds as ``decode`` counts them; ``on_progress`` sees it grow."""
    from dspine_jax.generation import generate, warm_up

    answers = {}

    def remember(rows: list) -> None:
        answers[0] = rows[0]
        if on_progress is not None:
            on_progress(rows)

    limits = dict(max_new_tokens=args.max_new_tokens, max_length=decoder.target.config.max_position_embeddings)
    try:
        warm_up(decoder, prompt, args.max_new_tokens)
        begin = time.perf_counter()
        return generate(decoder, [prompt], seed=args.seed, rounds_per_call=rounds_per_call, on_progress=remember, **limits), time.perf_counter() - begin
    except KeyboardInterrupt:
        raise Interrupted(answers) from None


def load(args: argparse.Namespace) -> tuple:
    """Read and check everything the command line names. -> (tokenizer, prompts, their lines, target, drafter or None, settings)."""
    import jax.numpy as jnp

    from dspine_jax.chat import agreed_template_mode, load_tokenizer
    from dspine_jax.sampling import SamplingConfig
    from dspine_jax.speculative import DecodeSettings
    from dspine_jax.target_io import load_target, read_target_config
    from serve.drafters import open_drafter
    from serve.environment import default_dtype
    from serve.kernel_choice import kernels_of
    from serve.prompts import Prompt, read_prompts

    args.dtype = args.dtype or default_dtype()
    sampling, kernels = SamplingConfig(args.temperature, args.top_k, args.top_p), kernels_of(args.kernel)
    asked = read_prompts(args.prompts) if args.prompts else [Prompt(1, [{"role": "user", "content": args.prompt}])]
    config = read_target_config(args.target)
    tokenizer = load_tokenizer(args.target, args.tokenizer)
    dtype = jnp.dtype(args.dtype)
    options = dict(dtype=dtype, kernels=kernels)
    drafter = open_drafter(args.drafter, config, num_draft_tokens=args.num_draft_tokens, **options) if args.drafter else None
    mode = agreed_template_mode(args.template_mode, {f"the drafter {args.drafter}": drafter.config.template_mode} if drafter else {})
    prompts = prompt_ids(asked, tokenizer, mode, config, args)  # before the target's weights are read
    drafts = args.num_draft_tokens
    if drafts is None:
        drafts = drafter.config.num_draft_tokens if drafter else 0
    settings = DecodeSettings(drafts, sampling, args.policy or "own", config.eos_token_ids, args.dtype, args.confidence_threshold)
    settings.check(drafter)
    return tokenizer, prompts, [prompt.line for prompt in asked], load_target(args.target, **options), drafter, settings


def prompt_ids(asked: list, tokenizer, mode: str, config, args: argparse.Namespace) -> list[list[int]]:
    """Token ids of every prompt. Raises ValueError for those that cannot be answered: the first with its reason, the others by line."""
    from dspine_jax.chat import chat_ids
    from dspine_jax.generation import check_ids, prompt_limits

    found, reasons = [], {}
    for index, prompt in enumerate(asked):
        try:
            ids = tokenizer.encode(prompt.messages[-1]["content"]) if args.raw else chat_ids(tokenizer, prompt.messages, mode)
            check_ids([ids], config.vocab_size, index)
            prompt_limits([len(ids)], args.max_new_tokens, config.max_position_embeddings, index)
            found.append(ids)
        except ValueError as error:
            reasons[prompt.line] = error
    if reasons:
        (line, reason), *others = reasons.items()
        where = f"{args.prompts}, line {line}: " if args.prompts else ""
        shown = ", ".join(str(line) for line, _ in others[:10]) + (f" and {len(others) - 10:,} more" if len(others) > 10 else "")
        raise ValueError(f"{where}{reason}" + (f"; also of no use: {'line' if len(others) == 1 else 'lines'} {shown}" if others else ""))
    return found


def choose_batch_size(target, drafter, settings, prompts: list[list[int]], args: argparse.Namespace) -> int:
    """Prompts decoded together: what is asked for, else what the device holds; never more than there are."""
    from dspine_jax.memory import default_batch_size, row_bytes
    from dspine_jax.refill import cache_rows, text_limit

    if args.batch_size is not None or len(prompts) == 1:
        return min(args.batch_size or 1, len(prompts))
    capacity = cache_rows(text_limit(max(map(len, prompts)), args.max_new_tokens, target.config.max_position_embeddings) + settings.num_draft_tokens)
    row = row_bytes(target.config, drafter and drafter.config, settings.num_draft_tokens, capacity, args.dtype)
    rows = min(default_batch_size(row), len(prompts))
    print(f"{rows} of {len(prompts)} prompts are decoded together (--batch-size)", file=sys.stderr)
    return rows


def run(args: argparse.Namespace) -> tuple[dict, int]:
    """Decode and measure. -> (the JSON report, exit code)."""
    import dataclasses

    from dspine_jax.speculative import Decoder

    tokenizer, prompts, lines, target, drafter, settings = load(args)
    args.batch_size = choose_batch_size(target, drafter, settings, prompts, args)
    decoder = Decoder(target, drafter, settings)
    answers, seconds, code = [], None, 0
    report: dict = {"batch_size": args.batch_size}
    try:
        if not args.json and len(prompts) == 1:
            stream = Stream(tokenizer, sys.stdout, sys.stdout.isatty())
            answers, _ = decode_one(decoder, prompts[0], args, stream, rounds_per_call=1)  # a call a round is slower: it is shown, not timed
            print()
        else:
            answers, seconds = decode(decoder, prompts, args, "decoding")
        if seconds is None:
            seconds = decode(decoder, prompts, args, "timing")[1]
        if drafter is not None and (args.check or not args.no_baseline):
            plain = Decoder(target, None, dataclasses.replace(settings, num_draft_tokens=0, policy="own", confidence_threshold=0.0))
            plain_answers, plain_seconds = decode(plain, prompts, args, "plain decoding")
            report["plain_tokens_per_s"] = sum(len(answer.tokens) for answer in plain_answers) / plain_seconds
            if settings.sampling.greedy:
                report |= compare(target, prompts, answers, plain_answers, args.dtype)
                code = int(args.check and not report["matches_greedy"])
        answered = range(len(prompts))
    except Interrupted as stop:
        code, answered = 130, range(len(prompts)) if answers else sorted(stop.answers)
        answers = answers or [stop.answers[index] for index in answered]
    by_prompt = {"prompt_tokens": [len(prompts[index]) for index in answered]} | ({"line": [lines[index] for index in answered]} if args.prompts else {})
    return report_answers(report, by_prompt, answers, seconds, tokenizer, settings, single=args.prompts is None) | {"interrupted": code == 130}, code


def compare(target, prompts: list[list[int]], answers: list, plain_answers: list, dtype: str) -> dict:
    """Whether the texts are those of plain greedy decoding; where not, the largest gap in logits at a first difference."""
    from dspine_jax.ties import parting_gaps

    gaps = parting_gaps(target, prompts, [a.tokens for a in answers], [b.tokens for b in plain_answers], dtype=dtype)
    largest = max(gaps, default=0.0)
    return {"matches_greedy": not gaps, "largest_gap": largest if largest < float("inf") else None}  # None: a text ends inside the other


def report_answers(report: dict, by_prompt: dict[str, list], answers: list, seconds: float | None, tokenizer, settings, *, single: bool) -> dict:
    """Texts, acceptance and speed as one JSON object; lists hold one value an answer, which a single prompt has bare."""
    from dspine_jax.acceptance import acceptance_statistics

    statistics = acceptance_statistics([answer.rounds for answer in answers], max(settings.num_draft_tokens, 1))
    by_prompt |= {
        "text": [tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers],
        "tokens": [answer.tokens for answer in answers],
        "finish_reason": [answer.finish_reason for answer in answers],
    }
    if single:
        by_prompt = {key: value[0] if value else None for key, value in by_prompt.items()}
    report = by_prompt | {key: statistics.get(name) for key, name in (("tau", "tau_pooled"), ("rounds", "rounds"))} | report
    report["accepted_over_proposed"] = statistics.get("accepted_over_proposed") if settings.num_draft_tokens else None
    report["tokens_per_s"] = None if seconds is None else sum(len(answer.tokens) for answer in answers) / seconds
    plain = report.get("plain_tokens_per_s")
    report["speedup"] = report["tokens_per_s"] / plain if seconds and plain else None  # None also where no token was to be written
    return report


def summary(report: dict, args: argparse.Namespace) -> str:
    """The last lines for a person."""
    from dspine_jax.ties import BFLOAT16_GAP

    lines = []
    if report["tau"] is not None and args.drafter and report["accepted_over_proposed"] is not None:
        lines.append(f"tau {report['tau']:.2f} over {report['rounds']} rounds, {report['accepted_over_proposed']:.0%} of the drafts accepted")
    if report["tokens_per_s"] is not None:
        lines.append(f"{report['tokens_per_s']:.1f} tokens/s")
    if report["speedup"] is not None:
        lines[-1] += f", plain {report['plain_tokens_per_s']:.1f}: {report['speedup']:.2f}x"
    if "matches_greedy" in report:
        gap, same = report["largest_gap"], "identical to plain greedy decoding"
        if not report["matches_greedy"]:
            where = "one text ends inside the other" if gap is None else f"first at a token {gap:.3f} below the best logit"
            same = f"DIFFERENT from plain greedy decoding, {where}"
            if args.dtype == "bfloat16" and gap is not None and gap <= BFLOAT16_GAP:
                same += " (a near tie in bfloat16; --dtype float32 has none: docs/lossless.md)"
        lines.append(same)
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Console entry point. Returns 0, 1 when --check finds a difference, 2 for bad input, 130 for Ctrl-C."""
    args = parse_args(argv)
    try:
        report, code = run(args)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        from dspine_jax.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        print(f"error: out of memory; --batch-size {args.batch_size} is too many: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while loading: there is nothing to show
        print("interrupted", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(report))
        return code
    if sys.stdout.isatty():
        print("\x1b[0m", end="")
    if args.prompts:
        for text in report["text"]:
            print(text, end="\n\n")
    sys.stdout.flush()
    if report["interrupted"]:
        whole = f": {sum(reason != 'unfinished' for reason in report['finish_reason'])} answers are whole" if args.prompts else ""
        print(f"\ninterrupted{whole}", file=sys.stderr)
    print(summary(report, args), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
