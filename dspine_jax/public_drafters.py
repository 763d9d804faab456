"""Drafter configs in the public layout (config.json of z-lab's, SpecForge's and SGLang's folders): read as DrafterConfig, and written.

Tensors have the names of our own folders; what a server needs beside them is in ``Layout.derived``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dspine_jax.config import DrafterConfig, InjectionConfig, TargetConfig

# What other drafters of the family, or settings that are not computed here, have; a value of these is refused by name.
OTHERS = ("projector_type", "conv_kernel_size", "selector_rank", "markov_rank", "lilicorr_rank", "output_multiplier", "final_logit_softcapping")
DSPINE_VERSION = 1  # of the keys and tensors that DSpine adds
# Layouts of other trainers by a key of theirs. DeepSpec's has all keys at top level; rank 0 is its DFlash.
_LAYOUTS_NOT_READ = {
    "markov_rank": "DeepSpec's layout, whose slots predict the token after theirs (shifted)",
    "speculators_model_type": "the layout of vllm-project/speculators",
}


class Layout(NamedTuple):
    """What one method has beyond the backbone."""

    architecture: str
    keys: Callable[[DrafterConfig], dict]  # written into dflash_config
    fields: Callable[[dict], dict]  # DrafterConfig fields read from dflash_config
    derived: tuple[str, ...] = ()  # tensors of the file that follow from the drafter and the target's LM head


def _dspine_keys(config: DrafterConfig) -> dict:
    c = config.injection
    return {
        "dspine_version": DSPINE_VERSION,
        "dspine_rank": c.transfer_size,
        "dspine_top_k": c.num_candidates,
        "dspine_layers": list(c.layers),
        "dspine_whiten": c.whiten,
        "dspine_message_init_std": c.message_init_std,
    }


def _dspine_fields(own: dict) -> dict:
    if own.get("dspine_version") != DSPINE_VERSION:
        raise ValueError(f"dflash_config.dspine_version is {own.get('dspine_version')!r}; this release reads version {DSPINE_VERSION}")
    for key in ("dspine_rank", "dspine_top_k"):
        if type(own.get(key)) is not int:
            raise ValueError(f"dflash_config.{key} is {own.get(key)!r}, expected a whole number")
    layers, whiten, std = own.get("dspine_layers"), own.get("dspine_whiten"), own.get("dspine_message_init_std")
    if not isinstance(layers, list) or not all(type(i) is int for i in layers):
        raise ValueError(f"dflash_config.dspine_layers is {layers!r}, expected a list of draft layers")
    if type(whiten) is not bool or type(std) not in (int, float):
        raise ValueError(f"dflash_config.dspine_whiten is {whiten!r} and dspine_message_init_std {std!r}, expected true or false and a number")
    return {"injection": InjectionConfig(tuple(layers), own["dspine_rank"], whiten, float(std), own["dspine_top_k"])}


LAYOUTS = {
    "dflash": Layout("DFlashDraftModel", lambda config: {}, lambda own: {}),
    "dspine": Layout("DSpineDraftModel", _dspine_keys, _dspine_fields, ("transfer.table",)),
}


def is_public_config(data: object) -> bool:
    """Whether the content of a config.json is in the public layout, or in another that is not ours."""
    return isinstance(data, dict) and not {"dflash_config", "architectures", *_LAYOUTS_NOT_READ}.isdisjoint(data)


def public_config(config: DrafterConfig, target: TargetConfig, *, dtype: str) -> dict:
    """config.json of a resolved drafter as its servers read it; ``public_drafter_config`` reads it back to the same config.

    ``dtype`` names the type of the weights. Which reader needs which key, and what it does without: docs/serving.md.
    """
    layout, causal = LAYOUTS[config.method], config.block_attention == "causal"
    own = {
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
        "num_draft_tokens": config.num_draft_tokens,
        "causal": causal,
        "label_shift": config.label_shift,
        "num_tokens": target.num_tokens,
        "template_mode": config.template_mode,
    }
    return {
        "architectures": [layout.architecture],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "layer_types": ["full_attention"] * config.num_layers,
        "use_sliding_window": False,
        "is_causal": causal,
        "dtype": dtype,
        "torch_dtype": dtype,
        "dflash_config": own | layout.keys(config),
    }


def public_drafter_config(data: dict) -> DrafterConfig:
    """The drafter that a public config.json describes: DFlash, or a DSpine that ``public_config`` wrote.

    ``block_size`` stands at top level or in ``dflash_config``, which wins; the RoPE base in ``rope_parameters`` or as ``rope_theta``. Raises ValueError for
    another drafter of the family, RoPE scaling, sliding windows, biases, shifted labels and missing or mistyped keys.
    """
    own = data.get("dflash_config")
    for key, layout in _LAYOUTS_NOT_READ.items():
        if own is None and key in data:
            raise ValueError(f"{key} is {data[key]!r}: {layout}, is not read here")
    if not isinstance(own, dict):
        raise ValueError(f"dflash_config is {own!r}, expected an object with target_layer_ids and mask_token_id")
    both = data | own
    for name in OTHERS:
        if both.get(name) not in (None, 0, 1.0):
            raise ValueError(f"{name} is {both[name]!r}: this is another drafter than DFlash, and only DFlash is read from public folders")
    if both.get("shift_label") or own.get("label_shift", "same_position") != "same_position":
        raise ValueError("shift_label is set: its slots predict the token after theirs, which is not built here")
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type {kind!r} is not supported, only 'default'")
    if any(layer != "full_attention" for layer in data.get("layer_types") or ()) or data.get("attention_bias"):
        raise ValueError(f"layer_types {data.get('layer_types')}, attention_bias {data.get('attention_bias')}: only full attention without biases is supported")
    sizes = {
        "mask_token_id": (own, "mask_token_id"), "block_size": (both, "block_size"), "num_layers": (data, "num_hidden_layers"),
        "num_heads": (data, "num_attention_heads"), "num_kv_heads": (data, "num_key_value_heads"), "head_dim": (data, "head_dim"),
        "intermediate_size": (data, "intermediate_size"), "hidden_size": (data, "hidden_size"), "vocab_size": (data, "vocab_size"),
    }  # fmt: skip
    fields = {}
    for name, (place, key) in sizes.items():
        if type(place.get(key)) is not int:
            raise ValueError(f"{key} is {place.get(key)!r}, expected a whole number")
        fields[name] = place[key]
    ids = own.get("target_layer_ids")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError(f"dflash_config.target_layer_ids is {ids!r}, expected a list of layers; a drafter's taps are never guessed")
    theta, eps = rope.get("rope_theta", data.get("rope_theta")), data.get("rms_norm_eps")
    for name, value in (("rope_theta", theta), ("rms_norm_eps", eps)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{name} is {value!r}, expected a number")
    if own.get("template_mode") not in (None, "thinking", "non-thinking", "unset"):
        raise ValueError(f"dflash_config.template_mode is {own['template_mode']!r}, expected 'thinking', 'non-thinking', 'unset' or null")
    causal = data.get("is_causal") or own.get("causal")
    return DrafterConfig(
        target_layer_ids=tuple(ids),
        num_target_layers=data.get("num_target_layers"),
        rope_theta=float(theta),
        rms_norm_eps=float(eps),
        block_attention="causal" if causal else "bidirectional",
        template_mode=own.get("template_mode"),
        **fields,
        **LAYOUTS[public_method(data)].fields(own),
    )


def public_method(data: dict) -> str:
    """The method of a public config.json, by its architecture; one that is not known counts as DFlash, whose importers never named it alike."""
    named = {layout.architecture: method for method, layout in LAYOUTS.items()}
    architectures = data.get("architectures") or [None]
    return named.get(architectures[0], "dflash")
