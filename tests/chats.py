"""Chat templates, tokenizers that have one, targets on disk that can be talked to, and files of conversations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tiny
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from train.data import Manifest, write_dataset

# ChatML with reasoning as newer chat models have it: shown for the last answer, taken out of earlier ones, and an empty
# think block in the prompt when thinking is off.
THINKING = """{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' -%}
{%- set text = m.content -%}{%- set reasoning = m.reasoning_content or '' -%}
{%- if not reasoning and '</think>' in text -%}
{%- set reasoning = text.split('</think>')[0].split('<think>')[-1] -%}{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{%- if loop.index0 > last.user -%}{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- text -}}
{%- else -%}{{- m.content -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}{%- endif -%}"""
PLAIN = """{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
ENDLESS = PLAIN.replace("'<|im_end|>\\n'", "('\\n' if messages[0].role == 'system' else '<|im_end|>\\n')")
SPECIAL = ("<|im_start|>", "<|im_end|>")


def make_tokenizer(template, bytelevel=False):
    """Characters with the merges "ab", "th" and newline pairs; or byte-level BPE whose post-processor cuts spaces off the offsets."""
    chars = sorted(pre_tokenizers.ByteLevel.alphabet()) if bytelevel else [*map(chr, range(32, 127)), "\n"]
    merges = [("a", "b"), ("t", "h"), ("\u0120", "a") if bytelevel else ("\n", "\n")]
    vocab = {text: i for i, text in enumerate([*chars, *map("".join, merges), "<unk>"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    if bytelevel:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.post_processor, backend.decoder = processors.ByteLevel(trim_offsets=True), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", clean_up_tokenization_spaces=False)
    tokenizer.chat_template = template
    return tokenizer


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text} | more


def write_chat_target(folder: Path, template: str) -> Path:
    """A tiny target with a real tokenizer. Some of its texts end early; special tokens are rarely written."""
    tiny.write_target(folder)
    tokenizer = make_tokenizer(template)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = dict(load_file(folder / "model.safetensors"))
    head = tensors["lm_head.weight"].copy()
    for token in ("<unk>", "<|im_start|>", "<think>", "</think>"):
        head[tokenizer.convert_tokens_to_ids(token)] = 0
    head[tokenizer.eos_token_id] *= 2.5
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    return folder


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_text(folder: Path, seed: int = 0) -> Path:
    """A tokenizer whose end token is marked as one, and ``rows`` of which every token follows from the one before: what a target is pretrained on."""
    tiny.write_tokenizer(folder / "tokenizer")
    content = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())
    content["added_tokens"] = [{"id": 2, "content": "<end>", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}]
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(content))
    tokens = 10 + (np.random.default_rng(seed).integers(0, 9, (40, 1)) + np.arange(16)) % 9
    write_dataset(folder / "rows", tokens, np.ones_like(tokens, bool), np.full(40, 16), Manifest(name="rows", source="made up"))
    return folder
