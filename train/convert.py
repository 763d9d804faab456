"""Turn .npz files of target-written answers into dataset folders.

Two forms are read, told apart by their keys:
  tokens [n,S], prompt_pad [n], answer_len [n] and optionally source [n]: one folder;
  {name}_tokens, {name}_prompt_pad, {name}_answer_len for each benchmark: one folder a benchmark under --output.
The first --prompt-columns columns of a row are its prompt, padded on the left by prompt_pad columns; the answer follows, answer_len
tokens long, its end token included where it has one. In the folder the prompt starts at position 0 and the loss mask
is 1 exactly on the answer. Rows that cannot give loss are dropped and counted.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import zipfile
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dspine_jax.chat import TEMPLATE_MODES
from train.data import Manifest, pad_rows, refuse_overwrite, skip_reason, write_dataset

EXAMPLES = """examples:
  dspine-convert train.npz --output data/smollm2 --sources 0,2 --vocab-size 49152 --target SmolLM2-135M-Instruct.Q4_1.gguf
  dspine-convert dev.npz --output data/dev --tokenizer tokenizer.json
  dspine-convert train.npz --output data/small --limit 256
"""
NEEDED = ("tokens", "prompt_pad", "answer_len")
SINGLE_PROMPT_COLUMNS, BENCHMARK_PROMPT_COLUMNS = 256, 512


def build_parser() -> argparse.ArgumentParser:
    """Every option of ``dspine-convert``."""
    parser = argparse.ArgumentParser(
        prog="dspine-convert", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("input", type=Path, help=".npz file")
    parser.add_argument("--output", type=Path, required=True, help="folder to write (for benchmarks: their parent)")
    parser.add_argument("--sources", type=_ids, help="keep rows whose source is one of these, such as 0,2")
    parser.add_argument("--limit", type=int, help="keep at most this many rows of each folder, in file order")
    parser.add_argument("--vocab-size", type=int, help="refuse token ids at or above this")
    parser.add_argument(
        "--prompt-columns", type=int, help=f"prompt columns of a row (default {SINGLE_PROMPT_COLUMNS}, in a benchmark file {BENCHMARK_PROMPT_COLUMNS})"
    )
    parser.add_argument("--target", default="", help="identity of the target that wrote the answers, kept in the manifest")
    parser.add_argument("--template-mode", choices=TEMPLATE_MODES, help="chat template mode of the prompts, kept in the manifest")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer file; its name and sha256 are kept in the manifest")
    parser.add_argument("--overwrite", action="store_true", help="replace the datasets in folders that are not empty")
    return parser


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = build_parser()
    args = parser.parse_args(argv)
    for name in ("limit", "vocab_size", "prompt_columns"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value} must be at least 1")
    return args


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,2") from None


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with np.load(path, allow_pickle=False) as data:
            return {name: data[name] for name in data.files}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is not a readable .npz of plain arrays: {error}") from error


def _groups(path: Path, data: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Arrays by output folder; the single form has the one name ''."""
    if "tokens" in data:
        groups = {"": data}
    else:
        names = [key.removesuffix("_tokens") for key in data if key.endswith("_tokens")]
        if not names:
            raise ValueError(f"{path} holds {', '.join(data) or 'no arrays'}; expected tokens, or NAME_tokens for each benchmark")
        groups = {name: {key.removeprefix(f"{name}_"): value for key, value in data.items() if key.startswith(f"{name}_")} for name in names}
    for name, group in groups.items():
        # The name becomes a folder: it may not climb out of --output.
        if name and (Path(name).name != name or name in (".", "..")):
            raise ValueError(f"{path}: benchmark name {name!r} is not a plain folder name")
        for key in NEEDED:
            if key not in group:
                raise ValueError(f"{path}: {f'{name}_{key}' if name else key} is missing")
            if not np.issubdtype(group[key].dtype, np.integer):
                raise ValueError(f"{path}: {f'{name}_{key}' if name else key} holds {group[key].dtype}, expected integers")
        shape = group["tokens"].shape
        if len(shape) != 2 or shape[0] == 0 or group["prompt_pad"].shape != shape[:1] or group["answer_len"].shape != shape[:1]:
            shapes = ", ".join(f"{key} {group[key].shape}" for key in NEEDED)
            raise ValueError(f"{path}: shapes do not fit [n,S], [n], [n] with n at least 1: {shapes}")
    return groups


def _check_ranges(path: Path, label: str, group: dict[str, np.ndarray], prompt_columns: int, vocab_size: int | None) -> None:
    tokens_nS = group["tokens"]
    answer_columns = tokens_nS.shape[1] - prompt_columns
    if answer_columns < 1:
        raise ValueError(f"{path}: {label}tokens has {tokens_nS.shape[1]} columns, --prompt-columns {prompt_columns} leaves none for answers")
    for key, low, high in (("prompt_pad", 0, prompt_columns - 1), ("answer_len", 0, answer_columns)):
        bad = (group[key] < low) | (group[key] > high)
        if bad.any():
            raise ValueError(f"{path}: {label}{key}[{bad.argmax()}] is {group[key][bad.argmax()]}, outside {low}..{high}")
    limit = 2**32 if vocab_size is None else vocab_size
    bad = ((tokens_nS < 0) | (tokens_nS >= limit)).any(axis=1)
    if bad.any():
        raise ValueError(f"{path}: {label}tokens row {bad.argmax()} holds id {tokens_nS[bad.argmax()].max()}, outside 0..{limit - 1}")


def convert_group(
    group: dict[str, np.ndarray], prompt_columns: int, sources: tuple[int, ...] | None = None, limit: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, int]]:
    """One folder's arrays from one group of the file.

    ``group``: tokens [n,S] left-padded, prompt_pad [n], answer_len [n], and source [n] when ``sources`` is given.
    Returns (tokens uint32 [m,S], loss_mask uint8 [m,S], lengths int32 [m], rows left out by reason).
    """
    token_rows, mask_rows, skipped = [], [], {}
    tokens_nS = group["tokens"]
    for i in tqdm(range(len(tokens_nS)), desc="rows", unit="row", disable=None, leave=False):
        pad, answer = int(group["prompt_pad"][i]), int(group["answer_len"][i])
        row = tokens_nS[i, pad : prompt_columns + answer]
        mask = np.arange(len(row)) >= prompt_columns - pad
        if sources is not None and int(group["source"][i]) not in sources:
            reason = "source not chosen"
        elif limit is not None and len(token_rows) >= limit:
            reason = "beyond the row limit"
        else:
            reason = skip_reason(mask)
        if reason is None:
            token_rows.append(row)
            mask_rows.append(mask)
        else:
            skipped[reason] = skipped.get(reason, 0) + 1
    return *pad_rows(token_rows, mask_rows, tokens_nS.shape[1]), skipped


def convert(args: argparse.Namespace) -> None:
    """Read, check everything, then write. Raises FileNotFoundError, FileExistsError or ValueError before the first folder is written."""
    groups = _groups(args.input, _read_npz(args.input))
    with open(args.input, "rb") as file:
        source = f"{args.input.name}, sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"
    tokenizer_sha256 = hashlib.sha256(args.tokenizer.read_bytes()).hexdigest() if args.tokenizer else None
    ready = {}
    for name, group in groups.items():
        label = f"{name}_" if name else ""
        prompt_columns = args.prompt_columns or (BENCHMARK_PROMPT_COLUMNS if name else SINGLE_PROMPT_COLUMNS)
        if args.sources is not None and group.get("source", np.zeros(0)).shape != group["answer_len"].shape:
            raise ValueError(f"{args.input}: --sources needs an array {label}source with one number a row")
        _check_ranges(args.input, label, group, prompt_columns, args.vocab_size)
        refuse_overwrite(args.output / name, args.overwrite)
        ready[name] = convert_group(group, prompt_columns, args.sources, args.limit)
        if len(ready[name][0]) == 0:
            raise ValueError(f"{args.input}: no row of {name or 'the file'} can give loss: {_listing(ready[name][3])}")
    for name, (tokens_nS, loss_mask_nS, lengths_n, skipped) in ready.items():
        manifest = Manifest(
            name=name or args.output.name,
            source=source if args.sources is None else f"{source}, sources {','.join(map(str, args.sources))}",
            target=args.target,
            template_mode=args.template_mode,
            tokenizer=args.tokenizer.name if args.tokenizer else None,
            tokenizer_sha256=tokenizer_sha256,
            skipped=skipped,
        )
        write_dataset(args.output / name, tokens_nS, loss_mask_nS, lengths_n, manifest, overwrite=args.overwrite)
        kept = f"{len(tokens_nS):,} rows of width {tokens_nS.shape[1]}, {int(loss_mask_nS.sum()):,} answer tokens"
        print(f"{args.output / name}: {kept}; left out: {_listing(skipped)}")


def _listing(skipped: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items())) or "none"


def main(argv: list[str] | None = None) -> int:
    """Console entry point. Returns 0, 2 for bad input or a file error, 130 for Ctrl-C."""
    args = _parse_args(argv)
    try:
        convert(args)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
