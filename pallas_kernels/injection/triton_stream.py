"""Another division of an injection between two kernels, in Triton and without JAX: the features alone, then all the rest as one stream of weights.

``features_kernel`` reads A only, a seventh of the bytes, and asks the cache for the first rows of Gh meanwhile: a kernel's start and end leave the memory
idle, and here the next one's weights are on their way through them. ``stream_kernel`` multiplies with Gh and then with Gp and M, one program for each tile
of columns; the gate stays in its registers between the two. The normed stream comes from outside, where it joins what made the stream: every program would
have to norm all of it. Products have two sums, of the even and the odd slices: with 16 rows a tensor core would wait for one.

Arrays are row-major and contiguous: x and normed [T,D], A [D,R], Gh [D,D], b [D], Gp and M [R,D] of one 16-bit type, anchor features [T/K,R] fp32. Between
the kernels lie source [T,R] in x's type, z [T,R] and squares [tiles of R,T] in fp32. Grids: (tiles of R, tiles of T) and (tiles of D, tiles of T).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.injection.triton_kernels import _prefetch


@triton.jit
def _part(left_ptr, weight_ptr, row, column, depth, T: tl.constexpr, DEEP: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """(left[row, depth], weight[depth, column]); what is not there is 0."""
    left_at = left_ptr + row[:, None] * DEEP + depth[None, :]
    weight_at = weight_ptr + depth[:, None] * WIDTH + column[None, :]
    if WHOLE:
        return tl.load(left_at), tl.load(weight_at, eviction_policy="evict_first")
    left = tl.load(left_at, mask=(row < T)[:, None] & (depth < DEEP)[None, :], other=0.0)
    return left, tl.load(weight_at, mask=(depth < DEEP)[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def _product(
    left_ptr, weight_ptr, row, column,
    T: tl.constexpr, DEEP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """left weight for a tile, DEPTH at a time."""
    WHOLE: tl.constexpr = (T % ROWS == 0) and (DEEP % DEPTH == 0) and (WIDTH % COLUMNS == 0)
    HALF: tl.constexpr = DEPTH // 2
    even = tl.zeros((ROWS, COLUMNS), tl.float32)
    odd = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range((DEEP + DEPTH - 1) // DEPTH):
        depth = i * DEPTH + tl.arange(0, HALF)
        left_even, weight_even = _part(left_ptr, weight_ptr, row, column, depth, T, DEEP, WIDTH, WHOLE)
        left_odd, weight_odd = _part(left_ptr, weight_ptr, row, column, depth + HALF, T, DEEP, WIDTH, WHOLE)
        even = tl.dot(left_even, weight_even, even)
        odd = tl.dot(left_odd, weight_odd, odd)
    return even + odd


@triton.jit
def features_kernel(
    normed_ptr, anchor_ptr, feature_ptr, gate_ptr, source_ptr, z_ptr, square_ptr,
    T: tl.constexpr, D: tl.constexpr, R: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """z = normed A, its sums of squares by tile, and source: what each slot reads, 0 for slot 0, the anchor's feature for slot 1, z of the slot before for the
    others. AHEAD: rows of Gh to ask the cache for.
    """
    tile, row_tile = tl.program_id(0), tl.program_id(1)
    if AHEAD > 0:
        if row_tile == 0:
            _prefetch(gate_ptr, 2 * D * AHEAD, tile, (R + COLUMNS - 1) // COLUMNS, 128)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    exists = row < T
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    real = column < R
    z = _product(normed_ptr, feature_ptr, row, column, T, D, R, ROWS, COLUMNS, DEPTH)
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


@triton.jit
def stream_kernel(
    x_ptr, normed_ptr, bias_ptr, source_ptr, square_ptr, gate_ptr, predecessor_ptr, message_ptr, new_ptr, hidden_gate_ptr,
    T: tl.constexpr, D: tl.constexpr, R: tl.constexpr, SLOTS: tl.constexpr, TILES: tl.constexpr, TILES_POWER: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The hidden gate, normed Gh + b, and the new stream. TILES: of ``squares``; TILES_POWER: rounded up to a power of two.

    Gp and M are read half as deep as Gh at a time: there are two of them.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    slot = row % SLOTS
    exists = row < T
    predicted = exists & (slot >= 2)
    real = exists[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]

    # Before the loops, so that their latency passes behind the weights'.
    x = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    tile = tl.arange(0, TILES_POWER)
    square_at = square_ptr + tile[:, None] * T + tl.where(predicted, row - 1, 0)[None, :]
    squares = tl.load(square_at, mask=(tile < TILES)[:, None] & predicted[None, :], other=0.0)
    factor = tl.where(slot == 1, 1.0, tl.sqrt(R * 1.0) * tl.rsqrt(tl.sum(squares, axis=0) + 1e-6))

    hidden_gate = _product(normed_ptr, gate_ptr, row, column, T, D, D, ROWS, COLUMNS, DEPTH) + bias[None, :]
    tl.store(hidden_gate_ptr + at, hidden_gate, mask=real)

    WHOLE: tl.constexpr = (T % ROWS == 0) and (R % (DEPTH // 2) == 0) and (D % COLUMNS == 0)
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    message = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range((R + DEPTH // 2 - 1) // (DEPTH // 2)):
        depth = i * (DEPTH // 2) + tl.arange(0, DEPTH // 2)
        feature, weight_predecessor = _part(source_ptr, predecessor_ptr, row, column, depth, T, R, D, WHOLE)
        _, weight_message = _part(source_ptr, message_ptr, row, column, depth, T, R, D, WHOLE)
        gate = tl.dot(feature, weight_predecessor, gate)
        message = tl.dot(feature, weight_message, message)

    gate = tl.sigmoid(gate * factor[:, None] + hidden_gate)
    new = x + gate * (message * factor[:, None])
    tl.store(new_ptr + at, new.to(new_ptr.dtype.element_ty), mask=real)
