"""Where two greedy texts part, and how near a tie the target was there (docs/lossless.md)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspine_jax.target import Target

# Bound on the gap at which bfloat16 texts may part, in logits: twice the largest margin measured on a real target (docs/lossless.md).
BFLOAT16_GAP = 1.0


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter length where one text is the other's beginning, None for equal texts."""
    for index, (a, b) in enumerate(zip(ours, theirs)):
        if a != b:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


@functools.partial(jax.jit, static_argnames=("graph", "dtype"))
def _last_logits(state, tokens_BS, last_B, *, graph, dtype):
    target = nnx.merge(graph, state)
    hidden_BSD = target(tokens_BS, dtype=dtype).hidden_BTD
    return target.logits(jnp.take_along_axis(hidden_BSD, last_B[:, None, None], axis=1)[:, 0])


def parting_gaps(
    target: Target, prompts: Sequence[Sequence[int]], ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], *, dtype
) -> list[float]:
    """For each pair of texts that part: how far the worse of the two first differing tokens lies below the best logit there.

    The logits are the target's, teacher-forced on the common beginning in ``dtype``; the two best ones are never further apart than
    this gap. Infinite where one text ends inside the other.
    """
    graph, state = nnx.split(target)
    width = max(len(p) + max(len(a), len(b)) for p, a, b in zip(prompts, ours, theirs))
    gaps = []
    for prompt, a, b in zip(prompts, ours, theirs):
        index = first_difference(a, b)
        if index is None:
            continue
        if index == min(len(a), len(b)):
            gaps.append(float("inf"))
            continue
        context = [*prompt, *a[:index]]
        tokens_BS = np.zeros((1, width), np.int32)
        tokens_BS[0, : len(context)] = context
        logits_V = _last_logits(state, jnp.asarray(tokens_BS), jnp.array([len(context) - 1]), graph=graph, dtype=jnp.dtype(dtype))[0]
        gaps.append(float(logits_V.max() - jnp.minimum(logits_V[a[index]], logits_V[b[index]])))
    return gaps
