"""Config files, command-line overrides, and JSON that reads back to the identical config.

Works for any frozen dataclass whose fields are int, float, bool, str, Literal, tuple[X, ...],
dict[str, X], another such dataclass, or one of these ``| None``. Every check is driven by the annotations, so
a mistyped key or value stops at once, with its full dotted name.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.util
import json
import math
import os
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

from dspine_jax.config import TrainConfig

T = TypeVar("T")


def load_config(path: str | os.PathLike) -> TrainConfig:
    """Run the Python file at ``path`` and return its module-level ``config``.

    The file is the user's own code: never call this on a downloaded one. Raises FileNotFoundError when there
    is no such file, ValueError (naming the file and, for an exception inside it, the line) otherwise.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"config file {path} does not exist; give the path of a Python file, such as configs/demo.py")
    spec = importlib.util.spec_from_file_location("dspine_config", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"config file {path} is not a .py file")
    module = importlib.util.module_from_spec(spec)
    try:
        # Compiled from the source each time: a cached .pyc is keyed by whole seconds and would hide a quick edit.
        exec(spec.loader.source_to_code(path.read_bytes(), str(path)), module.__dict__)
    except Exception as error:
        raise ValueError(f"config file {path}{_line_of(error, path)}: {type(error).__name__}: {error}") from error
    if not hasattr(module, "config"):
        raise ValueError(f"config file {path} defines no `config`; end it with config = TrainConfig(...)")
    if not isinstance(module.config, TrainConfig):
        raise ValueError(f"config file {path}: `config` is a {type(module.config).__name__}, not a TrainConfig")
    return module.config


def _line_of(error: Exception, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}"
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f", line {line}"


def apply_overrides(config: T, overrides: Iterable[str]) -> T:
    """Return ``config`` with ``key.subkey=value`` texts applied, all at once and in order (the last of equal keys wins).

    ``None`` (also none, null) unsets an optional field, ``(4,)`` or ``4,5`` is a tuple, ``true``/``false`` are bools, an int may
    stand for a float. Setting a subkey of an optional group that is None creates the group with its defaults, and so
    does ``group={}``. Raises ValueError naming the key: unknown (with the nearest known ones), wrong type, or refused
    by the config's own checks. These run once on the final values, so settings that belong together may come in any order.
    """
    data = config_to_dict(config)
    for text in overrides:
        key, separator, value = text.partition("=")
        key = key.strip()
        if not separator or not key:
            raise ValueError(f"override {text!r} is not of the form key=value, such as optimizer.learning_rate=3e-4")
        _set(data, type(config), key, value.strip())
    return config_from_dict(type(config), data)


def _set(data: dict, cls: type, key: str, text: str) -> None:
    *groups, name = key.split(".")
    root, where = cls, ""
    for group in groups:
        annotation = _field_types(cls, group, where, root)[group]
        where = f"{where}{group}."
        cls = _dataclass_in(annotation)
        if cls is None:
            raise ValueError(f"override {key}: {where[:-1]} is a single value of type {_name(annotation)}, it has no subkeys")
        if data[group] is None:
            data[group] = {}
        data = data[group]
    annotation = _field_types(cls, name, where, root)[name]
    value = _coerce(_parse(text, annotation), annotation, key, shown=text)
    data[name] = config_to_dict(value) if dataclasses.is_dataclass(value) else value


def _parse(text: str, annotation: Any) -> Any:
    """Text of the command line to a Python value, by the annotation; the type check follows in ``_coerce``."""
    options = _options(annotation)
    if type(None) in options and text.lower() in ("none", "null"):
        return None
    if bool in options and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if str in options or any(typing.get_origin(option) is Literal for option in options):
        quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
        return text[1:-1] if quoted else text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text  # refused by the type check, which names the key
    wants_tuple = any(typing.get_origin(option) is tuple for option in options)
    return (value,) if wants_tuple and isinstance(value, int) else value


def config_to_dict(config: Any) -> dict[str, Any]:
    """Nested dict of plain values; tuples stay tuples (JSON turns them into lists)."""
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return config_to_dict(value)
    return dict(value) if isinstance(value, dict) else value


def config_from_dict(cls: type[T], data: dict[str, Any], where: str = "") -> T:
    """Inverse of ``config_to_dict``; keys left out take their defaults. ``where`` prefixes the keys in errors, as "drafter.".

    Raises ValueError on an unknown key (with the nearest known one), a wrong type, a missing required key, or a value the
    dataclass itself refuses.
    """
    return _build(cls, data, where, cls)


def _build(cls: type[T], data: Any, where: str, root: type) -> T:
    if not isinstance(data, dict):
        raise ValueError(f"{where[:-1] or cls.__name__}: {data!r} is not a mapping of keys to values")
    values = {}
    for name, value in data.items():
        annotation = _field_types(cls, name, where, root)[name]
        values[name] = _coerce(value, annotation, f"{where}{name}", root=root)
    for f in dataclasses.fields(cls):
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            raise ValueError(f"{where}{f.name} is missing; {cls.__name__} needs it, type {_name(_hints(cls)[f.name])}")
    return cls(**values)


def save_config(config: Any, path: str | os.PathLike) -> None:
    """Write ``config`` as JSON. The file appears whole or not at all."""
    path = Path(path)
    text = json.dumps(config_to_dict(config), indent=2, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_config(path: str | os.PathLike, cls: type[T] = TrainConfig) -> T:
    """Read what ``save_config`` wrote; the object equals the saved one. Raises FileNotFoundError, or ValueError naming the file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    try:
        return config_from_dict(cls, data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _options(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone."""
    return typing.get_args(annotation) if typing.get_origin(annotation) in (typing.Union, types.UnionType) else (annotation,)


def _dataclass_in(annotation: Any) -> type | None:
    return next((option for option in _options(annotation) if dataclasses.is_dataclass(option)), None)


def _field_types(cls: type, name: Any, where: str, root: type) -> dict[str, Any]:
    """Annotations of ``cls``, after checking that ``name`` is one of its fields."""
    hints = _hints(cls)
    if name not in hints:
        # The same name elsewhere in the tree (learning_rate for optimizer.learning_rate) is nearer than a similar spelling here.
        elsewhere = [path for path in _paths(root) if path.split(".")[-1] == name]
        nearest = elsewhere or [f"{where}{near}" for near in difflib.get_close_matches(str(name), hints, n=1, cutoff=0.0)]
        place = f"in {where[:-1]}" if where else f"at the top level of {cls.__name__}"
        raise ValueError(f"unknown key {where}{name}; did you mean {' or '.join(nearest)}? Known {place}: {', '.join(hints)}")
    return hints


def _paths(cls: type, where: str = "") -> list[str]:
    found = []
    for name, annotation in _hints(cls).items():
        found.append(f"{where}{name}")
        inner = _dataclass_in(annotation)
        if inner is not None:
            found += _paths(inner, f"{where}{name}.")
    return found


_MISMATCH = object()


def _coerce(value: Any, annotation: Any, key: str, root: type | None = None, shown: str | None = None) -> Any:
    """``value`` as the annotated type, or ValueError. Lists become tuples, ints become floats; nothing else is converted."""
    for option in _options(annotation):
        result = _match(value, option, key, root)
        if result is not _MISMATCH:
            return result
    text = repr(value) if shown is None else shown
    raise ValueError(f"{key}: {text} is not of type {_name(annotation)}")


def _match(value: Any, option: Any, key: str, root: type | None) -> Any:
    origin = typing.get_origin(option)
    if dataclasses.is_dataclass(option):
        return _build(option, value, f"{key}.", root or option) if isinstance(value, dict) else _MISMATCH
    if option is type(None):
        return None if value is None else _MISMATCH
    if origin is Literal:
        return value if any(value == allowed and type(value) is type(allowed) for allowed in typing.get_args(option)) else _MISMATCH
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            return _MISMATCH
        item = typing.get_args(option)[0]
        return tuple(_coerce(entry, item, f"{key}[{i}]") for i, entry in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            return _MISMATCH
        item = typing.get_args(option)[1]
        return {name: _coerce(entry, item, f"{key}.{name}") for name, entry in value.items()}
    if option is float:
        # bool is an int to Python, and nan or inf would poison a run without a word: both are refused.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300 or not math.isfinite(value):
            return _MISMATCH
        return float(value)
    return value if type(value) is option else _MISMATCH


def _name(annotation: Any) -> str:
    options = _options(annotation)
    if len(options) > 1:
        return " or ".join(_name(option) for option in options)
    if annotation is type(None):
        return "None"
    if typing.get_origin(annotation) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(annotation))
    if annotation is float:
        return "float (finite)"
    return annotation.__name__ if isinstance(annotation, type) and typing.get_origin(annotation) is None else str(annotation)
