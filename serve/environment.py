"""What a figure was measured on: hardware, versions, commit, date."""

from __future__ import annotations

import datetime
import importlib.metadata
import subprocess
from pathlib import Path

PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint")


def environment() -> dict:
    """{"hardware", "versions", "commit", "date"} of this process; commit is "unknown" outside a git checkout."""
    import jax

    root = Path(__file__).resolve().parent.parent
    answer = subprocess.run(["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    devices = jax.devices()
    return {
        "hardware": f"{len(devices)} x {devices[0].device_kind}",
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "commit": answer.stdout.strip() if answer.returncode == 0 else "unknown",
        "date": datetime.date.today().isoformat(),
    }
