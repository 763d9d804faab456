"""Folders of weights as Hugging Face lays them out: ``model.safetensors``, or shards and an index. Pickles are refused, nothing is executed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from dspine_jax.checkpoint_io import SafetensorsFiles

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The folder's one safetensors file, or the shards that its index lists, without opening one.

    Raises FileNotFoundError for missing files; ValueError for a folder that holds only pickles, or both a file and an index.
    """
    single, index = folder / WEIGHTS, folder / INDEX
    if single.is_file() and index.is_file():
        raise ValueError(f"{folder}: both {WEIGHTS} and {INDEX} are there; keep the one that is meant")
    if single.is_file():
        return [single]
    if not index.is_file():
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        if pickled:
            raise ValueError(
                f"{folder}: holds only {', '.join(pickled)}; such files are pickles, which run code when read: refused. Convert them to safetensors first"
            )
        raise FileNotFoundError(f"{folder}: neither {WEIGHTS} nor {INDEX} is there")
    files = sorted(set(_weight_map(read_json(index), index).values()))
    for name in files:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: this shard is named in {INDEX} but is missing; download it again")
    return [folder / name for name in files]


def folder_tensors(folder: Path) -> SafetensorsFiles:
    """The tensors of a folder, read on access.

    Raises as ``weight_files``; ValueError for a damaged file, and for an index that does not name exactly the tensors of its shards, each in its file,
    or states another total size than theirs.
    """
    tensors = SafetensorsFiles(weight_files(folder))
    index = folder / INDEX
    if index.is_file():
        content = read_json(index)
        _check_index(folder, _weight_map(content, index), tensors)
        stated, size = (content.get("metadata") or {}).get("total_size"), sum(tensors.num_bytes(name) for name in tensors)
        if stated not in (None, size):
            raise ValueError(f"{index}: metadata.total_size is {stated}, the shards hold {size} bytes; download them again")
    return tensors


def write_tensors(folder: str | Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write ``model.safetensors`` into ``folder`` (made where missing); it appears whole or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{WEIGHTS}.partial"
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, partial, metadata={"format": "pt"})
    os.replace(partial, folder / WEIGHTS)


def read_json(file: Path) -> dict:
    """The object in a JSON file. Raises FileNotFoundError, or ValueError naming the file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{file}: the file is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds a {type(content).__name__}, not an object")
    return content


def _weight_map(content: dict, index: Path) -> dict[str, str]:
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: 'weight_map' is missing or empty")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{index}: tensor '{tensor}' points to {file!r}; a shard is a .safetensors file in the same folder")
    return weight_map


def _check_index(folder: Path, weight_map: dict[str, str], tensors: SafetensorsFiles) -> None:
    """The index and the shards must name the same tensors, each in the same file."""
    for name, file in weight_map.items():
        if name not in tensors or tensors.origin(name) != str(folder / file):
            raise ValueError(f"{folder / file}: {INDEX} says that tensor '{name}' is in this shard, but it is not")
    for name in tensors:
        if name not in weight_map:
            raise ValueError(f"{tensors.origin(name)}: holds tensor '{name}', which {INDEX} does not list")
