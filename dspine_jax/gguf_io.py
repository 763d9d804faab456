"""GGUF files: config, weights and tokenizer of a llama or qwen3 target.

Facts of the format as llama.cpp writes it: shapes are stored innermost axis first, the llama
converter reorders query and key rows for interleaved rotary pairs (qwen3's does not), and a
tied model has no ``output.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, dequantize

from dspine_jax.checkpoint_io import TensorSource
from dspine_jax.config import TargetConfig

ARCHITECTURES = ("llama", "qwen3")
_READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_1")
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
# Keys below these prefixes change the arithmetic; one that is not listed is refused.
_ARITHMETIC = ("rope.", "attention.", "expert", "logit_scale", "residual_scale", "embedding_scale")
_KNOWN = (
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
)
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # tokenizer.ggml.token_type
_QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def gguf_tensor_name(name: str) -> str:
    """``layers.3.mlp.up_proj.weight`` -> ``blk.3.ffn_up.weight``; raises KeyError for a name GGUF has no word for."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, rest = name.split(".", 2)
    stem, leaf = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[stem]}.{leaf}"


def read_gguf_config(path: str | Path) -> TargetConfig:
    """Architecture from a GGUF file's metadata; the vocabulary rows come from ``token_embd.weight``.

    Raises ValueError naming file, key and value for another architecture, rotary scaling, a missing
    key, or a damaged file.
    """
    return _config(_open(path), path)


def _config(reader: GGUFReader, path: str | Path) -> TargetConfig:
    arch = _field(reader, "general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(f"{path}: general.architecture {arch!r} is not supported; this port computes {' and '.join(ARCHITECTURES)}")
    if (_field(reader, "split.count") or 1) > 1:
        raise ValueError(f"{path}: one of {_field(reader, 'split.count')} parts; merge them into one file first")
    for key in reader.fields:
        short = key.removeprefix(f"{arch}.")
        if key.startswith(f"{arch}.") and short.startswith(_ARITHMETIC) and short not in _KNOWN:
            if short.startswith("expert") and _field(reader, key) == 0:
                continue
            raise ValueError(f"{path}: {key} is {_field(reader, key)!r}, which this port does not compute")

    def required(short: str):
        value = _field(reader, f"{arch}.{short}")
        if value is None:
            raise ValueError(f"{path}: {arch}.{short} is missing; there is no safe default")
        if isinstance(value, list):
            raise ValueError(f"{path}: {arch}.{short} differs between layers ({value}); this port has one value for all")
        return value

    scaling = _field(reader, f"{arch}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise ValueError(f"{path}: {arch}.rope.scaling.type is {scaling!r}; this port computes only unscaled rotary embedding")
    width, heads = required("embedding_length"), required("attention.head_count")
    head_dim = _field(reader, f"{arch}.attention.key_length")
    if head_dim is None:
        if width % heads:
            raise ValueError(f"{path}: {arch}.attention.key_length is absent and the width {width} is not a multiple of {heads} heads")
        head_dim = width // heads
    for short in ("attention.value_length", "rope.dimension_count"):
        value = _field(reader, f"{arch}.{short}")
        if value not in (None, head_dim):
            raise ValueError(f"{path}: {arch}.{short} is {value} but a head has {head_dim}; this port needs them equal")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise ValueError(f"{path}: tensor 'token_embd.weight' is missing")
    rows = int(tensors["token_embd.weight"].shape[1])
    num_tokens = min(rows, _num_tokens(reader) or rows)
    ends = (_field(reader, f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
    kv_heads = _field(reader, f"{arch}.attention.head_count_kv")
    fields = dict(
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else required("attention.head_count_kv"),
        num_layers=required("block_count"),
        intermediate_size=required("feed_forward_length"),
        rope_theta=float(required("rope.freq_base")),
        # Stored as fp32: the shortest decimal that rounds to it is what the model's author wrote.
        rms_norm_eps=float(str(np.float32(required("attention.layer_norm_rms_epsilon")))),
        max_position_embeddings=required("context_length"),
    )
    try:
        return TargetConfig(
            family=arch,
            vocab_size=rows,
            num_tokens=num_tokens,
            hidden_size=width,
            head_dim=head_dim,
            tie_embeddings="output.weight" not in tensors,
            eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
            **fields,
        )
    except ValueError as error:  # a config does not know its file
        raise ValueError(f"{path}: {error}") from error


class GGUFTensors(TensorSource):
    """Tensors of a GGUF file by their GGUF names, dequantised to fp32 one at a time; ``config`` is the file's TargetConfig.

    Query and key rows of the llama architecture come back in the half-split rotary order. Raises
    ValueError as ``read_gguf_config``, and naming file, tensor and type when a tensor's type is not one
    of F32, F16, BF16, Q8_0, Q4_1.
    """

    def __init__(self, path: str | Path):
        reader = _open(path)
        self.config = _config(reader, path)
        self._path = path
        self._tensors = {}
        for tensor in reader.tensors:
            if tensor.tensor_type.name not in _READABLE:
                raise ValueError(f"{path}: tensor '{tensor.name}' has type {tensor.tensor_type.name}; readable are {', '.join(_READABLE)}")
            self._tensors[tensor.name] = tensor

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        value = dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type)).reshape(self.shape(name))
        if self.config.family == "llama" and re.fullmatch(r"blk\.\d+\.attn_[qk]\.weight", name):
            # Stored row (h, i, half) is row (h, half, i) of the checkpoint.
            paired = value.reshape(-1, self.config.head_dim // 2, 2, value.shape[-1])
            value = paired.swapaxes(1, 2).reshape(value.shape)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def origin(self, name: str) -> str:
        return str(self._path)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))


def gguf_tokenizer(path: str | Path):
    """A transformers ``PreTrainedTokenizerFast`` (tokenizers backend) built from a GGUF file's own fields.

    Byte-level BPE with the pre-tokenizers 'smollm' (digits one by one, GPT-2 splitting) and 'qwen2'.
    Raises ValueError naming file, key and value for any other kind.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    reader = _open(path)
    kind, pre = _field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ValueError(f"{path}: tokenizer.ggml.model is {kind!r}; only byte-level BPE ('gpt2') is built here")
    if pre not in ("smollm", "qwen2"):
        raise ValueError(f"{path}: tokenizer.ggml.pre is {pre!r}; 'smollm' and 'qwen2' are built here")
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if _field(reader, f"tokenizer.ggml.{key}"):
            raise ValueError(f"{path}: tokenizer.ggml.{key} is true; this tokenizer adds nothing to a text")
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = _field(reader, "tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise ValueError(f"{path}: tokenizer.ggml.tokens or tokenizer.ggml.merges is missing; this file holds no tokenizer")
    types = _field(reader, "tokenizer.ggml.token_type") or [1] * len(tokens)
    vocab = {token: index for index, token in enumerate(tokens) if types[index] != _UNUSED}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges], fuse_unk=False))
    if pre == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        backend.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated", invert=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    for index, token in enumerate(tokens):
        if types[index] in (_CONTROL, _USER_DEFINED):
            backend.add_tokens([AddedToken(token, special=types[index] == _CONTROL, normalized=False)])
    special = {}
    for role, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        index = _field(reader, f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            special[role] = tokens[index]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    tokenizer.chat_template = _field(reader, "tokenizer.chat_template")
    return tokenizer


def _open(path: str | Path) -> GGUFReader:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        return GGUFReader(path)
    except (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a whole GGUF file ({error}); download it again") from error


def _field(reader: GGUFReader, key: str):
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _num_tokens(reader: GGUFReader) -> int | None:
    """Highest id in use + 1 (converters fill the table up with tokens of type 'unused'), or None without a tokenizer."""
    types = reader.get_field("tokenizer.ggml.token_type")
    if types is None:
        tokens = reader.get_field("tokenizer.ggml.tokens")
        return None if tokens is None else len(tokens.data)
    used = np.flatnonzero(np.asarray(types.contents()) != _UNUSED)
    return int(used[-1]) + 1 if used.size else None
