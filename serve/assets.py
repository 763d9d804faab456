"""Where the embedded demo lies: in a checkout, or beside an installed wheel."""

from __future__ import annotations

import sysconfig
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent / "assets" / "demo"
INSTALLED = Path(sysconfig.get_path("data")) / "share" / "dspine-jax" / "demo"


def demo_folder() -> Path:
    """Folder with target/, dflash/, dspine/, data/ and prompts.jsonl. Raises FileNotFoundError where neither place has it."""
    for folder in (CHECKOUT, INSTALLED):
        if (folder / "target" / "config.json").is_file():
            return folder
    raise FileNotFoundError(f"the embedded demo is neither at {CHECKOUT} nor at {INSTALLED}; give --target, or use a whole checkout or wheel")
