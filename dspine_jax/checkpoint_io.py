"""Weights of an NNX module as named tensors in torch layout, and back.

Names are mechanical: a Variable at path ``layers.0.mlp.up_proj.kernel`` is the tensor
``layers.0.mlp.up_proj.weight``; the leaves ``kernel``, ``weight`` and ``embedding`` become
``weight``, every other leaf (``bias``, ``mean``, ...) keeps its name. A Linear's kernel
[*in_shape,*out_shape] is stored [prod(out),prod(in)], its bias flat, all else as it is.
Both ways are strict: a checkpoint holds exactly the module's tensors, each once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from dspine_jax.layers import Linear

_WEIGHT_LEAVES = ("kernel", "weight", "embedding")
_LISTED = 8  # names an error message lists before it only counts


class TensorSource(Mapping):
    """A read-only mapping from tensor name to array that reads on access and knows its files."""

    def origin(self, name: str) -> str:
        """The file that holds the tensor, for error messages."""
        raise NotImplementedError

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in torch layout, without reading the data."""
        raise NotImplementedError


class SafetensorsFiles(TensorSource):
    """Tensors of one or many safetensors files, memory-mapped and read one at a time.

    ``files`` lists the files. Raises FileNotFoundError for a file that is not there, ValueError for
    a damaged file and for a tensor that two files hold.
    """

    def __init__(self, files: list[Path]):
        self._handles: dict[str, tuple[Path, safe_open]] = {}
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(f"{file}: the file is missing; download it again")
            try:
                handle = safe_open(file, framework="numpy")
            except SafetensorError as error:
                raise ValueError(f"{file}: not a whole safetensors file ({error}); download it again") from error
            for name in handle.keys():
                if name in self._handles:
                    raise ValueError(f"{file}: tensor '{name}' is also in {self._handles[name][0]}; each tensor must be stored once")
                self._handles[name] = (file, handle)

    def __getitem__(self, name: str) -> np.ndarray:
        file, handle = self._handles[name]
        try:
            return handle.get_tensor(name)
        except (SafetensorError, TypeError, AttributeError) as error:  # the last two: a dtype that numpy cannot hold
            raise ValueError(f"{file}: tensor '{name}' of type {handle.get_slice(name).get_dtype()} cannot be read ({error})") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def origin(self, name: str) -> str:
        return str(self._handles[name][0])

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[name][1].get_slice(name).get_shape())

    def num_bytes(self, name: str) -> int:
        """Size of the data, from the header."""
        bits = re.search(r"\d+", self._handles[name][1].get_slice(name).get_dtype())  # F32, BF16, F8_E4M3; BOOL has none and takes a byte
        return math.prod(self.shape(name)) * (int(bits.group()) if bits else 8) // 8

    def drop(self, name: str) -> None:
        """Forget a tensor, so that the strict check on names passes it over."""
        del self._handles[name]


def expected_tensors(module: nnx.Module) -> dict[str, tuple[tuple, tuple[int, ...]]]:
    """Tensor name -> (path in the module's state, shape in torch layout); works on abstract modules.

    Random-number state is not a weight and is left out. Raises ValueError when two paths get one
    name, or when a kernel of three or more axes does not belong to a ``Linear``.
    """
    found: dict[str, tuple[tuple, tuple[int, ...]]] = {}
    for path, variable in _variables(module):
        leaf = path[-1]
        suffix = "weight" if leaf in _WEIGHT_LEAVES else str(leaf)
        name = ".".join([*map(str, path[:-1]), suffix])
        if name in found:
            raise ValueError(f"module paths {found[name][0]} and {path} both map to tensor '{name}'; rename one of them")
        shape = tuple(variable.get_value().shape)
        if leaf == "kernel":
            n = _num_inputs(module, path, shape)
            shape = (math.prod(shape[n:]), math.prod(shape[:n]))
        elif leaf == "bias":
            shape = (math.prod(shape),)
        found[name] = (path, shape)
    return found


def module_to_tensors(module: nnx.Module) -> dict[str, np.ndarray]:
    """Every weight of the module as a host array in torch layout, in the dtype it is held in."""
    variables = dict(_variables(module))
    tensors = {}
    for name, (path, shape) in expected_tensors(module).items():
        value = np.asarray(jax.device_get(variables[path].get_value()))
        if path[-1] == "kernel":
            value = value.reshape(shape[1], shape[0]).T
        tensors[name] = np.ascontiguousarray(value).reshape(shape)
    return tensors


def load_tensors(
    module: nnx.Module,
    tensors: Mapping[str, np.ndarray],
    *,
    source: str,
    dtype=None,
    rename: Callable[[str], str] = lambda name: name,
    sharding: Callable[[tuple], jax.sharding.Sharding] | None = None,
) -> nnx.Module:
    """A module of the same structure filled from ``tensors``; ``module`` may be abstract and is not changed.

    ``source`` names the file in errors (a TensorSource knows each tensor's own file). ``dtype`` is
    what every Param is stored as; None keeps the module's own, and Variables that are no Params
    always do. ``rename`` maps the module's tensor name to the checkpoint's; ``sharding`` maps a
    state path to the sharding that the array is placed with. Tensors are read and placed one at a
    time, after all names and shapes were checked.

    Raises ValueError for a missing tensor, one too many, a wrong shape, or one that holds no floats
    where the module does.
    """
    files = tensors if isinstance(tensors, TensorSource) else None
    origin = files.origin if files is not None else lambda name: source
    shape_of = files.shape if files is not None else lambda name: tuple(tensors[name].shape)
    wanted = {rename(name): entry for name, entry in expected_tensors(module).items()}
    missing = [name for name in wanted if name not in tensors]
    if missing:
        listed = _listed([f"{name} {list(wanted[name][1])}" for name in missing])
        raise ValueError(f"{source}: missing {listed}; the config and the weights do not belong together")
    extra = [name for name in tensors if name not in wanted]
    if extra:
        listed = _listed([f"{name} {list(shape_of(name))}" for name in extra])
        raise ValueError(f"{origin(extra[0])}: this model has no {listed}; the config and the weights do not belong together")
    for name, (_, shape) in wanted.items():
        if shape_of(name) != shape:
            raise ValueError(f"{origin(name)}: tensor '{name}' has shape {list(shape_of(name))}, the config asks for {list(shape)}")

    graphdef, state = nnx.split(module)
    variables = dict(nnx.to_flat_state(state))
    for name, (path, _) in wanted.items():
        variable = variables[path]
        abstract = variable.get_value()
        kept = jnp.dtype(dtype) if dtype is not None and isinstance(variable, nnx.Param) else abstract.dtype
        value = np.asarray(tensors[name])
        if value.dtype != kept and not (_is_float(value.dtype) and _is_float(kept)):
            raise ValueError(f"{origin(name)}: tensor '{name}' holds {value.dtype}, which cannot stand for {kept}; quantised weights are not read here")
        value = value.astype(kept, copy=False)
        if path[-1] == "kernel":
            value = value.T
        value = value.reshape(abstract.shape)
        placed = jnp.asarray(value) if sharding is None else jax.device_put(value, sharding(path))
        variables[path] = variable.replace(placed)
    return nnx.merge(graphdef, nnx.from_flat_state(variables))


def _variables(module: nnx.Module) -> list[tuple[tuple, nnx.Variable]]:
    return [(path, variable) for path, variable in nnx.to_flat_state(nnx.state(module)) if not isinstance(variable, nnx.RngState)]


def _num_inputs(module: nnx.Module, path: tuple, shape: tuple[int, ...]) -> int:
    owner = module
    for key in path[:-1]:
        owner = owner[key] if isinstance(owner, (nnx.List, nnx.Dict)) else getattr(owner, key)
    if isinstance(owner, Linear):
        return len(owner.in_shape)
    if len(shape) == 2:
        return 1
    raise ValueError(f"module path {path}: a kernel of shape {shape} outside a Linear has no torch layout")


def _is_float(dtype) -> bool:
    return str(np.dtype(dtype)) in ("float16", "bfloat16", "float32", "float64")


def _listed(entries: list[str]) -> str:
    more = f" and {len(entries) - _LISTED} more" if len(entries) > _LISTED else ""
    return f"tensor{'s' if len(entries) > 1 else ''} " + ", ".join(entries[:_LISTED]) + more
