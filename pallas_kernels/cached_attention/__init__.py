"""Attention of new tokens to a KV cache with a length for each row: the reference, a GPU kernel, and the choice between them."""

from __future__ import annotations

import jax

from pallas_kernels.cached_attention import ref

__all__ = ["cached_attention"]

LEAST_PROGRAMS = 128


def cached_attention(
    q_BTHC: jax.Array, keys_BSGC: jax.Array, values_BSGC: jax.Array, start_B: jax.Array, *, width: int | None = None, implementation: str | None = None
) -> jax.Array:
    """Query t of row b, at position start[b] + t, attends to cache rows 0..start[b] + t; its own row is already written.

    q [B,T,H,C], keys and values [B,S,G,C], start [B] int -> [B,T,H,C] in q's dtype. No row may see past ``width`` (default S); the reference reads
    that many rows, the kernel what each row sees. implementation: 'xla', 'pallas' (raises NotImplementedError for what it does not serve), or None:
    the kernel for single tokens of many rows on an NVIDIA GPU where it serves them, else XLA.
    """
    from pallas_kernels.cached_attention import pallas_gpu

    reference = lambda *args: ref.cached_attention(*args, width=width)  # noqa: E731
    args = q_BTHC, keys_BSGC, values_BSGC, start_B
    if implementation == "xla":
        return reference(*args)
    reason = pallas_gpu.unsupported(q_BTHC, keys_BSGC)
    if implementation == "pallas":
        if reason:
            raise NotImplementedError(f"cached_attention: the kernel does not serve {reason}")
        return pallas_gpu.cached_attention(*args)
    if implementation is not None:
        raise ValueError(f"implementation {implementation!r} is none of 'xla', 'pallas'")
    # A program of the kernel walks over a whole row: with few of them most of the chip would idle.
    if reason or q_BTHC.shape[1] > 1 or q_BTHC.shape[0] * keys_BSGC.shape[2] < LEAST_PROGRAMS:
        return reference(*args)
    return jax.lax.platform_dependent(*args, cuda=pallas_gpu.cached_attention, default=reference)
