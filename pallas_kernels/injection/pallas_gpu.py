"""Injection of a decoding round as two Pallas kernels (Triton) that stream every weight once: 58 MB a layer at Qwen3-8B's sizes, and little else.

``products`` multiplies the rows with A and Gh, which need nothing but the stream; ``write`` multiplies their predecessors' features with Gp and M and
writes. Both norms are factors of a row and are applied after the products: so no program waits for a sum over a row that others work on, and the depth
of the first products can be split over programs.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.injection.ref import InjectionWeights
from pallas_kernels.shapes import ModelShape

LEAST_ROWS = 16  # of a matrix product


class Launch(NamedTuple):
    """Rows, columns and depth of a tile (powers of two, at least 16), programs that share a column's depth, Triton's warps and pipeline depth."""

    rows: int
    columns: int
    depth: int
    splits: int
    warps: int
    stages: int


# Kernel -> most rows of a call -> launch; larger calls take the last one.
LAUNCHES = {
    "products": {16: Launch(16, 64, 128, 2, 4, 4), 64: Launch(64, 64, 64, 2, 4, 4), 128: Launch(128, 128, 64, 4, 8, 3)},
    "write": {16: Launch(16, 32, 128, 1, 4, 4), 64: Launch(64, 32, 64, 1, 4, 4), 128: Launch(128, 32, 64, 1, 8, 4)},
}


def launch_for(kernel: str, rows: int) -> Launch:
    """The launch of a call with this many rows; its tile is no taller than the call."""
    launches = LAUNCHES[kernel]
    launch = next((launch for most, launch in launches.items() if rows <= most), list(launches.values())[-1])
    return launch._replace(rows=min(launch.rows, max(LEAST_ROWS, pl.next_power_of_2(rows))))


def candidates(kernel: str, shape: ModelShape, blocks: int) -> list[Launch]:
    """Launches worth a try for a decoding round's blocks, the likeliest first: what fits into shared memory and keeps enough bytes on the way."""
    tall = max(LEAST_ROWS, pl.next_power_of_2(blocks * shape.block_size))
    rows = (tall,) if tall <= 64 else (64, 128)
    if kernel == "products":
        grid = itertools.product(rows, (64, 128, 32), (128, 64, 256), (2, 4, 1), (4, 8) if tall > 16 else (4,), (4, 3, 5))
        count = lambda x: x.splits * (shape.hidden_size + shape.transfer_size) / x.columns * max(1, tall / x.rows)  # noqa: E731
        in_flight = lambda x: 2 * x.depth * (x.rows + x.columns) * x.stages  # noqa: E731
    else:
        parts = launch_for("products", tall).splits
        grid = itertools.product(rows, (32, 64, 16), (128, 64, 256), (1,), (4, 2, 8), (4, 3, 5))
        count = lambda x: shape.hidden_size / x.columns * max(1, tall / x.rows)  # noqa: E731
        feature_bytes = 4 * (parts + 1) if tall == LEAST_ROWS else 2
        in_flight = lambda x: x.depth * (4 * x.columns + feature_bytes * x.rows) * x.stages  # noqa: E731
    least = min(64, shape.hidden_size // 64)  # programs, of 132 multiprocessors
    return [x for x in itertools.starmap(Launch, grid) if 48 << 10 <= in_flight(x) <= 220 << 10 and least <= count(x) <= 640]


def _mask(rows: int, columns: int, real_rows, real_columns):
    """[rows,columns] mask of two masks, None for either says that all are real."""
    masks = [x for x in (None if real_rows is None else real_rows[:, None], None if real_columns is None else real_columns[None, :]) if x is not None]
    return jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), (rows, columns)) if masks else None


def _load(ref, rows, columns, real_rows, real_columns, part: tuple[int, ...] = ()):
    """ref[*part, rows, columns] as a tile; what is not real is 0."""
    mask = _mask(rows.size, columns.size, real_rows, real_columns)
    return plgpu.load(ref.at[*part, rows[:, None], columns[None, :]], mask=mask, other=None if mask is None else 0.0)


def _load_line(ref, index, real, part: tuple[int, ...] = ()):
    """ref[*part, index] in fp32; what is not real is 0."""
    return plgpu.load(ref.at[*part, index], mask=real, other=None if real is None else 0.0).astype(jnp.float32)


def _range(first, count: int, end: int, tile: int):
    """(indices first..first + count, which of them are below ``end``: None where tiles of this size divide it)."""
    index = first + jnp.arange(count, dtype=jnp.int32)
    return index, None if end % tile == 0 else index < end


def _products_kernel(x_ref, norm_ref, feature_ref, gate_ref, z_ref, g_ref, square_ref, *, launch: Launch):
    """x [T,D], norm [D], A [D,R], Gh [D,D] -> parts of (x norm) A [S,T,R], of (x norm) Gh [S,T,D] and of the sum of squares of x [S,T]; S splits."""
    T, D = x_ref.shape
    tile, split, row_tile = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row_M, real_M = _range(row_tile * launch.rows, launch.rows, T, launch.rows)
    steps = pl.cdiv(D, launch.depth)
    each = pl.cdiv(steps, launch.splits)
    first, end = split * each, each if launch.splits == 1 else jnp.minimum((split + 1) * each, steps)

    def products(weight_ref, out_ref, tile, squares: bool):
        column_C, real_C = _range(tile * launch.columns, launch.columns, weight_ref.shape[1], launch.columns)

        def step(i, carry):
            out_MC, square_M = carry
            depth_Q, real_Q = _range(i * launch.depth, launch.depth, D, launch.depth)
            x_MQ = _load(x_ref, row_M, depth_Q, real_M, real_Q).astype(jnp.float32)
            norm_Q = _load_line(norm_ref, depth_Q, real_Q)
            weight_QC = _load(weight_ref, depth_Q, column_C, real_Q, real_C)
            out_MC += plgpu.dot((x_MQ * norm_Q[None, :]).astype(weight_QC.dtype), weight_QC)
            return out_MC, square_M + jnp.sum(x_MQ * x_MQ, axis=1) if squares else square_M

        carry = jnp.zeros((launch.rows, launch.columns), jnp.float32), jnp.zeros((launch.rows,), jnp.float32)
        out_MC, square_M = jax.lax.fori_loop(first, end, step, carry)
        plgpu.store(out_ref.at[split, row_M[:, None], column_C[None, :]], out_MC, mask=_mask(*out_MC.shape, real_M, real_C))
        if squares:

            @pl.when(tile == 0)
            def _():
                plgpu.store(square_ref.at[split, row_M], square_M, mask=real_M)

    feature_tiles = pl.cdiv(feature_ref.shape[1], launch.columns)
    # The features' programs first: there are few of them.
    pl.when(tile < feature_tiles)(lambda: products(feature_ref, z_ref, tile, True))
    pl.when(tile >= feature_tiles)(lambda: products(gate_ref, g_ref, tile - feature_tiles, False))


def _write_kernel(x_ref, g_ref, square_ref, bias_ref, predecessor_ref, message_ref, *refs, slots: int, eps: float, launch: Launch):
    """x [T,D], the parts that ``_products_kernel`` left, bias [D], Gp and M [R,D] -> new stream [T,D], hidden gate [T,D] fp32.

    Between them in ``refs``: the parts z [S,T,R] and the anchors' features [B*N,R], or both as the rows [T,R] that ``predecessors`` made of them.
    """
    *sources, new_ref, hidden_gate_ref = refs
    T, D = x_ref.shape
    S, R = g_ref.shape[0], message_ref.shape[0]
    column_C, real_C = _range(pl.program_id(0) * launch.columns, launch.columns, D, launch.columns)
    row_M, real_M = _range(pl.program_id(1) * launch.rows, launch.rows, T, launch.rows)
    block_M = jax.lax.div(row_M, jnp.full_like(row_M, slots))
    slot_M = row_M - block_M * slots
    exists_M = jnp.ones((launch.rows,), jnp.bool_) if real_M is None else real_M
    predicted_M, anchored_M = exists_M & (slot_M >= 2), exists_M & (slot_M == 1)
    before_M = jnp.where(predicted_M, row_M - 1, 0)

    def rms(row_M, real_M):
        return jax.lax.rsqrt(sum(_load_line(square_ref, row_M, real_M, (s,)) for s in range(S)) / D + eps)

    # Before the loop, so that their latency passes behind its loads.
    x_MC = _load(x_ref, row_M, column_C, real_M, real_C).astype(jnp.float32)
    g_MC = sum(_load(g_ref, row_M, column_C, real_M, real_C, (s,)) for s in range(S))
    hidden_gate_MC = g_MC * rms(row_M, real_M)[:, None] + _load_line(bias_ref, column_C, real_C)[None, :]

    def step(i, carry):
        gate_MC, message_MC, square_M = carry
        depth_Q, real_Q = _range(i * launch.depth, launch.depth, R, launch.depth)
        predecessor_QC, weight_QC = (_load(ref, depth_Q, column_C, real_Q, real_C) for ref in (predecessor_ref, message_ref))
        if len(sources) == 1:
            feature_MQ = _load(sources[0], row_M, depth_Q, real_M, real_Q)
            z_MQ = feature_MQ.astype(jnp.float32)
        else:
            z_MQ = sum(_load(sources[0], before_M, depth_Q, predicted_M, real_Q, (s,)) for s in range(S))
            anchor_MQ = _load(sources[1], jnp.where(anchored_M, block_M, 0), depth_Q, anchored_M, real_Q).astype(jnp.float32)
            feature_MQ = (z_MQ + anchor_MQ).astype(weight_QC.dtype)  # one of them is 0, both for slot 0
        gate_MC += plgpu.dot(feature_MQ, predecessor_QC)
        message_MC += plgpu.dot(feature_MQ, weight_QC)
        return gate_MC, message_MC, square_M + jnp.sum(z_MQ * z_MQ, axis=1)

    zeros_MC = jnp.zeros((launch.rows, launch.columns), jnp.float32)
    carry = jax.lax.fori_loop(0, pl.cdiv(R, launch.depth), step, (zeros_MC, zeros_MC, jnp.zeros((launch.rows,), jnp.float32)))
    gate_MC, message_MC, square_M = carry
    factor_M = jnp.where(slot_M == 1, 1.0, _feature_factor(square_M, rms(before_M, predicted_M), R))
    gate_MC = jax.nn.sigmoid(gate_MC * factor_M[:, None] + hidden_gate_MC)
    new_MC = x_MC + gate_MC * (message_MC * factor_M[:, None])
    mask = _mask(*new_MC.shape, real_M, real_C)
    at = lambda ref: ref.at[row_M[:, None], column_C[None, :]]  # noqa: E731
    plgpu.store(at(new_ref), new_MC.astype(new_ref.dtype), mask=mask)
    plgpu.store(at(hidden_gate_ref), hidden_gate_MC, mask=mask)


def _feature_factor(square, rms, R: int):
    """What sqrt(R) unit(z rms) multiplies z by, z's sum of squares given."""
    return R**0.5 * rms * jax.lax.rsqrt(rms * rms * square + 1e-6)


def features_from_parts(z_STR: jax.Array, square_ST: jax.Array, D: int, eps: float) -> jax.Array:
    """p [T,R] fp32. In jnp, so that a decoding round, which has no use for it, does not compute it."""
    z_TR = jnp.sum(z_STR, axis=0)
    rms_T1 = jax.lax.rsqrt(jnp.sum(square_ST, axis=0) / D + eps)[:, None]
    return z_TR * _feature_factor(jnp.sum(z_TR * z_TR, axis=1, keepdims=True), rms_T1, z_TR.shape[1])


def predecessors(z_STR: jax.Array, anchor_feature_BNR: jax.Array, slots: int, dtype) -> jax.Array:
    """What every slot reads, before its factor: 0 for slot 0, the anchor's feature for slot 1, z of the slot before for the others. [T,R]"""
    z_NKR = jnp.sum(z_STR, axis=0).astype(dtype).reshape(-1, slots, z_STR.shape[-1])
    anchor_N1R = anchor_feature_BNR.reshape(-1, 1, z_STR.shape[-1]).astype(dtype)
    return jnp.concatenate([jnp.zeros_like(anchor_N1R), anchor_N1R, z_NKR[:, 1:-1]], axis=1).reshape(z_STR.shape[1:])


def _call(kernel, grid, launch: Launch, inputs, outputs, interpret: bool):
    whole = lambda x: pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))  # noqa: E731
    return pl.pallas_call(
        functools.partial(kernel, launch=launch),
        grid=grid,
        in_specs=[whole(x) for x in inputs],
        out_specs=[whole(x) for x in outputs],
        out_shape=outputs,
        compiler_params=plgpu.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        interpret=interpret,
        name="injection" + getattr(kernel, "func", kernel).__name__.removesuffix("_kernel"),
    )(*inputs)


def injection(
    x_BNKD: jax.Array, anchor_feature_BNR: jax.Array, weights: InjectionWeights, *, eps: float, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``pallas_kernels.injection.injection``; only for one device, weights in the stream's type. No gradient."""
    B, N, K, D = x_BNKD.shape
    R = weights.feature_DR.shape[1]
    T = B * N * K
    x_TD = x_BNKD.reshape(T, D)
    fp32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731

    launch = launch_for("products", T)
    S = launch.splits
    grid = pl.cdiv(R, launch.columns) + pl.cdiv(D, launch.columns), S, pl.cdiv(T, launch.rows)
    inputs = x_TD, weights.norm_D, weights.feature_DR, weights.gate_hidden_DD
    z_STR, g_STD, square_ST = _call(_products_kernel, grid, launch, inputs, (fp32(S, T, R), fp32(S, T, D), fp32(S, T)), interpret)

    launch = launch_for("write", T)
    grid = pl.cdiv(D, launch.columns), pl.cdiv(T, launch.rows)
    sources = z_STR, anchor_feature_BNR.reshape(B * N, R)
    if T > LEAST_ROWS:  # tall tiles of fp32 parts would not fit into shared memory
        sources = (predecessors(z_STR, anchor_feature_BNR, K, x_BNKD.dtype),)
    inputs = x_TD, g_STD, square_ST, weights.gate_bias_D, weights.gate_predecessor_RD, weights.message_RD, *sources
    outputs = jax.ShapeDtypeStruct((T, D), x_BNKD.dtype), fp32(T, D)
    new_TD, hidden_gate_TD = _call(functools.partial(_write_kernel, slots=K, eps=eps), grid, launch, inputs, outputs, interpret)

    p_TR = features_from_parts(z_STR, square_ST, D, eps)
    return new_TD.reshape(B, N, K, D), p_TR.reshape(B, N, K, R), hidden_gate_TD.reshape(B, N, K, D)
