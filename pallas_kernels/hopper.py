"""The NVIDIA GPU that a program is traced for, for kernels that only Hopper runs."""

from __future__ import annotations

import jax


def _device():
    """The mesh in scope's kind of device, or else the first one; None where that is no GPU."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) or (jax.devices()[0] if jax.default_backend() == "gpu" else None)


def not_hopper() -> str | None:
    """What keeps Hopper's kernels from this device, None if it is one."""
    device = _device()
    capability = getattr(device, "compute_capability", None)  # of a real device; the kind of one in a mesh has a name only
    names = ("H100", "H200", "H800", "H20", "GH200")
    found = str(capability).startswith("9.") if capability else any(name in getattr(device, "device_kind", "") for name in names)
    return None if found else "devices other than NVIDIA's Hopper"


def multiprocessors() -> int:
    """How many the device has; 1 where it does not say."""
    device = _device()
    return getattr(device, "num_cores", None) or getattr(device, "core_count", None) or 1
