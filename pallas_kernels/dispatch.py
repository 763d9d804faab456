"""The choice between an operation's reference and its kernels, by argument and by the platform that a program is lowered for."""

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


def gpu_or_reference(
    name: str, args: tuple, *, reference: Callable, kernel: Callable, reason: str | None, implementation: str | None, kind: str = "pallas", pays: bool = True
):
    """An operation with one kernel, for NVIDIA GPUs: ``implementation`` 'xla', ``kind``, or None, the kernel on a GPU where it serves and ``pays``.

    reason: what keeps the kernel from serving ``args``, None if nothing does. Raises NotImplementedError with it for an explicit ``kind``, ValueError for
    an unknown implementation.
    """
    if implementation == "xla":
        return reference(*args)
    if implementation == kind:
        if reason:
            raise NotImplementedError(f"{name}: the kernel does not serve {reason}")
        return kernel(*args)
    if implementation is not None:
        raise ValueError(f"implementation {implementation!r} is none of 'xla', {kind!r}")
    return jax.lax.platform_dependent(*args, cuda=kernel, default=reference) if pays and not reason else reference(*args)


def without_jax_triton() -> str | None:
    """What keeps kernels from running through jax-triton in this environment, None if nothing does."""
    try:
        import jax_triton  # noqa: F401
    except Exception as error:  # a CPU jaxlib makes it fail in several ways, not all of them ImportErrors
        return f"an environment without jax-triton: pip install 'dspine-jax[cuda,triton]' ({type(error).__name__}: {error})"
    return None
