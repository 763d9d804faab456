"""Drafter folders: ``config.json`` and ``model.safetensors`` in torch layout, strict both ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspine_jax.checkpoint_io import load_tensors, module_to_tensors
from dspine_jax.config import DEFAULT_KERNELS, DrafterConfig, KernelConfig, TargetConfig
from dspine_jax.config_io import read_config, save_config
from dspine_jax.drafter import Drafter
from dspine_jax.public_drafters import LAYOUTS, TARGET_COPIES, is_public_config, names_dspark, public_drafter_config
from dspine_jax.weight_folder import folder_tensors, read_json, weight_files, write_tensors


def drafter_tensors(drafter: Drafter, dtype=jnp.float32) -> dict[str, np.ndarray]:
    """Trained weights as ``dtype`` and the transfer space in fp32, in torch layout."""
    kept = lambda name: jnp.float32 if name.startswith("transfer.") else jnp.dtype(dtype)  # noqa: E731
    return {name: x.astype(kept(name)) for name, x in module_to_tensors(drafter).items()}


def save_drafter(folder: str | Path, drafter: Drafter, *, dtype=jnp.float32) -> None:
    """Write a drafter folder; trained weights as ``dtype``, the transfer space always fp32.

    The weights appear whole or not at all.
    """
    write_tensors(folder, drafter_tensors(drafter, dtype))
    save_config(drafter.config, Path(folder) / "config.json")


def read_drafter_config(folder: str | Path, target: TargetConfig) -> DrafterConfig:
    """The resolved config of a drafter folder, without reading a weight; folders in the public layout are read too.

    Raises FileNotFoundError for missing files, ValueError when the drafter belongs to another target or its weights are pickles.
    """
    folder = Path(folder)
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; a drafter folder holds config.json and model.safetensors")
    weight_files(folder)
    stored = _stored_config(file)
    if stored.target_layer_ids is None:
        raise ValueError(f"{file}: target_layer_ids is missing; a drafter's taps are never guessed")
    try:
        return stored.resolve(target)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _stored_config(path: Path) -> DrafterConfig:
    data = _public_content(path)
    if data is None:
        return read_config(path, DrafterConfig)
    try:
        return public_drafter_config(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _public_content(path: Path) -> dict | None:
    """config.json in the public layout; None for one of ours."""
    data = read_json(path)
    return data if is_public_config(data) else None


def load_drafter(
    folder: str | Path,
    target: TargetConfig,
    *,
    dtype=None,
    sharding: Callable[[tuple], jax.sharding.Sharding] | None = None,
    kernels: KernelConfig = DEFAULT_KERNELS,
) -> Drafter:
    """Read a drafter folder for a target; sizes are compared with the target before any weight is read.

    ``dtype`` None keeps fp32 parameters. Raises FileNotFoundError for missing files, ValueError when
    the drafter belongs to another target or its tensors are not exactly those of its config.
    """
    folder = Path(folder)
    config = read_drafter_config(folder, target)
    abstract = nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0), kernels=kernels))
    tensors, files = folder_tensors(folder), weight_files(folder)
    source, prefix = str(files[0] if len(files) == 1 else folder), ""
    content = _public_content(folder / "config.json")
    if content is not None:
        # Some trainers save the drafter as a part of a model; all names have the prefix then.
        prefix = "model." if all(name.startswith("model.") for name in tensors) else ""
        for name in LAYOUTS[config.method].derived:
            if prefix + name not in tensors:
                raise ValueError(f"{source}: missing tensor {name}; the config and the weights do not belong together")
            tensors.drop(prefix + name)
        for name in TARGET_COPIES if names_dspark(content) else ():
            if prefix + name in tensors:
                tensors.drop(prefix + name)
    return load_tensors(abstract, tensors, source=source, dtype=dtype, rename=lambda name: prefix + name, sharding=sharding)


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


