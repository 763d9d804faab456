"""Training that starts from the weights of a drafter folder instead of random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flax import nnx

from dspine_jax.config import DrafterConfig, TargetConfig
from dspine_jax.config_io import config_to_dict
from dspine_jax.drafter_io import load_drafter, read_drafter_config
from dspine_jax.transfer import Frozen
from train.step import TrainState

# What may differ from the folder's config: no shape and no meaning of a parameter hangs on it. A slot's task is the same in a block of any length.
FREE = ("block_size", "template_mode", "injection.message_init_std", "injection.num_candidates", "selector.num_candidates")


def load_start(folder: str, config: DrafterConfig, target: TargetConfig, shardings: TrainState) -> tuple[nnx.State, nnx.State]:
    """(params, frozen) of a drafter folder as fp32, placed by ``shardings``; says on standard output what it took.

    ``config`` is the run's, resolved. The transfer space is the folder's own: the weights were trained in its coordinates, and one built anew from
    other answers would be another basis. Folders are those that training exports, in fp32 or bf16, and public DFlash checkpoints in the layout of z-lab's.

    Raises FileNotFoundError for a missing folder or file, ValueError for a drafter of another target, one that differs from ``config`` outside
    ``FREE``, and damaged weights.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"init_from: {folder} is not a folder; give that of an exported drafter, as WORKDIR/drafter of an earlier run")
    try:
        theirs = read_drafter_config(folder, target)
        free = check_same_drafter(folder, theirs, config)
        planned = dict(nnx.to_flat_state(shardings.params)) | dict(nnx.to_flat_state(shardings.frozen))
        drafter = load_drafter(folder, target, sharding=lambda path: planned[path].get_value())
    except (ValueError, OSError) as error:
        kind = next(kind for kind in (FileNotFoundError, OSError, ValueError) if isinstance(error, kind))
        raise kind(f"init_from: {error}") from error
    space = "" if config.injection is None else " and transfer space"
    print("; ".join([f"init_from: weights{space} of {folder}", *free, "the optimizer starts anew"]))
    return nnx.split(drafter, nnx.Param, Frozen)[1:]


def check_same_drafter(folder: str, theirs: DrafterConfig, ours: DrafterConfig) -> list[str]:
    """What differs without harm, in words. Raises ValueError naming every other field, both values and what to set."""
    differing, mends, free = [], [], []

    def compare(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> None:
        for key, x in a.items():
            name, y = f"{prefix}{key}", b[key]
            if isinstance(x, dict) and isinstance(y, dict):
                compare(x, y, f"{name}.")
            elif x != y:
                (free if name in FREE else differing).append(f"drafter.{name} is {_shown(name, x)} there, {_shown(name, y)} in this run")
                if name not in FREE:
                    mends.extend(_settings(name, x))

    compare(config_to_dict(theirs), config_to_dict(ours))
    if differing:
        raise ValueError(f"{folder} holds another drafter: {'; '.join(differing)}. Start from one like this run's, or set {' '.join(mends)}")
    return free


def _shown(name: str, value: Any) -> str:
    if name == "injection":
        return "None (DFlash)" if value is None else "set (DSpine)"
    return str(value)


def _settings(name: str, value: Any) -> list[str]:
    """What --set takes to give a drafter this value."""
    if isinstance(value, dict):
        return [setting for key, part in value.items() if f"{name}.{key}" not in FREE for setting in _settings(f"{name}.{key}", part)]
    return [f"drafter.{name}={str(value).replace(' ', '')}"]
