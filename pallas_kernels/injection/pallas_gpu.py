"""Injection of a decoding round as two Pallas kernels (Triton) that stream every weight once: 58 MB a layer at Qwen3-8B's sizes, and little else.

``products`` multiplies the rows with A and Gh, which need nothing but the stream, and leaves each feature where its reader looks for it; ``write`` multiplies
these with Gp and M and writes. Both norms are factors of a row that are applied after the products, so no program waits for a sum over a row. Sums of squares
are kept by element until a loop has ended: summing a row in every step would make all warps wait for each other in every step.
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
    """Rows, columns and depth of a tile (powers of two, at least 16), Triton's warps and pipeline depth."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# Kernel -> most rows of a call -> launch; larger calls take the last one.
LAUNCHES = {
    "products": {16: Launch(16, 32, 128, 1, 4), 64: Launch(64, 64, 64, 4, 4), 128: Launch(128, 128, 64, 8, 3)},
    "write": {16: Launch(16, 32, 256, 2, 3), 64: Launch(64, 32, 64, 4, 4), 128: Launch(128, 32, 64, 8, 4)},
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
    width, weights = (shape.hidden_size + shape.transfer_size, 1) if kernel == "products" else (shape.hidden_size, 2)
    warps = (4, 2, 8) if tall > 16 else (2, 4, 1)
    count = lambda x: width / x.columns * max(1, tall / x.rows)  # noqa: E731
    in_flight = lambda x: 2 * x.depth * (x.rows + weights * x.columns) * x.stages  # noqa: E731
    grid = itertools.product(rows, (32, 64, 16, 128), (128, 256, 64), warps, (4, 5, 3))
    least = min(64, shape.hidden_size // 64)  # programs, of 132 multiprocessors
    return [x for x in itertools.starmap(Launch, grid) if 24 << 10 <= in_flight(x) <= 220 << 10 and least <= count(x) <= 640]


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


def _slots(row_M, real_M, slots: int):
    """(block, slot, whether it is one) of every row."""
    block_M = jax.lax.div(row_M, jnp.full_like(row_M, slots))
    return block_M, row_M - block_M * slots, jnp.ones(row_M.shape, jnp.bool_) if real_M is None else real_M


def _products_kernel(
    x_ref, anchor_ref, norm_ref, bias_ref, feature_ref, gate_ref, source_ref, z_ref, square_ref, hidden_gate_ref, *, slots: int, eps: float, launch: Launch
):
    """x [T,D], anchors' features [T/K,R], norm and b [D], A [D,R], Gh [D,D] -> source [T,R], z [T,R], squares [tiles of R,T], hidden gate [T,D].

    z = RMSNorm(x) A, squares its sums of squares by tile; source is what each slot reads: 0 for slot 0, the anchor's feature for slot 1, z of the slot
    before for the others.
    """
    T, D = x_ref.shape
    tile = pl.program_id(0)
    row_M, real_M = _range(pl.program_id(1) * launch.rows, launch.rows, T, launch.rows)

    def product(weight_ref, tile):
        column_C, real_C = _range(tile * launch.columns, launch.columns, weight_ref.shape[1], launch.columns)

        def step(i, carry):
            out_MC, square_MQ = carry
            depth_Q, real_Q = _range(i * launch.depth, launch.depth, D, launch.depth)
            x_MQ = _load(x_ref, row_M, depth_Q, real_M, real_Q).astype(jnp.float32)
            norm_Q = _load_line(norm_ref, depth_Q, real_Q)
            weight_QC = _load(weight_ref, depth_Q, column_C, real_Q, real_C)
            return out_MC + plgpu.dot((x_MQ * norm_Q[None, :]).astype(weight_QC.dtype), weight_QC), square_MQ + x_MQ * x_MQ

        carry = jnp.zeros((launch.rows, launch.columns), jnp.float32), jnp.zeros((launch.rows, launch.depth), jnp.float32)
        out_MC, square_MQ = jax.lax.fori_loop(0, pl.cdiv(D, launch.depth), step, carry)
        rms_M = jax.lax.rsqrt(jnp.sum(square_MQ, axis=1) / D + eps)
        return column_C, real_C, out_MC * rms_M[:, None]

    def put(ref, row_M, column_C, values_MC, real_M, real_C):
        plgpu.store(ref.at[row_M[:, None], column_C[None, :]], values_MC.astype(ref.dtype), mask=_mask(*values_MC.shape, real_M, real_C))

    def features():
        column_C, real_C, z_MC = product(feature_ref, tile)
        put(z_ref, row_M, column_C, z_MC, real_M, real_C)
        if real_C is not None:
            z_MC = jnp.where(real_C[None, :], z_MC, 0.0)
        plgpu.store(square_ref.at[tile, row_M], jnp.sum(z_MC * z_MC, axis=1), mask=real_M)
        block_M, slot_M, exists_M = _slots(row_M, real_M, slots)
        heard_M, anchored_M = exists_M & (slot_M >= 1) & (slot_M < slots - 1), exists_M & (slot_M == 1)
        put(source_ref, jnp.where(heard_M, row_M + 1, 0), column_C, z_MC, heard_M, real_C)
        anchor_MC = _load(anchor_ref, jnp.where(anchored_M, block_M, 0), column_C, anchored_M, real_C)
        put(source_ref, row_M, column_C, anchor_MC, exists_M & (slot_M <= 1), real_C)

    def gates():
        column_C, real_C, gate_MC = product(gate_ref, tile - feature_tiles)
        put(hidden_gate_ref, row_M, column_C, gate_MC + _load_line(bias_ref, column_C, real_C)[None, :], real_M, real_C)

    feature_tiles = pl.cdiv(feature_ref.shape[1], launch.columns)
    # The features' programs first: they have more to store.
    pl.when(tile < feature_tiles)(features)
    pl.when(tile >= feature_tiles)(gates)


def _write_kernel(x_ref, source_ref, square_ref, hidden_gate_ref, predecessor_ref, message_ref, new_ref, *, slots: int, launch: Launch):
    """x [T,D], what ``_products_kernel`` left, Gp and M [R,D] -> new stream [T,D]."""
    T, D = x_ref.shape
    tiles, R = square_ref.shape[0], message_ref.shape[0]
    column_C, real_C = _range(pl.program_id(0) * launch.columns, launch.columns, D, launch.columns)
    row_M, real_M = _range(pl.program_id(1) * launch.rows, launch.rows, T, launch.rows)
    _, slot_M, exists_M = _slots(row_M, real_M, slots)
    predicted_M = exists_M & (slot_M >= 2)

    # Before the loop, so that their latency passes behind its loads.
    x_MC = _load(x_ref, row_M, column_C, real_M, real_C).astype(jnp.float32)
    hidden_gate_MC = _load(hidden_gate_ref, row_M, column_C, real_M, real_C)
    tile_F = jnp.arange(pl.next_power_of_2(tiles), dtype=jnp.int32)
    square_FM = _load(square_ref, tile_F, jnp.where(predicted_M, row_M - 1, 0), tile_F < tiles, predicted_M)

    def step(i, carry):
        gate_MC, message_MC = carry
        depth_Q, real_Q = _range(i * launch.depth, launch.depth, R, launch.depth)
        feature_MQ = _load(source_ref, row_M, depth_Q, real_M, real_Q)
        predecessor_QC, weight_QC = (_load(ref, depth_Q, column_C, real_Q, real_C) for ref in (predecessor_ref, message_ref))
        return gate_MC + plgpu.dot(feature_MQ, predecessor_QC), message_MC + plgpu.dot(feature_MQ, weight_QC)

    zeros_MC = jnp.zeros((launch.rows, launch.columns), jnp.float32)
    gate_MC, message_MC = jax.lax.fori_loop(0, pl.cdiv(R, launch.depth), step, (zeros_MC, zeros_MC))
    factor_M = jnp.where(slot_M == 1, 1.0, _feature_factor(jnp.sum(square_FM, axis=0), R))
    gate_MC = jax.nn.sigmoid(gate_MC * factor_M[:, None] + hidden_gate_MC)
    new_MC = x_MC + gate_MC * (message_MC * factor_M[:, None])
    plgpu.store(new_ref.at[row_M[:, None], column_C[None, :]], new_MC.astype(new_ref.dtype), mask=_mask(*new_MC.shape, real_M, real_C))


def _feature_factor(square, R: int):
    """What sqrt(R) unit(z) multiplies z by, z's sum of squares given."""
    return R**0.5 * jax.lax.rsqrt(square + 1e-6)


def features(z_TR: jax.Array, square_FT: jax.Array) -> jax.Array:
    """p [T,R] fp32. In jnp, so that a decoding round, which has no use for it, does not compute it."""
    return z_TR * _feature_factor(jnp.sum(square_FT, axis=0), z_TR.shape[1])[:, None]


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
    T, dtype = B * N * K, x_BNKD.dtype
    x_TD, anchor_AR = x_BNKD.reshape(T, D), anchor_feature_BNR.reshape(B * N, R).astype(jnp.float32)
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731

    launch = launch_for("products", T)
    tiles = pl.cdiv(R, launch.columns)
    grid = tiles + pl.cdiv(D, launch.columns), pl.cdiv(T, launch.rows)
    inputs = x_TD, anchor_AR, weights.norm_D, weights.gate_bias_D, weights.feature_DR, weights.gate_hidden_DD
    outputs = array(dtype, T, R), array(jnp.float32, T, R), array(jnp.float32, tiles, T), array(jnp.float32, T, D)
    source_TR, z_TR, square_FT, hidden_gate_TD = _call(functools.partial(_products_kernel, slots=K, eps=eps), grid, launch, inputs, outputs, interpret)

    launch = launch_for("write", T)
    grid = pl.cdiv(D, launch.columns), pl.cdiv(T, launch.rows)
    inputs = x_TD, source_TR, square_FT, hidden_gate_TD, weights.gate_predecessor_RD, weights.message_RD
    (new_TD,) = _call(functools.partial(_write_kernel, slots=K), grid, launch, inputs, (array(dtype, T, D),), interpret)

    p_TR = features(z_TR, square_FT)
    return new_TD.reshape(B, N, K, D), p_TR.reshape(B, N, K, R), hidden_gate_TD.reshape(B, N, K, D)
