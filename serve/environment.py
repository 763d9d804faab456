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


def default_dtype() -> str:
    """The compute precision where none is asked for: bfloat16, but float32 on a CPU, which has no fast bfloat16."""
    import jax

    return "float32" if jax.default_backend() == "cpu" else "bfloat16"
