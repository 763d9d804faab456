"""Benchmarks: named lists of prompts, with the continuations a dataset folder stores of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from dspine_jax.chat import chat_ids, load_tokenizer
from serve.prompts import read_prompts
from train.data import DatasetFolder


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Prompts as token ids; ``answers`` are the target's stored greedy continuations, None where they are yet to be made."""

    name: str
    prompts: list[list[int]]
    answers: list[np.ndarray] | None
    template_mode: str | None  # as recorded with stored continuations


def dataset_folders(path: Path) -> list[Path]:
    """The dataset folder itself, or the dataset folders inside it in name order. Raises FileNotFoundError when there is none."""
    if (path / "manifest.json").is_file():
        return [path]
    found = sorted(p.parent for p in path.glob("*/manifest.json"))
    if not found:
        mend = "make one with dspine-prepare or dspine-convert (docs/data.md), or give JSONL prompts to dspine-evaluate --benchmarks"
        raise FileNotFoundError(f"{path} holds no dataset folder; {mend}")
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


def stored_benchmarks(path: Path, vocab_size: int, limit: int | None) -> list[Benchmark]:
    """Benchmarks of dataset folders. Raises ValueError for two of one name or answers in pieces, FileNotFoundError for no folder."""
    benchmarks: dict[str, Benchmark] = {}
    for folder in dataset_folders(path):
        data = DatasetFolder(folder, vocab_size=vocab_size)
        name = data.manifest.name
        if name in benchmarks:
            raise ValueError(f"{folder}: a second dataset named {name!r} would replace the first; give each its own name in manifest.json")
        tokens_nS = np.asarray(data.tokens[:limit])
        spans = answer_spans(np.asarray(data.loss_mask[:limit]), np.asarray(data.lengths[:limit]))
        prompts = [[int(token) for token in row[:start]] for row, (start, _) in zip(tokens_nS, spans)]
        benchmarks[name] = Benchmark(name, prompts, [row[start:stop] for row, (start, stop) in zip(tokens_nS, spans)], data.manifest.template_mode)
    return list(benchmarks.values())


def prompt_benchmarks(path: Path, target: str, tokenizer: str | None, template_mode: str, limit: int | None) -> list[Benchmark]:
    """Benchmarks of JSONL prompt files, one a file, named by it; first turns only. Raises ValueError or FileNotFoundError by file and line."""
    files = [path] if path.is_file() else sorted(path.glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{path} holds no .jsonl file; each benchmark is one, a prompt a line (dspine-generate --help)")
    encoder = load_tokenizer(target, tokenizer)
    encode = lambda file: [chat_ids(encoder, prompt.messages, template_mode) for prompt in read_prompts(file)[:limit]]  # noqa: E731
    return [Benchmark(file.stem, encode(file), None, template_mode) for file in files]
