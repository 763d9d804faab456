"""LM head with top-P in one pass over U, as two Pallas kernels (Triton lowering).

The first streams U: a program computes the logits of a run of rows for its tokens, leaves them and their maximum. The second, a program a token, finds the
runs that hold the P best by those maxima (see ``chunks``) and then the P best in them: a few KB a token. From ``HEAD_TOKENS`` on the head is XLA's
matrix product, and only the second kernel is used.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from dspine_jax.vocabulary import MASKED, mask_padded_vocabulary, vocabulary_logits
from pallas_kernels.mesh import mesh_in_scope
from pallas_kernels.topk_logits.chunks import CHUNK

LAST = jnp.iinfo(jnp.int32).max
MOST_CANDIDATES = 32
HEAD_TOKENS = 16  # most tokens of the first kernel: one block of 16 slots. Like LAUNCHES, for bench_selection to settle


class Launch(NamedTuple):
    """Tile of the first kernel: rows of U, and how deep a slice of D is read at a time, powers of two; Triton's warps and pipeline stages."""

    rows: int
    depth: int
    warps: int
    stages: int


# Tokens of a program -> launch.
LAUNCHES = {16: Launch(128, 128, 4, 4), 32: Launch(128, 128, 4, 4), 64: Launch(128, 64, 4, 4), 128: Launch(128, 64, 8, 4)}
SELECT_WARPS = 4


def unsupported(hidden: jax.Array, rows_VD: jax.Array, num_candidates: int) -> str | None:
    """What keeps the kernels from serving these arrays, None if nothing does."""
    if not 1 <= num_candidates <= min(MOST_CANDIDATES, rows_VD.shape[0]):
        return f"the {num_candidates} best of {rows_VD.shape[0]} (only 1 to {MOST_CANDIDATES})"
    if hidden.size == 0:
        return "no hidden state at all"
    if (mesh := mesh_in_scope()) is not None:
        return f"a mesh of several devices ({dict(mesh.shape)})"
    return None


def head_pays(hidden: jax.Array, rows_VD: jax.Array) -> bool:
    """Whether the LM head is the first kernel's rather than XLA's: few tokens, in types and sizes that it serves."""
    V, D = rows_VD.shape
    same = hidden.dtype == rows_VD.dtype and hidden.dtype in (jnp.bfloat16, jnp.float16)
    return same and D % 16 == 0 and V * D < 2**31 and hidden.size // D <= HEAD_TOKENS


def launch_for(count: int, D: int, launches: dict[int, Launch]) -> tuple[int, Launch]:
    """(tokens of a program, launch) for ``count`` hidden states of width D."""
    tokens = min(max(16, pl.next_power_of_2(count)), max(launches))
    launch = launches[tokens]
    return tokens, launch._replace(depth=min(launch.depth, D & -D))


def _head_kernel(hidden_ref, rows_ref, logits_ref, maxima_ref, *, count: int, real_rows: int, num_tokens: int, depth: int):
    """hidden_ref [M,D], rows_ref [W,D], logits_ref [M,W], maxima_ref [M]; tokens from ``count`` and rows from ``real_rows`` on only fill up the tiles."""
    (M, D), W = hidden_ref.shape, rows_ref.shape[0]
    token_M = pl.program_id(0) * M + jnp.arange(M, dtype=jnp.int32)
    id_W = pl.program_id(1) * W + jnp.arange(W, dtype=jnp.int32)
    real_M1, real_W1 = (token_M < count)[:, None], (id_W < real_rows)[:, None]

    def add(i, logits_WM):
        part = pl.ds(i * depth, depth)
        masked = {"mask": real_W1, "other": 0.0} if real_rows % W else {}
        u_WE = plgpu.load(rows_ref.at[:, part], eviction_policy="evict_first", **masked)
        h_ME = plgpu.load(hidden_ref.at[:, part], mask=real_M1, other=0.0)
        return logits_WM + plgpu.dot(u_WE, h_ME.T)

    # U as the left factor: a product works on 64 rows of the left one at the least, and there are seldom that many tokens.
    logits_WM = jax.lax.fori_loop(0, D // depth, add, jnp.zeros((W, M), jnp.float32))
    logits_WM = jnp.where((id_W < num_tokens)[:, None], logits_WM, MASKED)
    plgpu.store(logits_ref.at[:, :], logits_WM.T, mask=real_M1)
    plgpu.store(maxima_ref.at[:], logits_WM.max(axis=0), mask=token_M < count)


def _best(values_N, ids_N, count: int, width: int, most: int):
    """The ``count`` largest and their ids, ties to the lowest id, in arrays of ``width``; ids are at most ``most``, whatever the values (NaN) are."""
    slot_P = jnp.arange(width, dtype=jnp.int32)

    def take(i, carry):
        values_N, best_P, best_ids_P = carry
        top = values_N.max()
        first = jnp.min(jnp.where(values_N == top, ids_N, LAST))
        best_P = jnp.where(slot_P == i, top, best_P)
        best_ids_P = jnp.where(slot_P == i, jnp.minimum(first, most), best_ids_P)
        return jnp.where(ids_N == first, -jnp.inf, values_N), best_P, best_ids_P

    empty = values_N, jnp.full((width,), -jnp.inf, jnp.float32), jnp.zeros((width,), jnp.int32)
    return jax.lax.fori_loop(0, count, take, empty)[1:]


def _select_kernel(maxima_ref, logits_ref, values_ref, ids_ref, *, num_chunks: int, chunk: int, num_tokens: int, count: int):
    """One token: maxima_ref [C] and logits_ref [L] -> the ``count`` best in values_ref and ids_ref [P]; C and P overhang, the last chunk may."""
    (C,), (L,), (P,) = maxima_ref.shape, logits_ref.shape, ids_ref.shape
    chunk_C, slot_P = jnp.arange(C, dtype=jnp.int32), jnp.arange(P, dtype=jnp.int32)
    maxima_C = plgpu.load(maxima_ref.at[:], mask=chunk_C < num_chunks, other=-jnp.inf)
    held = min(count, num_chunks)  # chunks that can hold one of the best
    _, chosen_P = _best(maxima_C, chunk_C, held, P, num_chunks - 1)
    ids_PE = chosen_P[:, None] * chunk + jnp.arange(chunk, dtype=jnp.int32)[None, :]
    real_PE = (slot_P[:, None] < held) & (ids_PE < L)
    logits_PE = plgpu.load(logits_ref.at[ids_PE], mask=real_PE, other=-jnp.inf)
    logits_PE = jnp.where(real_PE & (ids_PE >= num_tokens), MASKED, logits_PE)
    best_P, ids_P = _best(logits_PE.reshape(-1), ids_PE.reshape(-1), count, P, L - 1)
    plgpu.store(values_ref.at[:], best_P, mask=slot_P < count)
    plgpu.store(ids_ref.at[:], ids_P, mask=slot_P < count)


def select(
    maxima_TC: jax.Array, logits_TL: jax.Array, num_candidates: int, *, chunk: int, num_tokens: int, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Top-P from logits [T,L] fp32 and the maxima [T,C] of their runs of ``chunk``, in which columns from ``num_tokens`` on count as -1e30.

    -> (values [T,P] fp32, ids [T,P] int32)
    """
    (T, C), L = maxima_TC.shape, logits_TL.shape[1]
    row = lambda width: pl.BlockSpec((None, width), lambda t: (t, 0))  # noqa: E731
    power = pl.next_power_of_2
    return pl.pallas_call(
        functools.partial(_select_kernel, num_chunks=C, chunk=chunk, num_tokens=num_tokens, count=num_candidates),
        grid=(T,),
        in_specs=[row(power(C)), row(L)],
        out_specs=[row(power(num_candidates))] * 2,
        out_shape=[jax.ShapeDtypeStruct((T, num_candidates), dtype) for dtype in (jnp.float32, jnp.int32)],
        compiler_params=plgpu.CompilerParams(num_warps=SELECT_WARPS, num_stages=1),
        interpret=interpret,
        name="topk_select",
    )(maxima_TC, logits_TL)


def head(hidden_TD: jax.Array, rows_VD: jax.Array, *, num_tokens: int, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Logits [T,L] fp32 and the maxima [T,C] of their C runs; L is V rounded up to whole runs, columns from ``num_tokens`` on are -1e30."""
    (T, D), V = hidden_TD.shape, rows_VD.shape[0]
    M, launch = launch_for(T, D, LAUNCHES)
    C = pl.cdiv(V, launch.rows)
    return pl.pallas_call(
        functools.partial(_head_kernel, count=T, real_rows=V, num_tokens=num_tokens, depth=launch.depth),
        grid=(pl.cdiv(T, M), C),  # tokens change fastest: the programs that read the same rows run together
        in_specs=[pl.BlockSpec((M, D), lambda t, c: (t, 0)), pl.BlockSpec((launch.rows, D), lambda t, c: (c, 0))],
        out_specs=[pl.BlockSpec((M, launch.rows), lambda t, c: (t, c)), pl.BlockSpec((M, None), lambda t, c: (t, c))],
        out_shape=[jax.ShapeDtypeStruct((T, C * launch.rows), jnp.float32), jax.ShapeDtypeStruct((T, C), jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        interpret=interpret,
        name="topk_head",
    )(hidden_TD, rows_VD)


def chunk_maxima(logits_TV: jax.Array, num_tokens: int) -> jax.Array:
    """Maxima [T,C] of runs of ``CHUNK`` of logits [T,V], of which the last may be short; columns from ``num_tokens`` on count as -1e30."""
    masked_TV = mask_padded_vocabulary(logits_TV, num_tokens)  # fused into the maxima: to write it out would take as long as to choose
    padded_TL = jnp.pad(masked_TV, ((0, 0), (0, -masked_TV.shape[1] % CHUNK)), constant_values=-jnp.inf)
    return padded_TL.reshape(padded_TL.shape[0], -1, CHUNK).max(axis=-1)


def topk(logits_TV: jax.Array, num_candidates: int, *, num_tokens: int, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Top-P of logits [T,V] that are in memory, whatever their columns from ``num_tokens`` on hold: maxima by XLA, the choice by the second kernel."""
    maxima_TC = chunk_maxima(logits_TV, num_tokens)
    return select(maxima_TC, logits_TV, num_candidates, chunk=CHUNK, num_tokens=num_tokens, interpret=interpret)


def topk_logits(
    hidden: jax.Array, rows_VD: jax.Array, num_candidates: int, *, num_tokens: int, own_head: bool | None = None, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """See ``pallas_kernels.topk_logits.topk_logits``; only for what ``unsupported`` has nothing against. own_head: instead of what ``head_pays`` says."""
    hidden_TD = hidden.reshape(-1, hidden.shape[-1])
    options = {"num_tokens": num_tokens, "interpret": interpret}
    if head_pays(hidden, rows_VD) if own_head is None else own_head:
        logits_TL, maxima_TC = head(hidden_TD, rows_VD, **options)
        best = select(maxima_TC, logits_TL, num_candidates, chunk=logits_TL.shape[1] // maxima_TC.shape[1], **options)
    else:
        best = topk(vocabulary_logits(hidden_TD, rows_VD, rows_VD.shape[0]), num_candidates, **options)
    return tuple(x_TP.reshape(*hidden.shape[:-1], num_candidates) for x_TP in best)
