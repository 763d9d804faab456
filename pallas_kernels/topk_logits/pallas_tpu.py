"""LM head with top-P in one pass over U, as one Pallas kernel for TPUs: the P best so far stay on the chip while tiles of U stream by."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dspine_jax.vocabulary import MASKED

LANES = 128  # the P best are kept in one register's width
LAST = jnp.iinfo(jnp.int32).max
TILE_BYTES = 4 << 20  # of U; two are in flight
MOST_TOKENS = 256  # of a tile: U is read again for each
VMEM_BYTES = 48 << 20


def unsupported(hidden: jax.Array, rows_VD: jax.Array, num_candidates: int) -> str | None:
    """What keeps the kernel from serving these arrays, None if nothing does."""
    if hidden.dtype != rows_VD.dtype or hidden.dtype not in (jnp.bfloat16, jnp.float32):
        return f"hidden states in {hidden.dtype} with rows in {rows_VD.dtype} (only bfloat16 or float32 for both)"
    if not 1 <= num_candidates <= min(LANES, rows_VD.shape[0]):
        return f"the {num_candidates} best of {rows_VD.shape[0]} (only 1 to {LANES})"
    return None


def _kernel(hidden_ref, rows_ref, values_ref, ids_ref, *, count: int, num_rows: int, num_tokens: int):
    """hidden_ref [M,D], rows_ref [W,D]; values_ref and ids_ref [M,LANES] hold the best so far, the first ``count`` lanes count."""
    tile, W = pl.program_id(1), rows_ref.shape[0]

    @pl.when(tile == 0)
    def _():
        values_ref[...] = jnp.full(values_ref.shape, -jnp.inf, jnp.float32)
        ids_ref[...] = jnp.zeros(ids_ref.shape, jnp.int32)

    logits_MW = jax.lax.dot_general(hidden_ref[...], rows_ref[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    id_MW = tile * W + jax.lax.broadcasted_iota(jnp.int32, logits_MW.shape, 1)
    logits_MW = jnp.where(id_MW < num_tokens, logits_MW, jnp.where(id_MW < num_rows, MASKED, -jnp.inf))

    # Ids rise from tile to tile, so one that only equals the last of the best comes too late. Most tiles hold no better one.
    @pl.when(jnp.any(jnp.max(logits_MW, axis=1, keepdims=True) > values_ref[:, count - 1 : count]))
    def _():
        lane_ML = jax.lax.broadcasted_iota(jnp.int32, values_ref.shape, 1)
        ids_MN = jnp.concatenate([ids_ref[...], id_MW], axis=1)

        def take(i, carry):
            left_MN, best_ML, best_ids_ML = carry
            top_M1 = jnp.max(left_MN, axis=1, keepdims=True)
            first_M1 = jnp.min(jnp.where(left_MN == top_M1, ids_MN, LAST), axis=1, keepdims=True)
            best_ML = jnp.where(lane_ML == i, top_M1, best_ML)
            best_ids_ML = jnp.where(lane_ML == i, jnp.minimum(first_M1, num_rows - 1), best_ids_ML)
            return jnp.where(ids_MN == first_M1, -jnp.inf, left_MN), best_ML, best_ids_ML

        empty = jnp.full(values_ref.shape, -jnp.inf, jnp.float32), jnp.zeros(ids_ref.shape, jnp.int32)
        _, best_ML, best_ids_ML = jax.lax.fori_loop(0, count, take, (jnp.concatenate([values_ref[...], logits_MW], axis=1), *empty))
        values_ref[...], ids_ref[...] = best_ML, best_ids_ML


def topk_logits(
    hidden: jax.Array,
    rows_VD: jax.Array,
    num_candidates: int,
    *,
    num_tokens: int,
    tile: tuple[int, int] | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See ``pallas_kernels.topk_logits.topk_logits``; only for what ``unsupported`` has nothing against. tile: (tokens, rows of U), for tests."""
    hidden_TD = hidden.reshape(-1, hidden.shape[-1])
    (T, D), V = hidden_TD.shape, rows_VD.shape[0]
    fit = max(LANES, TILE_BYTES // (D * rows_VD.dtype.itemsize) // LANES * LANES)
    M, W = tile or (min(T, MOST_TOKENS), min(fit, pl.cdiv(V, LANES) * LANES))
    best = pl.BlockSpec((M, LANES), lambda t, v: (t, 0))
    values_TL, ids_TL = pl.pallas_call(
        functools.partial(_kernel, count=num_candidates, num_rows=V, num_tokens=num_tokens),
        grid=(pl.cdiv(T, M), pl.cdiv(V, W)),
        in_specs=[pl.BlockSpec((M, D), lambda t, v: (t, 0)), pl.BlockSpec((W, D), lambda t, v: (v, 0))],
        out_specs=[best, best],
        out_shape=[jax.ShapeDtypeStruct((T, LANES), dtype) for dtype in (jnp.float32, jnp.int32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="topk_logits",
    )(hidden_TD, rows_VD)
    P = num_candidates
    return values_TL[:, :P].reshape(*hidden.shape[:-1], P), ids_TL[:, :P].reshape(*hidden.shape[:-1], P)
