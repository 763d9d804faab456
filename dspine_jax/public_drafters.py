"""Configs of public DFlash checkpoints (the layout of z-lab's and SGLang's folders) as DrafterConfig; their tensors have the names of ours."""

from __future__ import annotations

from dspine_jax.config import DrafterConfig

# What other drafters of the family, or settings that are not computed here, have; a value of these is refused by name.
OTHERS = ("projector_type", "conv_kernel_size", "selector_rank", "markov_rank", "lilicorr_rank", "output_multiplier", "final_logit_softcapping")


def is_public_config(data: object) -> bool:
    """Whether the content of a config.json is in the public layout."""
    return isinstance(data, dict) and "dflash_config" in data


def public_drafter_config(data: dict) -> DrafterConfig:
    """The DFlash drafter that a public config.json describes.

    ``block_size`` stands at top level or in ``dflash_config``, which wins; the RoPE base in ``rope_parameters`` or as ``rope_theta``. Raises ValueError for
    another drafter of the family, RoPE scaling, sliding windows, biases, shifted labels and missing or mistyped keys.
    """
    own = data["dflash_config"]
    if not isinstance(own, dict):
        raise ValueError(f"dflash_config is {own!r}, expected an object with target_layer_ids and mask_token_id")
    both = data | own
    for name in OTHERS:
        if both.get(name) not in (None, 0, 1.0):
            raise ValueError(f"{name} is {both[name]!r}: this is another drafter than DFlash, and only DFlash is read from public folders")
    if both.get("shift_label"):
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
    causal = data.get("is_causal") or own.get("causal")
    return DrafterConfig(
        target_layer_ids=tuple(ids),
        num_target_layers=data.get("num_target_layers"),
        rope_theta=float(theta),
        rms_norm_eps=float(eps),
        block_attention="causal" if causal else "bidirectional",
        **fields,
    )
