"""Batched decoding with continuous refill: a row that finishes makes room for the next request.

The device runs some rounds a call. The host then reads which rows are finished, fills them from the queue, sends the next
call off, and only then hands the finished answers on: what the caller does with them overlaps with the device's work.

A text is a function of seed, key, prompt and settings alone (in fp32): rows of a ``DecodeState`` live as if alone.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from dspine_jax.generation import FetchedRows, Generation, bucket, check_ids
from dspine_jax.speculative import Decoder, DecodeState

CACHE_ROWS = 64  # caches hold a multiple of this, which is what kernels read at a time


def cache_rows(longest: int) -> int:
    """Rows of the caches for texts of up to ``longest`` tokens, prompt included."""
    return -(-longest // CACHE_ROWS) * CACHE_ROWS


def group_size(batch_size: int) -> int:
    """Prompts that are started together: a sixteenth of the batch, so that few rows idle until a group of them is free."""
    return -(-batch_size // 16)


@dataclasses.dataclass(frozen=True)
class Request:
    """One text to be written: the number of its random key, its prompt, the most tokens, and whom it is for."""

    key: int
    prompt: Sequence[int]
    limit: int
    owner: object = None


@dataclasses.dataclass
class Profile:
    """Where the time of an ``answer_stream`` went. With one the device is waited for after every part, so the whole takes a little longer."""

    refill_s: float = 0.0
    decode_s: float = 0.0
    refills: int = 0
    calls: int = 0


def answer_stream(
    decoder: Decoder,
    next_request: Callable[[], Request | None],
    *,
    batch_size: int,
    max_length: int,
    max_new_tokens: int,
    seed: int = 0,
    rounds_per_call: int = 16,
    rows_per_refill: int | None = None,
    profile: Profile | None = None,
) -> Iterator[tuple[Request, Generation]]:
    """(request, answer) of every request, in the order in which they finish.

    ``next_request`` gives None when there is none at the moment; requests may arise from answers that were yielded. Prompt and
    answer together have at most ``max_length`` tokens, an answer at most ``max_new_tokens``. Prompts are started ``rows_per_refill`` at a time
    (default ``group_size``), each group as wide as its longest one, rounded up to a power of two: that is one program a width, and one for
    decoding. None of batch size, rounds or rows changes a text. Raises ValueError for a request that has no place.
    """
    if min(batch_size, max_length, max_new_tokens, rounds_per_call, 1 if rows_per_refill is None else rows_per_refill) < 1:
        raise ValueError(
            f"batch_size {batch_size}, max_length {max_length}, max_new_tokens {max_new_tokens}, rounds_per_call {rounds_per_call}, "
            f"rows_per_refill {rows_per_refill}: each must be at least 1"
        )
    stream = _Stream(decoder, next_request, batch_size, max_length, max_new_tokens, seed, rows_per_refill or group_size(batch_size), profile)
    finished: dict[int, Request] = {}
    fetched = None
    while True:
        try:
            stream.refill()
            if stream.running:
                stream.run(rounds_per_call)
            elif not finished:
                return
        finally:  # what is finished is handed on before an error or an interruption is
            for row, request in finished.items():
                yield request, fetched.answer(row, decoder.settings.stop_ids)
        fetched, finished = stream.collect()


class _Stream:
    """The decode state on the device, which request each row of it works on, and the requests that wait."""

    def __init__(self, decoder, next_request, batch_size: int, max_length: int, max_new_tokens: int, seed: int, rows_per_refill: int, profile: Profile | None):
        self.decoder, self.next_request, self.max_length, self.max_new_tokens = decoder, next_request, max_length, max_new_tokens
        self.count, self.profile = min(rows_per_refill, batch_size), profile
        # The newest token is not fed yet, so a block of drafts reaches this far past prompt and answer.
        self.overhang, self.width = decoder.settings.num_draft_tokens, 0
        self.capacity = cache_rows(max_length + self.overhang)
        self.root = jax.random.key(seed)
        self.batch_size = batch_size
        self.free = list(range(batch_size))
        self.running: dict[int, Request] = {}
        self.waiting: list[Request] = []
        self.state: DecodeState | None = None

    def refill(self) -> None:
        """Start waiting requests in free rows, once a whole group of rows is free; a smaller group only when no more requests wait."""
        while len(self.free) >= self.count or not self.running:
            # Many are looked at, so that prompts of like length are started together.
            while len(self.waiting) < max(self.batch_size, 4 * self.count) and (request := self.next_request()) is not None:
                self.waiting.append(self._checked(request))
            if not self.waiting:
                return
            self._start(self._group())

    def _checked(self, request: Request) -> Request:
        check_ids([request.prompt], self.decoder.target.config.vocab_size, request.key)
        if not 0 <= request.limit <= self.max_new_tokens or len(request.prompt) + request.limit > self.max_length:
            sizes = f"{len(request.prompt)} prompt tokens and {request.limit} to be written"
            raise ValueError(f"request {request.key}: {sizes} do not fit max_length {self.max_length} with answers of up to {self.max_new_tokens}")
        return request

    def _group(self) -> list[Request]:
        """The oldest waiting request and those nearest below it in length, taken off the list."""
        oldest = self.waiting[0]
        by_length = sorted(self.waiting, key=lambda request: len(request.prompt))
        stop = max(next(i for i, request in enumerate(by_length) if request is oldest) + 1, self.count)
        group = by_length[max(0, stop - self.count) : stop][: len(self.free)]
        taken = {id(request) for request in group}
        self.waiting = [request for request in self.waiting if id(request) not in taken]
        return group

    def _start(self, group: list[Request]) -> None:
        n, S = self.count, bucket(max(len(request.prompt) for request in group))
        S = min(S, self.capacity)
        row_n, key_n = np.full(n, self.batch_size, np.int32), np.zeros(n, np.uint32)  # a row past the end is dropped
        prompts_nS, lengths_n, limit_n = np.zeros((n, S), np.int32), np.ones(n, np.int32), np.zeros(n, np.int32)
        for i, request in enumerate(group):
            row_n[i], key_n[i] = self.free.pop(), request.key
            prompts_nS[i, : len(request.prompt)] = request.prompt
            lengths_n[i], limit_n[i] = len(request.prompt), request.limit
            self.running[int(row_n[i])] = request
            self.width = max(self.width, min(bucket(len(request.prompt) + request.limit + self.overhang), self.capacity))
        if self.state is None:
            self.state = self.decoder.idle(self.batch_size, capacity=self.capacity, room=bucket(self.max_new_tokens))
        begin = time.perf_counter()
        self.state = self.decoder.refill(self.state, row_n, prompts_nS, lengths_n, limit_n, _keys(self.root, key_n))
        if self.profile is not None:
            jax.block_until_ready(self.state)
            self.profile.refill_s += time.perf_counter() - begin
            self.profile.refills += 1

    def run(self, rounds: int) -> None:
        """Send off the next rounds; nothing waits for them here."""
        begin = time.perf_counter()
        self.state = self.decoder.run(self.state, rounds, width=self.width)
        if self.profile is not None:
            jax.block_until_ready(self.state)
            self.profile.decode_s += time.perf_counter() - begin
            self.profile.calls += 1

    def collect(self) -> tuple[FetchedRows | None, dict[int, Request]]:
        """Wait for the device and free the rows that are finished; -> what all rows hold, and the requests of the finished ones."""
        if not self.running:
            return None, {}
        fetched = FetchedRows.of(self.state)
        finished = {row: request for row, request in self.running.items() if fetched.finished_B[row]}
        for row in finished:
            del self.running[row]
        self.free += finished
        return fetched, finished


@jax.jit
def _keys(root: jax.Array, key_n: jax.Array) -> jax.Array:
    return jax.vmap(lambda key: jax.random.fold_in(root, key))(key_n)
