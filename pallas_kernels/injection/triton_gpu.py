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
    x_TD = x_BNKD.reshape(T, D)
    fp32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731

    first = pallas_gpu.launch_for("products", T)
    S = first.splits
    z_STR, g_STD, square_ST = jax_triton.triton_call(
        *(x_TD, weights.norm_D, weights.feature_DR, weights.gate_hidden_DD, weights.gate_predecessor_RD, weights.message_RD),
        kernel=triton_kernels.products_kernel,
        out_shape=[fp32(S, T, R), fp32(S, T, D), fp32(S, T)],
        grid=(pl.cdiv(R, first.columns) + pl.cdiv(D, first.columns), S, pl.cdiv(T, first.rows)),
        num_warps=first.warps,
        num_stages=first.stages,
        **dict(T=T, D=D, R=R, ROWS=first.rows, COLUMNS=first.columns, DEPTH=first.depth, SPLITS=S, PREFETCH=PREFETCH),
    )
    second = pallas_gpu.launch_for("write", T)
    anchor_AR = anchor_feature_BNR.reshape(B * N, R).astype(jnp.float32)
    prepared = T > pallas_gpu.LEAST_ROWS
    source = pallas_gpu.predecessors(z_STR, anchor_AR, K, x_BNKD.dtype) if prepared else z_STR
    new_TD, hidden_gate_TD = jax_triton.triton_call(
        *(x_TD, source, g_STD, square_ST, anchor_AR, weights.gate_bias_D, weights.gate_predecessor_RD, weights.message_RD),
        kernel=triton_kernels.write_kernel,
        out_shape=[jax.ShapeDtypeStruct((T, D), x_BNKD.dtype), fp32(T, D)],
        grid=(pl.cdiv(D, second.columns), pl.cdiv(T, second.rows)),
        num_warps=second.warps,
        num_stages=second.stages,
        **dict(T=T, D=D, R=R, SLOTS=K, EPS=eps, ROWS=second.rows, COLUMNS=second.columns, DEPTH=second.depth),
        **dict(SPLITS=S, PREPARED=prepared),
    )
    p_TR = pallas_gpu.features_from_parts(z_STR, square_ST, D, eps)
    return new_TD.reshape(B, N, K, D), p_TR.reshape(B, N, K, R), hidden_gate_TD.reshape(B, N, K, D)
