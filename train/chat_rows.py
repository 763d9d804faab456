"""Token ids and loss masks of conversations, from one render of the whole."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from dspine_jax.chat import chat_ids, render_chat
from train.chat_files import RowError
from train.data import Manifest

_MARK = "\ue000"  # private use: no template changes it


def mask_of(spans: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Loss mask uint8 [s], 1 on the given spans of positions."""
    mask = np.zeros(length, np.uint8)
    for start, stop in spans:
        mask[start:stop] = 1
    return mask


class ChatEncoder:
    """Prompts, rows and masks of one tokenizer in one template mode.

    ``end_text``, ``end_id``: the token that the template ends an answer with. ``trailer``: what it writes after that. ``end_ids`` are the target's
    end tokens and ``vocab_size`` the rows of its table. Raises ValueError for a tokenizer without offsets or without a chat template, or when the
    template's end of turn is no end token of the target (its answers would run on).
    """

    def __init__(self, tokenizer, template_mode: str, end_ids: Sequence[int], vocab_size: int):
        if not tokenizer.is_fast:
            raise ValueError("this tokenizer gives no character offsets; one with a tokenizer.json is needed")
        self.tokenizer, self.template_mode, self.end_ids, self.vocab_size = tokenizer, template_mode, tuple(end_ids), vocab_size
        # A copy without post-processor: some of these cut the spaces off the offsets, and none changes an id of a rendered chat.
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.post_processor = None
        self._backend.no_truncation()
        self._backend.no_padding()
        probe = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        tail = render_chat(tokenizer, probe, template_mode, open_answer=False).rpartition(_MARK)[2]
        ids, _, ends = self._encode(tail)
        if not ids or ids[0] not in end_ids:
            raise ValueError(
                f"the chat template ends an answer with {tail[:20]!r}, which does not begin with an end token of the target ({list(end_ids)});"
                " add it to eos_token_id in generation_config.json"
            )
        self.end_id, self.end_text, self.trailer = ids[0], tail[: ends[0]], tail[ends[0] :]

    def prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """What a decoder is given for the next answer. Raises RowError."""
        try:
            return self._check_ids(chat_ids(self.tokenizer, messages, self.template_mode))
        except RowError:
            raise
        except ValueError as error:
            raise RowError("the chat template refuses the conversation", str(error)) from error

    def user_turn_ids(self) -> list[int]:
        """The template up to where the first user's text begins. Raises ValueError when a user's turn does not end with ``end_text``."""
        text = self._render([{"role": "user", "content": _MARK}])
        before, _, after = text.partition(_MARK)
        if not after.startswith(self.end_text):
            raise ValueError(f"the chat template ends the user's turn with {after[:20]!r}, not with {self.end_text!r}: prompts cannot be sampled")
        return self._encode(before)[0]

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of an answer, its end token left out."""
        ids = ids[:-1] if ids and ids[-1] in self.end_ids else ids
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def renders_to(self, messages: list[dict[str, str]], ids: Sequence[int], closed: bool) -> bool:
        """Whether one render of the whole conversation has exactly these ids, up to what the template writes after them."""
        try:
            whole = self._encode(self._render(messages))[0]
        except RowError:
            return False
        rest = self.trailer if closed else self.end_text + self.trailer
        return whole[: len(ids)] == list(ids) and whole[len(ids) :] == self._encode(rest)[0]

    def kept_row(self, messages: list[dict[str, str]]) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids, token spans of the answers) of a conversation whose answers stay as they are.

        The ids are those of one render of the whole. A span is an answer, its reasoning where that is shown, and its end-of-turn token;
        nothing that the template writes by itself. Raises RowError when an answer cannot be told apart from the template with certainty, or when the row
        does not begin with the very prompt that a decoder would be given for the last answer.
        """
        text = self._render(messages)
        ids, starts, ends = self._encode(text)
        spans = []
        for begin, end in self._answer_spans(messages, text):
            first, last = bisect_left(starts, begin), bisect_left(starts, end)
            if first == len(ids) or starts[first] != begin or (first and ends[first - 1] > begin) or (last and ends[last - 1] > end):
                raise RowError("an answer shares a token with the template", repr(text[max(0, begin - 10) : begin + 10]))
            if last == len(ids) or (starts[last], ends[last], ids[last]) != (end, end + len(self.end_text), self.end_id):
                raise RowError("an answer without an end-of-turn token", repr(text[end : end + 20]))
            if not set(self.end_ids).isdisjoint(ids[first:last]):
                raise RowError("an end token within an answer")
            spans.append((first, last + 1))
        self._check_ids(ids)
        if spans:
            prompt_ids = self.prompt_ids(messages[: max(i for i, m in enumerate(messages) if m["role"] == "assistant")])
            if ids[: len(prompt_ids)] != prompt_ids or spans[-1][0] < len(prompt_ids):
                raise RowError("the row does not begin with the prompt of its last answer")
        return ids, spans

    def _answer_spans(self, messages: list[dict[str, str]], text: str) -> list[tuple[int, int]]:
        """Character spans of the answers in ``text``, the render of ``messages``.

        The template is rendered once more with a mark in place of each answer and without reasoning; the literal text around the marks is then
        found in ``text``. An answer that holds such text is cut short here, and its end token within shows it.
        """
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if not turns:
            return []
        mark = self._unused_mark(messages)
        marked = [{"role": "assistant", "content": f"{mark}{i}{mark}"} if i in turns else m for i, m in enumerate(messages)]
        render = self._render(marked)
        literals, fillers, position = [], [], 0  # literals before the first answer, between two, after the last
        for turn in turns:
            at = render.find(marked[turn]["content"], position)
            # The prompt of an answer and the whole part where a template writes an empty think block into only one of them.
            agreed = len(os.path.commonprefix([self._render(marked[:turn], open_answer=True), render]))
            if at < 0 or not position < agreed <= at:
                raise RowError("the template does not show every answer", f"message {turn + 1}")
            literals.append(render[position:agreed])
            fillers.append(render[agreed:at])
            position = at + len(marked[turn]["content"])
        last = render[position:]
        position, spans = 0, []
        for index, literal in enumerate(literals):
            at = text.find(literal, position) if index else (0 if text.startswith(literal) else -1)
            if at < 0:
                raise RowError("the answers do not fit the template mode", f"rendered as {self.template_mode}")
            if index:
                spans.append((position, at))
            position = at + len(literal)
        if not text.endswith(last) or position > len(text) - len(last):
            raise RowError("the answers do not fit the template mode", f"rendered as {self.template_mode}")
        spans.append((position, len(text) - len(last)))
        return [self._without_filler(text, span, filler, messages[turn]["content"], turn) for span, filler, turn in zip(spans, fillers, turns)]

    @staticmethod
    def _without_filler(text: str, span: tuple[int, int], filler: str, content: str, turn: int) -> tuple[int, int]:
        """The span without what the template writes before every answer. Raises RowError when it does not hold the answer."""
        begin, end = span
        if text.startswith(filler, begin, end):
            begin += len(filler)
        shown, content = text[begin:end].strip(), content.strip()
        if not (shown.endswith(content) or content.endswith(shown)):  # reasoning may come before it or be cut off its front
            raise RowError("the template alters an answer", f"message {turn + 1}")
        return begin, end

    def _unused_mark(self, messages: list[dict[str, str]]) -> str:
        used = set().union(*(text for m in messages for text in m.values()))
        for code in range(ord(_MARK), 0xF900):
            if chr(code) not in used:
                return chr(code)
        raise RowError("every private-use character occurs in the text")

    def _render(self, messages: list[dict[str, str]], *, open_answer: bool = False) -> str:
        try:
            return render_chat(self.tokenizer, messages, self.template_mode, open_answer=open_answer)
        except ValueError as error:
            raise RowError("the chat template refuses the conversation", str(error)) from error

    def _encode(self, text: str) -> tuple[list[int], list[int], list[int]]:
        """(ids, first character of each, one past its last)."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        offsets = encoding.offsets
        return encoding.ids, [start for start, _ in offsets], [end for _, end in offsets]

    def _check_ids(self, ids: list[int]) -> list[int]:
        if ids and max(ids) >= self.vocab_size:
            raise RowError("token id outside the target's vocabulary", f"{max(ids)}; the target has {self.vocab_size} rows")
        return ids


def check_template_mode(manifest: Manifest, template_mode: str, where: str = "") -> None:
    """Raise ValueError unless the data was prepared in ``template_mode``; ``where`` names the folder in the message."""
    if manifest.template_mode != template_mode:
        stored = "does not record its template mode" if manifest.template_mode is None else f"was prepared in template mode {manifest.template_mode!r}"
        raise ValueError(
            f"{where or manifest.name}: {stored}, but {template_mode!r} is asked for; use the data's mode, or prepare it again with --template-mode"
        )
