"""What a figure was measured on: hardware, versions, commit, date."""

from __future__ import annotations

import datetime
import importlib.metadata
import subprocess
from pathlib import Path

PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint")
GIB = 2**30


def environment() -> dict:
    """``stamp`` of this process under JAX."""
    import jax

    devices = jax.devices()
    return stamp(f"{len(devices)} x {devices[0].device_kind}", PACKAGES)


def stamp(hardware: str, packages: tuple[str, ...]) -> dict:
    """{"hardware", "versions", "commit", "date"}; commit is "unknown" outside a git checkout."""
    root = Path(__file__).resolve().parent.parent
    answer = subprocess.run(["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "hardware": hardware,
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "commit": answer.stdout.strip() if answer.returncode == 0 else "unknown",
        "date": datetime.date.today().isoformat(),
    }


def peak_memory_gib() -> float | None:
    """Peak device memory of the first local device in GiB, or None where the backend does not tell (CPU)."""
    import jax

    stats = jax.local_devices()[0].memory_stats()
    return stats["peak_bytes_in_use"] / GIB if stats and "peak_bytes_in_use" in stats else None


def default_dtype() -> str:
    """The compute precision where none is asked for: bfloat16, but float32 on a CPU, which has no fast bfloat16."""
    import jax

    return "float32" if jax.default_backend() == "cpu" else "bfloat16"
