"""The two kernels of an injection in Triton, for any caller: no JAX in this file. ``pallas_gpu`` says how they divide the work.

Arrays are row-major and contiguous: x [T,D], norm [D], A [D,R], Gh [D,D], b [D], Gp and M [R,D] of one 16-bit type, anchor features [T/K,R] fp32. Between
the kernels lie parts z [S,T,R], g [S,T,D] and squares [S,T] in fp32, S splits. Grids: (tiles of R + tiles of D, S, tiles of T) and (tiles of D, tiles of T).
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
    x_ptr, norm_ptr, weight_ptr, out_ptr, square_ptr, tile, split, row_tile,
    T: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr,
    SQUARES: tl.constexpr,
):  # fmt: skip
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    STEPS: tl.constexpr = (D + DEPTH - 1) // DEPTH
    EACH: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    WHOLE: tl.constexpr = (T % ROWS == 0) and (D % DEPTH == 0) and (WIDTH % COLUMNS == 0)
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    for i in range(split * EACH, tl.minimum((split + 1) * EACH, STEPS)):
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
        if SQUARES:
            square += tl.sum(x * x, axis=1)
    tl.store(out_ptr + (split * T + row)[:, None] * WIDTH + column[None, :], out, mask=(row < T)[:, None] & (column < WIDTH)[None, :])
    if SQUARES:
        if tile == 0:
            tl.store(square_ptr + split * T + row, square, mask=row < T)


@triton.jit
def products_kernel(
    x_ptr, norm_ptr, feature_ptr, gate_ptr, predecessor_ptr, message_ptr, z_ptr, g_ptr, square_ptr,
    T: tl.constexpr, D: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr,
    PREFETCH: tl.constexpr,
):  # fmt: skip
    """z, g and squares: parts of (x norm) A, (x norm) Gh and the sums of squares of x. With PREFETCH Gp and M are asked for as well."""
    tile, split, row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    FEATURE_TILES: tl.constexpr = (R + COLUMNS - 1) // COLUMNS
    TILES: tl.constexpr = FEATURE_TILES + (D + COLUMNS - 1) // COLUMNS
    if PREFETCH:
        if row_tile == 0:
            _prefetch(predecessor_ptr, 2 * R * D, split * TILES + tile, TILES * SPLITS, 128)
            _prefetch(message_ptr, 2 * R * D, split * TILES + tile, TILES * SPLITS, 128)
    if tile < FEATURE_TILES:
        _product(x_ptr, norm_ptr, feature_ptr, z_ptr, square_ptr, tile, split, row_tile, T, D, R, ROWS, COLUMNS, DEPTH, SPLITS, True)
    else:
        _product(x_ptr, norm_ptr, gate_ptr, g_ptr, square_ptr, tile - FEATURE_TILES, split, row_tile, T, D, D, ROWS, COLUMNS, DEPTH, SPLITS, False)


@triton.jit
def _rms(square_ptr, row, real, eps, T: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr):
    square = tl.load(square_ptr + row, mask=real, other=0.0)
    for split in tl.static_range(1, SPLITS):
        square += tl.load(square_ptr + split * T + row, mask=real, other=0.0)
    return tl.rsqrt(square / D + eps)


@triton.jit
def write_kernel(
    x_ptr, z_ptr, g_ptr, square_ptr, anchor_ptr, bias_ptr, predecessor_ptr, message_ptr, new_ptr, hidden_gate_ptr,
    T: tl.constexpr, D: tl.constexpr, R: tl.constexpr, SLOTS: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SPLITS: tl.constexpr, PREPARED: tl.constexpr,
):  # fmt: skip
    """new [T,D] and hidden gate [T,D] fp32; the last write is redone from the latter.

    PREPARED: z_ptr has what each slot reads, [T,R] in x's type (0, the anchor's feature, then z of the slot before), and anchor_ptr is not read. So it must
    be for tiles of more than 16 rows, whose fp32 parts would not fit into shared memory.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    block = row // SLOTS
    slot = row - block * SLOTS
    exists = row < T
    predicted = exists & (slot >= 2)
    anchored = exists & (slot == 1)
    before = tl.where(predicted, row - 1, 0)
    real = exists[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]

    # Before the loop, so that their latency passes behind its loads.
    x = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32)
    hidden_gate = tl.load(g_ptr + at, mask=real, other=0.0)
    for split in tl.static_range(1, SPLITS):
        hidden_gate += tl.load(g_ptr + split * T * D + at, mask=real, other=0.0)
    bias = tl.load(bias_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    hidden_gate = hidden_gate * _rms(square_ptr, row, exists, EPS, T, D, SPLITS)[:, None] + bias[None, :]
    rms_before = _rms(square_ptr, before, predicted, EPS, T, D, SPLITS)

    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    message = tl.zeros((ROWS, COLUMNS), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    for i in range((R + DEPTH - 1) // DEPTH):
        depth = i * DEPTH + tl.arange(0, DEPTH)
        weight_at = depth[:, None] * D + column[None, :]
        if (R % DEPTH == 0) and (D % COLUMNS == 0):
            weight_predecessor = tl.load(predecessor_ptr + weight_at)
            weight_message = tl.load(message_ptr + weight_at)
        else:
            weight_mask = (depth < R)[:, None] & (column < D)[None, :]
            weight_predecessor = tl.load(predecessor_ptr + weight_at, mask=weight_mask, other=0.0)
            weight_message = tl.load(message_ptr + weight_at, mask=weight_mask, other=0.0)
        if PREPARED:
            feature = tl.load(z_ptr + row[:, None] * R + depth[None, :], mask=exists[:, None] & (depth < R)[None, :], other=0.0)
            z = feature.to(tl.float32)
        else:
            z_at = before[:, None] * R + depth[None, :]
            predicted_mask = predicted[:, None] & (depth < R)[None, :]
            z = tl.load(z_ptr + z_at, mask=predicted_mask, other=0.0)
            for split in tl.static_range(1, SPLITS):
                z += tl.load(z_ptr + split * T * R + z_at, mask=predicted_mask, other=0.0)
            anchor = tl.load(anchor_ptr + block[:, None] * R + depth[None, :], mask=anchored[:, None] & (depth < R)[None, :], other=0.0)
            feature = (z + anchor).to(weight_message.dtype)  # one of them is 0, both for slot 0
        gate = tl.dot(feature, weight_predecessor, gate)
        message = tl.dot(feature, weight_message, message)
        square += tl.sum(z * z, axis=1)

    # sqrt(R) unit(z rms) as a factor of z.
    factor = tl.sqrt(R * 1.0) * rms_before * tl.rsqrt(rms_before * rms_before * square + 1e-6)
    factor = tl.where(slot == 1, 1.0, factor)
    gate = tl.sigmoid(gate * factor[:, None] + hidden_gate)
    new = x + gate * (message * factor[:, None])
    tl.store(new_ptr + at, new.to(new_ptr.dtype.element_ty), mask=real)
    tl.store(hidden_gate_ptr + at, hidden_gate, mask=real)
