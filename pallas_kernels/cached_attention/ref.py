"""Reference of cached attention: masked attention over the first rows of the cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspine_jax.attention import attend


def cached_attention(q_BTHC: jax.Array, keys_BSGC: jax.Array, values_BSGC: jax.Array, start_B: jax.Array, *, width: int | None = None) -> jax.Array:
    """See ``pallas_kernels.cached_attention.cached_attention``."""
    width = keys_BSGC.shape[1] if width is None else min(width, keys_BSGC.shape[1])
    positions_BT = start_B[:, None] + jnp.arange(q_BTHC.shape[1], dtype=jnp.int32)
    visible_BTS = jnp.arange(width) <= positions_BT[:, :, None]
    return attend(q_BTHC, keys_BSGC[:, :width], values_BSGC[:, :width], visible_BTS)
