"""Generate text with a drafter and its target, losslessly, and show what each round accepted."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

EPILOG = """examples:
  dspine-generate --target SmolLM2-135M-Instruct.Q4_1.gguf --drafter runs/dspine/drafter "Why is the sky blue?"
  dspine-generate --target my-target/ --drafter my-drafter/ --prompts questions.jsonl --batch-size 8 --json
  dspine-generate --target my-target/ "Why is the sky blue?"            plain decoding, no drafter
  dspine-generate ... --temperature 0.7 --top-p 0.9 --seed 1 "..."       follows the target's law exactly
  dspine-generate ... --check "..."                                     compare with plain greedy, token for token
--prompts holds one JSON object a line with "prompt" (text), "turns" (list of user texts; the first is used) or "messages".
In a terminal each round's tokens are shown in one colour: accepted drafts bright, the target's own token dim."""

# Known from other tools, not computed here: refused by name, because ignoring them would change the law of the text without a word.
UNSUPPORTED = (
    "--min-p --typical-p --repetition-penalty --presence-penalty --frequency-penalty --logit-bias --logprobs --num-beams --best-of --n "
    "--grammar --json-schema --regex --no-repeat-ngram-size --mirostat --stop"
).split()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; sampling options that are not computed are refused by name."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("dspine-generate", description=__doc__, epilog=EPILOG, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("prompt", nargs="?", help="the user's message")
    parser.add_argument("--prompts", type=Path, help="JSONL file of prompts")
    parser.add_argument("--target", required=True, help="HF folder or GGUF file")
    parser.add_argument("--drafter", help="drafter folder; without one the target decodes alone")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json, where the target has none")
    parser.add_argument("--raw", action="store_true", help="take the text as it is, without the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default 256")
    parser.add_argument("--num-draft-tokens", type=int, help="drafts a round, up to what the drafter was trained for (default: all)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, help="0 is off")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 is off")
    parser.add_argument("--policy", choices=("own", "tail_mixed", "point_mass"), default="own", help="what is drafted at temperature > 0 (docs/lossless.md)")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument("--batch-size", type=int, default=1, help="prompts decoded together (default 1)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="compute precision (default bfloat16)")
    parser.add_argument("--check", action="store_true", help="also decode plainly at temperature 0 and compare; exit 1 on a difference")
    parser.add_argument("--no-baseline", action="store_true", help="skip the plain run that the speed-up is measured against")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on standard output")
    args, unknown = parser.parse_known_args(argv)
    for option in unknown:
        name = option.split("=")[0]
        if name in UNSUPPORTED:
            parser.error(f"{name} is not supported: verification would no longer follow the law it promises; leave it out")
        parser.error(f"unrecognized argument {option}")
    if (args.prompt is None) == (args.prompts is None):
        parser.error("give one prompt, or a file with --prompts")
    if args.check and args.temperature > 0:
        parser.error(f"--check compares with plain greedy decoding; it needs --temperature 0, not {args.temperature}")
    for name in ("max_new_tokens", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    return args


def read_prompts(path: Path) -> list[list[dict[str, str]]]:
    """Conversations of a JSONL file. Raises FileNotFoundError, or ValueError naming file and line."""
    conversations = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):  # splitlines would break at U+2028
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
        if isinstance(row, dict) and isinstance(row.get("prompt"), str):
            conversations.append([{"role": "user", "content": row["prompt"]}])
        elif isinstance(row, dict) and isinstance(row.get("turns"), list) and row["turns"] and isinstance(row["turns"][0], str):
            conversations.append([{"role": "user", "content": row["turns"][0]}])
        elif isinstance(row, dict) and isinstance(row.get("messages"), list) and row["messages"]:
            conversations.append(row["messages"])
        else:
            raise ValueError(f'{path}, line {number}: needs "prompt" (text), "turns" (list of texts) or "messages" (list of role and content)')
    if not conversations:
        raise ValueError(f"{path} holds no prompt")
    return conversations


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
        self.out.flush()

    def _write(self, tokens: list[int], begin: int, end: int, colour: int, bright: bool) -> None:
        # Decoding prefixes keeps characters that several tokens share, and the spaces before words.
        text = self.tokenizer.decode(tokens[:end], skip_special_tokens=True)
        piece = text[self.written :] if not text.endswith("\ufffd") else ""
        self.written += len(piece)
        if piece and self.colour and colour:
            piece = f"\x1b[{'1' if bright else '2'};{colour}m{piece}\x1b[0m"
        self.out.write(piece)


def measure(decoder, batches: list[list[list[int]]], args: argparse.Namespace, max_length: int, on_progress=None) -> tuple[list, float]:
    """All answers and the seconds they took, compilation not counted (every batch shape is run once before)."""
    from dspine_jax.generation import generate

    options = dict(max_new_tokens=args.max_new_tokens, max_length=max_length, seed=args.seed)
    answers, seconds = [], 0.0
    for batch in batches:
        if on_progress is None:
            generate(decoder, batch, **options)
        begin = time.perf_counter()
        streamed = {} if on_progress is None else {"rounds_per_call": 1, "on_progress": on_progress}
        answers += generate(decoder, batch, **options, **streamed)
        seconds += time.perf_counter() - begin
    return answers, seconds


def run(args: argparse.Namespace) -> tuple[dict, int]:
    """Decode and measure. -> (the JSON report, exit code)."""
    import jax.numpy as jnp

    from dspine_jax.acceptance import acceptance_statistics
    from dspine_jax.chat import chat_ids, load_tokenizer
    from dspine_jax.drafter_io import load_drafter
    from dspine_jax.sampling import SamplingConfig
    from dspine_jax.speculative import Decoder, DecodeSettings
    from dspine_jax.target_io import load_target, read_target_config

    sampling = SamplingConfig(args.temperature, args.top_k, args.top_p)
    conversations = read_prompts(args.prompts) if args.prompts else [[{"role": "user", "content": args.prompt}]]
    config = read_target_config(args.target)
    tokenizer = load_tokenizer(args.target, args.tokenizer)
    encode = lambda c: tokenizer.encode(c[-1]["content"]) if args.raw else chat_ids(tokenizer, c)  # noqa: E731
    prompts = [encode(conversation) for conversation in conversations]
    dtype = jnp.dtype(args.dtype)
    drafter = load_drafter(args.drafter, config, dtype=dtype) if args.drafter else None
    drafts = args.num_draft_tokens if args.num_draft_tokens is not None else (drafter.config.num_draft_tokens if drafter else 0)
    settings = DecodeSettings(drafts, sampling, args.policy, config.eos_token_ids, args.dtype)
    settings.check(drafter)
    target = load_target(args.target, dtype=dtype)
    decoder = Decoder(target, drafter, settings)
    batches = [prompts[i : i + args.batch_size] for i in range(0, len(prompts), args.batch_size)]
    limit = config.max_position_embeddings
    if not args.json and len(prompts) == 1:
        stream = Stream(tokenizer, sys.stdout, sys.stdout.isatty())
        measure(decoder, batches, args, limit, on_progress=stream)
        print()
    answers, seconds = measure(decoder, batches, args, limit)
    count = sum(len(answer.tokens) for answer in answers)
    statistics = acceptance_statistics([answer.rounds for answer in answers], max(drafts, 1))
    report = {
        "text": [tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers],
        "tokens": [answer.tokens for answer in answers],
        "finish_reason": [answer.finish_reason for answer in answers],
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "tau": statistics.get("tau_pooled"),
        "rounds": statistics["rounds"],
        "accepted_over_proposed": statistics.get("accepted_over_proposed"),
        "tokens_per_s": count / seconds,
        "batch_size": args.batch_size,
    }
    code = 0
    if drafter is not None and (args.check or not args.no_baseline):
        plain = Decoder(target, None, DecodeSettings(0, sampling, "own", config.eos_token_ids, args.dtype))
        plain_answers, plain_seconds = measure(plain, batches, args, limit)
        report["plain_tokens_per_s"] = sum(len(answer.tokens) for answer in plain_answers) / plain_seconds
        report["speedup"] = report["tokens_per_s"] / report["plain_tokens_per_s"]
        if sampling.greedy:
            report["matches_greedy"] = all(a.tokens == b.tokens for a, b in zip(answers, plain_answers))
            if args.check and not report["matches_greedy"]:
                code = 1
    if len(prompts) == 1:
        report = {key: value[0] if isinstance(value, list) else value for key, value in report.items()}
    return report, code


def summary(report: dict, args: argparse.Namespace) -> str:
    """The last lines for a person."""
    lines = []
    if report["tau"] is not None and args.drafter:
        lines.append(f"tau {report['tau']:.2f} over {report['rounds']} rounds, {report['accepted_over_proposed']:.0%} of the drafts accepted")
    lines.append(f"{report['tokens_per_s']:.1f} tokens/s")
    if "speedup" in report:
        lines[-1] += f", plain {report['plain_tokens_per_s']:.1f}: {report['speedup']:.2f}x"
    if "matches_greedy" in report:
        same = "identical to plain greedy decoding" if report["matches_greedy"] else "DIFFERENT from plain greedy decoding"
        lines.append(same + (" (in bfloat16 near ties may differ: see docs/lossless.md)" if not report["matches_greedy"] and args.dtype == "bfloat16" else ""))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Console entry point. Returns 0, 1 when --check finds a difference, 2 for bad input, 130 for Ctrl-C."""
    args = parse_args(argv)
    try:
        report, code = run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\x1b[0m" if sys.stdout.isatty() else "", flush=True)
        print("interrupted", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(report))
    else:
        if isinstance(report["text"], list):
            for text in report["text"]:
                print(text, end="\n\n")
        print(summary(report, args), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
