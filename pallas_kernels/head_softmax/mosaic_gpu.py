"""LM head with softmax weights as a Pallas kernel for Hopper (Mosaic GPU): a matrix product whose tiles leave as rounded weights, sums and largest logits.

Programs stay on their multiprocessor and walk over tiles of 2 x 128 states and 128 vocabulary rows. One warpgroup fetches operands ahead, also for the next
tile; two multiply, each 128 states, and turn their logits into weights in registers.
"""

from __future__ import annotations

import functools
import inspect
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from dspine_jax.attention import MASKED
from dspine_jax.sharding import BATCH_AXES
from pallas_kernels.hopper import multiprocessors, not_hopper
from pallas_kernels.mesh import foreign, mesh_in_scope, spread

STATES, ROWS, DEPTH = 128, 128, 64  # of a warpgroup's tile
WARPGROUPS = 2
STATES_OF_TILE = WARPGROUPS * STATES
STAGES = 3  # pairs of operands in shared memory
SLICE = 64  # vocabulary rows of a tile in which the largest logit's id is looked for
STORED = 64  # columns of a tile that leave together
NEIGHBOURS = 8  # tiles of vocabulary rows that programs share at a time
LOG2_E = math.log2(math.e)
LAST_ID = jnp.iinfo(jnp.int32).max
# The index became part of the reference in jax 0.12.
WHOLE = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()


def unsupported(hidden_BTD: jax.Array, rows_VD: jax.Array) -> str | None:
    """What keeps the kernel from serving these arrays on this device, None if nothing does."""
    B, T, D = hidden_BTD.shape
    V = rows_VD.shape[0]
    if jax.version.__version_info__ < (0, 11):
        return f"jax {jax.__version__} (0.11 or newer)"
    if hidden_BTD.dtype != jnp.bfloat16:
        return f"{hidden_BTD.dtype} states (only bfloat16)"
    mesh = mesh_in_scope()
    if mesh is not None and foreign(mesh):
        return foreign(mesh)
    batch_ways, vocab_ways = (1, 1) if mesh is None else (mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["tensor"])
    if B % batch_ways or B // batch_ways * T % STATES_OF_TILE or not B * T:
        return f"{B} x {T} states on {batch_ways} devices (only multiples of {STATES_OF_TILE} on each)"
    if V % (vocab_ways * ROWS) or D % DEPTH or not V * D:
        return f"{V} vocabulary rows on {vocab_ways} devices, {D} wide (only multiples of {ROWS} on each and of {DEPTH})"
    return not_hopper()


def _kernel(hidden_ref, rows_ref, origin_ref, end_ref, weights_ref, total_ref, top_ref, best_ref, *, largest: float, padded: bool):
    """hidden [T,D], rows [V,D], origin [T], end [1] usable rows -> weights [T,V]; total, top, best [vocabulary tiles, T]."""
    (T, D), V = hidden_ref.shape, rows_ref.shape[0]
    swizzled = lambda width: (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width))  # noqa: E731
    operand = functools.partial(plgpu.BlockSpec, index_map=lambda k: (0, k), transforms=swizzled(DEPTH), memory_space=plgpu.SMEM)

    def pipeline(multiply, finish):
        return plgpu.emit_pipeline_warp_specialized(
            multiply,
            grid=(D // DEPTH,),
            memory_registers=40,
            in_specs=[operand((STATES_OF_TILE, DEPTH)), operand((ROWS, DEPTH))],
            wg_axis="warpgroup",
            num_compute_wgs=WARPGROUPS,
            max_concurrent_steps=STAGES,
            compute_context=finish,
        )

    nothing = lambda *_, **__: None  # noqa: E731

    @functools.partial(
        pl.run_scoped,
        allocations=pipeline(nothing, nothing).get_allocations(hidden_ref, rows_ref),
        weights_smem=plgpu.SMEM((WARPGROUPS, ROWS // STORED, STATES, STORED), weights_ref.dtype, transforms=swizzled(STORED)),
        sums_smem=plgpu.SMEM((WARPGROUPS, 2, STATES), jnp.float32),
        best_smem=plgpu.SMEM((WARPGROUPS, STATES), jnp.int32),
        collective_axes="warpgroup",
    )
    def _(allocations, weights_smem, sums_smem, best_smem):
        group = jax.lax.axis_index("warpgroup")

        @plgpu.nd_loop((T // STATES_OF_TILE * (V // ROWS),), collective_axes="program")
        def _(loop):
            state_tile, vocab_tile = plgpu.planar_snake(loop.index[0], (T // STATES_OF_TILE, V // ROWS), 1, NEIGHBOURS)
            first_row = vocab_tile * ROWS
            states = pl.ds(state_tile * STATES_OF_TILE + group * STATES, STATES)

            def finish(run):
                @functools.partial(pl.run_scoped, logits_ref=plgpu.ACC((STATES, ROWS), jnp.float32))
                def _(logits_ref):
                    run(logits_ref)
                    across = lambda x_S, columns=ROWS: jax.lax.broadcast_in_dim(x_S, (STATES, columns), [0])  # noqa: E731
                    ids = lambda columns: plgpu.broadcasted_iota(jnp.int32, (STATES, columns), 1, layout=plgpu.Layout.WGMMA)  # noqa: E731
                    logits_SR = logits_ref[...]
                    if padded:
                        logits_SR = jnp.where(ids(ROWS) < end_ref[0] - first_row, logits_SR, jnp.float32(MASKED))
                    origin_S = plgpu.load(origin_ref.at[states], *WHOLE, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
                    weights_SR = jnp.exp2(jnp.minimum(logits_SR * LOG2_E - across(origin_S * LOG2_E), jnp.float32(largest * LOG2_E)))
                    total_S = weights_SR.sum(axis=1)

                    def better(one, other):
                        """Of two slices (logits, their largest, first column) the one with the larger largest, the first of equals."""
                        (one_SC, one_S, one_first_S), (other_SC, other_S, other_first_S) = one, other
                        slice_SC = jnp.where(across(one_S, SLICE) >= across(other_S, SLICE), one_SC, other_SC)
                        return slice_SC, jnp.maximum(one_S, other_S), jnp.where(one_S >= other_S, one_first_S, other_first_S)

                    # The id is looked for in the best slice alone: comparisons are what takes longest in registers.
                    slices = [(logits_SR[:, first : first + SLICE], first) for first in range(0, ROWS, SLICE)]
                    slices = [(x_SC, x_SC.max(axis=1), jnp.int32(first)) for x_SC, first in slices]
                    best_SC, top_S, first_S = functools.reduce(better, slices)
                    best_S = jnp.where(best_SC == across(top_S, SLICE), ids(SLICE), jnp.int32(LAST_ID - V)).min(axis=1) + first_S + first_row
                    rounded_SR = weights_SR.astype(weights_ref.dtype)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left shared memory
                    for part in range(ROWS // STORED):
                        weights_smem.at[group, part][...] = rounded_SR[:, part * STORED : (part + 1) * STORED]
                    sums_smem.at[group, 0][...], sums_smem.at[group, 1][...], best_smem.at[group][...] = total_S, top_S, best_S
                    plgpu.commit_smem()
                    for part in range(ROWS // STORED):
                        plgpu.copy_smem_to_gmem(weights_smem.at[group, part], weights_ref.at[states, pl.ds(first_row + part * STORED, STORED)])
                    for smem, ref in ((sums_smem.at[group, 0], total_ref), (sums_smem.at[group, 1], top_ref), (best_smem.at[group], best_ref)):
                        plgpu.copy_smem_to_gmem(smem, ref.at[vocab_tile, states])

            def multiply(_, hidden_smem, rows_smem, logits_ref):
                plgpu.wgmma(logits_ref, hidden_smem.at[pl.ds(group * STATES, STATES)], rows_smem.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                return logits_ref

            tile = pl.ds(state_tile * STATES_OF_TILE, STATES_OF_TILE)
            pipeline(multiply, finish)(hidden_ref.at[tile, :], rows_ref.at[pl.ds(first_row, ROWS), :], allocations=allocations)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _local(hidden_BTD, rows_VD, origin_BT, end_1, *, largest: float, padded: bool, interpret):
    """One device's part -> (weights [B,T,V], total, top, best [B,T,vocabulary tiles]); ids count from its own first row."""
    (B, T, D), V = hidden_BTD.shape, rows_VD.shape[0]
    per_tile = lambda dtype: jax.ShapeDtypeStruct((V // ROWS, B * T), dtype)  # noqa: E731
    run = plgpu.kernel(
        functools.partial(_kernel, largest=largest, padded=padded),
        out_type=(jax.ShapeDtypeStruct((B * T, V), hidden_BTD.dtype), per_tile(jnp.float32), per_tile(jnp.float32), per_tile(jnp.int32)),
        grid=(multiprocessors(),),  # a program for each
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),  # the hardware's power of two
        interpret=interpret,
    )
    weights, *partial = run(hidden_BTD.reshape(B * T, D), rows_VD.astype(hidden_BTD.dtype), origin_BT.reshape(B * T), end_1)
    return weights.reshape(B, T, V), *(x.T.reshape(B, T, V // ROWS) for x in partial)


def head_softmax(hidden_BTD: jax.Array, rows_VD: jax.Array, origin_BT: jax.Array, *, num_tokens: int, largest: float, interpret=None):
    """See ``pallas_kernels.head_softmax.head_softmax``; only for what ``unsupported`` has nothing against. ``interpret``: Pallas' parameters for it."""
    mesh, V = mesh_in_scope(), rows_VD.shape[0]
    ways = 1 if mesh is None else mesh.shape["tensor"]
    first_W = jnp.arange(ways, dtype=jnp.int32) * (V // ways)  # first row of every part of the vocabulary
    states, parts = P(BATCH_AXES, None, None), P(BATCH_AXES, None, "tensor")
    local = functools.partial(_local, largest=largest, padded=num_tokens < V, interpret=interpret)
    run = spread(local, mesh, (states, P("tensor", None), P(BATCH_AXES, None), P("tensor")), (parts,) * 4)
    weights_BTV, total_BTW, top_BTW, best_BTW = run(hidden_BTD, rows_VD, origin_BT, jnp.clip(num_tokens - first_W, 0, V // ways))
    winner_BT1 = jnp.argmax(top_BTW, axis=2, keepdims=True)  # the first of equals, thus the lowest ids
    best_BT = jnp.take_along_axis(best_BTW, winner_BT1, axis=2)[..., 0]
    part_BT = winner_BT1[..., 0] // (top_BTW.shape[2] // ways)
    return weights_BTV, total_BTW.sum(axis=2), best_BT + jnp.take(first_W, part_BT)
