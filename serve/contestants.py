"""Who takes part in a comparison: each method's training config, what all must share, and variants at an equal number of parameters."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from flax import nnx

from dspine_jax.config import DrafterConfig, TargetConfig, TrainConfig
from dspine_jax.config_io import apply_overrides, config_to_dict, load_config
from dspine_jax.drafter import Drafter
from dspine_jax.drafter_io import drafter_parameter_counts
from dspine_jax.prompt_lookup import PromptLookupConfig
from dspine_jax.target_io import read_target_config

LOOKUP = PromptLookupConfig.method  # without a model: nothing to train, no seeds
METHODS = ("dflash", "dflash2", "dspark", "domino", "dspine", LOOKUP)
# The recipe each starts from; both get the parameters of DSpine by a wider MLP.
VARIANTS = {"dflash-wide": "dflash", "dspine-last": "dspine"}
MATCHED = 0.01  # largest difference of the parameter counts, as a share
# What a comparison holds equal: dotted names of TrainConfig, and the drafts a round.
SHARED = ("steps", "epochs", "compute_dtype", "anchors", "data.batch_size", "data.max_length")
SHARED += ("drafter.mask_token_id", "drafter.num_layers", "drafter.target_layer_ids", "drafter.head_dim", "drafter.num_heads", "drafter.num_kv_heads")


def recipe_file(recipes: str, method: str) -> Path:
    """The config file of a method, or of the one that a variant starts from."""
    return Path(recipes.replace("{method}", VARIANTS.get(method, method)))


def overrides_of(method: str, settings: list[str]) -> list[str]:
    """Of KEY=VALUE and METHOD:KEY=VALUE those that concern a method, or the one it is a variant of, without its name."""
    found = []
    for text in settings:
        key, separator, value = text.partition("=")
        name, colon, rest = key.rpartition(":")
        if colon and name not in (*METHODS, *VARIANTS):
            raise ValueError(f"--set {text}: {name} is no method; known: {', '.join((*METHODS, *VARIANTS))}")
        if name in ("", method, VARIANTS.get(method)):
            found.append(f"{rest}{separator}{value}")
    return found


def contestant(method: str, recipes: str, settings: list[str]) -> TrainConfig:
    """A method's config with its settings; ``target`` must be among them. Raises ValueError or OSError.

    "dflash-wide" is DFlash with a wider MLP, "dspine-last" DSpine that injects after its last layer only, with a wider MLP: both have the
    parameters of the DSpine recipe within ``MATCHED``.
    """
    config = apply_overrides(load_config(recipe_file(recipes, method)), overrides_of(method, settings))
    expected = VARIANTS.get(method, method)
    if config.drafter.method != expected:
        raise ValueError(f"{recipe_file(recipes, method)} with its settings makes a {config.drafter.method} drafter, not {expected}")
    if method not in VARIANTS:
        return config
    target = read_target_config(config.target)
    model = apply_overrides(load_config(recipe_file(recipes, "dspine")), overrides_of("dspine", settings)).drafter.resolve(target)
    drafter = config.drafter
    if method == "dspine-last":
        drafter = dataclasses.replace(drafter, injection=dataclasses.replace(drafter.injection, layers=(drafter.num_layers - 1,)))
    return dataclasses.replace(config, drafter=widened(drafter, target, parameters(model)))


def parameters(config: DrafterConfig) -> int:
    """Trained parameters of a resolved config; nothing is allocated."""
    return drafter_parameter_counts(nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0))))["total"]


def widened(config: DrafterConfig, target: TargetConfig, count: int) -> DrafterConfig:
    """The config with the MLP width whose parameters lie nearest to ``count``: a multiple of 64, or of less where 64 is too coarse.

    Raises ValueError where no width is within ``MATCHED``.
    """
    resolved = config.resolve(target)
    with_width = lambda width: dataclasses.replace(resolved, intermediate_size=width)  # noqa: E731
    # Linear in the width: gate, up and down of every layer.
    unit = 3 * resolved.num_layers * resolved.hidden_size
    exact = resolved.intermediate_size + (count - parameters(resolved)) / unit
    for multiple in (64, 32, 16, 8, 4, 2, 1):
        width = multiple * max(1, round(exact / multiple))
        if abs(parameters(with_width(width)) - count) <= MATCHED * count:
            return dataclasses.replace(config, intermediate_size=width)
    raise ValueError(f"no MLP width gives the {config.method} drafter {count} parameters within {MATCHED:.0%}: {exact:.1f} would")


def shared_settings(configs: dict[str, TrainConfig]) -> dict:
    """What all have in common, by dotted name. Raises ValueError naming the method, the setting and both values where one differs."""
    found: dict[str, tuple[str, object]] = {}
    for method, config in configs.items():
        values = {"drafts a round": config.drafter.num_draft_tokens}
        for name in SHARED:
            value = config_to_dict(config)
            for key in name.split("."):
                value = value[key]
            values[name] = value
        for name, value in values.items():
            first, theirs = found.setdefault(name, (method, value))
            if value != theirs:
                raise ValueError(f"an unfair comparison: {name} is {value} for {method}, but {theirs} for {first}; set one for both")
    return {name: value for name, (_, value) in found.items()}
