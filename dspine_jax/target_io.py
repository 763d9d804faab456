"""Loading a target from a Hugging Face folder or a GGUF file, and writing one as a folder.

Only safetensors and GGUF are read: both are plain data. Nothing in a folder is executed, and a
setting that this port does not compute is refused by name rather than passed over.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspine_jax.checkpoint_io import SafetensorsFiles, load_tensors, module_to_tensors
from dspine_jax.config import DEFAULT_KERNELS, KernelConfig, TargetConfig
from dspine_jax.gguf_io import GGUFTensors, gguf_tensor_name, read_gguf_config
from dspine_jax.target import Target
from dspine_jax.weight_folder import folder_tensors, read_json, write_tensors

FAMILIES = ("qwen3", "llama")
# Buffers that old releases stored though they follow from the config.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# Settings with the only value that the port computes.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


def read_target_config(path: str | Path) -> TargetConfig:
    """Architecture of an HF folder or a GGUF file, without reading weights.

    Raises FileNotFoundError when there is nothing at ``path``; ValueError naming file, key and value
    for another model family, a setting that is not computed here, or a missing key.
    """
    path = _existing(path)
    return read_gguf_config(path) if path.is_file() else _read_hf_config(path)


def load_target(
    path: str | Path,
    *,
    dtype=jnp.bfloat16,
    sharding: Callable[[tuple], jax.sharding.Sharding] | None = None,
    kernels: KernelConfig = DEFAULT_KERNELS,
) -> Target:
    """Target with the weights at ``path`` (HF folder with safetensors, or a GGUF file) stored as ``dtype``.

    ``sharding`` maps a state path to the sharding of that array; None places all on the default
    device. Host memory holds one tensor at a time. Raises as ``read_target_config``, and ValueError
    for weights that do not fit the config or damaged files, FileNotFoundError for missing shards.
    """
    path = _existing(path)
    if path.is_file():
        tensors = GGUFTensors(path)
        module = _abstract_target(tensors.config, dtype, kernels)
        return load_tensors(module, tensors, source=str(path), dtype=dtype, rename=gguf_tensor_name, sharding=sharding)
    config = read_target_config(path)
    tensors = folder_tensors(path)
    for name in [name for name in tensors if name.endswith(_IGNORED_SUFFIX)]:
        tensors.drop(name)
    if config.tie_embeddings and "lm_head.weight" in tensors:
        _drop_tied_head(tensors)
    return load_tensors(_abstract_target(config, dtype, kernels), tensors, source=str(path), dtype=dtype, rename=_hf_tensor_name, sharding=sharding)


def load_head_rows(path: str | Path) -> np.ndarray:
    """LM-head rows U [V,D] of a target, in the type that its file holds (a GGUF's as fp32), without reading its layers. Raises as ``load_target``."""
    path = _existing(path)
    if path.is_file():
        tensors = GGUFTensors(path)
        return tensors[gguf_tensor_name("embed_tokens.weight" if tensors.config.tie_embeddings else "lm_head.weight")]
    config, tensors = read_target_config(path), folder_tensors(path)
    name = _hf_tensor_name("embed_tokens.weight" if config.tie_embeddings else "lm_head.weight")
    if name not in tensors:
        raise ValueError(f"{path}: missing tensor {name}; the config and the weights do not belong together")
    if tensors.shape(name) != (config.vocab_size, config.hidden_size):
        raise ValueError(f"{path}: tensor '{name}' has shape {list(tensors.shape(name))}, the config asks for {[config.vocab_size, config.hidden_size]}")
    return tensors[name]


def save_target(folder: str | Path, target: Target, *, dtype=jnp.bfloat16) -> None:
    """Write a target as a Hugging Face folder (config.json, model.safetensors) that ``load_target`` and transformers read.

    A tokenizer is not written. The weights appear whole or not at all.
    """
    write_tensors(folder, {_hf_tensor_name(name): x.astype(jnp.dtype(dtype)) for name, x in module_to_tensors(target).items()})
    save_target_config(folder, target.config, dtype=dtype)


def save_target_config(folder: str | Path, config: TargetConfig, *, dtype=jnp.bfloat16) -> None:
    """Write config.json alone: enough for everything that reads no weights."""
    folder, c = Path(folder), config
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "architectures": [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[c.family]],
        "model_type": c.family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "tie_word_embeddings": c.tie_embeddings,
        "max_position_embeddings": c.max_position_embeddings,
        "eos_token_id": list(c.eos_token_ids),
        "torch_dtype": jnp.dtype(dtype).name,
    }
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")


def _abstract_target(config: TargetConfig, dtype, kernels: KernelConfig) -> Target:
    """Shapes only: random weights that the file then replaces would double the memory."""
    return nnx.eval_shape(lambda: Target(config, rngs=nnx.Rngs(0), param_dtype=dtype, kernels=kernels))


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder; give an HF folder (config.json and safetensors) or a .gguf file")
    if path.is_file() and path.suffix != ".gguf":
        raise ValueError(f"{path}: not a .gguf file; give the folder that holds config.json, or a .gguf file")
    return path


def _hf_tensor_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


# ---- weights of a folder ----------------------------------------------------------------------


def _drop_tied_head(tensors: SafetensorsFiles) -> None:
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if embedding in tensors:
        same = tensors.shape(head) == tensors.shape(embedding) and (tensors[head] == tensors[embedding]).all()
        if not same:
            raise ValueError(f"{tensors.origin(head)}: tie_word_embeddings is true but '{head}' differs from '{embedding}'; set it to false")
    tensors.drop(head)


# ---- config.json ------------------------------------------------------------------------------


def _read_hf_config(folder: Path) -> TargetConfig:
    file = folder / "config.json"
    raw = read_json(file)
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{file}: model_type {family!r} is not supported; this port computes {' and '.join(FAMILIES)}")
    for key, value in _FIXED.items():
        if raw.get(key, value) != value:
            raise ValueError(f"{file}: {key} is {raw[key]!r}; this port computes only {value!r}")
    other = sorted(set(raw.get("layer_types") or ()) - {"full_attention"})
    if other:
        raise ValueError(f"{file}: layer_types holds {', '.join(other)}; this port computes only full_attention")

    def integer(key: str, absent: int | None = None) -> int:
        value = raw.get(key)
        value = absent if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ValueError(f"{file}: {key} is {value!r}; a positive whole number is needed")
        return value

    def number(key: str) -> float:
        value = raw.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(f"{file}: {key} is {value!r}; a positive number is needed")
        return float(value)

    hidden_size, num_heads = integer("hidden_size"), integer("num_attention_heads")
    if raw.get("head_dim") is None and hidden_size % num_heads:
        raise ValueError(f"{file}: head_dim is absent and hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    rows = integer("vocab_size")
    fields = dict(
        family=family,
        vocab_size=rows,
        num_tokens=min(rows, _num_tokens(folder / "tokenizer.json") or rows),
        hidden_size=hidden_size,
        num_layers=integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=integer("num_key_value_heads", absent=num_heads),
        head_dim=integer("head_dim", absent=hidden_size // num_heads),
        intermediate_size=integer("intermediate_size"),
        rope_theta=_rope_theta(raw, file),
        rms_norm_eps=number("rms_norm_eps"),
        tie_embeddings=_tied(raw, file),
        eos_token_ids=_eos_token_ids(folder, raw),
        max_position_embeddings=integer("max_position_embeddings"),
    )
    try:
        return TargetConfig(**fields)
    except ValueError as error:  # a config does not know its file
        raise ValueError(f"{file}: {error}") from error


def _tied(raw: dict, file: Path) -> bool:
    tied = raw.get("tie_word_embeddings", False)  # both families' own default
    if not isinstance(tied, bool):
        raise ValueError(f"{file}: tie_word_embeddings is {tied!r}; true or false is needed")
    return tied


def _rope_theta(raw: dict, file: Path) -> float:
    """Theta from rope_parameters, else rope_scaling, else the top level; never a built-in value.

    Newer configs moved it into the dict, and a reader of the top level alone would take a default
    that only long prompts show to be wrong.
    """
    found: list[tuple[str, object]] = []
    for name in ("rope_parameters", "rope_scaling"):
        entry = raw.get(name)
        if entry is None:
            continue
        if not isinstance(entry, dict):
            raise ValueError(f"{file}: {name} is {entry!r}; an object is needed")
        for key in ("rope_type", "type"):
            if entry.get(key, "default") != "default":
                raise ValueError(f"{file}: {name}.{key} is {entry[key]!r}; this port computes only 'default' rotary embedding")
        unknown = sorted(set(entry) - set(_ROPE_KEYS))
        if unknown:
            raise ValueError(f"{file}: {name} holds {', '.join(unknown)}, which this port does not know")
        if entry.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"{file}: {name}.partial_rotary_factor is {entry['partial_rotary_factor']!r}; this port rotates the whole head")
        if entry.get("rope_theta") is not None:
            found.append((f"{name}.rope_theta", entry["rope_theta"]))
    if raw.get("rope_theta") is not None:
        found.append(("rope_theta", raw["rope_theta"]))
    if not found:
        raise ValueError(f"{file}: rope_theta is neither in rope_parameters, nor in rope_scaling, nor at top level; there is no safe default")
    for name, value in found:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(f"{file}: {name} is {value!r}; a positive number is needed")
    (first, theta), *others = found
    for name, value in others:
        if value != theta:
            warnings.warn(f"{file}: {first} is {theta} but {name} is {value}; the first is used", stacklevel=2)
    return float(theta)


def _eos_token_ids(folder: Path, raw: dict) -> tuple[int, ...]:
    """End ids of generation_config.json, then of config.json, without repeats."""
    ids: list[int] = []
    generation = folder / "generation_config.json"
    for file, content in ((generation, read_json(generation) if generation.is_file() else {}), (folder / "config.json", raw)):
        value = content.get("eos_token_id")
        for entry in value if isinstance(value, list) else [value]:
            if entry is None:
                continue
            if isinstance(entry, bool) or not isinstance(entry, int) or entry < 0:
                raise ValueError(f"{file}: eos_token_id {entry!r} is not a token id")
            ids.append(entry)
    return tuple(dict.fromkeys(ids))


def _num_tokens(file: Path) -> int | None:
    """Ids that the tokenizer can give (highest + 1), or None without a tokenizer.json."""
    if not file.is_file():
        return None
    tokenizer = read_json(file)
    vocab = (tokenizer.get("model") or {}).get("vocab")
    if not isinstance(vocab, (dict, list)) or not vocab:
        raise ValueError(f"{file}: model.vocab is missing or empty")
    highest = max(vocab.values()) if isinstance(vocab, dict) else len(vocab) - 1
    return 1 + max([highest, *(token["id"] for token in tokenizer.get("added_tokens") or ())])
