"""The embedded demo: a small trained target, its drafters and data (assets/demo in a checkout, share/dspine-jax/demo of an installed wheel)."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

DISTRIBUTION = "dspine-jax"
MARK = "demo/target/config.json"  # a file that tells the folder


def demo_folder() -> Path:
    """The folder with target/, dflash/, dspine/, data/ and prompts.jsonl. Raises FileNotFoundError where the installation has none."""
    checkout = Path(__file__).resolve().parents[1] / "assets" / "demo"
    if (checkout / "target" / "config.json").is_file():
        return checkout
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.as_posix().endswith(MARK) and (path := Path(file.locate()).resolve()).is_file():
            return path.parents[1]
    raise FileNotFoundError(f"this installation of {DISTRIBUTION} holds no demo (looked for {checkout} and share/dspine-jax/demo); give --target")
