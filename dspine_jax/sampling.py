"""From logits to the law a token is drawn from, and draws from it; all in fp32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dspine_jax.vocabulary import MASKED


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """temperature 0 is greedy; top_k 0 and top_p 1 are off. Raises ValueError on impossible values."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature {self.temperature} must be 0 (greedy) or positive")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} must be 0 (off) or positive")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p {self.top_p} must lie in (0, 1]; 1 is off")

    @property
    def greedy(self) -> bool:
        """Whether tokens are chosen by argmax, ties to the lowest id."""
        return self.temperature == 0.0


def probabilities(logits: jax.Array, sampling: SamplingConfig) -> jax.Array:
    """The law tokens are drawn from: temperature, then top-k, then top-p of what is left.

    logits [...,V] fp32 (masked columns at -1e30) -> probabilities [...,V] fp32. Greedy is a point
    mass on the argmax. Top-k keeps exactly k ids (lowest ids first among equals); top-p keeps the
    smallest set whose mass reaches top_p, the most likely id always.
    """
    if sampling.greedy:
        return jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    return jax.nn.softmax(kept_logits(logits, sampling), axis=-1)


def sample(keys_B: jax.Array, logits_BV: jax.Array, sampling: SamplingConfig) -> jax.Array:
    """One id a row from the law of ``probabilities``, without forming it. -> [B] int32."""
    if sampling.greedy:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(keys_B, kept_logits(logits_BV, sampling)).astype(jnp.int32)


def kept_logits(logits: jax.Array, sampling: SamplingConfig) -> jax.Array:
    """Logits over temperature, -inf where top-k and then top-p leave an id out. [...,V] -> [...,V] fp32."""
    V = logits.shape[-1]
    scaled = logits.astype(jnp.float32) / sampling.temperature
    if 0 < sampling.top_k < V:
        scaled = _keep_largest(scaled, jnp.ones_like, sampling.top_k)
    if sampling.top_p < 1.0:
        top = jnp.max(scaled, axis=-1, keepdims=True)
        total = jnp.sum(jnp.exp(scaled - top), axis=-1, keepdims=True)
        scaled = _keep_largest(scaled, lambda x: jnp.exp(x - top) / total, sampling.top_p)
    return scaled


def _keep_largest(values: jax.Array, weigh: Callable[[jax.Array], jax.Array], most: float) -> jax.Array:
    """Values [...,V], -inf where the weight of all that come before (larger values, and lower ids among equals) is ``most`` or more.

    The smallest kept value is found bit by bit in 32 sums over V: sorting takes several times longer. Weights are formed
    anew in each sum, which is cheaper than reading them.
    """

    def weight_above(bound):
        return jnp.sum(jnp.where(_ordered_bits(values) > bound, weigh(values), 0.0), axis=-1, keepdims=True)

    def halve(_, bounds):
        low, high = bounds  # between them lie the least bits that have less than ``most`` above
        middle = low + (high - low) // 2
        enough = weight_above(middle) < most
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    highest = jnp.max(_ordered_bits(values), axis=-1, keepdims=True)
    least, _ = jax.lax.fori_loop(0, 32, halve, (jnp.zeros_like(highest), highest))
    order = _ordered_bits(values)
    equal = order == least
    above = weight_above(least)
    weight = weigh(jnp.max(jnp.where(equal, values, -jnp.inf), axis=-1, keepdims=True))
    count = jnp.sum(equal, axis=-1, keepdims=True)
    # Equal values at the border are rare, and ranks are slow to count: only where some of them have to go.
    kept = jax.lax.cond(
        jnp.any(above + (count - 1) * weight >= most),
        lambda: (order > least) | (equal & (above + (jnp.cumsum(equal, axis=-1) - 1) * weight < most)),
        lambda: order >= least,
    )
    return jnp.where(kept, values, -jnp.inf)


def _ordered_bits(values: jax.Array) -> jax.Array:
    """fp32 -> uint32 in the same order."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def draw(keys_B: jax.Array, probs_BV: jax.Array) -> jax.Array:
    """One id a row from probabilities [B,V] (need not be normalised), a key a row. -> [B] int32."""
    return draw_from_each(keys_B, probs_BV[:, None])[:, 0]


def draw_from_each(keys_B: jax.Array, probs_BPV: jax.Array) -> jax.Array:
    """One id from each of a row's P laws [B,P,V], all by the noise of the row's key: what ``draw`` gives for that law alone. -> [B,P] int32."""
    log_probs = jnp.where(probs_BPV > 0, jnp.log(jnp.maximum(probs_BPV, 1e-38)), MASKED)
    return jax.vmap(jax.vmap(jax.random.categorical, (None, 0)))(keys_B, log_probs).astype(jnp.int32)


def residual(p_BV: jax.Array, q_BV: jax.Array) -> jax.Array:
    """max(p - q, 0) / its sum, the law after a rejection; p itself where rounding leaves no mass.

    Divided by its sum, never put through a softmax. [B,V] -> [B,V].
    """
    rest = jnp.maximum(p_BV - q_BV, 0.0)
    mass = jnp.sum(rest, axis=-1, keepdims=True)
    return jnp.where(mass > 1e-8, rest / jnp.where(mass > 0, mass, 1.0), p_BV)
