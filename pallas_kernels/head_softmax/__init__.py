"""LM head and softmax weights relative to a known origin in one operation: the reference, a GPU kernel, and the choice between them."""

from __future__ import annotations

import functools
import math

import jax

from pallas_kernels.dispatch import gpu_or_reference
from pallas_kernels.head_softmax import ref
from pallas_kernels.mesh import mesh_in_scope

__all__ = ["head_softmax", "position_multiple"]

IMPLEMENTATIONS = ("xla", "mosaic_gpu")


def position_multiple(batch: int) -> int:
    """How many positions of each of ``batch`` rows fill the kernel's tiles on every device; calls with multiples of it can use the kernel."""
    from pallas_kernels.head_softmax import mosaic_gpu

    mesh = mesh_in_scope()
    local = max(batch // (1 if mesh is None else mesh.size // mesh.shape.get("tensor", 1)), 1)
    return mosaic_gpu.STATES_OF_TILE // math.gcd(mosaic_gpu.STATES_OF_TILE, local)


def head_softmax(
    hidden_BTD: jax.Array, rows_VD: jax.Array, origin_BT: jax.Array, *, num_tokens: int, largest: float, implementation: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Softmax of ``hidden U^T`` before its division: weights exp(min(logit - origin, largest)), their sum, and the largest logit's id.

    With an origin that is known beforehand one pass does; the largest logit would be known only after one. Logits, exponents and sums are fp32, weights
    are rounded at the end; ids >= ``num_tokens`` weigh 0. Ties of the largest logit go to the lowest id.

    hidden [B,T,D], rows U [V,D], origin [B,T] fp32 -> (weights [B,T,V] in hidden's dtype, total [B,T] fp32, best [B,T] int32).

    implementation: 'xla', 'mosaic_gpu' (raises NotImplementedError for what it does not serve), or None: the kernel on NVIDIA's Hopper where it
    serves, else XLA.
    """
    from pallas_kernels.head_softmax import mosaic_gpu

    options = {"num_tokens": num_tokens, "largest": largest}
    return gpu_or_reference(
        "head_softmax",
        (hidden_BTD, rows_VD, origin_BT),
        reference=functools.partial(ref.head_softmax, **options),
        kernel=functools.partial(mosaic_gpu.head_softmax, **options),
        reason=mosaic_gpu.unsupported(hidden_BTD, rows_VD),
        implementation=implementation,
        kind="mosaic_gpu",
    )
