"""Transition table as a Pallas kernel for TPUs: slices of D follow each other, and the scores and the norms add up on the chip."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.injection import InjectionWeights

LANES = 128
TILE_SLOTS = 16
TILE_WIDTH = 512  # of D
VMEM_BYTES = 48 << 20
EXACT = jax.lax.Precision.HIGHEST


def unsupported(pre_write_BNKD: jax.Array, candidate_ids_BNJP: jax.Array, rows_VD: jax.Array, weights: InjectionWeights) -> str | None:
    """What keeps the kernel from serving these arrays, None if nothing does."""
    P = candidate_ids_BNJP.shape[-1]
    if pre_write_BNKD.dtype not in (jnp.bfloat16, jnp.float32):
        return f"{pre_write_BNKD.dtype} (only bfloat16 and float32)"
    if not 1 <= P <= 32:
        return f"{P} candidates (only 1 to 32)"
    if 0 in candidate_ids_BNJP.shape:
        return "no drafted slot"
    return None


def _kernel(
    feature_ref, stream_ref, gate_ref, candidate_ref, gate_weight_ref, message_weight_ref, norm_ref, table_ref, scores_ref, squares_ref,
    *, slots: int, size: int, eps: float,
):
    """feature_ref [M,R], stream_ref and gate_ref [S,E], candidate_ref [M,E], weights [R,E], norm_ref [1,E] -> table_ref [M,P]; M = S P."""
    (M, P), S, part = table_ref.shape, stream_ref.shape[0], pl.program_id(1)
    iota = functools.partial(jax.lax.broadcasted_iota, jnp.int32)

    @pl.when(part == 0)
    def _():
        scores_ref[...] = jnp.zeros(scores_ref.shape, jnp.float32)
        squares_ref[...] = jnp.zeros(squares_ref.shape, jnp.float32)

    # A slot's row, once for each of its P predecessors: a product with ones and zeros. What overhangs the array must be no NaN, for 0 * NaN is one.
    own_MS = ((iota((M, S), 0) >= P * iota((M, S), 1)) & (iota((M, S), 0) < P * iota((M, S), 1) + P)).astype(jnp.float32)
    real_S1 = pl.program_id(0) * S + iota((S, 1), 0) < slots
    spread = lambda ref: jnp.dot(own_MS, jnp.where(real_S1, ref[...].astype(jnp.float32), 0.0), precision=EXACT)  # noqa: E731
    dtype = stream_ref.dtype
    f_MR = feature_ref[...]
    gate_ME = jnp.dot(f_MR, gate_weight_ref[...], preferred_element_type=jnp.float32)
    message_ME = jnp.dot(f_MR, message_weight_ref[...], preferred_element_type=jnp.float32)
    written_ME = (spread(stream_ref) + jax.nn.sigmoid(gate_ME + spread(gate_ref)) * message_ME).astype(dtype).astype(jnp.float32)
    weighted_ME = (written_ME * norm_ref[...].astype(jnp.float32)).astype(dtype)
    scores_ref[...] += jax.lax.dot_general(weighted_ME, candidate_ref[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    squares_ref[...] += jnp.sum(written_ME * written_ME, axis=1, keepdims=True)

    @pl.when(part == pl.num_programs(1) - 1)
    def _():
        # Of the scores of all pairs those of the same slot are kept, brought into P columns by another product with ones and zeros.
        same_MM = jax.lax.dot_general(own_MS, own_MS, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32) > 0
        kept_MM = jnp.where(same_MM, scores_ref[...], 0.0)
        place_M1 = iota((M, 1), 0) - P * jnp.sum(own_MS * iota((M, S), 1).astype(jnp.float32), axis=1, keepdims=True).astype(jnp.int32)
        column_MP = (place_M1 == iota((M, P), 1)).astype(jnp.float32)
        scale_M1 = jax.lax.rsqrt(squares_ref[:, :1] / size + eps)
        table_ref[...] = jnp.dot(kept_MM, column_MP, precision=EXACT) * scale_M1


def table(
    stream_MKD: jax.Array, gate_MKD: jax.Array, feature_TR: jax.Array, candidate_TD: jax.Array, weights: InjectionWeights, norm_D: jax.Array,
    *, num_candidates: int, eps: float, tile: tuple[int, int] | None = None, interpret: bool = False,
) -> jax.Array:
    """As ``pallas_gpu.table``. tile: (slots, slice of D), for tests."""
    (T, R), D, P = feature_TR.shape, stream_MKD.shape[2], num_candidates
    slots, dtype = T // P, stream_MKD.dtype
    fit = max((width for width in range(LANES, TILE_WIDTH + 1, LANES) if D % width == 0), default=D)
    S, E = tile or (min(slots, TILE_SLOTS), fit)
    M = S * P
    rows, slot = pl.BlockSpec((M, E), lambda t, d: (t, d)), pl.BlockSpec((S, E), lambda t, d: (t, d))
    weight = pl.BlockSpec((R, E), lambda t, d: (0, d))
    drafted = lambda x_MKD: x_MKD[:, 1:].reshape(slots, D)  # noqa: E731
    return pl.pallas_call(
        functools.partial(_kernel, slots=slots, size=D, eps=eps),
        grid=(pl.cdiv(slots, S), D // E),
        in_specs=[pl.BlockSpec((M, R), lambda t, d: (t, 0)), slot, slot, rows, weight, weight, pl.BlockSpec((1, E), lambda t, d: (0, d))],
        out_specs=pl.BlockSpec((M, P), lambda t, d: (t, 0)),
        out_shape=jax.ShapeDtypeStruct((T, P), jnp.float32),
        scratch_shapes=[pltpu.VMEM((M, M), jnp.float32), pltpu.VMEM((M, LANES), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="transition_table",
    )(
        feature_TR.astype(dtype), drafted(stream_MKD), drafted(gate_MKD), candidate_TD.astype(dtype),
        weights.gate_predecessor_RD.astype(dtype), weights.message_RD.astype(dtype), norm_D[None],
    )  # fmt: skip
