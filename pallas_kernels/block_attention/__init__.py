"""Block attention (DESIGN 8): the reference, kernels for training on GPUs and TPUs, and the choice between them."""

from __future__ import annotations

import functools

import jax

from pallas_kernels.block_attention import ref
from pallas_kernels.dispatch import gpu_or_reference, run_kernel

__all__ = ["block_attention"]

IMPLEMENTATIONS = ("xla", "pallas")


def block_attention(
    q_BNKHC: jax.Array,
    ctx_k_BSGC: jax.Array,
    ctx_v_BSGC: jax.Array,
    block_k_BNKGC: jax.Array,
    block_v_BNKGC: jax.Array,
    context_len_BN: jax.Array,
    *,
    causal: bool,
    implementation: str | None = None,
) -> jax.Array:
    """Each block sees context positions j < context_len and its own slots; blocks never see each other.

    Strictly below the anchor: the anchor's own target state does not exist when drafting. With
    ``causal`` slot i sees own slots <= i, else all of them. Scores and softmax in fp32, scale C^-1/2.

    q [B,N,K,H,C]; ctx_k, ctx_v [B,S,G,C]; block_k, block_v [B,N,K,G,C]; context_len [B,N] int
    -> [B,N,K,H,C] in q's dtype. (BASELINES 1.1, 2.2)

    implementation: 'xla', 'pallas' (an NVIDIA GPU or a TPU; raises NotImplementedError for what its kernels do not serve), or None: the kernels for several
    blocks a row on an NVIDIA GPU where they serve them, else XLA, which decoding's one block a row keeps. No TPU was there to measure its kernels.
    """
    from pallas_kernels.block_attention import pallas_gpu, pallas_tpu

    arrays = q_BNKHC, ctx_k_BSGC, ctx_v_BSGC, block_k_BNKGC, block_v_BNKGC
    args, reason = (*arrays, context_len_BN), pallas_gpu.unsupported(*arrays)
    on_gpu, on_tpu = (functools.partial(kernels.block_attention, causal=causal) for kernels in (pallas_gpu, pallas_tpu))
    if implementation == "pallas":
        return run_kernel("block_attention", args, {"cuda": on_gpu, "tpu": on_tpu}, {"cuda": reason, "tpu": pallas_tpu.unsupported(*arrays)})
    return gpu_or_reference(
        "block_attention",
        args,
        reference=functools.partial(ref.block_attention, causal=causal),
        kernel=on_gpu,
        reason=reason,
        implementation=implementation,
        pays=q_BNKHC.shape[1] > 1,
    )
