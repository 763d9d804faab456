"""Tokenizers and chat prompts of a target."""

from __future__ import annotations

import os
import typing
from pathlib import Path
from typing import Literal

import jinja2

TemplateMode = Literal["thinking", "non-thinking", "unset"]
TEMPLATE_MODES: tuple[str, ...] = typing.get_args(TemplateMode)
_ENABLE_THINKING = {"thinking": {"enable_thinking": True}, "non-thinking": {"enable_thinking": False}, "unset": {}}


def load_tokenizer(target: str | Path, tokenizer: str | Path | None = None):
    """The tokenizer in an HF folder, in a GGUF file's own fields, or at an explicit folder.

    Raises FileNotFoundError when a folder has no tokenizer.json, ValueError when its files are damaged. Code in a folder is never run.
    """
    path = Path(target if tokenizer is None else tokenizer)
    if path.is_file():
        from dspine_jax.gguf_io import gguf_tokenizer

        return gguf_tokenizer(path)
    if not (path / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{path / 'tokenizer.json'} is missing; give a folder that holds one with --tokenizer")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would say that torch is missing, which no tokenizer needs
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library lets whatever a damaged file causes pass
        raise ValueError(f"{path}: no tokenizer can be made of the files there ({type(error).__name__}: {str(error).partition(chr(10))[0]})") from error


def agreed_template_mode(asked: str | None, recorded: dict[str, str | None]) -> str:
    """The one template mode of a run: what is asked for and what drafters and data record must not differ.

    ``recorded`` maps what records a mode (for the message) to it, None where nothing is recorded. 'unset' when nobody says. Raises
    ValueError naming two that differ.
    """
    said = {name: mode for name, mode in {"--template-mode": asked, **recorded}.items() if mode is not None}
    (first, mode), *others = said.items() or [("", "unset")]
    for name, other in others:
        if other != mode:
            raise ValueError(f"template mode {mode!r} of {first} is not {other!r} of {name}: drafter, data and prompts must share one mode")
    return mode


def render_chat(tokenizer, messages: list[dict[str, str]], template_mode: str = "unset", *, open_answer: bool) -> str:
    """The text of a whole conversation; with ``open_answer`` up to where the assistant's next answer begins.

    ``template_mode`` is what the template is told of reasoning: ``enable_thinking`` true, false, or not given. Raises ValueError
    for an unknown mode, a tokenizer without a chat template, or a conversation that the template refuses.
    """
    if template_mode not in TEMPLATE_MODES:
        raise ValueError(f"template mode {template_mode!r} is not one of {', '.join(TEMPLATE_MODES)}")
    if not tokenizer.chat_template:
        raise ValueError("this tokenizer has no chat template; use --raw to give the text as it is")
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=open_answer, tokenize=False, **_ENABLE_THINKING[template_mode])
    except (jinja2.TemplateError, TypeError, AttributeError) as error:
        raise ValueError(f"the chat template refuses this conversation: {error}") from error


def chat_ids(tokenizer, messages: list[dict[str, str]], template_mode: str = "unset") -> list[int]:
    """Token ids of a conversation up to where the assistant's answer begins, from one render of the whole.

    Raises as ``render_chat``.
    """
    return tokenizer.encode(render_chat(tokenizer, messages, template_mode, open_answer=True), add_special_tokens=False)
