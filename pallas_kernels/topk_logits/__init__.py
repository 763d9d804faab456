"""LM head and top-P in one operation (DESIGN 8): the reference, kernels, and the choice between them."""

from __future__ import annotations

import functools

import jax

from pallas_kernels.dispatch import or_reference, run_kernel
from pallas_kernels.topk_logits import chunks, ref

__all__ = ["topk_logits"]

IMPLEMENTATIONS = ("xla", "chunks", "pallas", "triton")


def topk_logits(
    hidden: jax.Array, rows_VD: jax.Array, num_candidates: int, *, num_tokens: int, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Top-P of fp32 logits ``hidden U^T`` among the first ``num_tokens`` rows, ties to the lowest id. Every implementation gives the same ids.

    hidden [...,D], rows U [V,D] -> (values [...,P] fp32 falling, ids [...,P] int32). Rows from ``num_tokens`` on score -1e30, whatever they hold.

    implementation: 'xla' (``lax.top_k`` over V), 'chunks' (plain XLA through the maxima of chunks), 'pallas' (a TPU or an NVIDIA GPU), 'triton' (the same
    kernels through jax-triton, NVIDIA), or None: on an NVIDIA GPU 'pallas' where it serves, else 'chunks'; elsewhere 'xla'. An explicit choice that cannot
    run raises NotImplementedError with the reason. Kernels have no derivative, 'triton' no vmap either.
    """
    from pallas_kernels.topk_logits import pallas_gpu, pallas_tpu

    args = hidden, rows_VD
    bind = lambda function: functools.partial(function, num_candidates=num_candidates, num_tokens=num_tokens)  # noqa: E731
    if implementation == "xla":
        return bind(ref.topk_logits)(*args)
    if implementation == "chunks":
        return bind(chunks.topk_logits)(*args)
    reason = pallas_gpu.unsupported(*args, num_candidates)
    if implementation == "pallas":
        kernels = {"cuda": bind(pallas_gpu.topk_logits), "tpu": bind(pallas_tpu.topk_logits)}
        return run_kernel("topk_logits", args, kernels, {"cuda": reason, "tpu": pallas_tpu.unsupported(*args, num_candidates)})
    if implementation == "triton":
        from pallas_kernels.topk_logits import triton_gpu

        return run_kernel("topk_logits", args, {"cuda": bind(triton_gpu.topk_logits)}, {"cuda": triton_gpu.unsupported(*args, num_candidates)})
    if implementation is not None:
        raise ValueError(f"implementation {implementation!r} is none of {', '.join(map(repr, IMPLEMENTATIONS))}")
    plain = bind(chunks.topk_logits)
    on_gpu = plain if reason else or_reference("topk_logits", bind(pallas_gpu.topk_logits), plain)
    return jax.lax.platform_dependent(*args, cuda=on_gpu, default=bind(ref.topk_logits))
