"""Cached attention as one Pallas kernel (Triton): a program a row and kv head walks over what the row has filled, and no further."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from dspine_jax.attention import MASKED

BLOCK_ROWS = 64  # cache rows read at a time; a cache holds a multiple of it
LEAST_QUERIES = 16  # rows of the smallest matrix product
MOST_QUERIES = 64


def _queries(q_BTHC: jax.Array, G: int) -> int:
    """Queries of one kv head, rounded up to the power of two that the kernel works on."""
    T, H = q_BTHC.shape[1:3]
    return max(LEAST_QUERIES, 1 << (T * (H // G) - 1).bit_length())


def unsupported(q_BTHC: jax.Array, keys_BSGC: jax.Array) -> str | None:
    """What keeps the kernel from serving these arrays, None if nothing does."""
    S, G, C = keys_BSGC.shape[1:]
    for dtype in (q_BTHC.dtype, keys_BSGC.dtype):
        if dtype not in (jnp.bfloat16, jnp.float16):
            return f"{dtype} (only bfloat16 and float16)"
    if C & (C - 1) or not 16 <= C <= 256:
        return f"a head width of {C} (only powers of two from 16 to 256)"
    if S % BLOCK_ROWS:
        return f"a cache of {S} rows (only multiples of {BLOCK_ROWS})"
    if _queries(q_BTHC, G) > MOST_QUERIES:
        return f"{q_BTHC.shape[1] * (q_BTHC.shape[2] // G)} queries a kv head (at most {MOST_QUERIES})"
    return None


def _kernel(start_ref, q_ref, k_ref, v_ref, out_ref, *, num_tokens: int, per_token: int, scale: float):
    """q_ref [M,C]: the queries of one row and kv head, token after token, then rows that only fill up to M; k_ref, v_ref [S,C]; out_ref [M,C]."""
    M, C = q_ref.shape
    query_M = jnp.arange(M, dtype=jnp.int32)
    real_M1 = (query_M < num_tokens * per_token)[:, None]
    q_MC = plgpu.load(q_ref.at[:, :], mask=real_M1, other=0.0)
    first = start_ref[0]
    last_M = first + query_M // per_token

    def walk(i, carry):
        out_MC, top_M, total_M = carry
        rows = pl.ds(i * BLOCK_ROWS, BLOCK_ROWS)
        scores_MR = plgpu.dot(q_MC, k_ref[rows, :].T) * scale
        row_R = i * BLOCK_ROWS + jnp.arange(BLOCK_ROWS, dtype=jnp.int32)
        scores_MR = jnp.where(row_R[None, :] <= last_M[:, None], scores_MR, MASKED)
        new_top_M = jnp.maximum(top_M, scores_MR.max(axis=1))
        weights_MR = jnp.exp(scores_MR - new_top_M[:, None])
        shrink_M = jnp.exp(top_M - new_top_M)
        v_RC = v_ref[rows, :]
        out_MC = out_MC * shrink_M[:, None] + plgpu.dot(weights_MR.astype(v_RC.dtype), v_RC)
        return out_MC, new_top_M, total_M * shrink_M + weights_MR.sum(axis=1)

    # Row 0 is visible to every query, so the first block leaves a finite top and a total of at least 1.
    carry = jnp.zeros((M, C), jnp.float32), jnp.full((M,), MASKED, jnp.float32), jnp.zeros((M,), jnp.float32)
    blocks = jnp.minimum((first + num_tokens - 1) // BLOCK_ROWS + 1, k_ref.shape[0] // BLOCK_ROWS)
    out_MC, _, total_M = jax.lax.fori_loop(0, blocks, walk, carry)
    plgpu.store(out_ref.at[:, :], (out_MC / total_M[:, None]).astype(out_ref.dtype), mask=real_M1)


def cached_attention(q_BTHC: jax.Array, keys_BSGC: jax.Array, values_BSGC: jax.Array, start_B: jax.Array, *, interpret: bool = False) -> jax.Array:
    """See ``pallas_kernels.cached_attention.cached_attention``; only for what ``unsupported`` has nothing against."""
    B, T, H, C = q_BTHC.shape
    S, G = keys_BSGC.shape[1:3]
    q_BGQC = q_BTHC.reshape(B, T, G, H // G, C).swapaxes(1, 2).reshape(B, G, T * (H // G), C)
    queries = pl.BlockSpec((None, None, _queries(q_BTHC, G), C), lambda b, g: (b, g, 0, 0))  # may overhang: read and written under a mask
    cache = pl.BlockSpec((None, S, None, C), lambda b, g: (b, 0, g, 0))
    out_BGQC = pl.pallas_call(
        functools.partial(_kernel, num_tokens=T, per_token=H // G, scale=C**-0.5),
        grid=(B, G),
        in_specs=[pl.BlockSpec((1,), lambda b, g: (b,)), queries, cache, cache],
        out_specs=queries,
        out_shape=jax.ShapeDtypeStruct(q_BGQC.shape, q_BTHC.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="cached_attention",
    )(start_B, q_BGQC, keys_BSGC, values_BSGC)
    return out_BGQC.reshape(B, G, T, H // G, C).swapaxes(1, 2).reshape(B, T, H, C)
