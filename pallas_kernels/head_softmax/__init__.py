"""LM head and softmax weights relative to a known origin in one operation: the reference, a GPU kernel, and the choice between them."""

from __future__ import annotations

import functools

import jax

from pallas_kernels.head_softmax import ref

__all__ = ["head_softmax"]


def head_softmax(
    hidden_BTD: jax.Array, rows_VD: jax.Array, origin_BT: jax.Array, *, num_tokens: int, largest: float, implementation: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Softmax of ``hidden U^T`` before its division: weights exp(min(logit - origin, largest)), their sum, and the largest logit's id.

    With an origin that is known beforehand one pass does; the largest logit would be known only after one. Logits, exponents and sums are fp32, weights
    are rounded at the end; ids >= ``num_tokens`` weigh 0. Ties of the largest logit go to the lowest id.

    hidden [B,T,D], rows U [V,D], origin [B,T] fp32 -> (weights [B,T,V] in hidden's dtype, total [B,T] fp32, best [B,T] int32).

    implementation: 'xla', 'pallas' (raises NotImplementedError for what it does not serve), or None: the kernel on an NVIDIA GPU where it serves, else XLA.
    """
    from pallas_kernels.head_softmax import pallas_gpu

    args = hidden_BTD, rows_VD, origin_BT
    reference = functools.partial(ref.head_softmax, num_tokens=num_tokens, largest=largest)
    kernel = functools.partial(pallas_gpu.head_softmax, num_tokens=num_tokens, largest=largest)
    if implementation == "xla":
        return reference(*args)
    reason = pallas_gpu.unsupported(hidden_BTD, rows_VD)
    if implementation == "pallas":
        if reason:
            raise NotImplementedError(f"head_softmax: the kernel does not serve {reason}")
        return kernel(*args)
    if implementation is not None:
        raise ValueError(f"implementation {implementation!r} is none of 'xla', 'pallas'")
    return reference(*args) if reason else jax.lax.platform_dependent(*args, cuda=kernel, default=reference)
