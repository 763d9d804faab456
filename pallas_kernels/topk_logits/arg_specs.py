"""Arguments of ``topk_logits`` at a model's sizes, for tests and benchmarks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.shapes import ModelShape


def arguments(shape: ModelShape, batch: int, key: jax.Array, dtype) -> tuple[tuple, dict]:
    """Hidden states of the K - 1 drafted slots of ``batch`` blocks [batch*(K-1),D], LM-head rows [V,D] of which the last few are padding, and P."""
    hidden_key, rows_key = jax.random.split(key)
    hidden_TD = jax.random.normal(hidden_key, (batch * (shape.block_size - 1), shape.hidden_size), dtype)
    rows_VD = jax.random.normal(rows_key, (shape.vocab_size, shape.hidden_size), dtype)
    return (hidden_TD, rows_VD), {"num_candidates": shape.num_candidates, "num_tokens": shape.vocab_size - shape.vocab_size // 500}


def bytes_moved(shape: ModelShape, batch: int, dtype) -> int:
    """U once."""
    return shape.vocab_size * shape.hidden_size * jnp.dtype(dtype).itemsize
