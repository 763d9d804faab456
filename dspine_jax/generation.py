"""From lists of prompts to lists of answers: shape buckets, limits and the round log around the decode loop."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspine_jax.replay import Round
from dspine_jax.speculative import Decoder, DecodeState

SMALLEST_BUCKET = 64


@dataclasses.dataclass(frozen=True)
class Generation:
    """One answer: its tokens, its rounds (the first token comes from prefill), and 'stop', 'length', or 'unfinished' while it grows."""

    tokens: list[int]
    rounds: list[Round]
    finish_reason: str


def bucket(size: int) -> int:
    """The power of two, at least 64, that a prompt width or an output room is rounded up to: so few shapes are ever compiled."""
    return max(SMALLEST_BUCKET, 1 << (size - 1).bit_length())


def check_ids(prompts: Sequence[Sequence[int]], vocab_size: int, first_row: int = 0) -> None:
    """Raise ValueError for an empty prompt or one with ids outside the target's table."""
    for row, prompt in enumerate(prompts, start=first_row):
        if not len(prompt):
            raise ValueError(f"prompt {row} is empty; give at least one token")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ValueError(f"prompt {row} holds a token id outside the target's table of {vocab_size} rows; is this its tokenizer?")


def prompt_limits(lengths: Sequence[int], max_new_tokens: int, max_length: int | None, first_row: int = 0) -> list[int]:
    """Output tokens each prompt may have. Raises ValueError for a prompt longer than ``max_length``."""
    limits = []
    for row, length in enumerate(lengths, start=first_row):
        if max_length is not None and length > max_length:
            raise ValueError(f"prompt {row} has {length} tokens, more than the context limit of {max_length}; shorten it")
        limits.append(max_new_tokens if max_length is None else min(max_new_tokens, max_length - length))
    return limits


_round = functools.lru_cache(maxsize=2**14)(Round)  # most are alike: plain decoding writes one a token


@dataclasses.dataclass(frozen=True)
class FetchedRows:
    """What the rows of a decode state have produced so far, on the host."""

    tokens_BT: np.ndarray
    count_B: np.ndarray
    finished_B: np.ndarray
    rounds_B: np.ndarray
    accepted_BT: np.ndarray
    proposed_BT: np.ndarray
    committed_BT: np.ndarray

    @classmethod
    def of(cls, state: DecodeState) -> FetchedRows:
        """Wait for the device and copy."""
        return cls(*jax.device_get([getattr(state, field.name) for field in dataclasses.fields(cls)]))

    def answer(self, b: int, stop_ids: tuple[int, ...]) -> Generation:
        """The text of one row."""
        tokens, rounds = self.tokens_BT[b, : self.count_B[b]].tolist(), slice(self.rounds_B[b])
        committed_R = self.committed_BT[b, rounds]
        anchor_R = np.cumsum(committed_R) - committed_R
        log = list(map(_round, anchor_R.tolist(), self.proposed_BT[b, rounds].tolist(), self.accepted_BT[b, rounds].tolist(), committed_R.tolist()))
        return Generation(tokens, log, "stop" if tokens and tokens[-1] in stop_ids else "length" if self.finished_B[b] else "unfinished")


def read_rows(state: DecodeState, stop_ids: tuple[int, ...]) -> list[Generation]:
    """What each row of a decode state has produced so far."""
    fetched = FetchedRows.of(state)
    return [fetched.answer(b, stop_ids) for b in range(len(fetched.count_B))]


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    max_length: int | None = None,
    seed: int = 0,
    first_row: int = 0,
    width: int | None = None,
    batch_size: int | None = None,
    rounds_per_call: int | None = None,
    on_progress: Callable[[list[Generation]], None] | None = None,
) -> list[Generation]:
    """Decode one batch of prompts (lists of token ids) to the end.

    Row b's randomness is a function of ``seed`` and ``first_row`` + b alone. ``width`` and ``batch_size`` enlarge the
    compiled shape, so that batches of other sizes share one program; they change no token. With ``rounds_per_call``
    the loop returns every so many rounds and ``on_progress`` sees all rows so far; text and rounds do not depend on it.
    Raises ValueError for prompts that are empty, too long for ``max_length``, or hold ids outside the target's table.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens} must be at least 1")
    check_ids(prompts, decoder.target.config.vocab_size, first_row)
    limits = prompt_limits([len(p) for p in prompts], max_new_tokens, max_length, first_row)
    B = max(batch_size or 0, len(prompts))
    tokens_BS = np.zeros((B, bucket(max(width or 0, *(len(p) for p in prompts)))), np.int32)
    lengths_B, limit_B = np.ones((B,), np.int32), np.zeros((B,), np.int32)  # rows that only fill the batch are finished at once
    for row, prompt in enumerate(prompts):
        tokens_BS[row, : len(prompt)] = prompt
        lengths_B[row], limit_B[row] = len(prompt), limits[row]
    keys_B = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(first_row + jnp.arange(B))
    state = decoder.start(*map(jnp.asarray, (tokens_BS, lengths_B, limit_B)), keys_B, room=bucket(max_new_tokens))
    read = lambda: read_rows(state, decoder.settings.stop_ids)[: len(prompts)]  # noqa: E731
    while True:
        state = decoder.run(state, rounds_per_call or bucket(max_new_tokens))
        if on_progress is not None:
            on_progress(read())
        if bool(state.finished_B.all()):
            return read()


def generate_batches(decoder: Decoder, prompts: Sequence[Sequence[int]], batch_size: int, **options) -> Iterator[list[Generation]]:
    """``generate`` batch after batch, all of one compiled shape. Text does not depend on ``batch_size`` (in fp32)."""
    width = max(len(p) for p in prompts)
    for first in range(0, len(prompts), batch_size):
        yield generate(decoder, prompts[first : first + batch_size], first_row=first, width=width, batch_size=batch_size, **options)


def warm_up(decoder: Decoder, prompt: Sequence[int], max_new_tokens: int) -> None:
    """Compile what ``generate`` will run on this prompt alone, without decoding it."""
    generate(decoder, [[0]], max_new_tokens=max_new_tokens, max_length=1, width=len(prompt))  # no room for a token: finished at once
