"""The two kernels of an injection in Triton, for any caller: no JAX in this file.

``products_kernel`` multiplies the rows with A and Gh, which need nothing but the stream, and leaves each feature where its reader looks for it;
``write_kernel`` multiplies these with Gp and M and writes. Both norms are factors of a row that are applied after the products, so no program waits for a sum
over a row. Sums of squares are kept by element until a loop has ended: summing a row in every step would make all warps wait for each other in every step.

Arrays are row-major and contiguous: x [T,D], norm [D], A [D,R], Gh [D,D], b [D], Gp and M [R,D] of one 16-bit type, anchor features [T/K,R] fp32. Between
the kernels lie source [T,R] in x's type and z [T,R], squares [tiles of R,T] and hidden gate [T,D] in fp32. Grids: (tiles of R + tiles of D, tiles of T) and
(tiles of D, tiles of T); the tiles of R are the first kernel's.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _prefetch(first, BYTES: tl.constexpr, share, SHARES: tl.constexpr, THREADS: tl.constexpr):
    """Ask the L2 cache for one of ``SHARES`` equal pieces of an array: the next kernel's weights, while this one's are under way."""
    LINES: tl.constexpr = BYTES // 128  # of the cache
    EACH: tl.constexpr = (LINES + SHARES - 1) // SHARES
    for i in range(0, EACH, THREADS):
        line = tl.minimum(share * EACH + tl.minimum(i + tl.arange(0, THREADS), EACH - 1), LINES - 1)
        at = first.to(tl.pointer_type(tl.int8)) + line * 128
        tl.inline_asm_elementwise("prefetch.global.L2::evict_last [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _product(
    x_ptr, norm_ptr, weight_ptr, row, column,
    T: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """RMSNorm(x) weight for a tile. Squares are kept by element: a sum in every step would make all warps wait for each other."""
    WHOLE: tl.constexpr = (T % ROWS == 0) and (D % DEPTH == 0) and (WIDTH % COLUMNS == 0)
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    square = tl.zeros((ROWS, DEPTH), tl.float32)
    for i in range((D + DEPTH - 1) // DEPTH):
        depth = i * DEPTH + tl.arange(0, DEPTH)
        x_at = x_ptr + row[:, None] * D + depth[None, :]
        weight_at = weight_ptr + depth[:, None] * WIDTH + column[None, :]
        if WHOLE:
            x = tl.load(x_at).to(tl.float32)
            norm = tl.load(norm_ptr + depth).to(tl.float32)
            weight = tl.load(weight_at, eviction_policy="evict_first")
        else:
            x = tl.load(x_at, mask=(row < T)[:, None] & (depth < D)[None, :], other=0.0).to(tl.float32)
            norm = tl.load(norm_ptr + depth, mask=depth < D, other=0.0).to(tl.float32)
            weight = tl.load(weight_at, mask=(depth < D)[:, None] & (column < WIDTH)[None, :], other=0.0)
        out = tl.dot((x * norm[None, :]).to(weight.dtype), weight, out)
        square += x * x
    return out * tl.rsqrt(tl.sum(square, axis=1) / D + EPS)[:, None]


@triton.jit
def products_kernel(
    x_ptr, anchor_ptr, norm_ptr, bias_ptr, feature_ptr, gate_ptr, predecessor_ptr, message_ptr, source_ptr, z_ptr, square_ptr, hidden_gate_ptr,
    T: tl.constexpr, D: tl.constexpr, R: tl.constexpr, SLOTS: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """z = RMSNorm(x) A and its sums of squares by tile; source: what each slot reads, 0 for slot 0, the anchor's feature for slot 1, z of the slot before for
    the others; the hidden gate RMSNorm(x) Gh + b. With PREFETCH Gp and M are asked for as well.
    """
    tile, row_tile = tl.program_id(0), tl.program_id(1)
    FEATURE_TILES: tl.constexpr = (R + COLUMNS - 1) // COLUMNS
    TILES: tl.constexpr = FEATURE_TILES + (D + COLUMNS - 1) // COLUMNS
    if PREFETCH:
        if row_tile == 0:
            _prefetch(predecessor_ptr, 2 * R * D, tile, TILES, 128)
            _prefetch(message_ptr, 2 * R * D, tile, TILES, 128)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    exists = row < T
    if tile < FEATURE_TILES:
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        real = column < R
        z = _product(x_ptr, norm_ptr, feature_ptr, row, column, T, D, R, EPS, ROWS, COLUMNS, DEPTH)
        z = tl.where(real[None, :], z, 0.0)
        tl.store(z_ptr + row[:, None] * R + column[None, :], z, mask=exists[:, None] & real[None, :])
        tl.store(square_ptr + tile * T + row, tl.sum(z * z, axis=1), mask=exists)
        block = row // SLOTS
        slot = row - block * SLOTS
        heard = exists & (slot >= 1) & (slot < SLOTS - 1)
        dtype = source_ptr.dtype.element_ty
        tl.store(source_ptr + (row + 1)[:, None] * R + column[None, :], z.to(dtype), mask=heard[:, None] & real[None, :])
        anchor = tl.load(anchor_ptr + block[:, None] * R + column[None, :], mask=(exists & (slot == 1))[:, None] & real[None, :], other=0.0)
        tl.store(source_ptr + row[:, None] * R + column[None, :], anchor.to(dtype), mask=(exists & (slot <= 1))[:, None] & real[None, :])
    else:
        column = (tile - FEATURE_TILES) * COLUMNS + tl.arange(0, COLUMNS)
        real = column < D
        gate = _product(x_ptr, norm_ptr, gate_ptr, row, column, T, D, D, EPS, ROWS, COLUMNS, DEPTH)
        gate += tl.load(bias_ptr + column, mask=real, other=0.0).to(tl.float32)[None, :]
        tl.store(hidden_gate_ptr + row[:, None] * D + column[None, :], gate, mask=exists[:, None] & real[None, :])


@triton.jit
def write_kernel(
    x_ptr, source_ptr, square_ptr, hidden_gate_ptr, predecessor_ptr, message_ptr, new_ptr,
    T: tl.constexpr, D: tl.constexpr, R: tl.constexpr, SLOTS: tl.constexpr, TILES: tl.constexpr, TILES_POWER: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The new stream [T,D]. TILES: of ``squares``; TILES_POWER: rounded up to a power of two."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    slot = row % SLOTS
    exists = row < T
    predicted = exists & (slot >= 2)
    real = exists[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]

    # Before the loop, so that their latency passes behind its loads.
    x = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32)
    hidden_gate = tl.load(hidden_gate_ptr + at, mask=real, other=0.0)
    tile = tl.arange(0, TILES_POWER)
    square_at = square_ptr + tile[:, None] * T + tl.where(predicted, row - 1, 0)[None, :]
    squares = tl.load(square_at, mask=(tile < TILES)[:, None] & predicted[None, :], other=0.0)

    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    message = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range((R + DEPTH - 1) // DEPTH):
        depth = i * DEPTH + tl.arange(0, DEPTH)
        source_at = source_ptr + row[:, None] * R + depth[None, :]
        weight_at = depth[:, None] * D + column[None, :]
        if (R % DEPTH == 0) and (D % COLUMNS == 0) and (T % ROWS == 0):
            feature = tl.load(source_at)
            weight_predecessor = tl.load(predecessor_ptr + weight_at)
            weight_message = tl.load(message_ptr + weight_at)
        else:
            feature = tl.load(source_at, mask=exists[:, None] & (depth < R)[None, :], other=0.0)
            weight_mask = (depth < R)[:, None] & (column < D)[None, :]
            weight_predecessor = tl.load(predecessor_ptr + weight_at, mask=weight_mask, other=0.0)
            weight_message = tl.load(message_ptr + weight_at, mask=weight_mask, other=0.0)
        gate = tl.dot(feature, weight_predecessor, gate)
        message = tl.dot(feature, weight_message, message)

    # sqrt(R) unit(z) as a factor of z.
    factor = tl.where(slot == 1, 1.0, tl.sqrt(R * 1.0) * tl.rsqrt(tl.sum(squares, axis=0) + 1e-6))
    gate = tl.sigmoid(gate * factor[:, None] + hidden_gate)
    new = x + gate * (message * factor[:, None])
    tl.store(new_ptr + at, new.to(new_ptr.dtype.element_ty), mask=real)
