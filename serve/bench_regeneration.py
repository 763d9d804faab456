"""Measure how fast a target answers prompts by itself, with continuous refill: answer tokens a second as one JSON line.

  python -m serve.bench_regeneration --target SmolLM2-135M-Instruct.Q4_1.gguf --prompts data/smollm2 --batch-size 1024 --limit 8192

Programs are compiled before the clock starts. "tokens_per_s" is the whole run, its first filling and its tail included; "steady_tokens_per_s" lies between
the first ``batch-size`` answers and the moment the queue is empty. A second run waits for every part and gives the shares of prefill and decoding.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

EPILOG = "--prompts is a dataset folder (docs/data.md), whose answers are left out, or a JSONL file as dspine-generate reads it."


def build_parser() -> argparse.ArgumentParser:
    """Every option of the benchmark."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("bench_regeneration", description=__doc__, epilog=EPILOG, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("--target", required=True, help="HF folder or GGUF file")
    parser.add_argument("--prompts", required=True, type=Path, help="dataset folder or JSONL file")
    parser.add_argument("--limit", type=int, help="use this many prompts (default: all)")
    parser.add_argument("--batch-size", type=int, default=512, help="rows decoded together (default 512)")
    parser.add_argument("--rounds-per-call", type=int, default=32, help="most tokens between two looks at what is finished (default 32)")
    parser.add_argument("--rows-per-refill", type=int, help="prompts started together (default: a sixteenth of the batch)")
    parser.add_argument("--max-length", type=int, default=512, help="prompt and answer together (default 512); longer prompts are left out")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default 256")
    parser.add_argument("--temperature", type=float, default=0.7, help="default 0.7")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 is off (default)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default bfloat16")
    return parser


def read_prompt_ids(path: Path, target: str) -> list[list[int]]:
    """Token ids of every prompt of a dataset folder or a JSONL file."""
    import numpy as np

    from dspine_jax.chat import chat_ids, load_tokenizer
    from serve.prompts import read_prompts
    from train.data import DatasetFolder

    if path.is_dir():
        data = DatasetFolder(path)
        return [data.tokens[i, : int(np.argmax(data.loss_mask[i]))].tolist() for i in range(data.num_rows)]
    tokenizer = load_tokenizer(target)
    return [chat_ids(tokenizer, prompt.messages) for prompt in read_prompts(path)]


def measure(args: argparse.Namespace) -> dict:
    """Run the benchmark. -> the report."""
    import jax
    import jax.numpy as jnp

    from dspine_jax.generation import bucket
    from dspine_jax.refill import Profile, Request, answer_stream, group_size
    from dspine_jax.sampling import SamplingConfig
    from dspine_jax.speculative import Decoder, DecodeSettings
    from dspine_jax.target_io import load_target
    from serve.environment import peak_memory_gib

    prompts = [ids for ids in read_prompt_ids(args.prompts, args.target) if 0 < len(ids) < args.max_length][: args.limit]
    if not prompts:
        raise ValueError(f"{args.prompts} holds no prompt shorter than --max-length {args.max_length}")
    target = load_target(args.target, dtype=jnp.dtype(args.dtype))
    sampling = SamplingConfig(args.temperature, 0, args.top_p)
    decoder = Decoder(target, None, DecodeSettings(0, sampling, "own", target.config.eos_token_ids, args.dtype))
    rows = args.rows_per_refill or group_size(args.batch_size)

    def run(asked: list[list[int]], profile: Profile | None = None) -> tuple[list[tuple[float, int]], float]:
        """-> ((clock, tokens) of each answer, clock when the last prompt was handed out)."""
        requests = iter([Request(i, ids, min(args.max_new_tokens, args.max_length - len(ids))) for i, ids in enumerate(asked)])
        empty_at = None

        def next_request():
            nonlocal empty_at
            request = next(requests, None)
            if request is None and empty_at is None:
                empty_at = time.perf_counter()
            return request

        options = dict(batch_size=args.batch_size, max_length=args.max_length, max_new_tokens=args.max_new_tokens, profile=profile)
        stream = answer_stream(decoder, next_request, rounds_per_call=args.rounds_per_call, rows_per_refill=rows, **options)
        return [(time.perf_counter(), len(answer.tokens)) for _, answer in stream], empty_at

    by_width: dict[int, list[list[int]]] = {}
    for ids in prompts:
        by_width.setdefault(bucket(len(ids)), []).append(ids)
    begin = time.perf_counter()
    run([max(group, key=len) for group in by_width.values() for _ in range(rows)])  # one group a width: all programs, and the widest read of the cache
    compile_s = time.perf_counter() - begin

    begin = time.perf_counter()
    answers, empty_at = run(prompts)
    seconds, tokens = answers[-1][0] - begin, sum(count for _, count in answers)
    profile = Profile()
    second_begin = time.perf_counter()
    run(prompts, profile)
    profiled_s = time.perf_counter() - second_begin
    report = {"tokens_per_s": tokens / seconds, "steady_tokens_per_s": None, "seconds": seconds, "answers": len(answers), "answer_tokens": tokens}
    steady = [(clock, count) for clock, count in answers[args.batch_size :] if clock <= empty_at]
    if len(steady) > 1 and steady[-1][0] > steady[0][0]:
        report["steady_tokens_per_s"] = sum(count for _, count in steady[1:]) / (steady[-1][0] - steady[0][0])
    report |= {"compile_s": compile_s, "prefill_share": profile.refill_s / profiled_s, "decode_share": profile.decode_s / profiled_s}
    report |= {"ms_per_step": 1e3 * profile.decode_s / max(profile.rounds, 1), "calls": profile.calls, "refills": profile.refills}
    report |= {"mean_prompt": sum(map(len, prompts)) / len(prompts), "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    report["peak_gib"] = peak_memory_gib()
    return report | {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 2 for bad input."""
    args = build_parser().parse_args(argv)
    try:
        print(json.dumps(measure(args)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
