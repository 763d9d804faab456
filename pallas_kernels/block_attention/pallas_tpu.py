"""Block attention as Pallas kernels for the TPU (Mosaic), forward and backward: scores exist only as tiles on the chip.

Blocks are taken in falling order of context length, a few whole blocks of one kv head a tile of queries. The grid walks over the context a tile of keys at a
time; what no block of a tile sees is neither fetched (its index stays where it was) nor computed. Own keys need no walk: a tile sees its own blocks alone.
Scores lie with keys down and queries across, so that what belongs to a query is a row of lanes, and the log-sum-exp is stored without padding.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dspine_jax.attention import MASKED
from pallas_kernels.block_attention.vjp import Passes, attention, unsupported_mesh
from pallas_kernels.mesh import mesh_in_scope

LANES = 128
MOST_QUERIES = 256  # of a tile, unless one block has more
MOST_KEYS = 256  # of a tile of context
MOST_OF_BLOCK = 2048  # queries of one block, which are never parted
VMEM_BYTES = 48 << 20  # the smallest chip, tpu7x, has 64 MiB


class Sizes(NamedTuple):
    """A device's arrays: rows B, kv heads G, heads a kv head ``group``, slots K, head width C, context S; blocks a tile, tiles of queries, keys a tile."""

    B: int
    G: int
    group: int
    K: int
    C: int
    S: int
    blocks: int
    tiles: int
    keys: int
    causal: bool

    @property
    def queries(self) -> int:
        """Queries of a tile, ordered by block, slot and head."""
        return self.blocks * self.K * self.group


def _sizes(q_BNKHC: jax.Array, ctx_k_BSGC: jax.Array, causal: bool) -> Sizes:
    B, N, K, H, C = q_BNKHC.shape
    S, G = ctx_k_BSGC.shape[1:3]
    of_block = K * (H // G)
    most = max(1, MOST_QUERIES // of_block)
    aligned = LANES // math.gcd(LANES, of_block)
    blocks = min(N, most // aligned * aligned or most)
    return Sizes(B, G, H // G, K, C, S, blocks, pl.cdiv(N, blocks), min(S, MOST_KEYS), causal)


def unsupported(q_BNKHC: jax.Array, ctx_k_BSGC: jax.Array, ctx_v_BSGC: jax.Array, block_k_BNKGC: jax.Array, block_v_BNKGC: jax.Array) -> str | None:
    """What keeps the kernels from serving these arrays, None if nothing does."""
    B, N, K, H, C = q_BNKHC.shape
    S, G = ctx_k_BSGC.shape[1:3]
    dtypes = {jnp.dtype(x.dtype) for x in (q_BNKHC, ctx_k_BSGC, ctx_v_BSGC, block_k_BNKGC, block_v_BNKGC)}
    if len(dtypes) > 1:
        return f"arrays of several types, {', '.join(sorted(map(str, dtypes)))}"
    if dtypes.isdisjoint((jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))):
        return f"{dtypes.pop()} (only bfloat16 and float32)"
    if 0 in (B, N, K, S):
        return f"an empty array ({B} rows of {N} blocks of {K} slots, {S} context rows)"
    if K * (H // G) > MOST_OF_BLOCK:
        return f"{K} slots of {H // G} heads a kv head (at most {MOST_OF_BLOCK} queries)"
    return unsupported_mesh(B, G)


def _dot(a, b, contract: tuple[int, int]):
    """Product of two matrices over one axis of each, fp32; exact for fp32 ones."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _iota(shape: tuple[int, int], axis: int):
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _own_visible(sizes: Sizes):
    """[own keys, queries] of a tile: a block's own slots, with ``causal`` up to the query's."""
    shape = sizes.blocks * sizes.K, sizes.queries
    key, query = _iota(shape, 0), jax.lax.div(_iota(shape, 1), jnp.int32(sizes.group))
    slots = jnp.int32(sizes.K)
    same = jax.lax.div(key, slots) == jax.lax.div(query, slots)
    return same & (key <= query) if sizes.causal else same


def _context_visible(keys_tile, len_1M, sizes: Sizes):
    """[keys, queries] of a tile of context."""
    return keys_tile * sizes.keys + _iota((sizes.keys, sizes.queries), 0) < len_1M


def _real_rows(ref, keys_tile, sizes: Sizes):
    """A tile of context rows; past the end, where there may be anything, 0."""
    rows = ref[...]
    if sizes.S % sizes.keys == 0:
        return rows
    return jnp.where(keys_tile * sizes.keys + _iota(rows.shape, 0) < sizes.S, rows, jnp.zeros_like(rows))


def _forward_kernel(reach_ref, q_ref, len_ref, own_k_ref, own_v_ref, k_ref, v_ref, out_ref, lse_ref, acc_ref, top_ref, total_ref, *, sizes: Sizes):
    """q, out [M,C], len, lse [1,M], own [blocks*K,C], context [R,C]; scratch: acc [C,M], top and total [1,M], fp32."""
    b, tile, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    scale = sizes.C**-0.5

    def add(k_RC, v_RC, visible_RM):
        scores_RM = jnp.where(visible_RM, _dot(k_RC, q_ref[...], (1, 1)) * scale, MASKED)
        top_1M = jnp.maximum(top_ref[...], jnp.max(scores_RM, axis=0, keepdims=True))
        weights_RM = jnp.where(visible_RM, jnp.exp(scores_RM - top_1M), 0.0)
        shrink_1M = jnp.exp(top_ref[...] - top_1M)
        acc_ref[...] = acc_ref[...] * shrink_1M + _dot(v_RC, weights_RM.astype(v_RC.dtype), (0, 0))
        total_ref[...] = total_ref[...] * shrink_1M + jnp.sum(weights_RM, axis=0, keepdims=True)
        top_ref[...] = top_1M

    @pl.when(step == 0)
    def _():
        acc_ref[...], total_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32), jnp.zeros(total_ref.shape, jnp.float32)
        top_ref[...] = jnp.full(top_ref.shape, MASKED, jnp.float32)
        add(own_k_ref[...], own_v_ref[...], _own_visible(sizes))  # first: every query sees one, so the top is finite from here on

    @pl.when(step * sizes.keys < reach_ref[b, tile])
    def _():
        add(k_ref[...], _real_rows(v_ref, step, sizes), _context_visible(step, len_ref[...], sizes))

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        out_ref[...] = (acc_ref[...] / total_ref[...]).T.astype(out_ref.dtype)
        lse_ref[...] = top_ref[...] + jnp.log(total_ref[...])


def _gradients(q_ref, dout_ref, lse_ref, delta_ref, k_RC, v_RC, visible_RM, sizes: Sizes):
    """(probabilities [R,M], gradients of the scores before scaling [R,M]) of a tile of keys, in fp32."""
    scores_RM = _dot(k_RC, q_ref[...], (1, 1)) * sizes.C**-0.5
    probs_RM = jnp.where(visible_RM, jnp.exp(jnp.where(visible_RM, scores_RM, MASKED) - lse_ref[...]), 0.0)
    return probs_RM, probs_RM * (_dot(v_RC, dout_ref[...], (1, 1)) - delta_ref[...])


def _backward_queries_kernel(
    reach_ref, q_ref, len_ref, own_k_ref, own_v_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, dq_ref, down_k_ref, down_v_ref, acc_ref, *, sizes: Sizes
):
    """dq [M,C] of a tile of queries and the gradients of its own keys and values; scratch: acc [M,C] fp32."""
    b, tile, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    gradients = functools.partial(_gradients, q_ref, dout_ref, lse_ref, delta_ref, sizes=sizes)

    @pl.when(step == 0)
    def _():
        probs_RM, dscores_RM = gradients(own_k_ref[...], own_v_ref[...], _own_visible(sizes))
        dscores_RM = dscores_RM.astype(q_ref.dtype)
        acc_ref[...] = _dot(dscores_RM, own_k_ref[...], (0, 0))
        down_k_ref[...] = (_dot(dscores_RM, q_ref[...], (1, 0)) * sizes.C**-0.5).astype(down_k_ref.dtype)
        down_v_ref[...] = _dot(probs_RM.astype(q_ref.dtype), dout_ref[...], (1, 0)).astype(down_v_ref.dtype)

    @pl.when(step * sizes.keys < reach_ref[b, tile])
    def _():
        k_RC, v_RC = (_real_rows(ref, step, sizes) for ref in (k_ref, v_ref))
        _, dscores_RM = gradients(k_RC, v_RC, _context_visible(step, len_ref[...], sizes))
        acc_ref[...] += _dot(dscores_RM.astype(q_ref.dtype), k_RC, (0, 0))

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        dq_ref[...] = (acc_ref[...] * sizes.C**-0.5).astype(dq_ref.dtype)


def _backward_context_kernel(
    reach_ref, q_ref, len_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref, *, sizes: Sizes
):
    """Gradients of a tile of context [R,C], a tile of queries at a time; scratch: both in fp32."""
    b, keys_tile, tile = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(tile == 0)
    def _():
        dk_acc_ref[...], dv_acc_ref[...] = jnp.zeros(dk_acc_ref.shape, jnp.float32), jnp.zeros(dv_acc_ref.shape, jnp.float32)

    @pl.when(keys_tile * sizes.keys < reach_ref[b, tile])
    def _():
        visible_RM = _context_visible(keys_tile, len_ref[...], sizes)
        probs_RM, dscores_RM = _gradients(q_ref, dout_ref, lse_ref, delta_ref, k_ref[...], v_ref[...], visible_RM, sizes)
        dk_acc_ref[...] += _dot(dscores_RM.astype(q_ref.dtype), q_ref[...], (1, 0))
        dv_acc_ref[...] += _dot(probs_RM.astype(q_ref.dtype), dout_ref[...], (1, 0))

    @pl.when(tile == pl.num_programs(3) - 1)
    def _():
        dk_ref[...] = (dk_acc_ref[...] * sizes.C**-0.5).astype(dk_ref.dtype)
        dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)


def _call(kernel, sizes: Sizes, arrays: dict, outputs: dict, scratch: list, *, walk_context: bool, interpret: bool):
    """One program a row, kv head, tile of queries and tile of context. arrays, outputs: name -> array, by whose number of axes its blocks are chosen:
    [B,G,tiles,..] follows the tiles of queries, [B,G,S,C] those of context. ``walk_context``: context changes fastest, else queries do.
    """
    key_tiles = pl.cdiv(sizes.S, sizes.keys)

    def places(i, j, reach_ref, b):
        tile, step = (i, j) if walk_context else (j, i)
        if walk_context:  # a tile that is not seen is not fetched either
            step = jnp.minimum(step, jnp.maximum(reach_ref[b, tile] - 1, 0) // sizes.keys)
        return tile, step

    def spec(x):
        if x.ndim == 5:
            return pl.BlockSpec((None, None, None, *x.shape[3:]), lambda b, g, i, j, reach: (b, g, places(i, j, reach, b)[0], 0, 0))
        return pl.BlockSpec((None, None, sizes.keys, sizes.C), lambda b, g, i, j, reach: (b, g, places(i, j, reach, b)[1], 0))

    reach_BT = arrays.pop("reach")
    grid = (sizes.B, sizes.G, *((sizes.tiles, key_tiles) if walk_context else (key_tiles, sizes.tiles)))
    return pl.pallas_call(
        functools.partial(kernel, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[spec(x) for x in arrays.values()],
            out_specs=[spec(x) for x in outputs.values()],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=list(outputs.values()),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="block_attention" + kernel.__name__.removesuffix("_kernel"),
    )(reach_BT, *arrays.values())


class _Order:
    """Blocks in falling order of context length and cut into tiles; past the end come blocks without context whose results nobody reads."""

    def __init__(self, context_len_BN: jax.Array, sizes: Sizes):
        self.sizes = sizes
        len_BN = jnp.clip(context_len_BN.astype(jnp.int32), 0, sizes.S)
        self.order_BN = jnp.argsort(-len_BN, axis=1)
        self.N = len_BN.shape[1]
        self.len_BN = self.pad(jnp.take_along_axis(len_BN, self.order_BN, axis=1))
        self.reach_BT = self.len_BN.reshape(sizes.B, sizes.tiles, sizes.blocks).max(axis=2)

    def pad(self, x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, self.sizes.tiles * self.sizes.blocks - self.N)] + [(0, 0)] * (x.ndim - 2))

    def lengths(self) -> jax.Array:
        """[B,G,tiles,1,M]."""
        s = self.sizes
        len_BT1M = jnp.repeat(self.len_BN.reshape(s.B, s.tiles, s.blocks), s.K * s.group, axis=2)[:, None, :, None]
        return jnp.broadcast_to(len_BT1M, (s.B, s.G, s.tiles, 1, s.queries))

    def tiles(self, x_BNKHC: jax.Array) -> jax.Array:
        """[B,N,K,G*heads,C] -> [B,G,tiles,rows,C]."""
        s = self.sizes
        order = self.order_BN[:, :, None, None, None]
        x = self.pad(jnp.take_along_axis(x_BNKHC, order, axis=1))
        x = x.reshape(s.B, s.tiles, s.blocks, s.K, s.G, -1, s.C)
        return x.transpose(0, 4, 1, 2, 3, 5, 6).reshape(s.B, s.G, s.tiles, -1, s.C)

    def blocks(self, x_BGTMC: jax.Array) -> jax.Array:
        """The inverse of ``tiles``."""
        s = self.sizes
        x = x_BGTMC.reshape(s.B, s.G, s.tiles, s.blocks, s.K, -1, s.C).transpose(0, 2, 3, 4, 1, 5, 6)
        x = x.reshape(s.B, s.tiles * s.blocks, s.K, -1, s.C)[:, : self.N]
        return jnp.take_along_axis(x, jnp.argsort(self.order_BN, axis=1)[:, :, None, None, None], axis=1)


def _arrays(order: _Order, q_BNKHC, ctx_k_BSGC, ctx_v_BSGC, block_k_BNKGC, block_v_BNKGC) -> dict:
    context = {"k": ctx_k_BSGC.swapaxes(1, 2), "v": ctx_v_BSGC.swapaxes(1, 2)}
    own = {"own_k": order.tiles(block_k_BNKGC), "own_v": order.tiles(block_v_BNKGC)}
    return {"reach": order.reach_BT, "q": order.tiles(q_BNKHC), "len": order.lengths()} | own | context


def _like(x: jax.Array, dtype=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)


def _forward(q_BNKHC, ctx_k_BSGC, ctx_v_BSGC, block_k_BNKGC, block_v_BNKGC, context_len_BN, *, causal: bool, interpret: bool):
    """-> (out [B,N,K,H,C], log-sum-exp of the scaled scores [B,G,tiles*M] in the order of the tiles)."""
    sizes = _sizes(q_BNKHC, ctx_k_BSGC, causal)
    order = _Order(context_len_BN, sizes)
    arrays = _arrays(order, q_BNKHC, ctx_k_BSGC, ctx_v_BSGC, block_k_BNKGC, block_v_BNKGC)
    M, outputs = sizes.queries, {"out": _like(arrays["q"]), "lse": _like(arrays["len"], jnp.float32)}
    out, lse = _call(_forward_kernel, sizes, arrays, outputs, [(sizes.C, M), (1, M), (1, M)], walk_context=True, interpret=interpret)
    return order.blocks(out), lse.reshape(sizes.B, sizes.G, -1)


def _backward(
    q_BNKHC, ctx_k_BSGC, ctx_v_BSGC, block_k_BNKGC, block_v_BNKGC, context_len_BN, out_BNKHC, lse_BGQ, dout_BNKHC, *, causal: bool, interpret: bool
):
    """Gradients of the five arrays."""
    sizes = _sizes(q_BNKHC, ctx_k_BSGC, causal)
    order = _Order(context_len_BN, sizes)
    arrays = _arrays(order, q_BNKHC, ctx_k_BSGC, ctx_v_BSGC, block_k_BNKGC, block_v_BNKGC)
    dout = order.tiles(dout_BNKHC)
    delta = jnp.sum(order.tiles(out_BNKHC).astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)[..., None, :]
    arrays |= {"dout": dout, "lse": lse_BGQ.reshape(delta.shape), "delta": delta}
    M, keys = sizes.queries, (sizes.keys, sizes.C)
    outputs = {name: _like(arrays[name]) for name in ("q", "own_k", "own_v")}
    dq, *down = _call(_backward_queries_kernel, sizes, dict(arrays), outputs, [(M, sizes.C)], walk_context=True, interpret=interpret)
    of_context = {name: x for name, x in arrays.items() if not name.startswith("own")}
    outputs = {name: _like(arrays[name]) for name in "kv"}
    dctx = _call(_backward_context_kernel, sizes, of_context, outputs, [keys, keys], walk_context=False, interpret=interpret)
    return order.blocks(dq), *(x.swapaxes(1, 2) for x in dctx), *map(order.blocks, down)


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
