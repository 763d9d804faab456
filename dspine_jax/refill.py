"""Batched decoding with continuous refill: a row that finishes makes room for the next request.

A call of the device ends when a group of rows is finished. The host then reads which they are, fills them from the queue, sends the
next call off, and only then hands the finished answers on: what the caller does with them overlaps with the device's work.

A text is a function of seed, key, prompt and settings alone (in fp32): rows of a ``DecodeState`` live as if alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from dspine_jax.generation import FetchedRows, Generation, bucket, check_ids, prompt_limits
from dspine_jax.speculative import Decoder, DecodeState

CACHE_ROWS = 64  # caches hold a multiple of this, which is what kernels read at a time


def cache_rows(longest: int) -> int:
    """Rows of the caches for texts of up to ``longest`` tokens, prompt included."""
    return -(-longest // CACHE_ROWS) * CACHE_ROWS


def group_size(batch_size: int) -> int:
    """Prompts that are started together: a sixteenth of the batch, so that few rows idle until a group of them is free."""
    return -(-batch_size // 16)


def text_limit(longest_prompt: int, max_new_tokens: int, max_length: int) -> int:
    """Most tokens of a prompt and its answer, the longest prompt rounded up so that other prompts share programs; at most ``max_length``."""
    return min(bucket(longest_prompt) + max_new_tokens, max_length)


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
    rounds: int = 0


def answer_stream(
    decoder: Decoder,
    next_request: Callable[[], Request | None],
    *,
    batch_size: int,
    max_length: int,
    max_new_tokens: int,
    seed: int = 0,
    rounds_per_call: int = 32,
    rows_per_refill: int | None = None,
    profile: Profile | None = None,
) -> Iterator[tuple[Request, Generation]]:
    """(request, answer) of every request, in the order in which they finish.

    ``next_request`` gives None when there is none at the moment; requests may arise from answers that were yielded. Prompt and
    answer together have at most ``max_length`` tokens, an answer at most ``max_new_tokens``. Prompts are started ``rows_per_refill`` at a time
    (default ``group_size``), each group as wide as its longest one, rounded up to a power of two: that is one program a width, and one for
    decoding. A call takes at most ``rounds_per_call`` rounds. None of batch size, rounds or rows changes a text. Raises ValueError for a
    request that has no place.

    What is finished is handed on before an error or Ctrl-C (KeyboardInterrupt) is raised; after Ctrl-C also what is begun, marked 'unfinished'.
    """
    stream = _Stream(decoder, next_request, batch_size, max_length, max_new_tokens, seed, rows_per_refill, profile)
    if rounds_per_call < 1:
        raise ValueError(f"rounds_per_call {rounds_per_call} must be at least 1")
    try:
        while True:
            stream.refill()
            if stream.running:
                stream.run(rounds_per_call)
            elif not stream.finished:
                return
            yield from stream.hand_on()
            stream.collect()
    except (Exception, KeyboardInterrupt) as error:
        latest = None
        with contextlib.suppress(RuntimeError):  # the device failed, or was about to be sent off with these very buffers
            latest = stream.collect()  # Ctrl-C nearly always comes while the device is waited for: what it did meanwhile counts
        yield from stream.hand_on()
        if isinstance(error, KeyboardInterrupt) and latest is not None:
            yield from stream.begun(latest)
        raise


def answer_prompts(
    decoder: Decoder, prompts: Sequence[Sequence[int]], *, batch_size: int, max_new_tokens: int, max_length: int, seed: int = 0, **options
) -> Iterator[tuple[int, Generation]]:
    """``answer_stream`` of a list of prompts: (index in the list, answer) as they finish. Texts are those of ``generate_batches``.

    ``max_length`` is the target's context limit; caches are only as long as the prompts need (``text_limit``). Raises as ``generate``.
    """
    requests = iter(_requests(prompts, max_new_tokens, max_length))
    limit = text_limit(max(map(len, prompts)), max_new_tokens, max_length)
    sizes = dict(batch_size=min(batch_size, len(prompts)), max_length=limit, max_new_tokens=max_new_tokens)
    for request, answer in answer_stream(decoder, lambda: next(requests, None), seed=seed, **sizes, **options):
        yield request.key, answer


def warm_up(decoder: Decoder, prompts: Sequence[Sequence[int]], *, batch_size: int, max_new_tokens: int, max_length: int) -> None:
    """Compile what ``answer_prompts`` will run on these prompts, without decoding any."""
    limit = text_limit(max(map(len, prompts)), max_new_tokens, max_length)
    stream = _Stream(decoder, lambda: None, min(batch_size, len(prompts)), limit, max_new_tokens)
    requests = [stream.checked(request) for request in _requests(prompts, max_new_tokens, max_length)]
    for S in sorted({stream.prompt_width([request]) for request in requests}):
        stream.start([], S)
    # A call reads as far as what has been admitted by then needs, and the first calls wait until many are.
    widths = list(itertools.accumulate(map(stream.read_width, requests), max))
    for width in sorted(set(widths[min(stream.window, len(widths)) - 1 :])):
        stream.state = decoder.run(stream.state, 0, enough=0, width=width)
    jax.block_until_ready(stream.state)


def _requests(prompts: Sequence[Sequence[int]], max_new_tokens: int, max_length: int) -> list[Request]:
    limits = prompt_limits([len(prompt) for prompt in prompts], max_new_tokens, max_length)
    return [Request(i, prompt, limit) for i, (prompt, limit) in enumerate(zip(prompts, limits))]


class _Stream:
    """The decode state on the device, which request each row of it works on, and the requests that wait."""

    def __init__(self, decoder, next_request, batch_size: int, max_length: int, max_new_tokens: int, seed=0, rows_per_refill=None, profile=None):
        rows_per_refill = group_size(batch_size) if rows_per_refill is None else rows_per_refill
        if min(batch_size, max_length, max_new_tokens, rows_per_refill) < 1:
            sizes = f"batch_size {batch_size}, max_length {max_length}, max_new_tokens {max_new_tokens}, rows_per_refill {rows_per_refill}"
            raise ValueError(f"{sizes}: each must be at least 1")
        self.decoder, self.next_request, self.max_length, self.max_new_tokens = decoder, next_request, max_length, max_new_tokens
        self.count, self.profile = min(rows_per_refill, batch_size), profile
        self.window = max(batch_size, 4 * self.count)  # many are looked at, so that prompts of like length are started together
        # The newest token is not fed yet, so a block of drafts reaches this far past prompt and answer.
        self.overhang, self.width = decoder.settings.num_draft_tokens, 0
        self.capacity = cache_rows(max_length + self.overhang)
        self.root = jax.random.key(seed)
        self.batch_size = batch_size
        self.free = list(range(batch_size))
        self.running: dict[int, Request] = {}
        self.waiting: list[Request] = []
        self.finished: deque[tuple[Request, FetchedRows, int]] = deque()  # with what the host has of them, and their row
        self.state: DecodeState | None = None

    def refill(self) -> None:
        """Start waiting requests in free rows, once a whole group of rows is free; a smaller group only when no more requests wait."""
        while len(self.free) >= self.count or not self.running:
            while len(self.waiting) < self.window and (request := self.next_request()) is not None:
                self.waiting.append(self.checked(request))
                self.width = max(self.width, self.read_width(request))
            if not self.waiting:
                return
            group = self._group()
            self.start(group, self.prompt_width(group))

    def prompt_width(self, group: list[Request]) -> int:
        """Columns in which these prompts are started."""
        return min(bucket(max(len(request.prompt) for request in group)), self.capacity)

    def read_width(self, request: Request) -> int:
        """Rows of the cache to be read for this request: what it may come to fill, rounded up."""
        width = bucket(len(request.prompt) + request.limit + self.overhang)
        return width if 2 * width <= self.capacity else self.capacity  # a program of its own pays where it reads half

    def checked(self, request: Request) -> Request:
        """The request. Raises ValueError when it has no place."""
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

    def start(self, group: list[Request], S: int) -> None:
        """Put the group in free rows, its prompts in S columns."""
        n = self.count
        row_n, key_n = np.full(n, self.batch_size, np.int32), np.zeros(n, np.uint32)  # a row past the end is dropped
        prompts_nS, lengths_n, limit_n = np.zeros((n, S), np.int32), np.ones(n, np.int32), np.zeros(n, np.int32)
        rows = [self.free.pop() for _ in group]
        for i, (row, request) in enumerate(zip(rows, group)):
            row_n[i], key_n[i], lengths_n[i], limit_n[i] = row, request.key, len(request.prompt), request.limit
            prompts_nS[i, : len(request.prompt)] = request.prompt
        if self.state is None:
            self.state = self.decoder.idle(self.batch_size, capacity=self.capacity, room=bucket(self.max_new_tokens))
        begin = time.perf_counter()
        self.state = self.decoder.refill(self.state, row_n, prompts_nS, lengths_n, limit_n, _keys(self.root, key_n))
        self.running.update(zip(rows, group))  # only now: a row that an interruption keeps from starting must not pass for the one before it
        if self.profile is not None:
            jax.block_until_ready(self.state)
            self.profile.refill_s += time.perf_counter() - begin
            self.profile.refills += 1

    def run(self, rounds: int) -> None:
        """Send off the next rounds; nothing waits for them here."""
        before_B = None if self.profile is None else np.asarray(self.state.rounds_B)
        begin = time.perf_counter()
        enough = min(len(self.free) + self.count, self.batch_size)
        self.state = self.decoder.run(self.state, rounds, enough=enough, width=self.width)
        if self.profile is not None:
            jax.block_until_ready(self.state)
            self.profile.decode_s += time.perf_counter() - begin
            self.profile.calls += 1
            self.profile.rounds += int((np.asarray(self.state.rounds_B) - before_B).max())  # the row that ended the call was at work to its end

    def collect(self) -> FetchedRows | None:
        """Wait for the device and free the rows that are finished. -> what all rows hold, None where none is at work."""
        if not self.running:
            return None
        fetched = FetchedRows.of(self.state)
        rows = [row for row in self.running if fetched.finished_B[row]]
        self.finished.extend((self.running.pop(row), fetched, row) for row in rows)
        self.free += rows
        return fetched

    def hand_on(self) -> Iterator[tuple[Request, Generation]]:
        """The answers that are finished, each once."""
        while self.finished:
            request, fetched, row = self.finished[0]
            answer = fetched.answer(row, self.decoder.settings.stop_ids)
            self.finished.popleft()
            yield request, answer

    def begun(self, fetched: FetchedRows) -> Iterator[tuple[Request, Generation]]:
        """What the rows at work have written so far."""
        for row, request in self.running.items():
            yield request, fetched.answer(row, self.decoder.settings.stop_ids)


@jax.jit
def _keys(root: jax.Array, key_n: jax.Array) -> jax.Array:
    return jax.vmap(lambda key: jax.random.fold_in(root, key))(key_n)
