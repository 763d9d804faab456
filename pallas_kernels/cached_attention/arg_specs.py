"""Arguments of cached attention at a model's sizes, shared by tests and benchmark."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.shapes import ModelShape

CONTEXT = 1024  # rows of the cache, of which each row of the batch has filled all but a few


def arguments(shape: ModelShape, batch: int, key: jax.Array, dtype, context: int = CONTEXT) -> tuple[tuple, dict]:
    """One new token's queries [B,1,H,C], cache [B,S,G,C] twice, and the positions [B] of the tokens, in the last 64 rows."""
    H, G, C = shape.num_heads, shape.num_kv_heads, shape.head_dim
    start_key, *keys = jax.random.split(key, 4)
    arrays = (jax.random.normal(key, size, dtype) for key, size in zip(keys, [(batch, 1, H, C), *[(batch, context, G, C)] * 2]))
    return (*arrays, jax.random.randint(start_key, (batch,), context - 64, context)), {}


def bytes_moved(shape: ModelShape, batch: int, dtype, context: int = CONTEXT) -> int:
    """Queries and the whole cache read once, the output written once."""
    return jnp.dtype(dtype).itemsize * 2 * batch * shape.head_dim * (shape.num_heads + context * shape.num_kv_heads)
