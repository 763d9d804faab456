"""An explicitly chosen kernel, on whatever platform a program is lowered for."""

from __future__ import annotations

from collections.abc import Callable

import jax


def run_kernel(name: str, args: tuple, kernels: dict[str, Callable], reasons: dict[str, str | None]):
    """An explicit choice: the kernel of the platform that the program is lowered for, never anything else.

    kernels: platform ('cuda', 'tpu') -> function of ``args``; reasons: platform -> what keeps its kernel from serving them. Raises NotImplementedError with
    the reasons where the default backend's kernel, or every kernel, has one; on a platform without a kernel, Pallas' own error when it is lowered.
    """
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    against = {platform: reason for platform, reason in reasons.items() if reason}
    if here in against or len(against) == len(kernels):
        raise NotImplementedError(f"{name}: no kernel serves " + "; ".join(f"{reason} on {platform}" for platform, reason in against.items()))
    served = {platform: kernel for platform, kernel in kernels.items() if platform not in against}
    # Only the branch of the platform is lowered, and there is none for a CPU: there the last one says that it cannot run.
    return jax.lax.platform_dependent(*args, **served, default=list(served.values())[-1])
