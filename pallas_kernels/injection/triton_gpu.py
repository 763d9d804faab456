"""The kernels of ``triton_kernels`` called from JAX, through jax-triton (an optional extra that only a CUDA jaxlib can import)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.injection import pallas_gpu
from pallas_kernels.injection.ref import InjectionWeights

PREFETCH = True  # the first kernel asks the cache for the second one's weights


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

    first, second = (pallas_gpu.launch_for(kernel, T) for kernel in ("products", "write"))
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
    p_TR = pallas_gpu.features(z_TR, square_FT)
    return new_TD.reshape(B, N, K, D), p_TR.reshape(B, N, K, R), hidden_gate_TD.reshape(B, N, K, D)
