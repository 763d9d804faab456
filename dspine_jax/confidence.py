"""DSpark's confidence: the head, proposals cut by it, its calibration, and the scheduler that spends a batch's verification on it (BASELINES 4.2).

Confidence c_j is the probability that draft j is accepted given that all before it were; a prefix of j drafts survives with the product of the first j.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspine_jax.config import DrafterConfig
from dspine_jax.layers import Linear


class ConfidenceHead(nnx.Module):
    """z = w [h ; e] + b, or w h + b: the logit of a draft's confidence from its state and the Markov embedding of the token before it."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, param_dtype=jnp.float32):
        width = config.hidden_size + (config.markov.rank if config.confidence_with_markov else 0)
        self.proj = Linear(width, 1, bias=True, rngs=rngs, param_dtype=param_dtype)

    def __call__(self, *parts: jax.Array) -> jax.Array:
        """h [...,D] and, where the head reads it, e [...,R] -> logits [...] fp32."""
        return self.proj(jnp.concatenate(parts, axis=-1).astype(jnp.float32))[..., 0]


def confident_prefix(logits_BJ: jax.Array, threshold: float) -> jax.Array:
    """How many drafts stand before the first whose confidence is below the threshold. -> [B] int32."""
    return jnp.cumprod((jax.nn.sigmoid(logits_BJ) >= threshold).astype(jnp.int32), axis=1).sum(axis=1)


# ---- calibration, on the host --------------------------------------------------------------------


def expected_calibration_error(predicted: np.ndarray, happened: np.ndarray, bins: int = 20) -> float:
    """Mean over equally wide bins, weighted by their counts, of |mean prediction - share that happened|. Both [R]."""
    predicted, happened = np.asarray(predicted, np.float64), np.asarray(happened, np.float64)
    index = np.minimum((predicted * bins).astype(int), bins - 1)
    gap = np.bincount(index, predicted - happened, minlength=bins)
    return float(np.abs(gap).sum() / max(len(predicted), 1))


def prefix_survival(logits_RJ: np.ndarray, temperatures_J: np.ndarray | None = None) -> np.ndarray:
    """Predicted probability that the first j + 1 drafts are all accepted: products of sigmoid(z / T). [R,J] -> [R,J]."""
    scaled = np.asarray(logits_RJ, np.float64) / (1.0 if temperatures_J is None else temperatures_J)
    return np.cumprod(0.5 * (1.0 + np.tanh(0.5 * scaled)), axis=1)


def fit_temperatures(logits_RJ: np.ndarray, accepted_R: np.ndarray, *, grid: np.ndarray | None = None, bins: int = 20) -> np.ndarray:
    """Sequential temperature scaling: T_1, T_2, ... in order, each by the grid value that minimises the calibration error of its prefix.

    logits z [R,J] of held-out rounds, accepted [R] drafts accepted in each; ``grid`` of temperatures, by default 121 from 1/8 to 8, evenly spaced in the
    logarithm; of equal errors the temperature nearest 1 wins. -> T [J]. Raises ValueError where there are no rounds.
    """
    logits_RJ, accepted_R = np.asarray(logits_RJ, np.float64), np.asarray(accepted_R)
    if not len(logits_RJ):
        raise ValueError("no rounds to calibrate on; decode some held-out prompts first")
    grid = np.geomspace(1 / 8, 8, 121) if grid is None else np.asarray(grid, np.float64)
    grid = grid[np.argsort(np.abs(np.log(grid)), kind="stable")]
    before_R, temperatures = np.ones(len(logits_RJ)), []
    for j in range(logits_RJ.shape[1]):
        survivals = [before_R * prefix_survival(logits_RJ[:, j : j + 1], t)[:, 0] for t in grid]
        best = int(np.argmin([expected_calibration_error(survival, accepted_R > j, bins) for survival in survivals]))
        temperatures.append(grid[best])
        before_R = survivals[best]
    return np.array(temperatures)


# ---- scheduling ----------------------------------------------------------------------------------


def schedule_drafts(confidence_RJ: np.ndarray, steps_per_second: Callable[[int], float]) -> np.ndarray:
    """How many drafts of each request to verify together, so that expected tokens per second are most (DSpark, algorithm 1).

    confidence c [R,J] of R requests; ``steps_per_second(B)`` is what the server reaches when it verifies B tokens a step, the R anchors
    included. Drafts are admitted by falling survival, each after those before it in its request (ties to the lower request), and admission stops at the first
    one that does not raise ``expected tokens x steps_per_second``: whether a draft is verified then never depends on a later one, which keeps the
    output's law. -> lengths [R] int.
    """
    survival_RJ = np.cumprod(np.asarray(confidence_RJ, np.float64), axis=1)
    R, J = survival_RJ.shape
    lengths = np.zeros(R, int)
    batch, expected = R, float(R)
    best = expected * steps_per_second(batch)
    waiting = [(-survival_RJ[r, 0], r) for r in range(R)] if J else []
    heapq.heapify(waiting)
    while waiting:
        negative, r = heapq.heappop(waiting)
        batch, expected = batch + 1, expected - negative
        value = expected * steps_per_second(batch)
        if value <= best:
            break
        best = value
        lengths[r] += 1
        if lengths[r] < J:
            heapq.heappush(waiting, (-survival_RJ[r, lengths[r]], r))
    return lengths
