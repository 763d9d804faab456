"""LM head with softmax weights as a Pallas kernel (Triton): a matrix product whose tiles leave as rounded weights with their sums and largest logits."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import PartitionSpec as P

from dspine_jax.attention import MASKED
from dspine_jax.sharding import BATCH_AXES
from pallas_kernels.mesh import foreign, mesh_in_scope, spread

LAST_ID = jnp.iinfo(jnp.int32).max


class Launch(NamedTuple):
    """States, vocabulary rows and inner width of a tile, all powers of two, and Triton's warps a program and pipeline depth."""

    states: int
    rows: int
    depth: int
    warps: int
    stages: int


LAUNCH = Launch(128, 128, 64, 8, 3)


def unsupported(hidden_BTD: jax.Array, rows_VD: jax.Array) -> str | None:
    """What keeps the kernel from serving these arrays, None if nothing does."""
    B, T, D = hidden_BTD.shape
    V = rows_VD.shape[0]
    if hidden_BTD.dtype != jnp.bfloat16:
        return f"{hidden_BTD.dtype} states (only bfloat16)"
    if 0 in (B, T, D, V):
        return f"an empty array ({B} x {T} states of width {D}, {V} rows)"
    mesh = mesh_in_scope()
    batch_ways, vocab_ways = (1, 1) if mesh is None else (mesh.size // mesh.shape.get("tensor", 1), mesh.shape.get("tensor", 1))
    if mesh is not None and foreign(mesh):
        return foreign(mesh)
    if B % batch_ways or V % vocab_ways:
        return f"{B} rows and {V} vocabulary rows on a mesh of {dict(mesh.shape)}, by which they do not divide"
    if B // batch_ways * T * (V // vocab_ways) >= 2**31:
        return f"{B // batch_ways * T} states x {V // vocab_ways} vocabulary rows on one device (their product must stay below 2^31)"
    return None


def _kernel(hidden_ref, rows_ref, origin_ref, end_ref, weights_ref, total_ref, top_ref, best_ref, *, tile: Launch, largest: float):
    """hidden [T,D], rows [V,D], origin [T], end [1] usable rows -> weights [T,V]; total, top, best [vocabulary tiles, T]."""
    (T, D), V = hidden_ref.shape, rows_ref.shape[0]
    state_tiles = pl.cdiv(T, tile.states)
    # Programs that run together share the vocabulary rows they read.
    vocab_tile = jax.lax.div(pl.program_id(0), state_tiles)
    first_state, first_row = (pl.program_id(0) - vocab_tile * state_tiles) * tile.states, vocab_tile * tile.rows
    real_T = first_state + jnp.arange(tile.states, dtype=jnp.int32) < T
    id_R = first_row + jnp.arange(tile.rows, dtype=jnp.int32)
    states, rows = pl.ds(first_state, tile.states), pl.ds(first_row, tile.rows)
    whole_T, whole_R, whole_D = T % tile.states == 0, V % tile.rows == 0, D % tile.depth == 0

    def load(ref, outer, real, whole, i):
        inner = pl.ds(i * tile.depth, tile.depth)
        if whole and whole_D:
            return plgpu.load(ref.at[outer, inner])
        mask = real[:, None] & (i * tile.depth + jnp.arange(tile.depth, dtype=jnp.int32) < D)[None, :]
        return plgpu.load(ref.at[outer, inner], mask=mask, other=0.0)

    def add(i, logits_TR):
        return logits_TR + plgpu.dot(load(hidden_ref, states, real_T, whole_T, i), load(rows_ref, rows, id_R < V, whole_R, i).T)

    logits_TR = jax.lax.fori_loop(0, pl.cdiv(D, tile.depth), add, jnp.zeros((tile.states, tile.rows), jnp.float32))
    logits_TR = jnp.where((id_R < end_ref[0])[None, :], logits_TR, MASKED)
    origin_T = plgpu.load(origin_ref.at[states], mask=real_T, other=0.0)
    exponent_TR = logits_TR - origin_T[:, None]
    weights_TR = jnp.exp(jnp.where(exponent_TR > largest, largest, exponent_TR))  # a minimum would hide a NaN from the step's guard
    top_T = logits_TR.max(axis=1)
    best_T = jnp.where(logits_TR == top_T[:, None], id_R[None, :], LAST_ID).min(axis=1)
    plgpu.store(weights_ref.at[states, rows], weights_TR.astype(weights_ref.dtype), mask=None if whole_T and whole_R else real_T[:, None] & (id_R < V)[None, :])
    for ref, value_T in ((total_ref, weights_TR.sum(axis=1)), (top_ref, top_T), (best_ref, best_T)):
        plgpu.store(ref.at[vocab_tile, states], value_T, mask=real_T)


def _local(hidden_BTD, rows_VD, origin_BT, end_1, *, largest: float, interpret: bool):
    """One device's part -> (weights [B,T,V], total, top, best [B,T,vocabulary tiles]); ids count from its own first row."""
    (B, T, D), V = hidden_BTD.shape, rows_VD.shape[0]
    tile = LAUNCH._replace(depth=min(LAUNCH.depth, max(16, pl.next_power_of_2(D))))
    vocab_tiles = pl.cdiv(V, tile.rows)
    per_tile = lambda dtype: jax.ShapeDtypeStruct((vocab_tiles, B * T), dtype)  # noqa: E731
    weights, *partial = pl.pallas_call(
        functools.partial(_kernel, tile=tile, largest=largest),
        grid=(vocab_tiles * pl.cdiv(B * T, tile.states),),
        out_shape=(jax.ShapeDtypeStruct((B * T, V), hidden_BTD.dtype), per_tile(jnp.float32), per_tile(jnp.float32), per_tile(jnp.int32)),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )(hidden_BTD.reshape(B * T, D), rows_VD.astype(hidden_BTD.dtype), origin_BT.reshape(B * T), end_1)
    return weights.reshape(B, T, V), *(x.T.reshape(B, T, vocab_tiles) for x in partial)


def head_softmax(hidden_BTD: jax.Array, rows_VD: jax.Array, origin_BT: jax.Array, *, num_tokens: int, largest: float, interpret: bool = False):
    """See ``pallas_kernels.head_softmax.head_softmax``; only for what ``unsupported`` has nothing against."""
    mesh, V = mesh_in_scope(), rows_VD.shape[0]
    ways = 1 if mesh is None else mesh.shape["tensor"]
    first_W = jnp.arange(ways, dtype=jnp.int32) * (V // ways)  # first row of every part of the vocabulary
    states, parts = P(BATCH_AXES, None, None), P(BATCH_AXES, None, "tensor")
    run = spread(
        functools.partial(_local, largest=largest, interpret=interpret), mesh, (states, P("tensor", None), P(BATCH_AXES, None), P("tensor")), (parts,) * 4
    )
    weights_BTV, total_BTW, top_BTW, best_BTW = run(hidden_BTD, rows_VD, origin_BT, jnp.clip(num_tokens - first_W, 0, V // ways))
    winner_BT1 = jnp.argmax(top_BTW, axis=2, keepdims=True)  # the first of equals, thus the lowest ids
    best_BT = jnp.take_along_axis(best_BTW, winner_BT1, axis=2)[..., 0]
    part_BT = winner_BT1[..., 0] // (top_BTW.shape[2] // ways)
    return weights_BTV, total_BTW.sum(axis=2), best_BT + jnp.take(first_W, part_BT)
