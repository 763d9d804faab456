"""The drafter without a model: its copies by brute force, its rounds in the decode loop, and its replay."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scripted import chain_target

from dspine_jax.generation import generate
from dspine_jax.prompt_lookup import NOT_PROPOSED, PromptLookup, PromptLookupConfig, lookup, lookups_at
from dspine_jax.replay import make_accept_odds, make_drafting, walk_rounds, walk_sampled_rounds
from dspine_jax.sampling import SamplingConfig
from dspine_jax.speculative import Decoder, DecodeSettings


def by_search(text: list[int], config: PromptLookupConfig) -> list[int] | None:
    """Longest suffix first, latest occurrence first; the copy goes on in its own output."""
    for n in range(min(config.longest, len(text)), config.shortest - 1, -1):
        for end in range(len(text) - 2, n - 2, -1):
            if text[end - n + 1 : end + 1] == text[len(text) - n :]:
                written = list(text)
                for j in range(config.num_draft_tokens):
                    written.append(written[end + 1 + j])
                return written[len(text) :]
    return None


@pytest.mark.parametrize("config", [PromptLookupConfig(5, 3, 1), PromptLookupConfig(4, 4, 2), PromptLookupConfig(3, 1, 1)])
def test_drafts_are_what_followed_the_longest_and_latest_occurrence(config):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 31, 400)
    tokens = rng.integers(0, 5, (400, 30))  # what lies behind a text's end must not be read
    drafts, found = (np.asarray(x) for x in jax.jit(lookup, static_argnums=2)(jnp.asarray(tokens), jnp.asarray(lengths), config))
    expected = [by_search(row[:n].tolist(), config) for row, n in zip(tokens, lengths)]
    assert found.tolist() == [e is not None for e in expected] and 0 < found.mean() < 1
    assert [d.tolist() for d, e in zip(drafts, expected) if e is not None] == [e for e in expected if e is not None]


def test_a_loop_is_drafted_whole():
    text = [9, 1, 2, 3, 1, 2, 3, 1]
    assert by_search(text, PromptLookupConfig(7, 8, 1)) == [2, 3, 1, 2, 3, 1, 2]


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="shortest 3 and longest 2"):
        PromptLookupConfig(longest=2, shortest=3)
    with pytest.raises(ValueError, match="num_draft_tokens 0"):
        PromptLookupConfig(0)
    with pytest.raises(ValueError, match="policy 'point_mass' cannot be served by a prompt-lookup drafter"):
        Decoder(tiny.tiny_target(), PromptLookup(PromptLookupConfig()), DecodeSettings(3, policy="point_mass"))


@pytest.fixture(scope="module")
def loops():
    """A target that goes round in circles of 6: what it writes soon stands in the text already."""
    return chain_target({t: t + 1 if t % 6 else t - 5 for t in range(7, 67)})


def test_greedy_text_rounds_and_replay(loops):
    """The text is plain greedy text; nothing is proposed until a token comes again, then all drafts are right; replay gives the same rounds."""
    prompts, config = [[8], [20, 26, 31, 33], [40, 41]], PromptLookupConfig(4, 3, 1)
    plain = generate(Decoder(loops, None, DecodeSettings(0)), prompts, max_new_tokens=24)
    drafter = PromptLookup(config)
    ours = generate(Decoder(loops, drafter, DecodeSettings(4)), prompts, max_new_tokens=24)
    assert [a.tokens for a in ours] == [a.tokens for a in plain]
    assert [(r.proposed, r.accepted) for r in ours[0].rounds[:7]] == [(0, 0)] * 5 + [(4, 4)] * 2
    fewer = generate(Decoder(loops, drafter, DecodeSettings(2)), prompts, max_new_tokens=24)
    assert [a.tokens for a in fewer] == [a.tokens for a in plain] and max(r.proposed for r in fewer[0].rounds) == 2

    drafting = make_drafting(drafter, loops, dtype=jnp.float32, anchors_per_chunk=8)
    odds = make_accept_odds(drafter, loops, SamplingConfig(1.0), "own", dtype=jnp.float32, anchors_per_chunk=8)
    for prompt, answer in zip(prompts, ours):
        tokens = np.array([prompt + answer.tokens])
        anchors = len(prompt) + np.arange(23)[None]
        drafts = np.asarray(drafting(tokens, anchors))[0]
        assert walk_rounds(np.array(answer.tokens), drafts) == answer.rounds
        # A point mass on a sure text: the sampled walk is the greedy one.
        assert walk_sampled_rounds(np.asarray(odds(tokens, anchors))[0], np.full(24, 0.5), 24) == answer.rounds


def test_a_replayed_position_does_not_see_the_text_after_it():
    config, rng = PromptLookupConfig(3, 2, 1), np.random.default_rng(1)
    tokens = rng.integers(0, 4, (3, 20))
    anchors = np.tile(np.arange(20), (3, 1))
    drafts = np.asarray(lookups_at(jnp.asarray(tokens), jnp.asarray(anchors), config))
    for b, n in np.ndindex(3, 20):
        expected = by_search(tokens[b, : n + 1].tolist(), config)
        assert drafts[b, n].tolist() == (expected or [NOT_PROPOSED] * 3)
