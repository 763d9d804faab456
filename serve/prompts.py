"""Prompts from JSONL files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A conversation that waits for an answer, and the line of the file that holds it, counted from 1."""

    line: int
    messages: list[dict[str, str]]


def read_prompts(path: Path) -> list[Prompt]:
    """Conversations of a JSONL file: "prompt" (text), "turns" (texts of the user; the first is used) or "messages".

    Raises FileNotFoundError, or ValueError naming file and line.
    """
    prompts = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error}); convert it first") from error
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would break at U+2028
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
        row = row if isinstance(row, dict) else {}
        messages, turns = row.get("messages"), row.get("turns")
        if isinstance(row.get("prompt"), str):
            prompts.append(Prompt(number, [{"role": "user", "content": row["prompt"]}]))
        elif isinstance(turns, list) and turns and isinstance(turns[0], str):
            prompts.append(Prompt(number, [{"role": "user", "content": turns[0]}]))
        elif isinstance(messages, list) and messages and all(_is_message(message) for message in messages):
            prompts.append(Prompt(number, messages))
        else:
            raise ValueError(f'{path}, line {number}: needs "prompt" (text), "turns" (list of texts) or "messages" (list of role and content)')
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
