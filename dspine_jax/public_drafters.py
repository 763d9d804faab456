"""Configs of public checkpoints (the layout of z-lab's and SGLang's folders) as DrafterConfig: DFlash, DFlash2 and Domino. Their tensors have our names."""

from __future__ import annotations

from dspine_jax.config import ConvolutionConfig, DrafterConfig, GRUConfig, SelectorConfig

# What other drafters of the family, or settings that are not computed here, have; a value of these is refused by name.
OTHERS = ("markov_rank", "lilicorr_rank", "output_multiplier", "final_logit_softcapping")
# Keys of the parts that are read, all of them needed once one is there.
SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
DOMINO = ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")


def is_public_config(data: object) -> bool:
    """Whether the content of a config.json is in the public layout."""
    return isinstance(data, dict) and "dflash_config" in data


def public_drafter_config(data: dict) -> DrafterConfig:
    """The drafter that a public config.json describes.

    DFlash2 is known by its keys, Domino by ``projector_type``. ``block_size`` stands at top level or in ``dflash_config``, which wins; the RoPE base in
    ``rope_parameters`` or as ``rope_theta``. Raises ValueError for another drafter of the family, RoPE scaling, sliding windows, biases, and missing or
    mistyped keys.
    """
    own = data["dflash_config"]
    if not isinstance(own, dict):
        raise ValueError(f"dflash_config is {own!r}, expected an object with target_layer_ids and mask_token_id")
    both = data | own
    for name in OTHERS:
        if both.get(name) not in (None, 0, 1.0):
            raise ValueError(f"{name} is {both[name]!r}: this is another drafter than those read from public folders, DFlash, DFlash2 and Domino")
    parts = _parts(both)
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
        **parts,
    )


def _parts(data: dict) -> dict:
    """The parts of DFlash2 or Domino, and the layout."""

    def numbers(names: tuple[str, ...]) -> list[int]:
        for name in names:
            if type(data.get(name)) is not int:
                raise ValueError(f"{name} is {data.get(name)!r}, expected a whole number")
        return [data[name] for name in names]

    if data.get("projector_type") not in (None, "domino"):
        raise ValueError(f"projector_type {data['projector_type']!r} is another drafter than those read from public folders, DFlash, DFlash2 and Domino")
    if data.get("projector_type") == "domino":
        hidden, projection, prefix = numbers(DOMINO)
        if prefix != 1:
            raise ValueError(f"pure_draft_prefix_len {prefix} is not supported, only 1: the first draft is uncorrected, all others are corrected")
        layout = "shifted" if data.get("shift_label") else "same_position"
        return {"gru": GRUConfig(hidden, projection), "label_shift": layout}
    if data.get("shift_label"):
        raise ValueError("shift_label is set without projector_type 'domino': how many drafts such a drafter makes is not said")
    if any(data.get(name) for name in SECOND):
        taps, group, rank, candidates = numbers(SECOND)
        return {"convolution": ConvolutionConfig(taps, group), "selector": SelectorConfig(rank, candidates)}
    return {}
