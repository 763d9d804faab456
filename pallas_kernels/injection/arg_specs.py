"""Arguments of an injection at a model's sizes, shared by tests and benchmark."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.injection.ref import InjectionWeights
from pallas_kernels.shapes import ModelShape


def arguments(shape: ModelShape, batch: int, key: jax.Array, dtype, blocks: int = 1) -> tuple[tuple, dict]:
    """A stream [B,N,K,D], anchor features [B,N,R] and weights whose products keep the scale of what they multiply; N blocks a row (one in decoding)."""
    D, R, K = shape.hidden_size, shape.transfer_size, shape.block_size
    sizes = [(batch, blocks, K, D), (batch, blocks, R), (D,), (D, R), (R, D), (D, D), (D,), (R, D)]
    scales = [1.0, 1.0, 1.0, D**-0.5, R**-0.5, D**-0.5, 1.0, R**-0.5]
    dtypes = [dtype, jnp.float32, *[dtype] * 6]
    draws = zip(jax.random.split(key, len(sizes)), sizes, scales, dtypes)
    x, anchor_feature, *weights = (scale * jax.random.normal(key, size, dtype) for key, size, scale, dtype in draws)
    return (x, anchor_feature, InjectionWeights(*weights)), {"eps": 1e-6}


def bytes_moved(shape: ModelShape, batch: int, dtype, blocks: int = 1) -> int:
    """Weights and stream read once, the new stream written once. Gates and features are left out: of a round's injections only one has a use for them."""
    D, R, K = shape.hidden_size, shape.transfer_size, shape.block_size
    rows = batch * blocks * K
    return jnp.dtype(dtype).itemsize * (D * D + 3 * D * R + 2 * D + 2 * rows * D) + 4 * batch * blocks * R


def used(outputs, training: bool):
    """What is read of a layer's outputs: in decoding no predicted features, in training no hidden gate (but the last layer's)."""
    new_stream, features, hidden_gate = outputs
    return (new_stream, features) if training else (new_stream, hidden_gate)
