"""Block attention as Pallas kernels (Triton), forward and backward: no array of scores, each context row is read only by blocks that may see it.

Blocks are taken in falling order of context length. A program works on a run of queries of one kv head in that order, whatever blocks they belong to, so
neither block sizes nor head groups are padded, and its context ends where that of its first block does. The order is applied by addresses; no array is moved.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from dspine_jax.attention import MASKED
from pallas_kernels.block_attention.vjp import Passes, attention, unsupported_mesh
from pallas_kernels.mesh import mesh_in_scope
from pallas_kernels.shapes import ModelShape

LEAST_TILE = 16  # the smallest matrix product
LOG2_E = math.log2(math.e)


class Launch(NamedTuple):
    """Queries and keys of a tile, both powers of two, and Triton's warps a program and pipeline depth."""

    queries: int
    keys: int
    warps: int
    stages: int


# Kernel -> widest head -> launch.
LAUNCHES = {
    "forward": {64: Launch(128, 64, 4, 3), 128: Launch(128, 64, 8, 3), 256: Launch(64, 32, 8, 2)},
    "backward_queries": {64: Launch(128, 64, 8, 3), 128: Launch(64, 64, 4, 2), 256: Launch(64, 32, 8, 2)},
    "backward_context": {64: Launch(64, 128, 8, 3), 128: Launch(64, 64, 4, 2), 256: Launch(32, 64, 8, 2)},
    "backward_own": {64: Launch(64, 64, 4, 2), 128: Launch(64, 64, 4, 2), 256: Launch(32, 64, 8, 2)},
}


def candidates(kernel: str, shape: ModelShape, blocks: int) -> list[Launch]:
    """Launches worth a try. Only for more than one block; the gradient's kernels want to be timed with the gradient."""
    return list(itertools.starmap(Launch, itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3))))


class Sizes(NamedTuple):
    """Blocks N, slots K, heads H, kv heads G, head width C and context rows S of one device's arrays."""

    N: int
    K: int
    H: int
    G: int
    C: int
    S: int
    causal: bool
    interpret: bool

    @property
    def queries(self) -> int:
        """Queries of a block that share a kv head."""
        return self.K * (self.H // self.G)

    def launch(self, kernel: str, num_keys: int) -> Launch:
        launch = next(launch for widest, launch in LAUNCHES[kernel].items() if self.C <= widest)
        fit = lambda tile, rows: min(tile, max(LEAST_TILE, pl.next_power_of_2(rows)))  # noqa: E731
        return launch._replace(queries=fit(launch.queries, self.N * self.queries), keys=fit(launch.keys, num_keys))


def unsupported(q_BNKHC: jax.Array, ctx_k_BSGC: jax.Array, ctx_v_BSGC: jax.Array, block_k_BNKGC: jax.Array, block_v_BNKGC: jax.Array) -> str | None:
    """What keeps the kernels from serving these arrays, None if nothing does."""
    B, N, K, H, C = q_BNKHC.shape
    S, G = ctx_k_BSGC.shape[1:3]
    dtypes = {jnp.dtype(x.dtype) for x in (q_BNKHC, ctx_k_BSGC, ctx_v_BSGC, block_k_BNKGC, block_v_BNKGC)}
    if len(dtypes) > 1:
        return f"arrays of several types, {', '.join(sorted(map(str, dtypes)))}"
    if dtypes.isdisjoint((jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))):
        return f"{dtypes.pop()} (only bfloat16 and float16)"
    if C & (C - 1) or not 16 <= C <= 256:
        return f"a head width of {C} (only powers of two from 16 to 256)"
    if 0 in (B, N, K, S):
        return f"an empty array ({B} rows of {N} blocks of {K} slots, {S} context rows)"
    return unsupported_mesh(B, G)


def _div(x, divisor: int):
    """Quotient of numbers that are not negative; ``//`` would also lower the case that they are."""
    return jax.lax.div(x, jnp.full_like(x, divisor))


def _power(scores_MR, shift_MR, sizes: Sizes):
    """exp(C^-1/2 scores), divided by 2^shift: one multiply-add and the hardware's power of two, which Triton would both wrap in more instructions."""
    scale = sizes.C**-0.5 * LOG2_E
    shift_MR = jnp.broadcast_to(shift_MR, scores_MR.shape)
    if sizes.interpret:
        return jnp.exp2(scores_MR * scale - shift_MR)
    code = f"{{ .reg .f32 x; fma.rn.f32 x, $1, 0f{struct.pack('>f', scale).hex()}, $2; ex2.approx.ftz.f32 $0, x; }}"
    shape = jax.ShapeDtypeStruct(scores_MR.shape, jnp.float32)
    return plgpu.elementwise_inline_asm(code, args=[scores_MR, -shift_MR], constraints="=f,f,f", pack=1, result_shape_dtypes=[shape])[0]


def _load_queries(order_ref, len_ref, kv_head, first, count: int, sizes: Sizes):
    """Queries first.. of the sorted list -> (real, position of the block in the order, slot, row in [N*K*H,...], visible context), [M] each."""
    query_M = first + jnp.arange(count, dtype=jnp.int32)
    real_M = query_M < sizes.N * sizes.queries
    place_M = _div(query_M, sizes.queries)
    within_M = query_M - place_M * sizes.queries
    group = sizes.H // sizes.G
    slot_M = _div(within_M, group)
    # Past the end the block is number N, which is nowhere: masked rows never share an address with real ones.
    block_M = plgpu.load(order_ref.at[place_M], mask=real_M, other=sizes.N)
    row_M = (block_M * sizes.K + slot_M) * sizes.H + kv_head * group + (within_M - slot_M * group)
    return real_M, place_M, slot_M, row_M, plgpu.load(len_ref.at[place_M], mask=real_M, other=0)


def _own_keys(order_ref, first, count: int, sizes: Sizes):
    """Own keys first.. of the sorted blocks -> (real, position of the block in the order, slot, row in [N*K,...]), [R] each."""
    key_R = first + jnp.arange(count, dtype=jnp.int32)
    real_R = key_R < sizes.N * sizes.K
    place_R = _div(key_R, sizes.K)
    slot_R = key_R - place_R * sizes.K
    block_R = plgpu.load(order_ref.at[place_R], mask=real_R, other=sizes.N)
    return real_R, place_R, slot_R, block_R * sizes.K + slot_R


def _at(ref, row_M):
    """Whole rows of a [rows,C] reference."""
    return ref.at[row_M[:, None], jnp.arange(ref.shape[1], dtype=jnp.int32)[None, :]]


def _sees(query_place, query_slot, key_place, key_slot, causal: bool):
    """Whether a query sees an own key; the arguments broadcast."""
    return (query_place == key_place) & (key_slot <= query_slot) if causal else query_place == key_place


def _walk_keys(order_ref, len_ref, ctx_refs, own_refs, first, tile: Launch, sizes: Sizes, queries, update, carry):
    """carry = update(carry, key [R,C], value [R,C], visible [M,R] or None for all) over what a tile's queries may see: context, then own blocks."""
    _, place_M, slot_M, _, len_M = queries
    first_place = _div(first, sizes.queries)
    last_place = jnp.minimum(_div(first + tile.queries - 1, sizes.queries), sizes.N - 1)
    whole = _div(len_ref[last_place], tile.keys)
    reach = len_ref[first_place]

    def walk_whole(i, carry):
        rows = pl.ds(i * tile.keys, tile.keys)
        key, value = (plgpu.load(ref.at[rows, :]) for ref in ctx_refs)
        return update(carry, key, value, None)

    def walk_context(i, carry):
        rows = pl.ds(i * tile.keys, tile.keys)
        row_R = i * tile.keys + jnp.arange(tile.keys, dtype=jnp.int32)
        key, value = (plgpu.load(ref.at[rows, :], mask=(row_R < reach)[:, None], other=0.0) for ref in ctx_refs)
        return update(carry, key, value, row_R[None, :] < len_M[:, None])

    def walk_own(i, carry):
        real_R, key_place_R, key_slot_R, row_R = _own_keys(order_ref, first_place * sizes.K + i * tile.keys, tile.keys, sizes)
        key, value = (plgpu.load(_at(ref, row_R), mask=real_R[:, None], other=0.0) for ref in own_refs)
        return update(carry, key, value, _sees(place_M[:, None], slot_M[:, None], key_place_R[None, :], key_slot_R[None, :], sizes.causal))

    # Tiles that are visible as a whole have a loop of their own, without masks.
    carry = jax.lax.fori_loop(0, whole, walk_whole, carry)
    carry = jax.lax.fori_loop(whole, _div(reach + tile.keys - 1, tile.keys), walk_context, carry)
    own_keys = (last_place + 1 - first_place) * sizes.K
    return jax.lax.fori_loop(0, _div(own_keys + tile.keys - 1, tile.keys), walk_own, carry)


def _forward_kernel(order_ref, len_ref, q_ref, ctx_k_ref, ctx_v_ref, own_k_ref, own_v_ref, out_ref, lse_ref, *, sizes: Sizes, tile: Launch):
    """order, len [N]; q, out [N*K*H,C]; ctx [S,C]; own [N*K,C]; lse [N*K*H/G], base 2, in the order of the sorted queries."""
    first = pl.program_id(0) * tile.queries
    queries = _load_queries(order_ref, len_ref, pl.program_id(1), first, tile.queries, sizes)
    real_M, _, _, row_M, _ = queries
    q_MC = plgpu.load(_at(q_ref, row_M), mask=real_M[:, None], other=0.0)

    def update(carry, k_RC, v_RC, visible_MR):
        out_MC, top_M, total_M = carry
        scores_MR = plgpu.dot(q_MC, k_RC.T)
        if visible_MR is not None:
            scores_MR = jnp.where(visible_MR, scores_MR, MASKED)
        new_top_M = jnp.maximum(top_M, scores_MR.max(axis=1))
        # Far above what is masked, so that a query that has seen nothing yet gathers nothing.
        shift_M = jnp.maximum(new_top_M, MASKED / 100) * scale
        weights_MR = _power(scores_MR, shift_M[:, None], sizes)
        shrink_M = jnp.exp2((top_M - new_top_M) * scale)
        out_MC = out_MC * shrink_M[:, None] + plgpu.dot(weights_MR.astype(v_RC.dtype), v_RC)
        return out_MC, new_top_M, total_M * shrink_M + weights_MR.sum(axis=1)

    M, scale = tile.queries, sizes.C**-0.5 * LOG2_E
    carry = jnp.zeros((M, sizes.C), jnp.float32), jnp.full((M,), MASKED, jnp.float32), jnp.zeros((M,), jnp.float32)
    refs = order_ref, len_ref, (ctx_k_ref, ctx_v_ref), (own_k_ref, own_v_ref)
    out_MC, top_M, total_M = _walk_keys(*refs, first, tile, sizes, queries, update, carry)
    plgpu.store(_at(out_ref, row_M), (out_MC / total_M[:, None]).astype(out_ref.dtype), mask=real_M[:, None])
    plgpu.store(lse_ref.at[pl.ds(first, M)], top_M * scale + jnp.log2(total_M), mask=real_M)


def _backward_queries_kernel(
    order_ref, len_ref, q_ref, ctx_k_ref, ctx_v_ref, own_k_ref, own_v_ref, out_ref, dout_ref, lse_ref, dq_ref, delta_ref, *, sizes: Sizes, tile: Launch
):
    """dq [N*K*H,C], and delta = sum(dout * out) like lse for the kernels below."""
    first = pl.program_id(0) * tile.queries
    queries = _load_queries(order_ref, len_ref, pl.program_id(1), first, tile.queries, sizes)
    real_M, _, _, row_M, _ = queries
    q_MC, out_MC, dout_MC = (plgpu.load(_at(ref, row_M), mask=real_M[:, None], other=0.0) for ref in (q_ref, out_ref, dout_ref))
    lse_M = plgpu.load(lse_ref.at[pl.ds(first, tile.queries)], mask=real_M, other=0.0)
    delta_M = (out_MC.astype(jnp.float32) * dout_MC.astype(jnp.float32)).sum(axis=1)

    def update(dq_MC, k_RC, v_RC, visible_MR):
        probs_MR = _power(plgpu.dot(q_MC, k_RC.T), lse_M[:, None], sizes)
        if visible_MR is not None:
            probs_MR = jnp.where(visible_MR, probs_MR, 0.0)
        dscores_MR = probs_MR * (plgpu.dot(dout_MC, v_RC.T) - delta_M[:, None])
        return dq_MC + plgpu.dot(dscores_MR.astype(k_RC.dtype), k_RC)

    refs = order_ref, len_ref, (ctx_k_ref, ctx_v_ref), (own_k_ref, own_v_ref)
    dq_MC = _walk_keys(*refs, first, tile, sizes, queries, update, jnp.zeros((tile.queries, sizes.C), jnp.float32))
    plgpu.store(_at(dq_ref, row_M), (dq_MC * sizes.C**-0.5).astype(dq_ref.dtype), mask=real_M[:, None])
    plgpu.store(delta_ref.at[pl.ds(first, tile.queries)], delta_M, mask=real_M)


def _backward_keys_kernel(
    order_ref, len_ref, seen_ref, whole_ref, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, dk_ref, dv_ref, *, own: bool, sizes: Sizes, tile: Launch
):
    """Gradients of one tile of context keys and values [S,C], or of own ones [N*K,C].

    seen, whole [tiles]: how many blocks, from the first of the order on, see any of a tile of context, and how many see all of it.
    """
    tile_index, kv_head = pl.program_id(0), pl.program_id(1)
    first_key = tile_index * tile.keys
    if own:
        real_R, key_place_R, key_slot_R, row_R = _own_keys(order_ref, first_key, tile.keys, sizes)
        first_place = _div(first_key, sizes.K)
        end_place = jnp.minimum(_div(first_key + tile.keys - 1, sizes.K) + 1, sizes.N)
    else:
        row_R = first_key + jnp.arange(tile.keys, dtype=jnp.int32)
        real_R = row_R < sizes.S
        first_place, end_place = 0, seen_ref[tile_index]
        whole = _div(whole_ref[tile_index] * sizes.queries, tile.queries)
    at = lambda ref: _at(ref, row_R) if own else ref.at[pl.ds(first_key, tile.keys), :]  # noqa: E731
    k_RC, v_RC = (plgpu.load(at(ref), mask=real_R[:, None], other=0.0) for ref in (k_ref, v_ref))

    def walk(masked: bool, i, carry):
        dk_RC, dv_RC = carry
        first = first_place * sizes.queries + i * tile.queries
        real_M, place_M, slot_M, row_M, len_M = _load_queries(order_ref, len_ref, kv_head, first, tile.queries, sizes)
        q_MC, dout_MC = (plgpu.load(_at(ref, row_M), mask=real_M[:, None], other=0.0) for ref in (q_ref, dout_ref))
        lse_M, delta_M = (plgpu.load(ref.at[pl.ds(first, tile.queries)], mask=real_M, other=0.0) for ref in (lse_ref, delta_ref))
        probs_RM = _power(plgpu.dot(k_RC, q_MC.T), lse_M[None, :], sizes)
        if own:
            probs_RM = jnp.where(_sees(place_M[None, :], slot_M[None, :], key_place_R[:, None], key_slot_R[:, None], sizes.causal), probs_RM, 0.0)
        elif masked:
            probs_RM = jnp.where(row_R[:, None] < len_M[None, :], probs_RM, 0.0)
        dv_RC = dv_RC + plgpu.dot(probs_RM.astype(dout_MC.dtype), dout_MC)
        dscores_RM = probs_RM * (plgpu.dot(v_RC, dout_MC.T) - delta_M[None, :])
        return dk_RC + plgpu.dot(dscores_RM.astype(q_MC.dtype), q_MC), dv_RC

    carry = (jnp.zeros((tile.keys, sizes.C), jnp.float32),) * 2
    if not own:
        carry = jax.lax.fori_loop(0, whole, functools.partial(walk, False), carry)
    num_queries = (end_place - first_place) * sizes.queries
    tiles = _div(num_queries + tile.queries - 1, tile.queries)
    dk_RC, dv_RC = jax.lax.fori_loop(0 if own else whole, tiles, functools.partial(walk, True), carry)
    plgpu.store(at(dk_ref), (dk_RC * sizes.C**-0.5).astype(dk_ref.dtype), mask=real_R[:, None])
    plgpu.store(at(dv_ref), dv_RC.astype(dv_ref.dtype), mask=real_R[:, None])


def _call(kernel, tiles: int, sizes: Sizes, launch: Launch, inputs, outputs, **static):
    """One program a tile, kv head and row of the batch. inputs, outputs: (array with the batch in front, axis of its kv heads or None)."""

    def spec(x, head_axis):
        squeezed = [None if axis in (0, head_axis) else size for axis, size in enumerate(x.shape)]
        return pl.BlockSpec(squeezed, lambda t, g, b: tuple(b if axis == 0 else g if axis == head_axis else 0 for axis in range(x.ndim)))

    return pl.pallas_call(
        functools.partial(kernel, sizes=sizes, tile=launch, **static),
        grid=(tiles, sizes.G, inputs[0][0].shape[0]),
        in_specs=[spec(*x) for x in inputs],
        out_specs=[spec(*x) for x in outputs],
        out_shape=[x for x, _ in outputs],
        compiler_params=plgpu.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        interpret=sizes.interpret,
        name=kernel.__name__.strip("_"),
    )(*(x for x, _ in inputs))


def _sizes(q_BNKHC: jax.Array, ctx_k_BSGC: jax.Array, causal: bool, interpret: bool) -> Sizes:
    _, N, K, H, C = q_BNKHC.shape
    return Sizes(N, K, H, ctx_k_BSGC.shape[2], C, ctx_k_BSGC.shape[1], causal, interpret)


def _sorted(context_len_BN: jax.Array, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """(blocks in falling order of context length, their lengths), [B,N] int32."""
    len_BN = jnp.clip(context_len_BN.astype(jnp.int32), 0, sizes.S)
    order_BN = jnp.argsort(-len_BN, axis=1).astype(jnp.int32)
    return order_BN, jnp.take_along_axis(len_BN, order_BN, axis=1)


def _rows(x: jax.Array, kv_heads: bool) -> tuple[jax.Array, int | None]:
    """Blocks, slots (and the heads of queries) as one axis of rows, for ``_call``."""
    return (x.reshape(x.shape[0], -1, *x.shape[-2:]), 2) if kv_heads else (x.reshape(x.shape[0], -1, x.shape[-1]), None)


def _forward(q_BNKHC, ctx_k_BSGC, ctx_v_BSGC, block_k_BNKGC, block_v_BNKGC, context_len_BN, *, causal: bool, interpret: bool):
    """-> (out [B,N,K,H,C], log-sum-exp of the scores [B,G,N*K*H/G], base 2, in the order of the sorted queries)."""
    sizes = _sizes(q_BNKHC, ctx_k_BSGC, causal, interpret)
    launch = sizes.launch("forward", sizes.S)
    order_BN, len_BN = _sorted(context_len_BN, sizes)
    q = _rows(q_BNKHC, False)
    inputs = [(order_BN, None), (len_BN, None), q, (ctx_k_BSGC, 2), (ctx_v_BSGC, 2), _rows(block_k_BNKGC, True), _rows(block_v_BNKGC, True)]
    lse = jax.ShapeDtypeStruct((q_BNKHC.shape[0], sizes.G, sizes.N * sizes.queries), jnp.float32)
    outputs = [(jax.ShapeDtypeStruct(q[0].shape, q[0].dtype), None), (lse, 1)]
    out, lse_BGQ = _call(_forward_kernel, pl.cdiv(sizes.N * sizes.queries, launch.queries), sizes, launch, inputs, outputs)
    return out.reshape(q_BNKHC.shape), lse_BGQ


def _backward(
    q_BNKHC, ctx_k_BSGC, ctx_v_BSGC, block_k_BNKGC, block_v_BNKGC, context_len_BN, out_BNKHC, lse_BGQ, dout_BNKHC, *, causal: bool, interpret: bool
):
    """Gradients of the five arrays."""
    sizes = _sizes(q_BNKHC, ctx_k_BSGC, causal, interpret)
    order_BN, len_BN = _sorted(context_len_BN, sizes)
    order, length, lse = (order_BN, None), (len_BN, None), (lse_BGQ, 1)
    q, out, dout = (_rows(x, False) for x in (q_BNKHC, out_BNKHC, dout_BNKHC))
    ctx = (ctx_k_BSGC, 2), (ctx_v_BSGC, 2)
    own = _rows(block_k_BNKGC, True), _rows(block_v_BNKGC, True)
    like = lambda x: (jax.ShapeDtypeStruct(x[0].shape, x[0].dtype), x[1])  # noqa: E731

    launch = sizes.launch("backward_queries", sizes.S)
    tiles = pl.cdiv(sizes.N * sizes.queries, launch.queries)
    inputs = [order, length, q, *ctx, *own, out, dout, lse]
    dq, delta_BGQ = _call(_backward_queries_kernel, tiles, sizes, launch, inputs, [like(q), like(lse)])

    def keys(kernel: str, pair, num_keys: int):
        launch = sizes.launch(kernel, num_keys)
        tiles = pl.cdiv(num_keys, launch.keys)
        first_T = jnp.arange(tiles, dtype=jnp.int32) * launch.keys
        seen_BT, whole_BT = ((len_BN[:, None, :] >= first_T[:, None] + rows).sum(axis=2, dtype=jnp.int32) for rows in (1, launch.keys))
        inputs = [order, length, (seen_BT, None), (whole_BT, None), q, *pair, dout, lse, (delta_BGQ, 1)]
        return _call(_backward_keys_kernel, tiles, sizes, launch, inputs, [like(x) for x in pair], own=kernel == "backward_own")

    dctx_k, dctx_v = keys("backward_context", ctx, sizes.S)
    down_k, down_v = keys("backward_own", own, sizes.N * sizes.K)
    return dq.reshape(q_BNKHC.shape), dctx_k, dctx_v, down_k.reshape(block_k_BNKGC.shape), down_v.reshape(block_v_BNKGC.shape)


PASSES = Passes(_forward, _backward)


def block_attention(
    q_BNKHC: jax.Array,
    ctx_k_BSGC: jax.Array,
    ctx_v_BSGC: jax.Array,
    block_k_BNKGC: jax.Array,
    block_v_BNKGC: jax.Array,
    context_len_BN: jax.Array,
    *,
    causal: bool,
    interpret: bool = False,
) -> jax.Array:
    """See ``pallas_kernels.block_attention.block_attention``; only for what ``unsupported`` has nothing against."""
    return attention(q_BNKHC, ctx_k_BSGC, ctx_v_BSGC, block_k_BNKGC, block_v_BNKGC, context_len_BN, PASSES, causal, interpret, mesh_in_scope())
