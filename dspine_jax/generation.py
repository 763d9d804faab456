"""From lists of prompts to lists of answers: shape buckets, limits and the round log around the decode loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspine_jax.replay import Round
from dspine_jax.speculative import Decoder, DecodeState

BUCKET = 64  # prompt widths and output rooms are rounded up to this, so few shapes are ever compiled


@dataclasses.dataclass(frozen=True)
class Generation:
    """One answer: its tokens, its rounds (the first token comes from prefill), and 'stop' or 'length'."""

    tokens: list[int]
    rounds: list[Round]
    finish_reason: str


def prompt_limits(lengths: Sequence[int], max_new_tokens: int, max_length: int | None) -> list[int]:
    """Output tokens each prompt may have. Raises ValueError for an empty prompt or one longer than ``max_length``."""
    limits = []
    for row, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"prompt {row} is empty; give at least one token")
        if max_length is not None and length > max_length:
            raise ValueError(f"prompt {row} has {length} tokens, more than the context limit of {max_length}; shorten it")
        limits.append(max_new_tokens if max_length is None else min(max_new_tokens, max_length - length))
    return limits


def read_rows(state: DecodeState, stop_ids: tuple[int, ...]) -> list[Generation]:
    """What each row of a decode state has produced so far."""
    names = ("tokens_BT", "count_B", "rounds_B", "accepted_BT", "proposed_BT", "committed_BT", "limit_B")
    tokens, count, rounds, accepted, proposed, committed, limit = jax.device_get([getattr(state, name) for name in names])
    answers = []
    for b in range(len(count)):
        log, anchor = [], 0
        for r in range(rounds[b]):
            log.append(Round(anchor, int(proposed[b, r]), int(accepted[b, r]), int(committed[b, r])))
            anchor += int(committed[b, r])
        row = [int(token) for token in tokens[b, : count[b]]]
        answers.append(Generation(row, log, "stop" if row and row[-1] in stop_ids else "length"))
    return answers


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    max_length: int | None = None,
    seed: int = 0,
    rounds_per_call: int | None = None,
    on_progress: Callable[[list[Generation]], None] | None = None,
) -> list[Generation]:
    """Decode one batch of prompts (lists of token ids) to the end.

    Row b's randomness is a function of ``seed`` and b alone. With ``rounds_per_call`` the loop returns every so many
    rounds and ``on_progress`` sees all rows so far; text and rounds do not depend on it. Raises ValueError for
    prompts that are empty, too long for ``max_length``, or hold ids outside the target's table.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens} must be at least 1")
    limits = prompt_limits([len(p) for p in prompts], max_new_tokens, max_length)
    vocab_size = decoder.target.config.vocab_size
    for row, prompt in enumerate(prompts):
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ValueError(f"prompt {row} holds a token id outside the target's table of {vocab_size} rows; is this its tokenizer?")
    up = lambda n: -(-n // BUCKET) * BUCKET  # noqa: E731
    tokens_BS = np.zeros((len(prompts), up(max(len(p) for p in prompts))), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BS[row, : len(prompt)] = prompt
    keys_B = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(jnp.arange(len(prompts)))
    lengths_B = jnp.asarray([len(p) for p in prompts], jnp.int32)
    state = decoder.start(jnp.asarray(tokens_BS), lengths_B, jnp.asarray(limits, jnp.int32), keys_B, room=up(max_new_tokens))
    stop_ids = decoder.settings.stop_ids
    while True:
        state = decoder.run(state, rounds_per_call or up(max_new_tokens))
        if on_progress is not None:
            on_progress(read_rows(state, stop_ids))
        if bool(state.finished_B.all()):
            return read_rows(state, stop_ids)
