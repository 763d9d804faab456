"""Adjacent causal injection (DESIGN 5.2, 5.3, 8): the reference, a gradient by hand, kernels for decoding rounds, and the choice between them."""

from __future__ import annotations

import functools

import jax

from pallas_kernels.injection import vjp
from pallas_kernels.injection.ref import InjectionWeights, unit, write
from pallas_kernels.injection.ref import injection as _reference

__all__ = ["InjectionWeights", "injection", "unit", "write"]

IMPLEMENTATIONS = ("xla", "pallas")
MOST_ROWS = 16  # of a call that takes the GPU kernels by default: with more, XLA's matrix products are as fast


def _differentiable(kernel, eps: float):
    """A kernel without a gradient of its own: the backward pass runs the injection again."""
    function = jax.custom_vjp(functools.partial(kernel, eps=eps))
    function.defvjp(lambda *args: (function(*args), args), lambda args, cotangents: jax.vjp(lambda *args: vjp.injection(*args, eps), *args)[1](cotangents))
    return function


def injection(
    x_BNKD: jax.Array, anchor_feature_BNR: jax.Array, weights: InjectionWeights, *, eps: float, implementation: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write every slot's predicted feature into its successor.

    Slot 0 is decoded, so slot 1 receives the anchor's embedding feature T[anchor]; slot i >= 2
    receives p_{i-1} of the stream *before* any write of this layer. Slot 0 is left as it is.

    x [B,N,K,D], anchor_feature [B,N,R] -> (new stream [B,N,K,D], predicted features p [B,N,K,R]
    fp32, hidden gate [B,N,K,D] fp32 for redoing the write).

    implementation: 'xla', the reference and its autodiff; 'pallas', kernels for one device (raises NotImplementedError for what they do not serve); or
    None: on an NVIDIA GPU those for calls of few rows that they serve, else jnp with a gradient by hand, on any platform and mesh.
    """
    args = x_BNKD, anchor_feature_BNR, weights
    if implementation == "xla":
        return _reference(*args, eps=eps)
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation {implementation!r} is none of {', '.join(map(repr, IMPLEMENTATIONS))}")
    from pallas_kernels.injection import pallas_gpu

    reason = pallas_gpu.unsupported(*args)
    kernel = _differentiable(pallas_gpu.injection, eps)
    if implementation == "pallas":
        if reason:
            raise NotImplementedError(f"injection: the kernels do not serve {reason}")
        return kernel(*args)
    plain = lambda *args: vjp.injection(*args, eps)  # noqa: E731
    if reason or x_BNKD.size // x_BNKD.shape[-1] > MOST_ROWS:
        return plain(*args)
    return jax.lax.platform_dependent(*args, cuda=kernel, default=plain)
