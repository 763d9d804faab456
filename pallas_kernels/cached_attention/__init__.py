"""Attention of new tokens to a KV cache with a length for each row: the reference, a GPU kernel, and the choice between them."""

from __future__ import annotations

import functools

import jax

from pallas_kernels.cached_attention import ref
from pallas_kernels.dispatch import gpu_or_reference

__all__ = ["cached_attention"]

IMPLEMENTATIONS = ("xla", "pallas")

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

    return gpu_or_reference(
        "cached_attention",
        (q_BTHC, keys_BSGC, values_BSGC, start_B),
        reference=functools.partial(ref.cached_attention, width=width),
        kernel=pallas_gpu.cached_attention,
        reason=pallas_gpu.unsupported(q_BTHC, keys_BSGC),
        implementation=implementation,
        # A program of the kernel walks over a whole row: with few of them most of the chip would idle.
        pays=q_BTHC.shape[1] == 1 and q_BTHC.shape[0] * keys_BSGC.shape[2] >= LEAST_PROGRAMS,
    )
