"""Put what configs/demo/make.sh made into the folder that ships: weights as bf16, a part of the training data, the evaluation data, a few prompts.

    python configs/demo/pack.py work assets/demo
"""

import argparse
import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp

from dspine_jax.drafter_io import load_drafter, save_drafter
from dspine_jax.target_io import read_target_config
from train.data import DatasetFolder, write_dataset

TARGET_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def copy_rows(source: Path, output: Path, rows: int, width: int) -> None:
    """The first rows of a dataset folder, cut to a width; where a row ends is part of the copy's manifest."""
    folder = DatasetFolder(source)
    tokens, mask, lengths = folder.tokens[:rows, :width], folder.loss_mask[:rows, :width], folder.lengths[:rows].clip(max=width)
    manifest = dataclasses.replace(folder.manifest, source=f"{folder.manifest.source}; the first {len(tokens)} rows, cut to {width} tokens")
    write_dataset(output, tokens, mask, lengths, manifest, overwrite=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder of configs/demo/make.sh")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--rows", type=int, default=1600, help="rows of training data (default 1600)")
    parser.add_argument("--width", type=int, default=256, help="their tokens (default 256)")
    parser.add_argument("--prompts", type=int, default=8, help="prompts to decode (default 8)")
    args = parser.parse_args()
    (args.output / "target").mkdir(parents=True, exist_ok=True)
    for name in TARGET_FILES:
        shutil.copyfile(args.work / "target" / name, args.output / "target" / name)
    target = read_target_config(args.output / "target")
    for method in ("dflash", "dspine"):
        save_drafter(args.output / method, load_drafter(args.work / method / "drafter", target), dtype=jnp.bfloat16)
    copy_rows(args.work / "train", args.output / "data" / "train", args.rows, args.width)
    copy_rows(args.work / "evaluation", args.output / "data" / "evaluation", 64, 384)
    # Prompts beyond those of the evaluation data.
    lines = (args.work / "evaluation.jsonl").read_text().splitlines()[64 : 64 + args.prompts]
    (args.output / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    files = [path for path in args.output.rglob("*") if path.is_file()]
    print(json.dumps({"files": len(files), "MB": sum(path.stat().st_size for path in files) / 1e6}))


if __name__ == "__main__":
    main()
