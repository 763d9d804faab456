"""From logits to the law a token is drawn from, and draws from it; all in fp32."""

from __future__ import annotations

import dataclasses

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
    V = logits.shape[-1]
    if sampling.greedy:
        return jax.nn.one_hot(jnp.argmax(logits, axis=-1), V, dtype=jnp.float32)
    scaled = logits.astype(jnp.float32) / sampling.temperature
    limit = sampling.top_k if 0 < sampling.top_k < V else V
    if limit == V and sampling.top_p >= 1.0:
        return jax.nn.softmax(scaled, axis=-1)
    values, ids = jax.lax.top_k(scaled, limit)
    kept = jax.nn.softmax(values, axis=-1)
    if sampling.top_p < 1.0:
        before = jnp.cumsum(kept, axis=-1) - kept
        kept = jnp.where(before < sampling.top_p, kept, 0.0)
        kept = kept / jnp.sum(kept, axis=-1, keepdims=True)
    return jnp.put_along_axis(jnp.zeros_like(scaled), ids, kept, axis=-1, inplace=False)


def draw(keys_B: jax.Array, probs_BV: jax.Array) -> jax.Array:
    """One id a row from probabilities [B,V] (need not be normalised), a key a row. -> [B] int32."""
    log_probs = jnp.where(probs_BV > 0, jnp.log(jnp.maximum(probs_BV, 1e-38)), MASKED)
    return jax.vmap(jax.random.categorical)(keys_B, log_probs).astype(jnp.int32)


def residual(p_BV: jax.Array, q_BV: jax.Array) -> jax.Array:
    """max(p - q, 0) / its sum, the law after a rejection; p itself where rounding leaves no mass.

    Divided by its sum, never put through a softmax. [B,V] -> [B,V].
    """
    rest = jnp.maximum(p_BV - q_BV, 0.0)
    mass = jnp.sum(rest, axis=-1, keepdims=True)
    return jnp.where(mass > 1e-8, rest / jnp.where(mass > 0, mass, 1.0), p_BV)
