"""The law a token is drawn from: against sorting, with equal logits, and drawn without being formed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspine_jax.sampling import SamplingConfig, draw, probabilities, sample

V = 57


def by_sorting(logits_V: np.ndarray, law: SamplingConfig) -> np.ndarray:
    """What ``probabilities`` promises, an id at a time, in fp64."""
    scaled = logits_V.astype(np.float64) / law.temperature
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    order = order[: law.top_k] if law.top_k else order
    weights = np.exp(scaled[order] - scaled[order[0]])
    weights /= weights.sum()
    kept, mass = np.zeros(len(scaled)), 0.0
    for i, weight in zip(order, weights):
        if law.top_p < 1 and mass >= law.top_p:
            break
        kept[i], mass = weight, mass + weight
    return kept / kept.sum()


RNG = np.random.default_rng(0)
LOGITS = {
    "distinct": 3 * RNG.normal(size=(16, V)),
    "many equal": RNG.integers(-2, 3, (16, V)).astype(float),
    "all equal": np.zeros((2, V)),
    "padded": np.where(np.arange(V) < 40, RNG.integers(0, 4, (16, V)), -1e30),
    "one": np.where(np.arange(V) == 9, 15.0, RNG.normal(size=(4, V))),
}


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("top_k", [0, 1, 7, V])
def test_laws_are_those_of_sorting(kind, top_k):
    logits_BV = jnp.asarray(LOGITS[kind], jnp.float32)
    for top_p in (1.0, 0.93, 0.41, 1e-6):
        law = SamplingConfig(0.7, top_k, top_p)
        ours = np.asarray(jax.jit(probabilities, static_argnums=1)(logits_BV, law))
        expected = np.stack([by_sorting(row, law) for row in np.asarray(logits_BV)])
        assert ((ours > 0) == (expected > 1e-30)).all(), law
        np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("law", [SamplingConfig(0.0), SamplingConfig(0.7), SamplingConfig(1.0, 5), SamplingConfig(0.7, 0, 0.8), SamplingConfig(2.0, 9, 0.6)])
def test_a_token_drawn_without_the_law_is_that_drawn_from_it(law):
    """The same key gives the same id as ``draw`` from ``probabilities``."""
    logits_BV = jnp.asarray(np.tile(LOGITS["distinct"], (8, 1)), jnp.float32)
    keys_B = jax.random.split(jax.random.key(0), len(logits_BV))
    assert np.array_equal(sample(keys_B, logits_BV, law), draw(keys_B, probabilities(logits_BV, law)))


def test_nothing_is_sorted():
    """For a large vocabulary sorting takes longer than the step of a small target."""
    program = jax.jit(sample, static_argnums=2).lower(jax.random.split(jax.random.key(0), 2), jnp.zeros((2, V)), SamplingConfig(0.7, 5, 0.9)).as_text()
    assert "sort" not in program and "top_k" not in program
