"""Arguments of block attention at a model's sizes, shared by tests and benchmark."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.shapes import ModelShape

CONTEXT = 1024  # rows of context of a decoding round
TRAINING_CONTEXT = 512  # with several blocks a row: the length of a training sequence


def _context(blocks: int, context: int | None) -> int:
    return context or (CONTEXT if blocks == 1 else TRAINING_CONTEXT)


def arguments(shape: ModelShape, batch: int, key: jax.Array, dtype, blocks: int = 1, context: int | None = None) -> tuple[tuple, dict]:
    """Queries [B,N,K,H,C], context keys and values [B,S,G,C], own ones [B,N,K,G,C] and context lengths: all of it for one block a row, else uniform."""
    H, G, C, K, S = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, _context(blocks, context)
    sizes = [(batch, blocks, K, H, C), *[(batch, S, G, C)] * 2, *[(batch, blocks, K, G, C)] * 2]
    length_key, *keys = jax.random.split(key, 1 + len(sizes))
    arrays = (jax.random.normal(key, size, dtype) for key, size in zip(keys, sizes))
    context_len_BN = jax.random.randint(length_key, (batch, blocks), 0, S) if blocks > 1 else jnp.full((batch, blocks), S)
    return (*arrays, context_len_BN), {"causal": True}


def bytes_moved(shape: ModelShape, batch: int, dtype, blocks: int = 1, context: int | None = None) -> int:
    """Queries, context and own keys and values read once, the output written once."""
    rows = batch * blocks * shape.block_size
    heads = 2 * rows * shape.num_heads + 2 * (rows + batch * _context(blocks, context)) * shape.num_kv_heads
    return jnp.dtype(dtype).itemsize * heads * shape.head_dim
