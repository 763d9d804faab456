"""The Triton kernels of ``triton_kernels`` called from JAX through jax-triton, an optional extra that is imported on the first call."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dspine_jax.vocabulary import vocabulary_logits
from pallas_kernels.dispatch import without_jax_triton
from pallas_kernels.topk_logits import pallas_gpu
from pallas_kernels.topk_logits.chunks import CHUNK

LAUNCHES = dict(pallas_gpu.LAUNCHES)


def unsupported(hidden: jax.Array, rows_VD: jax.Array, num_candidates: int) -> str | None:
    """What keeps the kernels from serving these arrays in this environment, None if nothing does."""
    return pallas_gpu.unsupported(hidden, rows_VD, num_candidates) or without_jax_triton()


def topk_logits(
    hidden: jax.Array,
    rows_VD: jax.Array,
    num_candidates: int,
    *,
    num_tokens: int,
    own_head: bool | None = None,
    compute_capability: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See ``pallas_kernels.topk_logits.topk_logits``; only for what ``unsupported`` has nothing against. own_head: as ``pallas_gpu.topk_logits`` has it.

    compute_capability: of the GPU to compile for (90 for Hopper), default the first one of this machine.
    """
    import jax_triton

    from pallas_kernels.topk_logits import triton_kernels as kernels

    triton_call = functools.partial(jax_triton.triton_call, compute_capability=compute_capability)
    shape = jax.ShapeDtypeStruct
    hidden_TD = hidden.reshape(-1, hidden.shape[-1])
    (T, D), V, P = hidden_TD.shape, rows_VD.shape[0], num_candidates
    if pallas_gpu.head_pays(hidden, rows_VD) if own_head is None else own_head:
        M, launch = pallas_gpu.launch_for(T, D, LAUNCHES)
        C = pl.cdiv(V, launch.rows)
        logits_TL, maxima_TC = triton_call(
            hidden_TD,
            rows_VD,
            kernel=kernels.head_kernel,
            out_shape=[shape((T, C * launch.rows), jnp.float32), shape((T, C), jnp.float32)],
            grid=(pl.cdiv(T, M), C),
            num_warps=launch.warps,
            num_stages=launch.stages,
            COUNT=T,
            ROWS=V,
            WIDTH=D,
            NUM_TOKENS=num_tokens,
            CHUNKS=C,
            BLOCK_T=M,
            BLOCK_V=launch.rows,
            BLOCK_D=launch.depth,
        )
        chunk = launch.rows
    else:
        logits_TL = vocabulary_logits(hidden_TD, rows_VD, V)
        maxima_TC, chunk = pallas_gpu.chunk_maxima(logits_TL, num_tokens), CHUNK
    C = maxima_TC.shape[1]
    values_TP, ids_TP = triton_call(
        maxima_TC,
        logits_TL,
        kernel=kernels.select_kernel,
        out_shape=[shape((T, P), jnp.float32), shape((T, P), jnp.int32)],
        grid=(T,),
        num_warps=pallas_gpu.SELECT_WARPS,
        num_stages=1,
        WIDTH=logits_TL.shape[1],
        NUM_TOKENS=num_tokens,
        CHUNKS=C,
        CHUNK=chunk,
        NUMBER=P,
        BLOCK_C=pl.next_power_of_2(C),
        SLOTS=pl.next_power_of_2(P),
        HELD=min(P, C),
    )
    return values_TP.reshape(*hidden.shape[:-1], P), ids_TP.reshape(*hidden.shape[:-1], P)
