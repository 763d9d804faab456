"""Drafter folders: ``config.json`` and ``model.safetensors`` in torch layout, strict both ways."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from dspine_jax.checkpoint_io import SafetensorsFiles, load_tensors, module_to_tensors
from dspine_jax.config import DrafterConfig, TargetConfig
from dspine_jax.config_io import read_config, save_config
from dspine_jax.drafter import Drafter
from dspine_jax.public_drafters import is_public_config, public_drafter_config


def save_drafter(folder: str | Path, drafter: Drafter, *, dtype=jnp.float32) -> None:
    """Write a drafter folder; trained weights as ``dtype``, the transfer space always fp32.

    The weights appear whole or not at all.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    frozen = {name for name in module_to_tensors(drafter) if name.startswith("transfer.")}
    tensors = {name: x if name in frozen else x.astype(jnp.dtype(dtype)) for name, x in module_to_tensors(drafter).items()}
    partial = folder / ".model.safetensors.partial"
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, partial, metadata={"format": "pt"})
    os.replace(partial, folder / "model.safetensors")
    save_config(drafter.config, folder / "config.json")


def read_drafter_config(folder: str | Path, target: TargetConfig) -> DrafterConfig:
    """The resolved config of a drafter folder, without reading a weight; public DFlash folders are read too.

    Raises FileNotFoundError for missing files, ValueError when the drafter belongs to another target.
    """
    folder = Path(folder)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing; a drafter folder holds config.json and model.safetensors")
    stored = _stored_config(folder / "config.json")
    if stored.target_layer_ids is None:
        raise ValueError(f"{folder / 'config.json'}: target_layer_ids is missing; a drafter's taps are never guessed")
    try:
        return stored.resolve(target)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error


def _stored_config(path: Path) -> DrafterConfig:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        data = None  # read_config says what is wrong
    if not is_public_config(data):
        return read_config(path, DrafterConfig)
    try:
        return public_drafter_config(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load_drafter(folder: str | Path, target: TargetConfig, *, dtype=None, sharding: Callable[[tuple], jax.sharding.Sharding] | None = None) -> Drafter:
    """Read a drafter folder for a target; sizes are compared with the target before any weight is read.

    ``dtype`` None keeps fp32 parameters. Raises FileNotFoundError for missing files, ValueError when
    the drafter belongs to another target or its tensors are not exactly those of its config.
    """
    config = read_drafter_config(folder, target)
    abstract = nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0)))
    weights = Path(folder) / "model.safetensors"
    return load_tensors(abstract, SafetensorsFiles([weights]), source=str(weights), dtype=dtype, sharding=sharding)


def drafter_parameter_counts(drafter: Drafter) -> dict[str, int]:
    """Trained parameters: total, those beyond DFlash's ('head'), and those of the injections among them."""
    sizes = {path: variable.get_value().size for path, variable in nnx.to_flat_state(nnx.state(drafter, nnx.Param))}
    backbone = lambda path: path[0] in ("fc", "hidden_norm", "norm", "layers") and not {"attention_conv", "mlp_conv"} & set(path)  # noqa: E731
    count = lambda wanted: sum(size for path, size in sizes.items() if wanted(path))  # noqa: E731
    return {
        "total": sum(sizes.values()),
        "head": count(lambda path: not backbone(path)),
        "injection": count(lambda path: path[0] == "injections"),
    }


