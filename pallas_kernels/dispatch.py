"""The choice between an operation's reference and its kernels, by argument and by the platform that a program is lowered for."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import jax

PLAIN = ("xla", "chunks")  # implementations without a kernel, which run anywhere
_warned: set[str] = set()  # operations whose kernel was given up


def or_reference(name: str, kernel: Callable, reference: Callable) -> Callable:
    """``kernel``, or ``reference`` where tracing the kernel raises anything at all, with one warning an operation: for choices that the caller left open.

    What only a compiler or the device finds out comes after tracing, where nothing can be chosen any more: ``unsupported`` has to know it beforehand.
    """

    def run(*args):
        try:
            return kernel(*args)
        except Exception as error:  # whatever it is, a default must not stop a run that the reference can serve
            if name not in _warned:
                _warned.add(name)
                warnings.warn(f"{name}: plain XLA instead of the kernel, which raised {type(error).__name__}: {error}", stacklevel=2)
            return reference(*args)

    return run


def run_kernel(name: str, args: tuple, kernels: dict[str, Callable], reasons: dict[str, str | None]):
    """An explicit choice: the kernel of the platform that the program is lowered for, never anything else.

    kernels: platform ('cuda', 'tpu') -> function of ``args``; reasons: platform -> what keeps its kernel from serving them. Raises NotImplementedError with
    the reasons where the default backend's kernel, or every kernel, has one, or where that backend is an accelerator without a kernel; on a CPU, from
    which a program may be lowered for other platforms, Pallas' own error when it is lowered for the CPU.
    """
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    against = {platform: reason for platform, reason in reasons.items() if reason}
    if here not in kernels and here != "cpu":
        raise NotImplementedError(f"{name}: no such kernel for {here}, only for {', '.join(kernels)}")
    if here in against or len(against) == len(kernels):
        raise NotImplementedError(f"{name}: no kernel serves " + "; ".join(f"{reason} on {platform}" for platform, reason in against.items()))
    served = {platform: kernel for platform, kernel in kernels.items() if platform not in against}
    # Only the branch of the platform is lowered, and there is none for a CPU: there the last one says that it cannot run.
    return jax.lax.platform_dependent(*args, **served, default=list(served.values())[-1])


def check_here(choices: dict[str, str]) -> None:
    """Refuse kernels on a CPU before anything is read or traced; what an accelerator does not serve only ``run_kernel`` can say.

    choices: operation -> implementation, of programs that run where they are traced. Raises NotImplementedError.
    """
    for name, implementation in choices.items():
        if implementation not in PLAIN and jax.default_backend() == "cpu":
            raise NotImplementedError(f"{name}: {implementation!r} is a kernel of an accelerator and cannot run on a CPU; use 'xla' or the default")


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
        return run_kernel(name, args, {"cuda": kernel}, {"cuda": reason})
    if implementation is not None:
        raise ValueError(f"implementation {implementation!r} is none of 'xla', {kind!r}")
    return jax.lax.platform_dependent(*args, cuda=or_reference(name, kernel, reference), default=reference) if pays and not reason else reference(*args)


def without_jax_triton() -> str | None:
    """What keeps kernels from running through jax-triton in this environment, None if nothing does."""
    try:
        import jax_triton  # noqa: F401
    except Exception as error:  # a CPU jaxlib makes it fail in several ways, not all of them ImportErrors
        return f"an environment without jax-triton: pip install 'dspine-jax[cuda,triton]' ({type(error).__name__}: {error})"
    return None
