"""Injection as one Pallas kernel for the TPU (Mosaic), forward only: every weight is streamed once for a tile of rows, features never leave the chip.

The grid is sequential there, so one axis runs through both phases: first the columns of A, which leave z in scratch memory, then the columns of the stream.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dspine_jax.layers import rms_norm
from pallas_kernels.injection.ref import InjectionWeights, unit

LANES, SUBLANES = 128, 8
MOST_COLUMNS = 256  # of a tile of weights: 2 MiB of Gh at a width of 4096
MOST_ROWS = 256
VMEM_BYTES = 48 * 2**20  # the smallest chip, tpu7x, has 64 MiB


def _columns(width: int, most: int) -> int:
    """Columns of a tile: the largest multiple of the lanes that divides the width, or all of them."""
    fitting = [columns for columns in range(LANES, most + 1, LANES) if width % columns == 0]
    return max(fitting, default=width)


def _vmem_bytes(rows: int, D: int, R: int, itemsize: int) -> int:
    """Two buffers of every block and the scratch memory."""
    feature_columns, columns = _columns(R, MOST_COLUMNS), _columns(D, MOST_COLUMNS)
    weights = itemsize * (D * feature_columns + (D + 2 * R) * columns + 2 * D)
    streams = itemsize * rows * (D + columns) + 4 * rows * (columns + 2 * R)
    return 2 * (weights + streams) + rows * (itemsize * (D + R) + 4 * R)


def unsupported(x_BNKD: jax.Array, weights: InjectionWeights) -> str | None:
    """What keeps the kernel from serving these sizes, None if nothing does."""
    D, R = weights.feature_DR.shape
    needed = _vmem_bytes(_blocks(x_BNKD.shape[2]) * x_BNKD.shape[2], D, R, x_BNKD.dtype.itemsize)
    if needed > VMEM_BYTES:
        return f"widths of {D} and {R} on a TPU, which need {needed / 2**20:.0f} MiB of its memory on the chip (at most {VMEM_BYTES / 2**20:.0f})"
    return None


def _blocks(slots: int) -> int:
    """Blocks of a tile of rows: a multiple of the sublanes, so that rows and blocks both fill them."""
    return SUBLANES * max(1, MOST_ROWS // (SUBLANES * slots))


def _kernel(
    x_ref, anchor_ref, norm_ref, feature_ref, hidden_ref, bias_ref, predecessor_ref, message_ref,
    new_ref, p_ref, hidden_gate_ref, normed_ref, z_ref, f_ref, *, slots: int, num_blocks: int, eps: float,
):  # fmt: skip
    """x [T,D], anchor [T/K,R], norm [1,D], tiles of A [D,..], Gh [D,..], b [1,..], Gp and M [R,..] -> tiles of the new stream and gate [T,..], p [T,R].

    Scratch: the normed stream [T,D], z in its tiles [R/..,T,..] fp32, what each slot reads [T,R].
    """
    row_tile, step, feature_tiles, R = pl.program_id(0), pl.program_id(1), z_ref.shape[0], f_ref.shape[1]
    dtype = x_ref.dtype
    product = functools.partial(jnp.dot, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None)

    @pl.when(step == 0)
    def _():
        normed_ref[...] = rms_norm(x_ref[...], norm_ref[...], eps)

    @pl.when(step < feature_tiles)
    def _():
        z_ref[step] = product(normed_ref[...], feature_ref[...])

    @pl.when(step == feature_tiles)
    def _():
        p_TR = R**0.5 * unit(jnp.concatenate([z_ref[i] for i in range(feature_tiles)], axis=1))
        p_ref[...] = p_TR
        rows, blocks = p_TR.shape[0], anchor_ref.shape[0]
        slot_T1 = jax.lax.rem(jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0), slots)
        # Row T of the anchors' product is the anchor of T's block in slot 1 and 0 elsewhere: exact, each sum has one term.
        row_TN, block_TN = (jax.lax.broadcasted_iota(jnp.int32, (rows, blocks), axis) for axis in (0, 1))
        # The last tile may reach past the end, where there may be anything: NaN times 0 would spread.
        real_N1 = row_tile * blocks + jax.lax.broadcasted_iota(jnp.int32, (blocks, 1), 0) < num_blocks
        anchor_NR = jnp.where(real_N1, anchor_ref[...].astype(jnp.float32), 0.0).astype(dtype)
        anchor_TR = product((row_TN == block_TN * slots + 1).astype(dtype), anchor_NR)
        f_ref[...] = jnp.where(slot_T1 >= 2, pltpu.roll(p_TR, 1, 0), anchor_TR).astype(dtype)

    @pl.when(step >= feature_tiles)
    def _():
        columns = new_ref.shape[1]
        hidden_gate_TC = product(normed_ref[...], hidden_ref[...]) + bias_ref[...].astype(jnp.float32)
        gate_TC = jax.nn.sigmoid(product(f_ref[...], predecessor_ref[...]) + hidden_gate_TC)
        first = (step - feature_tiles) * columns
        x_TC = x_ref[...] if columns == x_ref.shape[1] else x_ref[:, pl.ds(pl.multiple_of(first, LANES), columns)]
        new_ref[...] = (x_TC.astype(jnp.float32) + gate_TC * product(f_ref[...], message_ref[...])).astype(dtype)
        hidden_gate_ref[...] = hidden_gate_TC


def injection(
    x_BNKD: jax.Array, anchor_feature_BNR: jax.Array, weights: InjectionWeights, *, eps: float, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``pallas_kernels.injection.injection``; only for one device and what ``unsupported`` has nothing against. No gradient."""
    B, N, K, D = x_BNKD.shape
    R, dtype = weights.feature_DR.shape[1], x_BNKD.dtype
    anchor_AR = anchor_feature_BNR.reshape(B * N, R)
    blocks = min(_blocks(K), B * N)
    padding = -blocks * K % SUBLANES and -(B * N) % SUBLANES  # a few blocks whose rows do not fill the sublanes
    if padding:
        blocks = B * N + padding
    x_TD = jnp.pad(x_BNKD.reshape(B * N * K, D), ((0, padding * K), (0, 0)))
    anchor_AR = jnp.pad(anchor_AR, ((0, padding), (0, 0)))
    rows, T = blocks * K, x_TD.shape[0]

    feature_columns, columns = _columns(R, MOST_COLUMNS), _columns(D, MOST_COLUMNS)
    feature_tiles, tiles = R // feature_columns, D // columns
    row = lambda width: pl.BlockSpec((1, width), lambda t, i: (0, 0))  # noqa: E731
    second = lambda i: jnp.maximum(i - feature_tiles, 0)  # noqa: E731
    of_tile = lambda height: pl.BlockSpec((height, columns), lambda t, i: (0, second(i)))  # noqa: E731
    out_tile = pl.BlockSpec((rows, columns), lambda t, i: (t, second(i)))
    new_TD, p_TR, hidden_gate_TD = pl.pallas_call(
        functools.partial(_kernel, slots=K, num_blocks=anchor_AR.shape[0], eps=eps),
        grid=(pl.cdiv(T, rows), feature_tiles + tiles),
        in_specs=[
            pl.BlockSpec((rows, D), lambda t, i: (t, 0)),
            pl.BlockSpec((blocks, R), lambda t, i: (t, 0)),
            row(D),
            pl.BlockSpec((D, feature_columns), lambda t, i: (0, jnp.minimum(i, feature_tiles - 1))),
            of_tile(D),
            of_tile(1),
            of_tile(R),
            of_tile(R),
        ],
        out_specs=[out_tile, pl.BlockSpec((rows, R), lambda t, i: (t, 0)), out_tile],
        out_shape=[
            jax.ShapeDtypeStruct((T, D), dtype),
            jax.ShapeDtypeStruct((T, R), jnp.float32),
            jax.ShapeDtypeStruct((T, D), jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM((rows, D), dtype), pltpu.VMEM((feature_tiles, rows, feature_columns), jnp.float32), pltpu.VMEM((rows, R), dtype)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="injection",
    )(
        *(x_TD, anchor_AR, weights.norm_D[None], weights.feature_DR, weights.gate_hidden_DD, weights.gate_bias_D[None]),
        *(weights.gate_predecessor_RD, weights.message_RD),
    )
    return tuple(x[: B * N * K].reshape(B, N, K, -1) for x in (new_TD, p_TR, hidden_gate_TD))
