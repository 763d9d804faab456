"""Adjacent causal injection (DESIGN 5.2, 5.3, 8): the reference, a gradient by hand, kernels for decoding rounds, and the choice between them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import run_kernel, without_jax_triton
from pallas_kernels.injection import vjp
from pallas_kernels.injection.ref import InjectionWeights, unit, write
from pallas_kernels.injection.ref import injection as _reference
from pallas_kernels.mesh import mesh_in_scope

__all__ = ["InjectionWeights", "injection", "unit", "write"]

IMPLEMENTATIONS = ("xla", "pallas", "triton", "mosaic_gpu")


def _with_gradient(kernel, eps: float):
    """A kernel without a gradient of its own: the backward pass runs the injection again."""
    function = jax.custom_vjp(functools.partial(kernel, eps=eps))
    function.defvjp(lambda *args: (function(*args), args), lambda args, cotangents: jax.vjp(lambda *args: vjp.injection(*args, eps), *args)[1](cotangents))
    return function


def _unsupported(x_BNKD: jax.Array, weights: InjectionWeights) -> str | None:
    """What keeps every kernel from serving these arrays, None if nothing does."""
    if x_BNKD.dtype != jnp.bfloat16:
        return f"a stream of {x_BNKD.dtype} (only bfloat16)"
    for name in ("feature_DR", "gate_predecessor_RD", "gate_hidden_DD", "message_RD"):
        dtype = getattr(weights, name).dtype
        if dtype != x_BNKD.dtype:  # each call would read and write whole weights to cast them
            return f"{name} of {dtype} with a stream of {x_BNKD.dtype} (only weights of the stream's type)"
    if 0 in x_BNKD.shape:
        return f"an empty stream {x_BNKD.shape}"
    mesh = mesh_in_scope()
    if mesh is not None:
        return f"a mesh of several devices, {dict(mesh.shape)}"
    return None


def injection(
    x_BNKD: jax.Array, anchor_feature_BNR: jax.Array, weights: InjectionWeights, *, eps: float, implementation: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write every slot's predicted feature into its successor.

    Slot 0 is decoded, so slot 1 receives the anchor's embedding feature T[anchor]; slot i >= 2
    receives p_{i-1} of the stream *before* any write of this layer. Slot 0 is left as it is.

    x [B,N,K,D], anchor_feature [B,N,R] -> (new stream [B,N,K,D], predicted features p [B,N,K,R]
    fp32, hidden gate [B,N,K,D] fp32 for redoing the write).

    implementation: 'xla', the reference and its autodiff; 'pallas', a kernel for a TPU; 'triton', two for an NVIDIA GPU through jax-triton; 'mosaic_gpu', one
    for at most 16 rows on NVIDIA's Hopper; all for one device, and raise NotImplementedError for what they do not serve; or None: jnp with a gradient by
    hand, on any platform and mesh. Kernels have to be asked for: 'mosaic_gpu' is faster than XLA on an H200, but its programs wait for each other, which
    no other process with the same kernel may prevent (CUDA's MPS lets it); Triton's are slower; no TPU was there to measure one.
    """
    args = x_BNKD, anchor_feature_BNR, weights
    if implementation is None:
        return vjp.injection(*args, eps)
    if implementation == "xla":
        return _reference(*args, eps=eps)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is none of {', '.join(map(repr, IMPLEMENTATIONS))}")
    from pallas_kernels.injection import mosaic_gpu, pallas_tpu, triton_gpu

    reason = _unsupported(x_BNKD, weights)
    if implementation == "mosaic_gpu":
        reason = reason or mosaic_gpu.unsupported(x_BNKD, weights)
        return run_kernel("injection", args, {"cuda": _with_gradient(mosaic_gpu.injection, eps)}, {"cuda": reason})
    if implementation == "triton":
        return run_kernel("injection", args, {"cuda": _with_gradient(triton_gpu.injection, eps)}, {"cuda": reason or without_jax_triton()})
    kernel = _with_gradient(pallas_tpu.injection, eps)
    return run_kernel("injection", args, {"tpu": kernel}, {"tpu": reason or pallas_tpu.unsupported(x_BNKD, weights)})
