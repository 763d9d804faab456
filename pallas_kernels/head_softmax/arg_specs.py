"""Arguments of ``head_softmax`` at a model's sizes, shared by tests and benchmark."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.shapes import ModelShape

POSITIONS = 256  # of a row: a chunk of the loss


def arguments(shape: ModelShape, batch: int, key: jax.Array, dtype) -> tuple[tuple, dict]:
    """States [batch,256,D], LM-head rows [V,D] of which the last few are padding, and origins near the logits of labels."""
    keys = jax.random.split(key, 3)
    hidden_BTD = jax.random.normal(keys[0], (batch, POSITIONS, shape.hidden_size), dtype)
    rows_VD = shape.hidden_size**-0.5 * jax.random.normal(keys[1], (shape.vocab_size, shape.hidden_size), dtype)
    origin_BT = 3 + jax.random.normal(keys[2], (batch, POSITIONS))
    return (hidden_BTD, rows_VD, origin_BT), {"num_tokens": shape.vocab_size - shape.vocab_size // 500, "largest": 74.0}


def bytes_moved(shape: ModelShape, batch: int, dtype) -> int:
    """U and states once, weights once; the arithmetic takes longer than that."""
    size, states = jnp.dtype(dtype).itemsize, batch * POSITIONS
    return size * (shape.vocab_size * (shape.hidden_size + states) + states * shape.hidden_size)
