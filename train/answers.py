"""Rows of a dataset from conversations: answers that the target writes, or that are kept; prompts that it writes itself."""

from __future__ import annotations

import argparse
import base64
import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterator

import numpy as np

from train.chat_files import RowError
from train.journal import Journal

# Random keys are a function of (seed, turn * TURN_STRIDE + row): a row's text depends on neither its neighbours nor on when it is written.
TURN_STRIDE, PROMPT_TURN = 2**25, 63


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A row of a file, or a prompt of the target's own (``file`` is then empty).

    ``index`` counts all rows read, used or not. ``prompt_ids`` open its first answer, None where answers are kept.
    """

    index: int
    place: str
    file: str
    messages: list[dict]
    prompt_ids: np.ndarray | None


def has_room(prompt_ids: np.ndarray | list[int], max_length: int) -> bool:
    """Whether an answer of two tokens, the least that can give loss, fits behind the prompt."""
    return len(prompt_ids) + 2 <= max_length


def finished_answers(decoder, next_request: Callable[[], object], args: argparse.Namespace, batch_size: int, most_new_tokens: int, max_length: int) -> Iterator:
    """(request, answer) as they finish; requests may arise from answers that were yielded (``dspine_jax.refill``)."""
    from dspine_jax.refill import answer_stream

    sizes = dict(batch_size=batch_size, max_length=max_length, max_new_tokens=most_new_tokens)
    for request, answer in answer_stream(decoder, next_request, seed=args.seed, **sizes):
        if answer.finish_reason != "unfinished":  # a run that is interrupted writes those anew
            yield request, answer


class Dialogue:
    """A conversation while it is answered: ``history`` are the messages so far, ``rows`` what the target has seen and written."""

    def __init__(self, conversation: Conversation, args: argparse.Namespace, encoder):
        self.conversation, self.args, self.encoder = conversation, args, encoder
        self.open_turns = [m for m in conversation.messages if m["role"] == "user"]
        self.history = [m for m in conversation.messages[:1] if m["role"] == "system"] + [self.open_turns.pop(0)]
        self.rows: list[dict] = []
        self.counts = Counter(answers=0, capped=0)

    def request(self, prompt_ids: list[int]):
        """The ``dspine_jax.refill.Request`` for the next answer of this conversation."""
        from dspine_jax.refill import Request

        key = self.counts["answers"] * TURN_STRIDE + self.conversation.index
        return Request(key, prompt_ids, min(self.args.max_new_tokens, self.args.max_length - len(prompt_ids)), self)

    def take(self, prompt_ids: list[int], answer):
        """Take an answer in. -> the request for the next one; None after the last, or when its prompt leaves no room.

        The row is exactly what the target was given and what it wrote. A row that a later one begins with goes into that.
        """
        ids, closed = prompt_ids + answer.tokens, answer.finish_reason == "stop"
        self.history.append({"role": "assistant", "content": self.encoder.text_of(answer.tokens)})
        spans = [[len(prompt_ids), len(ids)]]
        if self.rows and ids[: len(self.rows[-1]["ids"])] == self.rows[-1]["ids"]:
            spans = self.rows.pop()["spans"] + spans
        self.rows.append({"ids": ids, "spans": spans, "renders": self.encoder.renders_to(self.history, ids, closed)})
        self.counts["answers"] += 1
        self.counts["capped"] += not closed
        if not self.open_turns:
            return None
        try:
            following = self.encoder.prompt_ids(self.history + self.open_turns[:1])
        except RowError:  # the template refuses what the target wrote
            return None
        if not has_room(following, self.args.max_length):
            return None
        self.history.append(self.open_turns.pop(0))
        return self.request(following)

    def record(self) -> dict:
        """What the journal keeps of it."""
        return record_of(self.conversation, self.rows, self.args.max_length) | dict(self.counts) | {"open": len(self.open_turns)}


def record_of(conversation: Conversation, rows: list[dict], max_length: int) -> dict:
    """The rows of a finished conversation that can give loss, cut to ``max_length``, and why the others cannot."""
    from train.chat_rows import mask_of
    from train.data import skip_reason

    kept, skipped = [], Counter()
    for row in rows:
        reason = skip_reason(mask_of(row["spans"], len(row["ids"])), max_length)
        if reason is None:
            ids = np.asarray(row["ids"][:max_length], "<u4")
            kept.append(row | {"ids": base64.b64encode(ids.tobytes()).decode(), "cut": len(row["ids"]) > max_length})
        else:
            skipped[reason] += 1
    return {"conversation": conversation.index, "rows": kept, "skipped": dict(skipped)}


def write_prompts(decoder, args: argparse.Namespace, encoder, journal: Journal) -> None:
    """Let the target write the user's part of ``args.self_prompts`` conversations; the journal keeps each text, or why it is of no use."""
    from tqdm import tqdm

    from dspine_jax.refill import Request

    opening = encoder.user_turn_ids()
    special = {index for index, token in encoder.tokenizer.added_tokens_decoder.items() if token.special}
    done = {record["prompt"] for record in journal.records if "prompt" in record}
    requests = (Request(PROMPT_TURN * TURN_STRIDE + i, opening, args.max_prompt_tokens, i) for i in range(args.self_prompts) if i not in done)
    batch_size = min(args.batch_size, args.self_prompts)
    with tqdm(total=args.self_prompts, initial=len(done), unit="prompt", desc="prompts", disable=None) as progress:
        sizes = batch_size, args.max_prompt_tokens, len(opening) + args.max_prompt_tokens
        for request, answer in finished_answers(decoder(args.prompt_temperature), lambda: next(requests, None), args, *sizes):
            record, text = {"prompt": request.owner}, encoder.text_of(answer.tokens)
            if answer.tokens[-1] != encoder.end_id:
                record["reason"] = "own prompt unfinished"
            elif special.intersection(answer.tokens[:-1]):
                record["reason"] = "own prompt with a special token"
            elif not text.strip():
                record["reason"] = "own prompt empty"
            journal.add(record | ({} if "reason" in record else {"text": text}))
            progress.update()


def write_answers(conversations: list[Conversation], decoder, args: argparse.Namespace, encoder, finish: Callable[[dict], None]) -> None:
    """Let the target answer every user turn; ``finish`` takes the record of each conversation that is done."""
    first = (Dialogue(c, args, encoder).request(c.prompt_ids.tolist()) for c in conversations)
    following: deque = deque()
    batch_size = min(args.batch_size, len(conversations))

    def next_request():
        return following.popleft() if following else next(first, None)

    for request, answer in finished_answers(decoder(args.temperature), next_request, args, batch_size, args.max_new_tokens, args.max_length):
        further = request.owner.take(request.prompt, answer)
        if further is None:
            finish(request.owner.record())
        else:
            following.append(further)


def keep_answers(conversations: list[Conversation], args: argparse.Namespace, encoder, finish: Callable[[dict], None]) -> None:
    """Rows of conversations whose answers stay; ``finish`` takes the record of each."""
    for conversation in conversations:
        answered = max(i for i, m in enumerate(conversation.messages) if m["role"] == "assistant") + 1
        try:
            ids, spans = encoder.kept_row(conversation.messages[:answered])
            record = record_of(conversation, [{"ids": ids, "spans": spans, "renders": True}], args.max_length) | {"answers": len(spans)}
        except RowError as error:
            record = {"conversation": conversation.index, "rows": [], "skipped": {error.reason: 1}, "detail": error.detail}
        finish(record)
