"""Block attention (DESIGN 8)."""

import os

import jax

from pallas_kernels.block_attention import cudnn, ref

__all__ = ["block_attention"]


def block_attention(q, ck, cv, bk, bv, n, *, causal, implementation=None):
    implementation = implementation or os.environ.get("BLOCK_ATTENTION")
    if implementation is None:
        served = cudnn.unsupported(q, ck) is None and q.shape[1] > 1 and jax.default_backend() == "gpu"
        implementation = "cudnn" if served else "xla"
    return {"cudnn": cudnn, "xla": ref}[implementation].block_attention(q, ck, cv, bk, bv, n, causal=causal)
