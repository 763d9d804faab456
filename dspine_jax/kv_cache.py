"""Preallocated key/value cache with a length counter per row: rollback is a counter.

One array per layer, never a stacked one: scanning over stacked caches copies a slice each step.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """keys, values: one [B,capacity,G,C] array per layer; lengths_B int32 counts the valid rows."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    lengths_B: jax.Array

    @classmethod
    def empty(cls, batch: int, capacity: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype) -> KVCache:
        """An all-zero cache of the given shape with length 0 in every row."""
        shape = (batch, capacity, num_kv_heads, head_dim)
        zeros = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))  # noqa: E731
        return cls(zeros(), zeros(), jnp.zeros((batch,), jnp.int32))

    @property
    def capacity(self) -> int:
        """Rows each layer can hold."""
        return self.keys[0].shape[1]

    def with_lengths(self, lengths_B: jax.Array) -> KVCache:
        """The same arrays with other counters: this is both commit and rollback."""
        return dataclasses.replace(self, lengths_B=jnp.asarray(lengths_B, jnp.int32))


def write_rows(cache_BSGC: jax.Array, new_BTGC: jax.Array, start_B: jax.Array) -> jax.Array:
    """Write T rows at per-row offsets [start, start+T); rows past the capacity are dropped.

    A dynamic update slice would move an overhanging write back over valid rows without a word;
    a dropping scatter leaves them alone. Callers check for room before a round.
    """
    B, T = new_BTGC.shape[:2]
    rows_BT = start_B[:, None] + jnp.arange(T)[None]
    batch_BT = jnp.broadcast_to(jnp.arange(B)[:, None], (B, T))
    return cache_BSGC.at[batch_BT, rows_BT].set(new_BTGC.astype(cache_BSGC.dtype), mode="drop")
