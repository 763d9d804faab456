"""Arguments of ``transition_table`` at a model's sizes, for tests and benchmarks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.injection import InjectionWeights
from pallas_kernels.shapes import ModelShape


def arguments(shape: ModelShape, batch: int, key: jax.Array, dtype) -> tuple[tuple, dict]:
    """One block a row: stream, hidden gate, candidates, features of norm sqrt(R), LM-head rows [V,D], the last injection's weights, the final norm."""
    D, R, V, K, P = shape.hidden_size, shape.transfer_size, shape.vocab_size, shape.block_size, shape.num_candidates
    keys = iter(jax.random.split(key, 12))
    normal = lambda *size, std=1.0, dtype=dtype: (std * jax.random.normal(next(keys), size, jnp.float32)).astype(dtype)  # noqa: E731
    # The message is the size of the stream, and the gate neither open nor shut.
    weights = InjectionWeights(
        norm_D=jnp.ones((D,), dtype),
        feature_DR=normal(D, R, std=D**-0.5),
        gate_predecessor_RD=normal(R, D, std=R**-0.5),
        gate_hidden_DD=jnp.zeros((D, D), dtype),
        gate_bias_D=jnp.zeros((D,), dtype),
        message_RD=normal(R, D, std=R**-0.5),
    )
    arrays = (
        normal(batch, 1, K, D),
        normal(batch, 1, K, D, dtype=jnp.float32),
        jax.random.randint(next(keys), (batch, 1, K - 1, P), 0, V),
        normal(batch, 1, R, dtype=jnp.float32),
        normal(batch, 1, K - 1, P, R, dtype=jnp.float32),
        normal(V, D, std=D**-0.5),
    )
    norm_D = 1.0 + normal(D, std=0.1, dtype=jnp.float32)
    return (*arrays, weights, norm_D.astype(dtype)), {"eps": 1e-6}


def bytes_moved(shape: ModelShape, batch: int, dtype) -> int:
    """The two projections of features, and a block's stream, gate, features, candidate rows and table."""
    D, R, P, J = shape.hidden_size, shape.transfer_size, shape.num_candidates, shape.block_size - 1
    size = jnp.dtype(dtype).itemsize
    row = J * D * (size + 4) + 4 * R * (1 + J * P) + J * P * (size * D + 4 * P)
    return 2 * R * D * size + batch * row
