"""Drafter configs in the public layouts (config.json of z-lab's, SpecForge's, DeepSpec's and SGLang's folders), read and written for every method.

Tensors have the names of our own folders; what a server needs beside them is in ``Layout.derived``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dspine_jax.config import ConvolutionConfig, DrafterConfig, GRUConfig, InjectionConfig, MarkovConfig, SelectorConfig, TargetConfig

# What other drafters of the family, or settings that are not computed here, have; a value of these is refused by name.
OTHERS = ("markov_rank", "lilicorr_rank", "output_multiplier", "final_logit_softcapping")
# The names under which DeepSpec and SpecForge save DSpark drafters, and DeepSpec its DFlash (rank 0). Only under these names are slots known to be shifted.
DSPARK_NAMES = ("Qwen3DSparkModel", "DSparkDraftModel")
# DeepSpec stores the target's two tables beside its own weights, frozen.
TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight")
# Keys of the parts that are read, all of them needed once one is there.
SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
DOMINO = ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")
DSPINE_VERSION = 1  # of the keys and tensors that DSpine adds


class Layout(NamedTuple):
    """What one method has beyond the backbone."""

    architecture: str
    keys: Callable[[DrafterConfig], dict]  # written into dflash_config
    fields: Callable[[dict], dict]  # DrafterConfig fields read from config.json, dflash_config over the top level
    derived: tuple[str, ...] = ()  # tensors of the file that follow from the drafter and the target's LM head
    label_shifts: tuple[str, ...] = ("same_position",)  # where its server takes the drafts from
    top: Callable[[DrafterConfig], dict] = lambda config: {}  # written at top level, where nested keys are not looked for


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


def _dspark_top(config: DrafterConfig) -> dict:
    if config.markov is None:
        raise ValueError("drafter.markov is None: servers run no DSpark drafter without a Markov head (markov_rank > 0)")
    return {
        "markov_rank": config.markov.rank,
        "markov_head_type": config.markov.kind,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }


def _dspark_fields(data: dict) -> dict:
    (rank,) = _numbers(data, ("markov_rank",))
    kind, confidence = data.get("markov_head_type"), data.get("enable_confidence_head")
    if rank and kind not in ("vanilla", "gated", "rnn"):
        raise ValueError(f"markov_head_type is {kind!r}, expected 'vanilla', 'gated' or 'rnn'")
    with_markov = data.get("confidence_head_with_markov") if confidence else False
    for name, value in (("enable_confidence_head", confidence), ("confidence_head_with_markov", with_markov)):
        if type(value) is not bool:
            raise ValueError(f"{name} is {value!r}, expected true or false; engines differ in what they take it for where it is missing")
    return {"markov": MarkovConfig(kind, rank) if rank else None, "confidence": confidence, "confidence_with_markov": with_markov}


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
    "dspark": Layout("Qwen3DSparkModel", lambda config: {}, _dspark_fields, label_shifts=("shifted",), top=_dspark_top),
    "domino": Layout("DFlashDraftModel", _domino_keys, _domino_fields, label_shifts=("same_position", "shifted")),
    "dspine": Layout("DSpineDraftModel", _dspine_keys, _dspine_fields, ("transfer.table",)),
}


def is_public_config(data: object) -> bool:
    """Whether the content of a config.json is in the public layout, or in another that is not ours."""
    return isinstance(data, dict) and not {"dflash_config", "architectures", "speculators_model_type"}.isdisjoint(data)


def public_config(config: DrafterConfig, target: TargetConfig, *, dtype: str) -> dict:
    """config.json of a resolved drafter as its servers read it; ``public_drafter_config`` reads it back to the same config.

    ``dtype`` names the type of the weights. Which reader needs which key, and what it does without: docs/serving.md. Raises ValueError for a drafter that no
    server reads.
    """
    layout, causal = LAYOUTS[config.method], config.block_attention == "causal"
    if config.label_shift not in layout.label_shifts:
        where = "the slots of their own positions" if layout.label_shifts == ("same_position",) else "the slots before their positions, the anchor's first"
        raise ValueError(f"label_shift {config.label_shift!r}: servers take the drafts of a {config.method} drafter from {where}")
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
    } | layout.top(config)


def public_drafter_config(data: dict) -> DrafterConfig:
    """The drafter that a public config.json describes: one of ``public_method``.

    ``block_size`` stands at top level or in ``dflash_config``, which wins; the RoPE base in ``rope_parameters`` or as ``rope_theta``. Raises ValueError for
    another drafter of the family, RoPE scaling, sliding windows, biases, and missing or mistyped keys.
    """
    own, method = _own_keys(data), public_method(data)
    both, shifted = data | own, names_dspark(data)
    for name in OTHERS:
        if both.get(name) not in (None, 0, 1.0) and not (method == "dspark" and name == "markov_rank"):
            raise ValueError(f"{name} is {both[name]!r}: this is another drafter than those read from public folders, {', '.join(LAYOUTS)}")
    _check_label_shift(both, method, shifted=shifted)
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
        **({"label_shift": "shifted"} if shifted else {}),
        **LAYOUTS[method].fields(both),
    )


def public_method(data: dict) -> str:
    """The method of a public config.json: DSpine by its architecture, DSpark and DeepSpec's DFlash by theirs or by ``projector_type``, the others by
    their keys, as importers name architectures in many ways.

    Raises ValueError for a projector that is none of them.
    """
    both = data | _own_keys(data)
    if LAYOUTS["dspine"].architecture in (data.get("architectures") or ()):
        return "dspine"
    if both.get("projector_type") not in (None, "domino", "dspark"):
        raise ValueError(f"projector_type {both['projector_type']!r} is another drafter than those read from public folders, {', '.join(LAYOUTS)}")
    if both.get("projector_type") == "domino":
        return "domino"
    if names_dspark(data):
        return "dflash" if both.get("markov_rank") == 0 and not both.get("enable_confidence_head") else "dspark"
    return "dflash2" if any(both.get(name) for name in SECOND) else "dflash"


def names_dspark(data: dict) -> bool:
    """Whether a public config.json says that its trainer is DSpark's, whose slots predict the token after theirs."""
    return not set(DSPARK_NAMES).isdisjoint(data.get("architectures") or ()) or (data | _own_keys(data)).get("projector_type") == "dspark"


def _own_keys(data: dict) -> dict:
    """The keys that engines prefer to those at top level: ``dflash_config``, ``dspark_config`` over it. DeepSpec nests none, there it is all of them."""
    if "speculators_model_type" in data:
        raise ValueError(f"speculators_model_type is {data['speculators_model_type']!r}: the layout of vllm-project/speculators, is not read here")
    own, more = data.get("dflash_config"), data.get("dspark_config") or {}
    if own is None and not set(DSPARK_NAMES).isdisjoint(data.get("architectures") or ()):
        own = data
    if not isinstance(own, dict) or not isinstance(more, dict):
        raise ValueError(f"dflash_config is {own!r}, expected an object with target_layer_ids and mask_token_id")
    return own | more


def _check_label_shift(both: dict, method: str, *, shifted: bool) -> None:
    """Raise ValueError where a config says of its slots what its method does not do, or what is not read."""
    if shifted:
        for name, value in (("sample_from_anchor", False), ("shift_label", False), ("label_shift", "same_position")):
            if both.get(name) == value:
                raise ValueError(f"{name} is {value!r}: slots predict the tokens of their own positions, which is not read for DSpark")
        return
    if both.get("shift_label") and method != "domino":
        raise ValueError("shift_label is set without projector_type 'domino': how many drafts such a drafter makes is not said")
    if both.get("label_shift", "same_position") != "same_position" and method != "domino":
        raise ValueError(f"label_shift is {both['label_shift']!r}: slots predict the token after theirs, which is read for Domino and DSpark alone")
