"""Conversations from JSONL files of strangers: every broken row has a reason, none ends the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

MAX_ROW_BYTES = 16 * 2**20
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
_ROLES = ("system", "user", "assistant")


class RowError(ValueError):
    """A row that cannot be used. ``reason`` is what it is counted under, ``detail`` says more of this row."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason, self.detail = reason, detail


def read_lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """(line number from 1, bytes) of each line that is not blank; None stands for one above ``MAX_ROW_BYTES``.

    Only "\\n" ends a line: rows may hold U+2028 and its kin. Memory holds one line at a time.
    """
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(MAX_ROW_BYTES + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if len(line) > MAX_ROW_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_ROW_BYTES)
                yield number, None
            elif line.strip():
                yield number, line


def parse_conversation(line: bytes | None) -> list[dict[str, str | None]]:
    """Messages of a row: an optional system turn, then user and assistant in turn.

    Read are "messages" (role, content, perhaps reasoning_content), "conversations" (from and value, or as messages), "turns" (texts of
    the user; an answer that is yet to be written has content None) and "prompt" (text), in this order of preference. Raises RowError for anything else.
    """
    row = _load(line)
    if not isinstance(row, dict):
        raise RowError("not an object", f"a {type(row).__name__}")
    if row.get("messages") is not None:
        messages = [_message(m, "role", "content") for m in _list(row["messages"], "messages")]
    elif row.get("conversations") is not None:
        messages = [_message(m, *_sharegpt_keys(m)) for m in _list(row["conversations"], "conversations")]
    elif row.get("turns") is not None:
        messages = [_message({"role": "user", "content": text}, "role", "content") for text in _list(row["turns"], "turns")]
        messages = [m for user in messages for m in (user, {"role": "assistant", "content": None})][:-1]
    elif row.get("prompt") is not None:
        messages = [_message({"role": "user", "content": row["prompt"]}, "role", "content")]
    else:
        raise RowError("no messages, conversations, turns or prompt", f"keys: {', '.join(map(str, row))[:80] or 'none'}")
    _check_turns(messages)
    return messages


def _load(line: bytes | None):
    if line is None:
        raise RowError("row too large", f"more than {MAX_ROW_BYTES} bytes")
    try:
        return json.loads(line.decode("utf-8"), object_pairs_hook=_object)
    except RowError:
        raise
    except UnicodeDecodeError as error:
        raise RowError("not UTF-8", f"byte {error.start}") from error
    except RecursionError as error:
        raise RowError("nested too deeply") from error
    except ValueError as error:  # also numbers of too many digits
        raise RowError("not JSON", str(error)) from error


def _object(pairs: list[tuple]) -> dict:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise RowError("a key given twice", repr(next(key for key in keys if keys.count(key) > 1)))
    return result


def _list(value: object, key: str) -> list:
    if not isinstance(value, list):
        raise RowError("messages are not a list", f"{key} is a {type(value).__name__}")
    if not value:
        raise RowError("no messages", f"{key} is empty")
    return value


def _sharegpt_keys(message: object) -> tuple[str, str]:
    return ("role", "content") if isinstance(message, dict) and "from" not in message else ("from", "value")


def _message(message: object, role_key: str, text_key: str) -> dict[str, str]:
    if not isinstance(message, dict) or role_key not in message or text_key not in message:
        raise RowError("a message without role and content", f"{role_key} and {text_key} are needed")
    role = message[role_key]
    role = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) and role_key == "from" else role
    if role not in _ROLES:
        raise RowError("unknown role", repr(role)[:60])
    if message.get("tool_calls"):
        raise RowError("tool calls")
    result = {"role": role, "content": message[text_key]}
    if message.get("reasoning_content") is not None:
        result["reasoning_content"] = message["reasoning_content"]
    for key, text in result.items():
        if not isinstance(text, str):
            raise RowError(f"{key} is not text", f"a {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError("half a surrogate pair in the text", f"character {error.start} of a {role} turn") from error
    return result


def _check_turns(messages: list[dict[str, str]]) -> None:
    roles = [m["role"] for m in messages]
    if "user" not in roles:
        raise RowError("no user turn")
    turns = roles[1:] if roles[0] == "system" else roles
    if "system" in turns:
        raise RowError("a system turn that is not the first")
    for index, role in enumerate(turns):
        if role != ("user", "assistant")[index % 2]:
            raise RowError("roles do not alternate", f"turn {index + 1} is {role}; user and assistant take turns, the user first")
    if any(m["role"] == "user" and not m["content"].strip() for m in messages):
        raise RowError("empty user text")
