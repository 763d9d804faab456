"""Drafter configs in the public layout (config.json of z-lab's, SpecForge's and SGLang's folders): DFlash, DFlash2, Domino and DSpine, read and written.

Tensors have the names of our own folders; what a server needs beside them is in ``Layout.derived``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dspine_jax.config import ConvolutionConfig, DrafterConfig, GRUConfig, InjectionConfig, SelectorConfig, TargetConfig

# What other drafters of the family, or settings that are not computed here, have; a value of these is refused by name.
OTHERS = ("markov_rank", "lilicorr_rank", "output_multiplier", "final_logit_softcapping")
# Keys of the parts that are read, all of them needed once one is there.
SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
DOMINO = ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")
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
    fields: Callable[[dict], dict]  # DrafterConfig fields read from config.json, dflash_config over the top level
    derived: tuple[str, ...] = ()  # tensors of the file that follow from the drafter and the target's LM head


def _numbers(data: dict, names: tuple[str, ...]) -> list[int]:
    for name in names:
        if type(data.get(name)) is not int:
            raise ValueError(f"{name} is {data.get(name)!r}, expected a whole number")
    return [data[name] for name in names]


def _second_keys(config: DrafterConfig) -> dict:
    convolution, selector = config.convolution, config.selector
    return dict(zip(SECOND, (convolution.taps, convolution.group_size, selector.rank, selector.num_candidates)))


def _second_fields(data: dict) -> dict:
    taps, group, rank, candidates = _numbers(data, SECOND)
    return {"convolution": ConvolutionConfig(taps, group), "selector": SelectorConfig(rank, candidates)}


def _domino_keys(config: DrafterConfig) -> dict:
    gru = config.gru
    sizes = dict(zip(DOMINO, (gru.hidden_size, gru.projection_size, 1)))
    return {"projector_type": "domino", "shift_label": config.label_shift == "shifted"} | sizes


def _domino_fields(data: dict) -> dict:
    hidden, projection, prefix = _numbers(data, DOMINO)
    if prefix != 1:
        raise ValueError(f"pure_draft_prefix_len {prefix} is not supported, only 1: the first draft is uncorrected, all others are corrected")
    return {"gru": GRUConfig(hidden, projection), "label_shift": "shifted" if data.get("shift_label") else "same_position"}


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
    "dflash": Layout("DFlashDraftModel", lambda config: {}, lambda data: {}),
    "dflash2": Layout("DFlash2DraftModel", _second_keys, _second_fields),
    "domino": Layout("DFlashDraftModel", _domino_keys, _domino_fields),
    "dspine": Layout("DSpineDraftModel", _dspine_keys, _dspine_fields, ("transfer.table",)),
}


def is_public_config(data: object) -> bool:
    """Whether the content of a config.json is in the public layout, or in another that is not ours."""
    return isinstance(data, dict) and not {"dflash_config", "architectures", *_LAYOUTS_NOT_READ}.isdisjoint(data)


def public_config(config: DrafterConfig, target: TargetConfig, *, dtype: str) -> dict:
    """config.json of a resolved drafter as its servers read it; ``public_drafter_config`` reads it back to the same config.

    ``dtype`` names the type of the weights. Which reader needs which key, and what it does without: docs/serving.md. Raises ValueError for a drafter that no
    server reads.
    """
    if config.method not in LAYOUTS:
        raise ValueError(f"a {config.method} drafter is not written for servers, only {', '.join(LAYOUTS)}")
    if config.label_shift != "same_position" and config.method != "domino":
        raise ValueError(f"label_shift {config.label_shift!r}: servers take the drafts of a {config.method} drafter from the slots of their own positions")
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
    """The drafter that a public config.json describes: DFlash, DFlash2 (known by its keys), Domino (by ``projector_type``) or a DSpine of ``public_config``.

    ``block_size`` stands at top level or in ``dflash_config``, which wins; the RoPE base in ``rope_parameters`` or as ``rope_theta``. Raises ValueError for
    another drafter of the family, RoPE scaling, sliding windows, biases, and missing or mistyped keys.
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
            raise ValueError(f"{name} is {both[name]!r}: this is another drafter than those read from public folders, {', '.join(LAYOUTS)}")
    method = public_method(data)
    if both.get("shift_label") and method != "domino":
        raise ValueError("shift_label is set without projector_type 'domino': how many drafts such a drafter makes is not said")
    if own.get("label_shift", "same_position") != "same_position" and method != "domino":
        raise ValueError(f"dflash_config.label_shift is {own['label_shift']!r}: slots predict the token after theirs, which is read for Domino alone")
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
        **LAYOUTS[method].fields(both),
    )


def public_method(data: dict) -> str:
    """The method of a public config.json: DSpine by its architecture, the others by their keys, as importers name architectures in many ways.

    Raises ValueError for a projector that is none of them.
    """
    own = data.get("dflash_config")
    both = data | own if isinstance(own, dict) else data
    if LAYOUTS["dspine"].architecture in (data.get("architectures") or ()):
        return "dspine"
    if both.get("projector_type") not in (None, "domino"):
        raise ValueError(f"projector_type {both['projector_type']!r} is another drafter than those read from public folders, {', '.join(LAYOUTS)}")
    if both.get("projector_type") == "domino":
        return "domino"
    return "dflash2" if any(both.get(name) for name in SECOND) else "dflash"
