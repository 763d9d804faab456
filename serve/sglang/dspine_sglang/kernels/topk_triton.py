"""LM head with top-P as plain Triton kernels, without JAX: see ``pallas_gpu`` for how the two divide the work."""

import triton
import triton.language as tl


@triton.jit
def head_kernel(
    hidden_ptr,
    rows_ptr,
    logits_ptr,
    maxima_ptr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """hidden [COUNT,WIDTH] times rows [ROWS,WIDTH] -> logits [COUNT,CHUNKS*BLOCK_V] fp32 and their maxima [COUNT,CHUNKS] a run of BLOCK_V rows.

    Columns from NUM_TOKENS on are -1e30. Grid: (cdiv(COUNT, BLOCK_T), CHUNKS), CHUNKS = cdiv(ROWS, BLOCK_V); BLOCK_D divides WIDTH; a block is a power of
    two, BLOCK_T and BLOCK_D at least 16, BLOCK_V at least 64.
    """
    chunk = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    column = tl.arange(0, BLOCK_D)
    u_ptr = rows_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    h_ptr = hidden_ptr + token.to(tl.int64)[:, None] * WIDTH + column[None, :]
    logits = tl.zeros((BLOCK_V, BLOCK_T), tl.float32)
    for start in range(0, WIDTH, BLOCK_D):
        if ROWS % BLOCK_V == 0:
            u = tl.load(u_ptr + start, eviction_policy="evict_first")
        else:
            u = tl.load(u_ptr + start, mask=(row < ROWS)[:, None], other=0.0, eviction_policy="evict_first")
        h = tl.load(h_ptr + start, mask=(token < COUNT)[:, None], other=0.0)
        logits = tl.dot(u, tl.trans(h), logits)
    logits = tl.where((row < NUM_TOKENS)[:, None], logits, -1e30)
    out_ptr = logits_ptr + token.to(tl.int64)[None, :] * (CHUNKS * BLOCK_V) + row[:, None]
    tl.store(out_ptr, logits, mask=(token < COUNT)[None, :])
    tl.store(maxima_ptr + token * CHUNKS + chunk, tl.max(logits, axis=0), mask=token < COUNT)


@triton.jit
def _best(values, ids, NUMBER: tl.constexpr, SLOTS: tl.constexpr, MOST: tl.constexpr):
    """The NUMBER largest and their ids, ties to the lowest id, in arrays of SLOTS; ids are at most MOST, whatever the values (NaN) are."""
    slot = tl.arange(0, SLOTS)
    best = tl.full((SLOTS,), float("-inf"), tl.float32)
    best_ids = tl.zeros((SLOTS,), tl.int32)
    for i in range(NUMBER):
        top = tl.max(values, axis=0)
        first = tl.min(tl.where(values == top, ids, 2147483647), axis=0)
        best = tl.where(slot == i, top, best)
        best_ids = tl.where(slot == i, tl.minimum(first, MOST), best_ids)
        values = tl.where(ids == first, float("-inf"), values)
    return best, best_ids


@triton.jit
def select_kernel(
    maxima_ptr,
    logits_ptr,
    values_ptr,
    ids_ptr,
    WIDTH: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    NUMBER: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SLOTS: tl.constexpr,
    HELD: tl.constexpr,
):
    """Top-NUMBER of one row a program: maxima [*,CHUNKS] of runs of CHUNK and logits [*,WIDTH] fp32 -> values fp32 and ids int32 [*,NUMBER], falling.

    Columns from NUM_TOKENS on count as -1e30. Grid: the rows. BLOCK_C and SLOTS: CHUNKS and NUMBER rounded up to powers of two; HELD = min(NUMBER, CHUNKS).
    """
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK_C)
    slot = tl.arange(0, SLOTS)
    maxima = tl.load(maxima_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    _, chosen = _best(maxima, chunk, HELD, SLOTS, CHUNKS - 1)
    ids = chosen[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    here = logits_ptr + row.to(tl.int64) * WIDTH
    real = (slot < HELD)[:, None] & (ids < WIDTH)
    logits = tl.load(here + ids, mask=real, other=float("-inf"))
    logits = tl.where(real & (ids >= NUM_TOKENS), -1e30, logits)
    best, best_ids = _best(tl.reshape(logits, (SLOTS * CHUNK,)), tl.reshape(ids, (SLOTS * CHUNK,)), NUMBER, SLOTS, WIDTH - 1)
    tl.store(values_ptr + row * NUMBER + slot, best, mask=slot < NUMBER)
    tl.store(ids_ptr + row * NUMBER + slot, best_ids, mask=slot < NUMBER)
