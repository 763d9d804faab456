"""Acceptance statistics of logged rounds (BASELINES 8.2), and bootstrap intervals over prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspine_jax.replay import Round


def acceptance_statistics(rounds_by_prompt: Sequence[Sequence[Round]], num_draft_tokens: int) -> dict:
    """Pooled and per-request acceptance length, and per-slot rates.

    tau_pooled = sum tokens / sum rounds; tau_per_request = mean over prompts with a round of their own
    mean; accept_rate[k] = rounds accepting > k / rounds proposing > k; cond_accept[k] = the same among
    rounds that accepted the k slots before; accepted_over_proposed; mean_accepted = sum accepted / sum rounds.
    """
    rounds = [r for prompt in rounds_by_prompt for r in prompt]
    if not rounds:
        return {"rounds": 0, "tokens": 0, "prompts": len(rounds_by_prompt)}
    tokens, proposed, accepted = (np.array([getattr(r, name) for r in rounds]) for name in ("tokens", "proposed", "accepted"))
    per_request = [np.mean([r.tokens for r in prompt]) for prompt in rounds_by_prompt if prompt]
    survival, conditional = [], []
    for k in range(num_draft_tokens):
        proposing, reached = proposed > k, (proposed > k) & (accepted >= k)
        survival.append(float((accepted > k)[proposing].mean()) if proposing.any() else None)
        conditional.append(float((accepted > k)[reached].mean()) if reached.any() else None)
    return {
        "prompts": len(rounds_by_prompt),
        "rounds": len(rounds),
        "tokens": int(tokens.sum()),
        "tau_pooled": float(tokens.sum() / len(rounds)),
        "tau_per_request": float(np.mean(per_request)),
        "mean_accepted": float(accepted.mean()),
        "accepted_over_proposed": float(accepted.sum() / proposed.sum()) if proposed.any() else None,  # None: plain decoding
        "accept_rate": survival,
        "cond_accept": conditional,
    }


def _resampled_averages(benchmarks: dict[str, tuple[np.ndarray, np.ndarray]], picks: dict[str, np.ndarray]) -> np.ndarray:
    """Mean over benchmarks of pooled tau, for each row of resampled prompt indices."""
    taus = [tokens[picks[name]].sum(1) / rounds[picks[name]].sum(1) for name, (tokens, rounds) in benchmarks.items()]
    return np.mean(taus, axis=0)


def average_interval(
    benchmarks: dict[str, tuple[np.ndarray, np.ndarray]], *, resamples: int = 10_000, seed: int = 0, level: float = 0.95
) -> list[float]:
    """Bootstrap interval over prompts of the mean over benchmarks of pooled tau; arguments as ``paired_bootstrap``'s."""
    rng = np.random.default_rng(seed)
    picks = {name: rng.integers(0, len(tokens), (resamples, len(tokens))) for name, (tokens, _) in benchmarks.items()}
    tail = 100 * (1 - level) / 2
    return [float(v) for v in np.percentile(_resampled_averages(benchmarks, picks), [tail, 100 - tail])]


def paired_bootstrap(
    ours: dict[str, tuple[np.ndarray, np.ndarray]],
    theirs: dict[str, tuple[np.ndarray, np.ndarray]],
    *,
    resamples: int = 10_000,
    seed: int = 0,
    level: float = 0.95,
) -> dict[str, float | list[float] | None]:
    """Ratios of average tau and of average (tau - 1) with intervals from resampling prompts in pairs.

    Each argument maps a benchmark to (tokens [prompts], rounds [prompts]); the same prompts are drawn
    for both methods, within each benchmark. The ratio of (tau - 1) is None where the other method accepts
    nothing in some resample. Raises ValueError when the prompts do not pair up.
    """
    if ours.keys() != theirs.keys() or any(len(ours[b][0]) != len(theirs[b][0]) for b in ours):
        raise ValueError(f"the two methods were not scored on the same prompts: {sorted(ours)} against {sorted(theirs)}")
    rng = np.random.default_rng(seed)
    picks = {name: rng.integers(0, len(tokens), (resamples, len(tokens))) for name, (tokens, _) in ours.items()}
    everyone = {name: np.arange(len(tokens))[None] for name, (tokens, _) in ours.items()}
    a, b = _resampled_averages(ours, picks), _resampled_averages(theirs, picks)
    a0, b0 = _resampled_averages(ours, everyone)[0], _resampled_averages(theirs, everyone)[0]
    tail = 100 * (1 - level) / 2
    interval = lambda x: [float(v) for v in np.percentile(x, [tail, 100 - tail])]  # noqa: E731
    accepts = bool((b > 1).all()) and b0 > 1
    return {
        "ratio": float(a0 / b0),
        "ratio_interval": interval(a / b),
        "ratio_accepted": float((a0 - 1) / (b0 - 1)) if accepts else None,
        "ratio_accepted_interval": interval((a - 1) / (b - 1)) if accepts else None,
    }
