"""Dataset folders (docs/data.md) and the grain pipeline that reads them.

A folder holds ``tokens.npy`` [n,S], ``loss_mask.npy`` [n,S], ``lengths.npy`` [n] and ``manifest.json``. Rows start at position 0 and
are padded on the right; the mask is 1 on the tokens that a drafter learns to propose.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import grain
import numpy as np
from absl import flags

from dspine_jax.config import DataConfig
from dspine_jax.config_io import config_from_dict, config_to_dict

FORMAT_VERSION = 1
ARRAYS = {"tokens.npy": ("uint16", "uint32"), "loss_mask.npy": ("uint8",), "lengths.npy": ("int32",)}
ROWS_PER_CHUNK = 4096  # rows read at a time in full passes, so that memory stays small

# Grain's worker processes read absl flags and import this module first; a program without absl.app.run has not parsed them.
if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a dataset folder says of itself. ``write_dataset`` fills the fields of the last group."""

    name: str
    source: str  # where the text comes from, for people
    target: str = ""  # identity of the target that wrote the answers
    template_mode: str | None = None  # chat template mode of the prompts; None: not recorded
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)  # rows left out, by reason
    version: int = FORMAT_VERSION
    rows: int = 0
    width: int = 0
    sha256: dict[str, str] = dataclasses.field(default_factory=dict)  # of each array file


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_dataset(
    folder: str | os.PathLike, tokens_nS: np.ndarray, loss_mask_nS: np.ndarray, lengths_n: np.ndarray, manifest: Manifest, *, overwrite: bool = False
) -> Manifest:
    """Write a dataset folder and return its completed manifest.

    tokens: integers [n,S], ids below 2**32 (stored as uint16 when all fit); loss_mask: bool or 0/1 [n,S], zero past the row's length;
    lengths: integers [n] in 1..S. The manifest is written last, so a broken-off write leaves a folder that is refused.
    Raises FileExistsError when the folder holds anything and ``overwrite`` is False (with it only these four files are replaced),
    ValueError when the arrays do not fit each other.
    """
    folder = Path(folder)
    tokens_nS, lengths_n = np.asarray(tokens_nS), np.asarray(lengths_n)
    _check_values(folder, tokens_nS, np.asarray(loss_mask_nS), lengths_n)
    refuse_overwrite(folder, overwrite)
    dtype = np.uint16 if int(tokens_nS.max()) < 2**16 else np.uint32
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").unlink(missing_ok=True)
    np.save(folder / "tokens.npy", tokens_nS.astype(dtype), allow_pickle=False)
    np.save(folder / "loss_mask.npy", np.asarray(loss_mask_nS).astype(np.uint8), allow_pickle=False)
    np.save(folder / "lengths.npy", lengths_n.astype(np.int32), allow_pickle=False)
    n, S = tokens_nS.shape
    manifest = dataclasses.replace(manifest, version=FORMAT_VERSION, rows=n, width=S, sha256={name: _sha256(folder / name) for name in ARRAYS})
    temporary = folder / ".manifest.json.tmp"
    temporary.write_text(json.dumps(config_to_dict(manifest), indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, folder / "manifest.json")
    return manifest


def refuse_overwrite(folder: Path, overwrite: bool) -> None:
    """Raise FileExistsError when ``folder`` holds anything and ``overwrite`` is False."""
    if not overwrite and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty; choose another folder or ask to overwrite")


def _check_values(folder: Path, tokens_nS: np.ndarray, loss_mask_nS: np.ndarray, lengths_n: np.ndarray, vocab_size: int | None = None) -> None:
    """Shapes first, then every value in chunks of rows. Raises ValueError naming folder, row and value."""
    if tokens_nS.ndim != 2 or tokens_nS.size == 0 or loss_mask_nS.shape != tokens_nS.shape or lengths_n.shape != tokens_nS.shape[:1]:
        raise ValueError(
            f"{folder}: shapes disagree or are empty: tokens {tokens_nS.shape}, loss_mask {loss_mask_nS.shape}, lengths {lengths_n.shape};"
            " expected [n,S], [n,S], [n] with n and S at least 1"
        )
    n, S = tokens_nS.shape
    limit = 2**32 if vocab_size is None else vocab_size
    supervised = 0
    for start in range(0, n, ROWS_PER_CHUNK):
        rows = slice(start, start + ROWS_PER_CHUNK)
        tokens, mask, lengths = np.asarray(tokens_nS[rows]), np.asarray(loss_mask_nS[rows]), np.asarray(lengths_n[rows])
        bad = (lengths < 1) | (lengths > S)
        if bad.any():
            raise ValueError(f"{folder}: row {start + bad.argmax()} has length {lengths[bad.argmax()]}; lengths must lie in 1..{S}")
        bad = ((tokens < 0) | (tokens >= limit)).any(axis=1)
        if bad.any():
            row = tokens[bad.argmax()]
            value = int(row[(row < 0) | (row >= limit)][0])
            raise ValueError(f"{folder}: row {start + bad.argmax()} holds token id {value}, outside 0..{limit - 1}; it was made for another tokenizer")
        bad = ((mask != 0) & (mask != 1)).any(axis=1) | ((mask != 0) & (np.arange(S)[None] >= lengths[:, None])).any(axis=1)
        if bad.any():
            raise ValueError(f"{folder}: the loss mask of row {start + bad.argmax()} is not 0/1, or is set past the row's length {lengths[bad.argmax()]}")
        supervised += int(np.count_nonzero(mask))
    if supervised == 0:
        raise ValueError(f"{folder}: the loss mask is zero on all {n} rows, nothing can be learnt; prepare the data again with its answers marked")


class DatasetFolder:
    """A validated, memory-mapped dataset folder.

    ``tokens`` uint16 or uint32 [n,S], ``loss_mask`` uint8 [n,S], ``lengths`` int32 [n], ``manifest``, ``num_rows``, ``width``. Opening reads everything
    once (checksums and values). Raises FileNotFoundError for a missing folder or file; ValueError naming file and value
    for an unreadable or truncated array, disagreeing shapes, another format version, ids at or above ``vocab_size``, or a mask that is zero everywhere.
    """

    def __init__(self, path: str | os.PathLike, vocab_size: int | None = None):
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"dataset folder {str(path)!r} does not exist; make one with dspine-prepare or dspine-convert (docs/data.md)")
        for name in ("manifest.json", *ARRAYS):
            if not (self.path / name).is_file():
                raise FileNotFoundError(f"{self.path / name} is missing; the folder is not a dataset or its writing was broken off, make it again")
        self.manifest = self._read_manifest()
        self._map()
        expected = (self.manifest.rows, self.manifest.width)
        if self.tokens.shape != expected:
            raise ValueError(f"{self.path / 'tokens.npy'} has shape {self.tokens.shape} but manifest.json says {expected}")
        for name in ARRAYS:
            found, recorded = _sha256(self.path / name), self.manifest.sha256.get(name)
            if found != recorded:
                raise ValueError(f"{self.path / name} has sha256 {found}, manifest.json says {recorded}; it was changed or damaged, copy or make it again")
        _check_values(self.path, self.tokens, self.loss_mask, self.lengths, vocab_size)

    def _read_manifest(self) -> Manifest:
        path = self.path / "manifest.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error
        version = data.get("version") if isinstance(data, dict) else None
        # Before any other check: another version may well have other keys.
        if type(version) is not int or version != FORMAT_VERSION:
            raise ValueError(f"{path}: format version {version!r} is not {FORMAT_VERSION}; make the dataset again with this release")
        try:
            return config_from_dict(Manifest, data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def _map(self) -> None:
        for name, dtypes in ARRAYS.items():
            path = self.path / name
            try:
                array = np.lib.format.open_memmap(path, mode="r")
            except (ValueError, EOFError, OSError, SyntaxError, TypeError) as error:
                raise ValueError(f"{path} cannot be read, it is truncated or not a .npy array: {error}") from error
            if array.dtype not in dtypes:
                raise ValueError(f"{path} holds {array.dtype}, expected {' or '.join(dtypes)}")
            setattr(self, name.removesuffix(".npy"), array)

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def __getstate__(self) -> dict:
        # A pickled memory map carries its whole content; grain's workers map the files again instead.
        return {name: value for name, value in self.__dict__.items() if not isinstance(value, np.memmap)}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._map()


def skip_reason(loss_mask_S: np.ndarray, max_length: int | None = None) -> str | None:
    """Why a row can never give loss, or None when it can.

    A block needs a supervised anchor and at least one supervised label after it: two neighbouring mask positions within ``max_length``.
    """
    mask = np.asarray(loss_mask_S) != 0
    if not mask.any():
        return "no answer tokens"
    mask = mask[:max_length]
    if not mask.any():
        return "answer starts after max_length"
    return None if (mask[:-1] & mask[1:]).any() else "fewer than two neighbouring answer tokens"


def trainable_rows(folder: DatasetFolder, max_length: int | None = None) -> np.ndarray:
    """int32 [m]: rows for which ``skip_reason`` is None, in order."""
    kept = []
    for start in range(0, folder.num_rows, ROWS_PER_CHUNK):
        mask = np.asarray(folder.loss_mask[start : start + ROWS_PER_CHUNK, :max_length]) != 0
        kept.append(start + np.flatnonzero((mask[:, :-1] & mask[:, 1:]).any(axis=1)))
    return np.concatenate(kept).astype(np.int32)


def pad_rows(token_rows: Sequence[np.ndarray], mask_rows: Sequence[np.ndarray], width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Right-pad rows of [s] to (tokens uint32 [n,S], loss_mask uint8 [n,S], lengths int32 [n]), S = ``width``, cutting longer ones."""
    n = len(token_rows)
    tokens_nS, loss_mask_nS, lengths_n = np.zeros((n, width), np.uint32), np.zeros((n, width), np.uint8), np.zeros(n, np.int32)
    for i, (tokens, mask) in enumerate(zip(token_rows, mask_rows, strict=True)):
        length = min(len(tokens), width)
        tokens_nS[i, :length], loss_mask_nS[i, :length], lengths_n[i] = tokens[:length], mask[:length], length
    return tokens_nS, loss_mask_nS, lengths_n


def count_supervised(folder: DatasetFolder) -> int:
    """Number of positions in the folder whose loss mask is set."""
    return sum(int(np.count_nonzero(folder.loss_mask[start : start + ROWS_PER_CHUNK])) for start in range(0, folder.num_rows, ROWS_PER_CHUNK))


def rows_holding(folder: DatasetFolder, token: int) -> int:
    """Number of rows with ``token`` before their end."""
    count = 0
    for start in range(0, folder.num_rows, ROWS_PER_CHUNK):
        rows = slice(start, start + ROWS_PER_CHUNK)
        tokens_nS, lengths_n = np.asarray(folder.tokens[rows]), np.asarray(folder.lengths[rows])
        count += int(((tokens_nS == token) & (np.arange(folder.width) < lengths_n[:, None])).any(axis=1).sum())
    return count


def token_frequencies(folder: DatasetFolder, vocab_size: int) -> np.ndarray:
    """float64 [V]: how often each token id is supervised. Raises ValueError when an id is not below ``vocab_size``."""
    counts_V = np.zeros(vocab_size, np.float64)
    for start in range(0, folder.num_rows, ROWS_PER_CHUNK):
        rows = slice(start, start + ROWS_PER_CHUNK)
        ids = np.asarray(folder.tokens[rows])[np.asarray(folder.loss_mask[rows]) != 0]
        if ids.size and ids.max() >= vocab_size:
            raise ValueError(f"{folder.path}: token id {ids.max()} is outside a vocabulary of {vocab_size}")
        counts_V += np.bincount(ids, minlength=vocab_size)
    return counts_V


class _RowSource:
    """Random-access source of grain: the rows of a folder that can give loss, cut to ``width``."""

    def __init__(self, folder: DatasetFolder, rows_m: np.ndarray, width: int):
        self.folder, self.rows_m, self.width = folder, rows_m, width

    def __len__(self) -> int:
        return len(self.rows_m)

    def __repr__(self) -> str:
        return f"_RowSource({self.folder.path}, rows={len(self)}, width={self.width})"

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        row, S = int(self.rows_m[index]), self.width
        return {
            "tokens": self.folder.tokens[row, :S].astype(np.int32),
            "loss_mask": self.folder.loss_mask[row, :S].astype(bool),
            "lengths": np.int32(min(int(self.folder.lengths[row]), S)),
            "row_ids": np.int32(row),
        }


def make_iterator(folder: DatasetFolder, *, data_config: DataConfig, seed: int, process_index: int = 0, process_count: int = 1) -> grain.DatasetIterator:
    """Endless grain iterator of this process' share of each global batch; ``get_state``/``set_state`` resume exactly.

    Batches: {"tokens": int32 [b,S], "loss_mask": bool [b,S], "lengths": int32 [b], "row_ids": int32 [b]} with b = batch_size / process_count and S the folder's
    width or ``max_length``. The order depends on ``seed`` alone and is drawn anew each epoch. Batches are cut from one endless stream of epochs:
    every process has equally many, all of one shape; the rest of an epoch opens the next one's first batch, and a batch larger than the folder
    runs over several epochs.
    Rows that cannot give loss within S are left out (``trainable_rows`` names the others).
    Raises ValueError when batch_size does not divide by process_count, the process index is out of range, or no row is left.
    """
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index {process_index} is outside 0..{process_count - 1}")
    if data_config.batch_size < 1 or data_config.batch_size % process_count:
        raise ValueError(f"data.batch_size {data_config.batch_size} does not divide into {process_count} processes; use a multiple of {process_count}")
    if data_config.num_workers < 0:
        raise ValueError(f"data.num_workers {data_config.num_workers} is negative; 0 reads in the main process")
    if data_config.max_length is not None and data_config.max_length < 2:
        raise ValueError(f"data.max_length {data_config.max_length} leaves no anchor with a label; use at least 2")
    S = folder.width if data_config.max_length is None else min(folder.width, data_config.max_length)
    rows_m = trainable_rows(folder, S)
    if len(rows_m) == 0:
        raise ValueError(f"{folder.path}: no row of {folder.num_rows} has two neighbouring answer tokens in its first {S} positions; raise data.max_length")
    dataset = grain.MapDataset.source(_RowSource(folder, rows_m, S)).seed(seed).shuffle().repeat(None)
    dataset = dataset[process_index::process_count].batch(data_config.batch_size // process_count, drop_remainder=True)
    iterable = dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
    if data_config.num_workers:
        iterable = iterable.mp_prefetch(grain.MultiprocessingOptions(num_workers=data_config.num_workers, per_worker_buffer_size=2))
    return iter(iterable)
