"""Injection of a decoding round as one Pallas kernel for Hopper (Mosaic GPU): every multiprocessor streams its share of the weights without a pause.

A program owns 32 columns of the stream. It multiplies the rows with a part of A (a tile of 64 columns, a share of the depth), then with half the depth of a
tile of Gh that it has in common with its neighbour, then the predecessors' features with its own columns of Gp and M. Weights come through one ring of
shared memory, so those of the next product are on their way while programs wait for each other: for the features, which are sums over programs, and at the
end for the neighbour's half of Gh. Both norms are factors of a row and are applied after the products.

The products are transposed: 64 weight columns are the tall side of a Hopper matrix product, whose other side may be as short as 16 rows.

Programs wait for each other, so all must run at once: ``unsupported`` refuses what has more programs than the device has multiprocessors (two do not fit
on one, but whatever else runs beside them ends by itself).
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from pallas_kernels.hopper import multiprocessors, not_hopper
from pallas_kernels.injection.ref import InjectionWeights
from pallas_kernels.shapes import ModelShape

ROWS = 16  # of a call; the short side of a product
TILE, OWN = 64, 32  # columns of a tile of A and Gh, and of the stream that a program writes
FETCH, MULTIPLY, HELP = range(3)  # warpgroups


def _feature_factor(square, rms, R: int):
    """What sqrt(R) unit(z rms) multiplies z by, z's sum of squares given."""
    return R**0.5 * rms * jax.lax.rsqrt(rms * rms * square + 1e-6)


def features_from_parts(z_STR: jax.Array, square_ST: jax.Array, D: int, eps: float) -> jax.Array:
    """p [T,R] fp32. In jnp, so that a decoding round, which has no use for it, does not compute it."""
    z_TR = jnp.sum(z_STR, axis=0)
    rms_T1 = jax.lax.rsqrt(jnp.sum(square_ST, axis=0) / D + eps)[:, None]
    return z_TR * _feature_factor(jnp.sum(z_TR * z_TR, axis=1, keepdims=True), rms_T1, z_TR.shape[1])


class Launch(NamedTuple):
    """Depth of a piece of weights (64 columns wide), how many of them shared memory holds, pieces of the rows that are normed together."""

    depth: int
    stages: int
    batch: int


LAUNCHES = {"round": {ROWS: Launch(128, 4, 4)}}  # as those of triton_gpu, for the benchmark's --scan and --set


def _launch() -> Launch:
    return next(iter(LAUNCHES["round"].values()))


def _fits(launch: Launch, D: int, R: int) -> bool:
    """Whether shared memory holds the weights' ring beside the rows, half of their depth, and the features."""
    return 2 * TILE * launch.depth * launch.stages + 2 * ROWS * (D // 2 + R) + 4 * ROWS * 2 * OWN <= 225 << 10  # of 227, for barriers and gaps


def candidates(kernel: str, shape: ModelShape, blocks: int) -> list[Launch]:
    """Launches worth a try, of those that fit into shared memory.

    Few stages first: four were faster than seven. A depth of 64 does not compile ("Number of tiles is not a multiple of 4").
    """
    grid = ((depth, stages, batch) for depth in (128, 256) for stages in (3, 2, 4, 5, 6, 7, 8) for batch in (4, 2, 1))
    D, R = shape.hidden_size, shape.transfer_size
    return [x for x in itertools.starmap(Launch, grid) if _fits(x, D, R) and R // 2 % (x.depth * x.batch) == 0]


def _transforms(width: int):
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)


def _across(x, shape: tuple[int, int], axis: int, layout):
    """A line of numbers, one for each index along ``axis``, as an array of this shape."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, shape, [axis]), layout)


def _counters(count: int):
    """Counters that all programs share, 0 at first."""
    return pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))


def _arrive(counters, index):
    """One more; whoever sees it sees what this warpgroup wrote before."""
    plgpu.semaphore_signal(counters.at[index], memory_scope="gpu")


def _wait(counters, index, count):
    plgpu.semaphore_wait(counters.at[index], count, decrement=False, memory_scope="gpu")


def _load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)


def _store(ref, x):
    """Whether whole cache lines are written or not, which jax 0.12 wants to be told."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def _stacked_product(sum_CT, weights_smem, features_smem):
    """sum [64,16] + two pieces of weights [2,Q,32], one above the other, times features [16,Q]."""

    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType(_transforms(OWN)), plgpu.RefType(_transforms(OWN))),
        return_type=plgpu.ShapeDtypeStruct((2 * OWN, ROWS), jnp.float32, layout=layout),
    )
    def product(_, sum_CT, weights, features):
        # [2,Q/8,1,8,32] -> tiles [2,Q/8,32,8] of a [64,Q] operand; [2,Q/32,8,32] -> tiles [Q/32,2,32,8] of a [Q,16] operand.
        weights = mgpu.memref_transpose(mgpu.memref_slice(weights, (slice(None), slice(None), 0)), (0, 1, 3, 2))
        features = mgpu.memref_transpose(features, (1, 0, 3, 2))
        sum_CT = mgpu.wgmma(mgpu.WGMMAAccumulator.from_registers(sum_CT), weights, features, swizzle=2 * OWN)
        nvvm.wgmma_commit_group_sync_aligned()
        nvvm.wgmma_wait_group_sync_aligned(0)
        return sum_CT.value

    return product(sum_CT, weights_smem, features_smem)


def _kernel(x_ref, norm_ref, a_ref, gh_ref, bias_ref, gp_ref, m_ref, anchor_ref, new_ref, hidden_gate_ref, z_ref, square_ref, *refs, slots, eps, launch):
    """x [16,D], norm [D], A [D,R], Gh [D,D], bias [D], Gp and M [R,D], anchors' features [N,R] fp32
    -> new stream [16,D], hidden gate [16,D] fp32, parts of (x norm) A [S,17,R] and of the sum of squares of x [2,17], both from their row 1 on.

    In ``refs`` what programs pass on (predecessors' features [16,R], their parts of the sum of squares [R/64,16], parts of (x norm) Gh [2,16,D]), and
    shared memory.
    """
    feature_ref, feature_square_ref, g_ref, x_smem, feature_smem, factor_smem, out_smem, ring, filled, emptied, normed, featured = refs
    ring_smem, own_ring_smem = ring
    D, R = gh_ref.shape[0], a_ref.shape[1]
    depth, stages, batch = launch
    a_tiles, splits = R // TILE, z_ref.shape[0]
    a_steps, gh_steps, own_steps = D // splits // depth, D // 2 // depth, R // depth

    program = jax.lax.axis_index("program")
    pair, half = program // 2, program % 2
    a_tile, a_split = pair % a_tiles, half * (splits // 2) + pair // a_tiles
    own, gh_columns, a_columns = pl.ds(program * OWN, OWN), pl.ds(pair * TILE, TILE), pl.ds(a_tile * TILE, TILE)
    first_step = pair // a_tiles * a_steps  # of the half of the depth, where this program's part of A begins; Gh begins there, too

    def step_depth(i):
        """Where the i-th piece of the depth begins."""
        return half * (D // 2) + (first_step + i) % gh_steps * depth

    part_arrived, features_arrived, half_arrived = (_counters(count) for count in (a_tiles, 1, D // TILE))
    role = jax.lax.axis_index("warpgroup")

    @pl.when(role == FETCH)
    def _():
        def fetch(first, count, copy):
            def step(i, _):
                slot = (first + i) % stages

                @pl.when(first + i >= stages)
                def _():
                    plgpu.barrier_wait(emptied.at[slot])

                copy(i, slot)
                return _

            jax.lax.fori_loop(0, count, step, None)

        def tile(ref, columns):
            def copy(i, slot):  # in two parts, because every slot's barrier counts two
                for part in range(2):
                    rows = pl.ds(step_depth(i) + part * (depth // 2), depth // 2)
                    plgpu.copy_gmem_to_smem(ref.at[rows, columns], ring_smem.at[slot, pl.ds(part * (depth // 2), depth // 2)], filled.at[slot])

            return copy

        def both(i, slot):
            for part, ref in enumerate((gp_ref, m_ref)):
                plgpu.copy_gmem_to_smem(ref.at[pl.ds(i * depth, depth), own], own_ring_smem.at[slot, part], filled.at[slot])

        fetch(0, a_steps, tile(a_ref, a_columns))
        fetch(a_steps, gh_steps, tile(gh_ref, gh_columns))
        fetch(a_steps + gh_steps, own_steps, both)
        fetch(a_steps + gh_steps + own_steps, stages, lambda *_: None)  # the last ones have been read

    @pl.when(role == MULTIPLY)
    def _():
        def product(first, count, known):
            """[64,16], x times a column of tiles; of x the first ``known`` batches of pieces have been waited for."""

            def accumulate(sum_ref):
                def step(i, _):
                    slot = (first + i) % stages
                    plgpu.barrier_wait(filled.at[slot])
                    plgpu.wgmma(sum_ref, ring_smem.at[slot].transpose((1, 0)), x_smem.at[i].transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(emptied.at[slot])
                    return _

                for j in range(count // batch):
                    if j >= known:
                        plgpu.barrier_wait(normed.at[j])
                    jax.lax.fori_loop(j * batch, (j + 1) * batch, step, None)
                return sum_ref[...]

            return pl.run_scoped(accumulate, plgpu.ACC((TILE, ROWS), jnp.float32))

        def store(ref, sum_CT):
            """Rows of a product into rows of memory, number by number."""
            _store(ref.transpose((1, 0)), plgpu.layout_cast(sum_CT, plgpu.Layout._WGMMA_ACC_32BIT))

        store(z_ref.at[a_split, pl.ds(1, ROWS), a_columns], product(0, a_steps, 0))
        _arrive(part_arrived, a_tile)
        store(g_ref.at[half, :, gh_columns], product(a_steps, gh_steps, a_steps // batch))
        _arrive(half_arrived, pair)

        plgpu.barrier_wait(featured)

        def step(i, sum_CT):
            slot = (a_steps + gh_steps + i) % stages
            plgpu.barrier_wait(filled.at[slot])
            sum_CT = _stacked_product(sum_CT, own_ring_smem.at[slot], feature_smem.at[i])
            plgpu.barrier_arrive(emptied.at[slot])
            return sum_CT

        zeros_CT = plgpu.layout_cast(jnp.zeros((2 * OWN, ROWS), jnp.float32), plgpu.Layout.WGMMA)
        sum_CT = jax.lax.fori_loop(0, own_steps - 1, step, zeros_CT)

        # Before the last product, behind which their latency passes.
        layout = plgpu.Layout.SMEM_GMEM_COPY((ROWS, OWN), jnp.float32, 2 * OWN)
        load = functools.partial(_load, layout=layout)
        line = lambda ref, axis: _load(ref, layout.reduce(1 - axis)).astype(jnp.float32)  # noqa: E731
        across = lambda ref, axis: _across(line(ref, axis), (ROWS, OWN), axis, layout)  # noqa: E731
        rms_TC, factor_TC, bias_TC = across(factor_smem.at[0], 0), across(factor_smem.at[1], 0), across(bias_ref.at[own], 1)
        x_TC = load(x_ref.at[:, own]).astype(jnp.float32)
        _wait(half_arrived, pair, 2)
        hidden_gate_TC = (load(g_ref.at[0, :, own]) + load(g_ref.at[1, :, own])) * rms_TC + bias_TC
        _store(hidden_gate_ref.at[:, own], hidden_gate_TC)

        store(out_smem.at[:, pl.ds(0, 2 * OWN)], step(own_steps - 1, sum_CT))
        gate_TC, message_TC = (load(out_smem.at[:, pl.ds(part * OWN, OWN)]) * factor_TC for part in range(2))
        new_TC = x_TC + message_TC / (1.0 + jnp.exp(-(gate_TC + hidden_gate_TC)))
        _store(new_ref.at[:, own], new_TC.astype(new_ref.dtype))

    @pl.when(role == HELP)
    def _():
        # Rows times norm, in the order in which they are needed, with their sum of squares.
        layout = plgpu.Layout.SMEM_GMEM_COPY((ROWS, depth), jnp.bfloat16, 128)
        square_TQ = plgpu.layout_cast(jnp.zeros((ROWS, depth), jnp.float32), layout)
        for j in range(gh_steps // batch):
            pieces = []
            for i in range(j * batch, (j + 1) * batch):
                columns = pl.ds(step_depth(i), depth)
                pieces.append((_load(x_ref.at[:, columns], layout), _load(norm_ref.at[columns], layout.reduce(0))))
            for i, (x_TQ, norm_Q) in zip(range(j * batch, (j + 1) * batch), pieces):
                x_TQ = x_TQ.astype(jnp.float32)
                square_TQ += x_TQ * x_TQ
                x_smem.at[i][...] = (x_TQ * _across(norm_Q.astype(jnp.float32), (ROWS, depth), 1, layout)).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.barrier_arrive(normed.at[j])

        @pl.when(pair == 0)
        def _():
            _store(square_ref.at[half, pl.ds(1, ROWS)], square_TQ.sum(axis=1))
            _arrive(features_arrived, 0)

        @pl.when(a_split == 0)
        def _():
            _wait(part_arrived, a_tile, splits)
            layout = plgpu.Layout.SMEM_GMEM_COPY((ROWS, TILE), jnp.float32, 128)
            load = functools.partial(_load, layout=layout)
            z_TC = functools.reduce(jnp.add, [load(z_ref.at[s, pl.ds(0, ROWS), a_columns]) for s in range(splits)])  # of the row before
            row_TC = plgpu.broadcasted_iota(jnp.int32, (ROWS, TILE), 0, layout=layout)
            slot_TC = row_TC % slots
            z_TC = jnp.where(slot_TC >= 2, z_TC, jnp.float32(0))
            _store(feature_square_ref.at[a_tile], (z_TC * z_TC).sum(axis=1))
            for n in range(anchor_ref.shape[0]):
                anchor_C = _load(anchor_ref.at[n, a_columns], layout.reduce(0))
                z_TC = jnp.where(row_TC == n * slots + 1, _across(anchor_C, (ROWS, TILE), 1, layout), z_TC)
            _store(feature_ref.at[:, a_columns], z_TC.astype(jnp.bfloat16))
            _arrive(features_arrived, 0)

        _wait(features_arrived, 0, a_tiles + 2)
        layout = plgpu.Layout.SMEM_GMEM_COPY((ROWS, depth), jnp.bfloat16, 2 * OWN)
        feature_TQ = [_load(feature_ref.at[:, pl.ds(i * depth, depth)], layout) for i in range(own_steps)]  # all on the way before the first is stored
        line = layout.reduce(1)
        load = functools.partial(_load, layout=line)
        rms = lambda first: jax.lax.rsqrt((load(square_ref.at[0, pl.ds(first, ROWS)]) + load(square_ref.at[1, pl.ds(first, ROWS)])) / D + eps)  # noqa: E731
        square_T = functools.reduce(jnp.add, [load(feature_square_ref.at[tile]) for tile in range(a_tiles)])
        slot_T = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=line) % slots
        for i in range(own_steps):
            feature_smem.at[i][...] = feature_TQ[i]
        _store(factor_smem.at[0], rms(1))
        _store(factor_smem.at[1], jnp.where(slot_T >= 2, _feature_factor(square_T, rms(0), R), jnp.float32(1)))
        plgpu.commit_smem()
        plgpu.barrier_arrive(featured)


def unsupported(x_BNKD: jax.Array, weights: InjectionWeights) -> str | None:
    """What keeps the kernel from serving these arrays on this device, None if nothing does."""
    B, N, K, D = x_BNKD.shape
    R = weights.feature_DR.shape[1]
    if jax.version.__version_info__ < (0, 11):
        return f"jax {jax.__version__} (0.11 or newer)"
    other_device = not_hopper()
    if other_device:
        return other_device
    for name in ("norm_D", "gate_bias_D"):
        if getattr(weights, name).dtype != jnp.bfloat16:
            return f"{name} of {getattr(weights, name).dtype} (only bfloat16)"
    if B * N * K > ROWS:
        return f"{B * N * K} rows (at most {ROWS})"
    launch = _launch()
    pieces = launch.depth * launch.batch
    if R % TILE or D % R or (R // 2) % pieces or (D // 2) % pieces or R % launch.depth or not _fits(launch, D, R):
        return f"a stream {D} wide with features of {R}"
    if D // OWN > multiprocessors():
        return f"a device of {multiprocessors()} multiprocessors (a stream {D} wide wants {D // OWN})"
    return None


def injection(
    x_BNKD: jax.Array, anchor_feature_BNR: jax.Array, weights: InjectionWeights, *, eps: float, interpret=None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``pallas_kernels.injection.injection``; only for what ``unsupported`` has nothing against. No gradient.

    interpret: Pallas' parameters for its interpreter, which runs one program after the other: so it runs all of them three times, each time with what they
    passed on the time before.
    """
    B, N, K, D = x_BNKD.shape
    R, T = weights.feature_DR.shape[1], B * N * K
    splits = 2 * D // R
    launch = _launch()
    depth, stages, batch = launch
    x_TD = jnp.pad(x_BNKD.reshape(T, D), ((0, ROWS - T), (0, 0)))
    fp32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    smem = lambda shape, width: plgpu.SMEM(shape, jnp.bfloat16, transforms=_transforms(width))  # noqa: E731
    run = plgpu.kernel(
        functools.partial(_kernel, slots=K, eps=eps, launch=launch),
        out_type=(bf16(ROWS, D), fp32(ROWS, D), fp32(splits, ROWS + 1, R), fp32(2, ROWS + 1), bf16(ROWS, R), fp32(R // TILE, ROWS), fp32(2, ROWS, D)),
        scratch_types=(
            smem((D // 2 // depth, ROWS, depth), TILE),
            smem((R // depth, ROWS, depth), OWN),
            plgpu.SMEM((2, ROWS), jnp.float32),
            plgpu.SMEM((ROWS, 2 * OWN + 4), jnp.float32),  # so wide that rows begin in different banks
            plgpu.RefUnion(smem((stages, depth, TILE), TILE), smem((stages, 2, depth, OWN), OWN)),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=D // 2 // depth // batch),
            plgpu.Barrier(),
        ),
        grid=(3,) * bool(interpret) + (D // OWN,),
        grid_names=("pass",) * bool(interpret) + ("program",),
        interpret=interpret,
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="injection_round",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    inputs = x_TD, weights.norm_D, weights.feature_DR, weights.gate_hidden_DD, weights.gate_bias_D, weights.gate_predecessor_RD, weights.message_RD
    # Under vmap one launch after the other: more programs at once would share counters, and not all of them would run.
    run = jax.custom_batching.sequential_vmap(run)
    new_TD, hidden_gate_TD, z_STR, square_ST, *_ = run(*inputs, anchor_feature_BNR.reshape(B * N, R).astype(jnp.float32))
    p_TR = features_from_parts(z_STR[:, 1 : T + 1], square_ST[:, 1 : T + 1], D, eps)
    return new_TD[:T].reshape(B, N, K, D), p_TR.reshape(B, N, K, R), hidden_gate_TD[:T].reshape(B, N, K, D)
