"""The kernels of ``triton_stream`` called from JAX, through jax-triton (an optional extra that only a CUDA jaxlib can import)."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dspine_jax.layers import rms_norm
from pallas_kernels.injection.pallas_gpu import LEAST_ROWS, features
from pallas_kernels.injection.ref import InjectionWeights
from pallas_kernels.shapes import ModelShape

MOST_ROWS = 64  # of a tile


class Launch(NamedTuple):
    """Columns and depth of a tile (powers of two, at least 16 and 32), Triton's warps and pipeline depth, rows of Gh that ``features`` asks for."""

    columns: int
    depth: int
    warps: int
    stages: int
    ahead: int = 0


# Kernel -> most rows of a call -> launch; larger calls take the last one.
LAUNCHES = {"features": {2**30: Launch(16, 256, 4, 5, 1536)}, "stream": {2**30: Launch(32, 256, 4, 4)}}


def candidates(kernel: str, shape: ModelShape, blocks: int) -> list[Launch]:
    """Launches worth a try for a decoding round, the likeliest first. ``stream`` wants one program a multiprocessor or two, and 32 KB on the way at least."""
    fits = lambda x: 40 << 10 <= 2 * x.depth * (LEAST_ROWS + x.columns) * (x.stages - 1) <= 220 << 10  # noqa: E731
    if kernel == "stream":
        return list(filter(fits, itertools.starmap(Launch, itertools.product((32, 16, 64), (256, 128, 512), (4, 2, 8), (4, 5, 6, 3)))))
    grid = itertools.product((16, 32), (256, 512, 128), (4, 2), (5, 4, 8), (1536, 0, 768, 2304, 3072))
    return list(filter(fits, itertools.starmap(Launch, grid)))


def injection(
    x_BNKD: jax.Array, anchor_feature_BNR: jax.Array, weights: InjectionWeights, *, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``pallas_kernels.injection.injection``; only for one device, weights in the stream's type. No gradient."""
    import jax_triton

    from pallas_kernels.injection import triton_stream

    B, N, K, D = x_BNKD.shape
    T, R = B * N * K, weights.feature_DR.shape[1]
    x_TD, anchor_AR = x_BNKD.reshape(T, D), anchor_feature_BNR.reshape(B * N, R).astype(jnp.float32)
    normed_TD = rms_norm(x_TD, weights.norm_D, eps)
    rows = min(MOST_ROWS, max(LEAST_ROWS, pl.next_power_of_2(T)))
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    first, second = (next(launch for most, launch in LAUNCHES[kernel].items() if T <= most) for kernel in ("features", "stream"))
    sizes = lambda launch: dict(T=T, D=D, R=R, SLOTS=K, ROWS=rows, COLUMNS=launch.columns, DEPTH=launch.depth)  # noqa: E731
    tiles = pl.cdiv(R, first.columns)
    source_TR, z_TR, square_FT = jax_triton.triton_call(
        *(normed_TD, anchor_AR, weights.feature_DR, weights.gate_hidden_DD),
        kernel=triton_stream.features_kernel,
        out_shape=[array(x_BNKD.dtype, T, R), array(jnp.float32, T, R), array(jnp.float32, tiles, T)],
        grid=(tiles, pl.cdiv(T, rows)),
        num_warps=first.warps,
        num_stages=first.stages,
        **sizes(first) | dict(AHEAD=min(first.ahead, D)),
    )
    new_TD, hidden_gate_TD = jax_triton.triton_call(
        *(x_TD, normed_TD, weights.gate_bias_D, source_TR, square_FT, weights.gate_hidden_DD, weights.gate_predecessor_RD, weights.message_RD),
        kernel=triton_stream.stream_kernel,
        out_shape=[array(x_BNKD.dtype, T, D), array(jnp.float32, T, D)],
        grid=(pl.cdiv(D, second.columns), pl.cdiv(T, rows)),
        num_warps=second.warps,
        num_stages=second.stages,
        **sizes(second) | dict(TILES=tiles, TILES_POWER=pl.next_power_of_2(tiles)),
    )
    return new_TD.reshape(B, N, K, D), features(z_TR, square_FT).reshape(B, N, K, R), hidden_gate_TD.reshape(B, N, K, D)
