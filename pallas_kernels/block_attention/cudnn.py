"""Block attention through cuDNN's flash attention: all blocks of a row as queries of one masked attention over context and block keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def unsupported(q_BNKHC: jax.Array, ctx_k_BSGC: jax.Array) -> str | None:
    """What keeps cuDNN from serving these arrays, None if nothing does."""
    N, K, C = q_BNKHC.shape[1], q_BNKHC.shape[2], q_BNKHC.shape[-1]
    for dtype in (q_BNKHC.dtype, ctx_k_BSGC.dtype):
        if dtype not in (jnp.bfloat16, jnp.float16):
            return f"{dtype} (only bfloat16 and float16)"
    if C % 8 or C > 128:
        return f"a head width of {C} (only multiples of 8 up to 128)"
    if N * K % 2 or ctx_k_BSGC.shape[1] % 2:
        return f"{N} x {K} queries over {ctx_k_BSGC.shape[1]} rows (only even numbers)"
    return None


def visible(context_len_BN: jax.Array, S: int, K: int, *, causal: bool) -> jax.Array:
    """Which of S context rows, then N x K block slots each of N x K queries sees. context_len [B,N] -> bool [B,N*K,S+N*K]."""
    B, N = context_len_BN.shape
    context = jnp.broadcast_to(jnp.arange(S) < context_len_BN[:, :, None, None], (B, N, K, S)).reshape(B, N * K, S)
    slot = jnp.arange(N * K)
    own = slot[:, None] // K == slot // K
    if causal:
        own = own & (slot <= slot[:, None])
    return jnp.concatenate([context, jnp.broadcast_to(own, (B, N * K, N * K))], axis=-1)


def block_attention(q_BNKHC, ctx_k_BSGC, ctx_v_BSGC, block_k_BNKGC, block_v_BNKGC, context_len_BN, *, causal: bool) -> jax.Array:
    """See ``pallas_kernels.block_attention.ref.block_attention``; only for what ``unsupported`` has nothing against."""
    B, N, K, H, C = q_BNKHC.shape
    S, G = ctx_k_BSGC.shape[1:3]
    rows = lambda context, block: jnp.concatenate([context, block.reshape(B, N * K, G, C)], axis=1)  # noqa: E731
    mask = visible(context_len_BN, S, K, causal=causal)[:, None]
    args = q_BNKHC.reshape(B, N * K, H, C), rows(ctx_k_BSGC, block_k_BNKGC), rows(ctx_v_BSGC, block_v_BNKGC)
    return jax.nn.dot_product_attention(*args, mask=mask, implementation="cudnn").reshape(B, N, K, H, C)
