"""Tokenizers and chat prompts of a target."""

from __future__ import annotations

from pathlib import Path


def load_tokenizer(target: str | Path, tokenizer: str | Path | None = None):
    """The tokenizer in an HF folder, in a GGUF file's own fields, or at an explicit folder.

    Raises FileNotFoundError when a folder has no tokenizer.json. Code in a folder is never run.
    """
    path = Path(target if tokenizer is None else tokenizer)
    if path.is_file():
        from dspine_jax.gguf_io import gguf_tokenizer

        return gguf_tokenizer(path)
    if not (path / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{path / 'tokenizer.json'} is missing; give a folder that holds one with --tokenizer")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)


def chat_ids(tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation up to where the assistant's answer begins, from one render of the whole.

    Raises ValueError when the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError("this tokenizer has no chat template; use --raw to give the text as it is")
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)
