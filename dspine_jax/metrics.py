"""Training metrics as (sum, weight) pairs, reduced once (BASELINES 8.4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def slot_accuracy(correct_BNJ: jax.Array, eval_mask_BNJ: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Per drafted slot: (number right [J], number supervised [J])."""
    hits = correct_BNJ & eval_mask_BNJ
    return hits.sum((0, 1)).astype(jnp.float32), eval_mask_BNJ.sum((0, 1)).astype(jnp.float32)


def slot_sums(values_BNJ: jax.Array, eval_mask_BNJ: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Per drafted slot: (sum of a value over supervised slots [J], number supervised [J])."""
    return jnp.sum(jnp.where(eval_mask_BNJ, values_BNJ, 0.0), (0, 1)), eval_mask_BNJ.sum((0, 1)).astype(jnp.float32)


def simulated_acceptance(correct_BNJ: jax.Array, eval_mask_BNJ: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sum over blocks of 1 + leading right slots, number of blocks with a supervised first slot).

    On the conditioned path correctness is judged with the true predecessor, which is exact for
    acceptance: a slot only matters while its prefix is right.
    """
    leading = jnp.cumprod((correct_BNJ & eval_mask_BNJ).astype(jnp.float32), axis=-1).sum(-1)
    real = eval_mask_BNJ[..., 0]
    return jnp.sum((1.0 + leading) * real), jnp.sum(real).astype(jnp.float32)
