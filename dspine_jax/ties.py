"""Where two greedy texts part, and how near a tie the target was there (docs/lossless.md)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspine_jax.target import Target

# Largest top-2 margin, in nats, at which bfloat16 texts of one target were seen to part (docs/lossless.md), rounded up.
BFLOAT16_MARGIN = 0.5


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter length where one text is the other's beginning, None for equal texts."""
    for index, (a, b) in enumerate(zip(ours, theirs)):
        if a != b:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


@functools.partial(jax.jit, static_argnames=("graph", "dtype"))
def _margins(state, tokens_BS, last_B, *, graph, dtype):
    target = nnx.merge(graph, state)
    hidden_BSD = target(tokens_BS, dtype=dtype).hidden_BTD
    logits_BV = target.logits(jnp.take_along_axis(hidden_BSD, last_B[:, None, None], axis=1)[:, 0])
    best_B2 = jax.lax.top_k(logits_BV, 2)[0]
    return best_B2[:, 0] - best_B2[:, 1]


def top2_margins(target: Target, contexts: Sequence[Sequence[int]], *, dtype, width: int) -> list[float]:
    """Best minus second best fp32 logit of the token after each context (token ids, at most ``width``), computed in ``dtype``."""
    graph, state = nnx.split(target)
    margins = []
    for context in contexts:
        tokens_BS = np.zeros((1, width), np.int32)
        tokens_BS[0, : len(context)] = context
        margins.append(float(_margins(state, jnp.asarray(tokens_BS), jnp.array([len(context) - 1]), graph=graph, dtype=jnp.dtype(dtype))[0]))
    return margins
