"""The kernels of ``triton_kernels`` called from JAX, through jax-triton (an optional extra that only a CUDA jaxlib can import)."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.injection.ref import InjectionWeights
from pallas_kernels.shapes import ModelShape

LEAST_ROWS = 16  # of a matrix product
PREFETCH = True  # the first kernel asks the cache for the second one's weights


class Launch(NamedTuple):
    """Rows, columns and depth of a tile (powers of two, at least 16), Triton's warps and pipeline depth."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# Kernel -> most rows of a call -> launch; larger calls take the last one.
LAUNCHES = {
    "products": {16: Launch(16, 32, 128, 1, 4), 64: Launch(64, 64, 64, 4, 4), 128: Launch(128, 128, 64, 8, 3)},
    "write": {16: Launch(16, 32, 256, 2, 3), 64: Launch(64, 32, 64, 4, 4), 128: Launch(128, 32, 64, 8, 4)},
}


def launch_for(kernel: str, rows: int) -> Launch:
    """The launch of a call with this many rows; its tile is no taller than the call."""
    launches = LAUNCHES[kernel]
    launch = next((launch for most, launch in launches.items() if rows <= most), list(launches.values())[-1])
    return launch._replace(rows=min(launch.rows, max(LEAST_ROWS, pl.next_power_of_2(rows))))


def candidates(kernel: str, shape: ModelShape, blocks: int) -> list[Launch]:
    """Launches worth a try for a decoding round's blocks, the likeliest first: what fits into shared memory and keeps enough bytes on the way."""
    tall = max(LEAST_ROWS, pl.next_power_of_2(blocks * shape.block_size))
    rows = (tall,) if tall <= 64 else (64, 128)
    width, weights = (shape.hidden_size + shape.transfer_size, 1) if kernel == "products" else (shape.hidden_size, 2)
    warps = (4, 2, 8) if tall > 16 else (2, 4, 1)
    count = lambda x: width / x.columns * max(1, tall / x.rows)  # noqa: E731
    in_flight = lambda x: 2 * x.depth * (x.rows + weights * x.columns) * x.stages  # noqa: E731
    grid = itertools.product(rows, (32, 64, 16, 128), (128, 256, 64), warps, (4, 5, 3))
    least = min(64, shape.hidden_size // 64)  # programs, of 132 multiprocessors
    return [x for x in itertools.starmap(Launch, grid) if 24 << 10 <= in_flight(x) <= 220 << 10 and least <= count(x) <= 640]


def features(z_TR: jax.Array, square_FT: jax.Array) -> jax.Array:
    """p [T,R] fp32. In jnp, so that a decoding round, which has no use for it, does not compute it."""
    return z_TR * (z_TR.shape[1] ** 0.5 * jax.lax.rsqrt(jnp.sum(square_FT, axis=0) + 1e-6))[:, None]


def injection(
    x_BNKD: jax.Array, anchor_feature_BNR: jax.Array, weights: InjectionWeights, *, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``pallas_kernels.injection.injection``; only for one device, weights in the stream's type. No gradient."""
    import jax_triton

    from pallas_kernels.injection import triton_kernels

    B, N, K, D = x_BNKD.shape
    T, R = B * N * K, weights.feature_DR.shape[1]
    x_TD, anchor_AR = x_BNKD.reshape(T, D), anchor_feature_BNR.reshape(B * N, R).astype(jnp.float32)
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    sizes = lambda launch: dict(T=T, D=D, R=R, SLOTS=K, ROWS=launch.rows, COLUMNS=launch.columns, DEPTH=launch.depth)  # noqa: E731

    first, second = (launch_for(kernel, T) for kernel in ("products", "write"))
    tiles = pl.cdiv(R, first.columns)
    source_TR, z_TR, square_FT, hidden_gate_TD = jax_triton.triton_call(
        *(x_TD, anchor_AR, weights.norm_D, weights.gate_bias_D, weights.feature_DR, weights.gate_hidden_DD),
        *(weights.gate_predecessor_RD, weights.message_RD),
        kernel=triton_kernels.products_kernel,
        out_shape=[array(x_BNKD.dtype, T, R), array(jnp.float32, T, R), array(jnp.float32, tiles, T), array(jnp.float32, T, D)],
        grid=(tiles + pl.cdiv(D, first.columns), pl.cdiv(T, first.rows)),
        num_warps=first.warps,
        num_stages=first.stages,
        **sizes(first) | dict(EPS=eps, PREFETCH=PREFETCH),
    )
    (new_TD,) = jax_triton.triton_call(
        *(x_TD, source_TR, square_FT, hidden_gate_TD, weights.gate_predecessor_RD, weights.message_RD),
        kernel=triton_kernels.write_kernel,
        out_shape=[array(x_BNKD.dtype, T, D)],
        grid=(pl.cdiv(D, second.columns), pl.cdiv(T, second.rows)),
        num_warps=second.warps,
        num_stages=second.stages,
        **sizes(second) | dict(TILES=tiles, TILES_POWER=pl.next_power_of_2(tiles)),
    )
    p_TR = features(z_TR, square_FT)
    return new_TD.reshape(B, N, K, D), p_TR.reshape(B, N, K, R), hidden_gate_TD.reshape(B, N, K, D)
