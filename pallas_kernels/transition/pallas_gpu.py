"""Transition table as a Pallas kernel (Triton lowering): the written and normed streams of all predecessors exist only as tiles.

A program redoes the write of a run of predecessors for a slice of D, adds up what their norms need and multiplies the slice with that of the candidates. The
norm's factor is one number a predecessor, so it is applied once the slices are summed, which XLA does.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.injection import InjectionWeights
from pallas_kernels.mesh import mesh_in_scope


class Launch(NamedTuple):
    """Tile: predecessors, slice of D and slice of R read at a time, all powers of two; Triton's warps and pipeline stages."""

    rows: int
    width: int
    depth: int
    warps: int
    stages: int


# Most predecessors -> launch.
LAUNCHES = {256: Launch(128, 32, 64, 8, 3), 2**31: Launch(128, 64, 64, 8, 3)}


def unsupported(pre_write_BNKD: jax.Array, candidate_ids_BNJP: jax.Array, rows_VD: jax.Array, weights: InjectionWeights) -> str | None:
    """What keeps the kernel from serving these arrays, None if nothing does."""
    P, (R, D) = candidate_ids_BNJP.shape[-1], weights.message_RD.shape
    if pre_write_BNKD.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{pre_write_BNKD.dtype} (only bfloat16 and float16)"
    if P & (P - 1) or not 2 <= P <= 32:
        return f"{P} candidates (only powers of two from 2 to 32)"
    if D % 16 or R % 16:
        return f"a hidden size of {D} with a transfer size of {R} (only multiples of 16)"
    if 0 in candidate_ids_BNJP.shape or pre_write_BNKD.size >= 2**31:
        return f"a stream of shape {pre_write_BNKD.shape} (it must be smaller than 2^31 numbers and have drafted slots)"
    if (mesh := mesh_in_scope()) is not None:
        return f"a mesh of several devices ({dict(mesh.shape)})"
    return None


def launch_for(count: int, D: int, R: int) -> Launch:
    """The launch for ``count`` predecessors."""
    launch = next(launch for most, launch in LAUNCHES.items() if count <= most)
    return launch._replace(
        rows=min(launch.rows, max(16, pl.next_power_of_2(count))), width=min(launch.width, D & -D), depth=min(launch.depth, R & -R)
    )


def _kernel(
    feature_ref, stream_ref, gate_ref, candidate_ref, gate_weight_ref, message_weight_ref, norm_ref, out_ref, *, count: int, J: int, depth: int
):
    """feature_ref [M,R], stream_ref and gate_ref [groups,K,E], candidate_ref [M,E], weights [R,E], norm_ref [E]; out_ref [2,M,P]: scores, squares."""
    (_, M, P), R, E = out_ref.shape, feature_ref.shape[1], norm_ref.shape[0]
    row_M = pl.program_id(0) * M + jnp.arange(M, dtype=jnp.int32)
    real_M1 = (row_M < count)[:, None]
    load = lambda ref: plgpu.load(ref, mask=jnp.broadcast_to(real_M1, (M, ref.shape[1])), other=0.0) if count % M else ref[...]  # noqa: E731

    def add(i, carry):
        part = pl.ds(i * depth, depth)
        f_MR = load(feature_ref.at[:, part])
        return tuple(total + plgpu.dot(f_MR, ref[part, :]) for total, ref in zip(carry, (gate_weight_ref, message_weight_ref)))

    gate_ME, message_ME = jax.lax.fori_loop(0, R // depth, add, (jnp.zeros((M, E), jnp.float32),) * 2)
    slot_M = jax.lax.div(row_M, jnp.full_like(row_M, P))
    group_M = jax.lax.div(slot_M, jnp.full_like(row_M, J))
    spread = lambda x_M: jnp.broadcast_to(x_M[:, None], (M, E))  # noqa: E731
    place = spread(group_M), spread(slot_M - group_M * J + 1), jnp.broadcast_to(jnp.arange(E, dtype=jnp.int32)[None, :], (M, E))
    own = lambda ref: plgpu.load(ref.at[place], mask=jnp.broadcast_to(real_M1, (M, E)), other=0.0).astype(jnp.float32)  # noqa: E731
    dtype = stream_ref.dtype
    written_ME = own(stream_ref) + jax.nn.sigmoid(gate_ME + own(gate_ref)) * message_ME
    weighted_ME = (written_ME * norm_ref[...].astype(jnp.float32)[None, :]).astype(dtype)
    # Scores of all pairs in the tile; those of the same slot are kept, one block of P columns a row.
    scores_MM = plgpu.dot(weighted_ME, load(candidate_ref).T)
    local_M = jnp.arange(M, dtype=jnp.int32)
    block_M = jax.lax.div(local_M, jnp.full_like(local_M, P))
    scores_MM = jnp.where(block_M[:, None] == block_M[None, :], scores_MM, 0.0)
    scores_MP = scores_MM.reshape(M, M // P, P).sum(axis=1)
    # In P columns like the scores, so that XLA sums both in one launch.
    squares_MP = jnp.broadcast_to(jnp.sum(written_ME * written_ME, axis=1)[:, None], (M, P))
    for i, x_MP in enumerate((scores_MP, squares_MP)):
        plgpu.store(out_ref.at[pl.ds(i, 1)], x_MP[None], mask=jnp.broadcast_to(real_M1, (M, P))[None])


def table(
    stream_MKD: jax.Array, gate_MKD: jax.Array, feature_TR: jax.Array, candidate_TD: jax.Array, weights: InjectionWeights, norm_D: jax.Array,
    *, num_candidates: int, eps: float, interpret: bool = False,
) -> jax.Array:
    """stream and gate [M,K,D] of M groups, features and candidate rows of their T = M (K-1) P predecessors and candidates -> scores [T,P] fp32."""
    (T, R), (M, K, D), P = feature_TR.shape, stream_MKD.shape, num_candidates
    dtype = stream_MKD.dtype
    launch = launch_for(T, D, R)
    E, slices = launch.width, D // launch.width
    tile = pl.BlockSpec((launch.rows, E), lambda t, d: (t, d))
    stream, weight = pl.BlockSpec((M, K, E), lambda t, d: (0, 0, d)), pl.BlockSpec((R, E), lambda t, d: (0, d))
    parts = pl.pallas_call(
        functools.partial(_kernel, count=T, J=K - 1, depth=launch.depth),
        grid=(pl.cdiv(T, launch.rows), slices),  # predecessors change fastest: the programs that read the same weights run together
        in_specs=[pl.BlockSpec((launch.rows, R), lambda t, d: (t, 0)), stream, stream, tile, weight, weight, pl.BlockSpec((E,), lambda t, d: (d,))],
        out_specs=pl.BlockSpec((2, None, launch.rows, P), lambda t, d: (0, d, t, 0)),
        out_shape=jax.ShapeDtypeStruct((2, slices, T, P), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        interpret=interpret,
        name="transition_table",
    )(
        feature_TR.astype(dtype), stream_MKD, gate_MKD, candidate_TD.astype(dtype),
        weights.gate_predecessor_RD.astype(dtype), weights.message_RD.astype(dtype), norm_D,
    )  # fmt: skip
    scores_TP, squares_TP = parts.sum(axis=1)
    return scores_TP * jax.lax.rsqrt(squares_TP / D + eps)
