"""Conversations to dataset folders: hostile files, masks, template modes, answers of the target, interruption."""

import argparse
import base64
import dataclasses
import json
import types

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from chats import ENDLESS, PLAIN, THINKING, assistant, make_tokenizer, user, write_chat_target, write_jsonl
from safetensors.numpy import load_file

from dspine_jax import memory
from dspine_jax.chat import TEMPLATE_MODES, chat_ids, load_tokenizer, render_chat
from dspine_jax.generation import Generation, generate_batches
from dspine_jax.sampling import SamplingConfig
from dspine_jax.speculative import Decoder, DecodeSettings
from dspine_jax.target_io import load_target, read_target_config
from train import answers, prepare
from train.chat_files import MAX_ROW_BYTES, RowError, parse_conversation, read_lines
from train.chat_rows import ChatEncoder, check_template_mode, mask_of
from train.data import DatasetFolder, Manifest
from train.journal import NAME, Journal


def make_encoder(template=THINKING, mode="unset", **options):
    tokenizer = make_tokenizer(template, **options)
    return ChatEncoder(tokenizer, mode, [tokenizer.eos_token_id], len(tokenizer))


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """{template name: folder of a tiny target with a real tokenizer}. Some texts end early; special tokens are rarely written."""
    folder = tmp_path_factory.mktemp("targets")
    return {name: write_chat_target(folder / name, template) for name, template in (("thinking", THINKING), ("plain", PLAIN))}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Six prompts of one turn; one holds U+2028."""
    texts = ("the cat", "what is ab?", "tell me of the \u2028 sea", "x", "a longer question about the path", "7*6")
    return write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", [{"prompt": text} for text in texts])


def run(*argv):
    return prepare.main([str(arg) for arg in argv])


WRITING = ("--dtype", "float32", "--top-k", 20, "--max-new-tokens", 24, "--batch-size", 4, "--max-length", 200)


def rows_of(folder):
    """[(ids, mask)] without padding."""
    data = DatasetFolder(folder)
    return [(data.tokens[i, :n].tolist(), data.loss_mask[i, :n].tolist()) for i, n in enumerate(data.lengths)]


def masked_text(tokenizer, ids, mask):
    """The runs of masked tokens, as text."""
    runs, previous = [], 0
    for token, on in zip(ids, mask):
        if on:
            runs = runs if previous else [*runs, []]
            runs[-1].append(token)
        previous = on
    return [tokenizer.decode(run) for run in runs]


# --- rows of files -----------------------------------------------------------


def _line(*messages):
    return json.dumps({"messages": [*messages]}).encode()


HOSTILE = {
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "not JSON": b'{"prompt": "x"',
    "nested too deeply": b"[" * 200_000 + b"]" * 200_000,
    "row too large": b'{"prompt": "' + b"x" * MAX_ROW_BYTES + b'"}',
    "not an object": b'["prompt"]',
    "a key given twice": b'{"prompt": "x", "prompt": "y"}',
    "no messages, conversations, turns or prompt": b'{"text": "x"}',
    "messages are not a list": b'{"messages": "x"}',
    "no messages": b'{"turns": []}',
    "a message without role and content": b'{"conversations": [{"from": "human"}]}',
    "unknown role": b'{"conversations": [{"from": "tool", "value": "x"}]}',
    "tool calls": _line(user("x"), assistant("", tool_calls=[{"name": "f"}]) | {"content": ""}),
    "content is not text": _line(user([{"type": "text", "text": "x"}])),
    "reasoning_content is not text": _line(user("x"), assistant("y", reasoning_content=3)),
    "half a surrogate pair in the text": b'{"prompt": "x\\ud800"}',
    "no user turn": _line({"role": "system", "content": "x"}),
    "a system turn that is not the first": _line(user("x"), {"role": "system", "content": "y"}),
    "roles do not alternate": _line(user("x"), user("y")),
    "empty user text": b'{"prompt": " \\n"}',
    "the same conversation again": b'{"turns": ["good"]}',
    "prompt too long for max_length": json.dumps({"prompt": "word " * 100}).encode(),
    "the chat template refuses the conversation": b'{"prompt": "REFUSE"}',
}
NUMBER = b'{"prompt": ' + b"1" * 5000 + b"}"  # Python refuses to read it


def test_hostile_rows_are_counted_by_reason(tmp_path, targets, capfd):
    """Each broken row gives one count of its own reason, none ends the run, and the good rows beside them are used."""
    good = [b'{"prompt": "good"}', b'{"prompt": "nul \\u0000 and \xe2\x80\xa8 are fine", "id": NaN}']
    file = tmp_path / "hostile.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([good[0], b"", b"  ", *HOSTILE.values(), NUMBER, good[1]]))
    target = tmp_path / "target"
    target.symlink_to(targets["plain"])
    refusing = tmp_path / "tokenizer"
    make_tokenizer("{% if 'REFUSE' in messages[0].content %}{{ raise_exception('no') }}{% endif %}" + PLAIN).save_pretrained(refusing)
    args = prepare.parse_args([str(x) for x in (file, "--target", target, "--tokenizer", refusing, "--output", tmp_path / "out", *WRITING)])
    skips, tokenizer = prepare.Skips(strict=False), load_tokenizer(target, refusing)
    encoder = ChatEncoder(tokenizer, "unset", [tokenizer.eos_token_id], len(tokenizer))
    found, rows_read = prepare.read_conversations(args, encoder, skips, set())
    assert [c.messages[0]["content"] for c in found] == ["good", "nul \0 and \u2028 are fine"]
    assert skips.counts == dict.fromkeys(HOSTILE, 1) | {"not JSON": 2}
    assert skips.counts.total() == len(HOSTILE) + 1 >= 20 and rows_read == len(HOSTILE) + 3
    error = capfd.readouterr().err
    for number, reason in enumerate(HOSTILE, start=4):
        assert f"{file}, line {number}: {reason}" in error


def test_few_rows_are_named_and_all_are_counted(tmp_path, targets, capfd):
    rows = [{"bad": i} for i in range(9)] + [{"prompt": "fine"}]
    file = write_jsonl(tmp_path / "f.jsonl", rows)
    assert run(file, "--target", targets["plain"], "--output", tmp_path / "out", *WRITING, "--dry-run") == 0
    out, error = capfd.readouterr()
    assert error.count("left out: ") == 4 and "line 3: no messages" in error and "line 4" not in error and "6 more rows" in error
    assert "1 of 10 rows can be used; left out: 9 no messages" in out
    assert not (tmp_path / "out").exists()


def test_strict_stops_at_the_first(tmp_path, targets, capfd):
    file = write_jsonl(tmp_path / "f.jsonl", [{"prompt": "fine"}, {"prompt": 3}, {"bad": 1}])
    assert run(file, "--target", targets["plain"], "--output", tmp_path / "out", "--strict") == 2
    error = capfd.readouterr().err
    assert error.startswith(f"error: {file}, line 2: content is not text") and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_forms_of_rows():
    """messages before conversations before turns before prompt; ShareGPT names; unanswered turns are marked."""
    both = {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "turns": ["other"]}
    expected = [{"role": "system", "content": "s"}, user("q"), assistant("a")]
    assert parse_conversation(json.dumps(both).encode()) == expected
    assert parse_conversation(json.dumps({"conversations": expected, "prompt": "other"}).encode()) == expected
    assert parse_conversation(json.dumps({"messages": [user("m"), assistant("a", reasoning_content="r", name="n")]} | both).encode()) == [
        user("m"),
        assistant("a", reasoning_content="r"),
    ]
    assert parse_conversation(b'{"turns": ["a", "b"], "prompt": "other"}') == [user("a"), assistant(None), user("b")]


def test_huge_lines_do_not_fill_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("train.chat_files.MAX_ROW_BYTES", 64)
    (tmp_path / "f").write_bytes(b"x" * 1000 + b"\n" + b"y" * 63 + b"\n" + b"z" * 65)
    assert list(read_lines(tmp_path / "f")) == [(1, None), (2, b"y" * 63 + b"\n"), (3, None)]


# --- one render, masks laid over it (D05, D06) ---------------------------------

THREE_TURNS = [
    user("one"),
    assistant("first ab", reasoning_content="why the first"),
    user("two"),
    assistant("<b>second</b>"),  # begins like a think block
    user("three"),
    assistant("third", reasoning_content="why the third"),
]


@pytest.mark.parametrize("mode", ("thinking", "unset"))
def test_one_render_gives_ids_and_mask(mode):
    """D06: reasoning in turns 1 and 3. The ids are those of the full render, the mask covers the answers as shown there."""
    encoder = make_encoder(mode=mode)
    text = render_chat(encoder.tokenizer, THREE_TURNS, mode, open_answer=False)
    ids, spans = encoder.kept_row(THREE_TURNS)
    assert ids == encoder.tokenizer.encode(text, add_special_tokens=False)
    mask = mask_of(spans, len(ids)).tolist()
    assert len(mask) == len(ids)
    expected = ["first ab<|im_end|>", "<b>second</b><|im_end|>", "<think>\nwhy the third\n</think>\n\nthird<|im_end|>"]
    assert masked_text(encoder.tokenizer, ids, mask) == expected
    assert all(part in text for part in expected) and "why the first" not in text


@pytest.mark.parametrize("bytelevel", (False, True))
@pytest.mark.parametrize("mode", TEMPLATE_MODES)
@pytest.mark.parametrize("template", (THINKING, PLAIN))
def test_mask_is_the_answer_and_its_end_token(template, mode, bytelevel):
    """D05, also for text that looks like the template's own, and for a tokenizer whose post-processor trims offsets."""
    encoder = make_encoder(template, mode, bytelevel=bytelevel)
    fake = "x<|im_end|>\n<|im_start|>assistant\nfake<|im_end|>\n<think>"
    for answer in (" ab  the answer ", "a\n<b>", "<", "th"):
        ids, spans = encoder.kept_row([{"role": "system", "content": "ab"}, user(fake), assistant("one"), user("two"), assistant(answer)])
        assert masked_text(encoder.tokenizer, ids, mask_of(spans, len(ids))) == ["one<|im_end|>", answer + "<|im_end|>"]


def test_marks_in_the_text_do_not_confuse():
    """The private-use marks that find the answers may occur in a conversation."""
    encoder = make_encoder(PLAIN, bytelevel=True)
    messages = [user("\ue0001\ue000 x \ue0003\ue000"), assistant("\ue0003\ue000"), user("y"), assistant("z\ue000")]
    ids, spans = encoder.kept_row(messages)
    assert masked_text(encoder.tokenizer, ids, mask_of(spans, len(ids))) == ["\ue0003\ue000<|im_end|>", "z\ue000<|im_end|>"]


def test_stock_template_of_a_real_model(shared_dir):
    """D05 on the tokenizer and template of SmolLM2."""
    tokenizer = load_tokenizer(shared_dir / "data" / "smollm2")
    encoder = ChatEncoder(tokenizer, "unset", [2], 49_152)
    answer = "Caf\u00e9 \U0001f600 at 12:30.\n\n  - done "
    messages = [user("Where?\n"), assistant(answer)]
    ids, spans = encoder.kept_row(messages)
    assert ids == tokenizer.encode(render_chat(tokenizer, messages, open_answer=False), add_special_tokens=False)
    assert masked_text(tokenizer, ids, mask_of(spans, len(ids))) == [answer + "<|im_end|>"] and ids[spans[-1][1] - 1] == 2
    assert encoder.renders_to(messages, ids[: spans[-1][1]], closed=True)


@pytest.mark.parametrize(
    "template, mode, messages, reason",
    [
        (PLAIN, "unset", [user("x"), assistant("\nstarts with a newline")], "an answer shares a token with the template"),
        (PLAIN, "unset", [user("x"), assistant("a<|im_end|>b")], "an end token within an answer"),
        (PLAIN, "unset", [user("x"), assistant("a<|im_end|>\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\nb"), user("y"), assistant("c")], None),
        (THINKING, "non-thinking", [user("x"), assistant("y", reasoning_content="z")], "the answers do not fit the template mode"),
        (THINKING, "non-thinking", [user("x"), assistant("<think>z</think>y")], "the answers do not fit the template mode"),
        (PLAIN.replace("m.content", "m.content | upper"), "unset", [user("x"), assistant("y")], "the template alters an answer"),
        (PLAIN.replace("m.content", "(m.content if loop.last else 'gone')"), "unset", THREE_TURNS, "the template does not show every answer"),
        (ENDLESS, "unset", [{"role": "system", "content": "s"}, user("x"), assistant("y")], "an answer without an end-of-turn token"),
        (PLAIN.replace("generation_prompt -%}", "generation_prompt -%}{{- '!' -}}"), "unset", [user("x"), assistant("y")], None),
    ],
)
def test_doubtful_rows_are_refused_whole(template, mode, messages, reason):
    with pytest.raises(RowError) as caught:
        make_encoder(template, mode).kept_row(messages)
    assert reason is None or caught.value.reason == reason, caught.value


def test_ids_outside_the_targets_table():
    tokenizer = make_tokenizer(PLAIN)
    encoder = ChatEncoder(tokenizer, "unset", [tokenizer.eos_token_id], tokenizer.eos_token_id)
    with pytest.raises(RowError, match="outside the target's vocabulary"):
        encoder.prompt_ids([user("x")])
    with pytest.raises(ValueError, match="does not begin with an end token of the target"):
        ChatEncoder(tokenizer, "unset", [5], len(tokenizer))


def test_rows_that_cannot_give_loss(tmp_path, targets, capfd):
    """D02: user turns only, an answer behind max_length, and a good row: one is kept, two are counted. (A batch without labels: test_losses.)"""
    rows = [[user("only a question")], [user("long " * 20), assistant("late")], [user("q"), assistant("an answer")]]
    file = write_jsonl(tmp_path / "f.jsonl", [{"messages": m} for m in rows])
    assert run(file, "--target", targets["plain"], "--output", tmp_path / "out", "--keep-answers", "--max-length", 64) == 0
    data = DatasetFolder(tmp_path / "out")
    assert data.num_rows == 1 and data.manifest.skipped == {"no answer tokens": 1, "answer starts after max_length": 1}
    assert "1 answer starts after max_length, 1 no answer tokens" in capfd.readouterr().out
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == ["lengths.npy", "loss_mask.npy", "manifest.json", "tokens.npy"]


@pytest.mark.parametrize("empty", ([user("only a question")], [user("long " * 20), assistant("late")]))
def test_a_file_without_any_answer_is_named(tmp_path, targets, capfd, empty):
    """D05: an empty mask is an error, of one file among good ones too."""
    good = write_jsonl(tmp_path / "good.jsonl", [{"messages": [user("q"), assistant("an answer")]}])
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"messages": empty}])
    assert run(good, bad, "--target", targets["plain"], "--output", tmp_path / "out", "--keep-answers", "--max-length", 64) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {bad}: no row") and "answer" in error and not (tmp_path / "out" / "manifest.json").exists()


# --- one mode for data, training and use (D03) -----------------------------------


def test_mode_of_data_is_the_mode_of_use(tmp_path, targets):
    """D03: the mode is readable from the data, and a row opens with the ids that a decode command in that mode builds."""
    question = [{"role": "system", "content": "be brief"}, user("why?")]
    file, opened = write_jsonl(tmp_path / "f.jsonl", [{"messages": [*question, assistant("so")]}]), {}
    for mode in TEMPLATE_MODES:
        assert run(file, "--target", targets["thinking"], "--output", tmp_path / mode, "--keep-answers", "--template-mode", mode) == 0
        data = DatasetFolder(tmp_path / mode)
        assert data.manifest.template_mode == mode
        check_template_mode(data.manifest, mode)
        for other in set(TEMPLATE_MODES) - {mode}:
            with pytest.raises(ValueError, match=f"folder: was prepared in template mode '{mode}', but '{other}' is asked for"):
                check_template_mode(data.manifest, other, "folder")
        tokenizer = load_tokenizer(targets["thinking"])
        expected = chat_ids(tokenizer, question, mode)
        ((ids, mask),) = rows_of(tmp_path / mode)
        assert ids[: len(expected)] == expected and not any(mask[: len(expected)])
        opened[mode] = tokenizer.decode(expected)
    assert opened["non-thinking"] == opened["thinking"] + "<think>\n\n</think>\n\n" and opened["unset"] == opened["thinking"]
    assert chat_ids(tokenizer, question) == chat_ids(tokenizer, question, "unset")
    with pytest.raises(ValueError, match="does not record its template mode"):
        check_template_mode(Manifest(name="x", source="y"), "unset")
    with pytest.raises(ValueError, match="'off' is not one of thinking, non-thinking, unset"):
        chat_ids(tokenizer, question, "off")


def test_template_is_told_the_mode():
    tokenizer = make_tokenizer("{{ enable_thinking is defined }} {{ enable_thinking }}")
    assert [render_chat(tokenizer, [user("x")], mode, open_answer=True) for mode in TEMPLATE_MODES] == ["True True", "True False", "False "]


# --- answers of the target -------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory, targets, prompts):
    """The six prompts answered by the target at temperature 0.7."""
    folder = tmp_path_factory.mktemp("written") / "set"
    assert run(prompts, "--target", targets["plain"], "--output", folder, *WRITING, "--seed", 5) == 0
    return folder


def test_rows_are_what_the_target_saw_and_wrote(written, targets, prompts):
    """Prompt ids of the decode command, then the ids that ``generate_batches`` gives for seed and row; masked is the answer alone."""
    target, tokenizer = load_target(targets["plain"], dtype=jnp.float32), load_tokenizer(targets["plain"])
    texts = [json.loads(line)["prompt"] for line in prompts.read_text(encoding="utf-8").split("\n") if line]
    asked = [chat_ids(tokenizer, [user(text)]) for text in texts]
    settings = DecodeSettings(0, SamplingConfig(0.7, 20, 0.95), "own", (tokenizer.eos_token_id,), "float32")
    batches = generate_batches(Decoder(target, None, settings), asked, 4, max_new_tokens=24, seed=5)
    expected = [answer for batch in batches for answer in batch]
    rows = rows_of(written)
    assert [ids for ids, _ in rows] == [prompt + answer.tokens for prompt, answer in zip(asked, expected)]
    assert [mask for _, mask in rows] == [[0] * len(p) + [1] * len(a.tokens) for p, a in zip(asked, expected)]
    ends = [ids[-1] == tokenizer.eos_token_id for ids, _ in rows]
    assert 0 < sum(ends) < len(ends)  # some ended by themselves; one that hit the cap has no end token
    assert all(sum(mask) == 24 for end, (_, mask) in zip(ends, rows) if not end)
    manifest = DatasetFolder(written).manifest
    assert manifest.template_mode == "unset" and manifest.tokenizer == "tokenizer.json" and "temperature 0.7" in manifest.source and "seed 5" in manifest.source
    assert manifest.tokenizer_sha256 == prepare.file_sha256(targets["plain"] / "tokenizer.json")
    assert manifest.target == prepare.target_identity(targets["plain"]) and prepare.file_sha256(prompts) in manifest.source


def test_text_depends_on_neither_batch_nor_interruption(written, targets, prompts, tmp_path, monkeypatch, capfd):
    """Ctrl-C after three of six rows, a torn line, then the same command with another batch size: the same four files."""
    add, left = Journal.add, iter(range(3))

    def add_some(journal, record):
        if next(left, None) is None:
            raise KeyboardInterrupt
        add(journal, record)

    folder = tmp_path / "set"
    command = (prompts, "--target", targets["plain"], "--output", folder, *WRITING, "--seed", 5)
    monkeypatch.setattr(Journal, "add", add_some)
    assert run(*command) == 130
    assert "interrupted: 3 of 6 conversations" in capfd.readouterr().err and [path.name for path in folder.iterdir()] == [NAME]
    monkeypatch.undo()
    with open(folder / NAME, "ab") as file:
        file.write(b'{"conversation": 3, "rows": [{"id')
    (folder / "tokens.npy").write_bytes(b"half")  # as if the writing of the set had been broken off
    asked = []
    real = answers.Dialogue.take
    monkeypatch.setattr(answers.Dialogue, "take", lambda self, prompt, answer: asked.append(self.conversation.index) or real(self, prompt, answer))
    assert run(*command, "--batch-size", 3) == 0
    assert asked == [3, 4, 5]
    assert tiny.fingerprints(folder) == tiny.fingerprints(written) | {"manifest.json": tiny.fingerprints(folder)["manifest.json"]}
    assert DatasetFolder(folder).manifest == DatasetFolder(written).manifest


def test_answers_that_are_only_begun_are_not_taken(written, targets, prompts, tmp_path, monkeypatch, capfd):
    """Ctrl-C in the third call of the device, with rows at work: what is finished is kept, and the same command gives the same files."""
    real, calls = Decoder.run, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    folder = tmp_path / "set"
    command = (prompts, "--target", targets["plain"], "--output", folder, *WRITING, "--seed", 5)
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "run", interrupted)
        assert run(*command) == 130
    kept = int(capfd.readouterr().err.partition("interrupted: ")[2].split()[0])
    assert 0 < kept < 5
    assert run(*command) == 0 and tiny.fingerprints(folder) == tiny.fingerprints(written) | {"manifest.json": tiny.fingerprints(folder)["manifest.json"]}


def test_other_settings_do_not_go_on(targets, prompts, tmp_path, capfd):
    folder = tmp_path / "set"
    command = (prompts, "--target", targets["plain"], "--output", folder, "--keep-answers")
    good = write_jsonl(tmp_path / "good.jsonl", [{"messages": [user("q"), assistant("an answer")]}])
    tokenizer = load_tokenizer(targets["plain"])
    args = prepare.parse_args([str(x) for x in (good, *command[1:])])
    settings = prepare.describe_settings(args, tokenizer)
    journal = Journal(folder, settings)
    journal.open()
    journal.add({"conversation": 0, "rows": [], "skipped": {"invented": 1}})
    journal.close()
    before = (folder / NAME).read_bytes()
    command = (good, *command[1:])
    assert run(*command, "--max-length", 100) == 2
    error = capfd.readouterr().err
    assert "max_length 512 there, 100 now" in error and "--overwrite" in error and error.count("there") == 1 and (folder / NAME).read_bytes() == before
    assert run(*command) == 2 and "no row can give loss: 1 invented" in capfd.readouterr().err  # what the journal says is believed
    (folder / NAME).write_bytes(before.replace(b'{"conversation"', b'{"conversation', 1))
    assert run(*command) == 2 and f"{folder / NAME}, line 2 is damaged" in capfd.readouterr().err
    assert run(*command, "--max-length", 100, "--overwrite") == 0
    ids = rows_of(folder)
    assert run(*command) == 2 and "exists and is not empty" in capfd.readouterr().err
    assert run(*command, "--overwrite") == 0 and rows_of(folder) == ids and not (folder / NAME).exists()


def test_a_torn_line_is_cut_off(tmp_path):
    """Records before and after it stay whole; a journal torn in its first line begins anew."""
    settings = {"a": [1, None]}
    for torn, kept in ((b'{"conver', [{"n": 1}]), (None, [])):
        journal = Journal(tmp_path, settings)
        journal.open()
        journal.add({"n": 1})
        journal.close()
        content = journal.path.read_bytes()
        journal.path.write_bytes(content[:9] if torn is None else content + torn)
        journal = Journal(tmp_path, settings)
        assert journal.records == kept and bool(journal.size) == bool(kept)
        journal.open()
        journal.add({"n": 2})
        journal.close()
        assert Journal(tmp_path, settings).records == [*kept, {"n": 2}]
        journal.path.unlink()


def test_an_unfinished_overwrite_leaves_the_old_set(targets, tmp_path, monkeypatch):
    rows = [{"messages": [user(f"q{i}"), assistant("an answer")]} for i in range(3)]
    first, second = write_jsonl(tmp_path / "a.jsonl", rows[:1]), write_jsonl(tmp_path / "b.jsonl", rows)
    common = ("--target", targets["plain"], "--output", tmp_path / "set", "--keep-answers")
    assert run(first, *common) == 0
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "write", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(second, *common, "--overwrite") == 130
    assert DatasetFolder(tmp_path / "set").num_rows == 1
    with monkeypatch.context() as patch:  # nothing is left to be done but the writing
        patch.setattr(prepare, "keep_answers", None)
        assert run(second, *common, "--overwrite") == 0
    assert DatasetFolder(tmp_path / "set").num_rows == 3


@pytest.mark.parametrize("template", ("plain", "thinking"))
def test_turns_are_answered_in_order(template, targets, tmp_path, capfd):
    """Greedy, so each supervised token must be the target's argmax behind the very ids of its row; the prompts are renders of the history so far.

    Without reasoning in the template the turns of a conversation are one row; where earlier turns change, each is a row of its own.
    """
    talks = [["hi", "and the rest?", "ab"], ["one more"], ["two", "th"]]
    file = write_jsonl(tmp_path / "f.jsonl", [{"turns": turns} for turns in talks])
    options = (*WRITING, "--temperature", 0, "--template-mode", "non-thinking")
    assert run(file, "--target", targets[template], "--output", tmp_path / "set", *options) == 0
    assert ("does not read enable_thinking" in capfd.readouterr().err) == (template == "plain")
    tokenizer, target = load_tokenizer(targets[template]), load_target(targets[template], dtype=jnp.float32)
    rows = rows_of(tmp_path / "set")
    width = max(len(ids) for ids, _ in rows)
    padded = np.array([ids + [0] * (width - len(ids)) for ids, _ in rows])
    choice = np.asarray(jnp.argmax(target.logits(target(jnp.asarray(padded)).hidden_BTD), axis=-1))
    for row, (ids, mask) in enumerate(rows):
        for at in np.flatnonzero(mask):
            assert ids[at] == choice[row, at - 1]
    spans = [[(i, next((j for j in range(i, len(m)) if not m[j]), len(m))) for i in range(1, len(m)) if m[i] and not m[i - 1]] for _, m in rows]
    assert [len(s) for s in spans] == ([3, 1, 2] if template == "plain" else [1] * 6)
    flat = iter([(ids, span) for (ids, _), row in zip(rows, spans) for span in row])
    for turns in talks:
        history = []
        for text in turns:
            history.append(user(text))
            ids, (start, stop) = next(flat)
            assert ids[:start] == chat_ids(tokenizer, history, "non-thinking")
            history.append(assistant(tokenizer.decode(ids[start:stop]).removesuffix("<|im_end|>")))


class Scripted:
    """Stands for the decoder: answers are given texts, ``ids`` where a text is a list."""

    def __init__(self, monkeypatch, encoder, texts, closed=True):
        texts = iter(texts)

        def finished(decoder, next_request, *args):
            while (request := next_request()) is not None:
                text = next(texts)
                ids = text if isinstance(text, list) else encoder.tokenizer.encode(text, add_special_tokens=False)
                ids = ids + [encoder.end_id] if closed else ids
                yield request, Generation(ids[: request.limit], [], "stop" if closed and len(ids) <= request.limit else "length")

        monkeypatch.setattr(answers, "finished_answers", finished)

    @staticmethod
    def records(conversations, encoder, **options):
        found = []
        args = argparse.Namespace(**{"batch_size": 2, "seed": 0, "temperature": 1.0, "max_new_tokens": 50, "max_length": 200} | options)
        ready = []
        for index, turns in enumerate(conversations):
            messages = [m for text in turns for m in (user(text), assistant(None))][:-1]
            ready.append(answers.Conversation(index, "", "", messages, np.asarray(encoder.prompt_ids(messages[:1]))))
        answers.write_answers(ready, lambda temperature: None, args, encoder, found.append)
        return found


def test_unusual_tokenisation_is_kept_as_written(monkeypatch):
    """The target wrote "a", "b" where the tokenizer has "ab": the row keeps these ids, is marked, and a later turn does not swallow it."""
    encoder = make_encoder(PLAIN)
    a, b = encoder.tokenizer.convert_tokens_to_ids(["a", "b"])
    Scripted(monkeypatch, encoder, [[a, b, a, b], "fine", "ab", "fine"])
    odd, usual = Scripted.records([["q", "r"], ["s", "t"]], encoder)
    assert [row["renders"] for row in odd["rows"]] == [False, True] and [row["renders"] for row in usual["rows"]] == [True]
    assert [len(row["spans"]) for row in odd["rows"]] == [1, 1] and [len(row["spans"]) for row in usual["rows"]] == [2]
    prompt = chat_ids(encoder.tokenizer, [user("q")])
    decode = lambda row: np.frombuffer(base64.b64decode(row["ids"]), "<u4").tolist()  # noqa: E731
    assert decode(odd["rows"][0]) == prompt + [a, b, a, b, encoder.end_id]
    text = render_chat(encoder.tokenizer, [user("q"), assistant("abab"), user("r"), assistant("fine")], open_answer=False)
    assert encoder.tokenizer.decode(decode(odd["rows"][1])) + "\n" == text


def test_answers_that_give_no_loss_are_counted(monkeypatch):
    encoder = make_encoder(PLAIN)
    Scripted(monkeypatch, encoder, ["", "fine"])
    empty, fine = Scripted.records([["q"], ["r"]], encoder)
    assert empty["rows"] == [] and empty["skipped"] == {"fewer than two neighbouring answer tokens": 1} and len(fine["rows"]) == 1


def test_turns_without_room_stay_open(monkeypatch):
    encoder = make_encoder(PLAIN)
    Scripted(monkeypatch, encoder, ["x" * 300], closed=False)
    length = len(encoder.prompt_ids([user("q")]))
    (record,) = Scripted.records([["q", "r", "s"]], encoder, max_length=length + 20)
    assert record["rows"][0]["spans"] == [[length, length + 20]] and (record["open"], record["capped"], record["answers"]) == (2, 1, 1)


# --- prompts of the target --------------------------------------------------------


def test_own_prompts(targets, tmp_path, capfd, monkeypatch):
    """Each of the N is used or counted; a used one opens its row as a user's turn, and a second run reads them from the journal."""
    folder, command = tmp_path / "set", ("--self-prompts", 24, "--prompt-temperature", 0.7, "--max-prompt-tokens", 24, "--target", targets["plain"])
    interrupted = iter([KeyboardInterrupt])
    real = prepare.finish_all
    monkeypatch.setattr(prepare, "finish_all", lambda *args: (_ for _ in ()).throw(error) if (error := next(interrupted, None)) else real(*args))
    assert run(*command, "--output", folder, *WRITING) == 130
    monkeypatch.setattr(prepare, "write_prompts", None)
    assert run(*command, "--output", folder, *WRITING) == 0
    data, tokenizer = DatasetFolder(folder), load_tokenizer(targets["plain"])
    assert data.num_rows + sum(data.manifest.skipped.values()) == 24 and data.num_rows >= 2
    assert data.manifest.skipped["own prompt unfinished"] >= 2 and "24 prompts asked of the target at temperature 0.7" in data.manifest.source
    seen = set()
    for ids, mask in rows_of(folder):
        text = tokenizer.decode(ids[: mask.index(1)])
        prompt = text.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")
        assert chat_ids(tokenizer, [user(prompt)]) == ids[: mask.index(1)] and "<|im" not in prompt and prompt.strip()
        seen.add(prompt)
    assert len(seen) == data.num_rows
    assert "left out: own prompt" in capfd.readouterr().err


def test_own_prompts_of_no_use_are_counted(monkeypatch):
    encoder, records = make_encoder(PLAIN), []
    start = encoder.tokenizer.convert_tokens_to_ids("<|im_start|>")
    Scripted(monkeypatch, encoder, ["good one", " ", [start, 5], "good one", "x" * 99])
    args = argparse.Namespace(self_prompts=5, max_prompt_tokens=20, batch_size=2, seed=0, prompt_temperature=1.0, keep_answers=False, max_length=200)
    journal = types.SimpleNamespace(records=records, add=records.append)
    answers.write_prompts(lambda temperature: None, args, encoder, journal)
    skips = prepare.Skips(strict=True)  # strict speaks of files
    (found,) = prepare.own_conversations(7, args, encoder, journal, skips, set())
    assert found.messages == [user("good one")] and found.index == 7
    assert skips.counts == {name: 1 for name in ("own prompt empty", "own prompt with a special token", "the same conversation again", "own prompt unfinished")}


# --- needs, command line ----------------------------------------------------------


def test_needs_are_printed_and_a_full_disk_is_refused(targets, prompts, tmp_path, capfd, monkeypatch):
    config = read_target_config(targets["plain"])
    options = ("--target", targets["plain"], "--output", tmp_path / "a" / "set", "--max-length", 1000, "--max-new-tokens", 100, "--batch-size", 8)
    args = prepare.parse_args([str(x) for x in (prompts, *options)])
    sizes = prepare.needs(config, 1_000_000, args)
    assert sizes["arrays"] == 1_000_000 * (1000 * 3 + 4)  # uint16 ids and a byte of mask, an int32 a row
    assert sizes["cache"] == 2 * 3 * (8 + 1) * 1024 * 2 * 16 * 2  # keys and values, layers, rows and those just started, positions, heads, width, bytes
    tensors = load_file(targets["plain"] / "model.safetensors")
    assert sizes["weights"] == 2 * sum(x.size for x in tensors.values()) and sizes["logits"] == 4 * 8 * 128
    wide = prepare.needs(dataclasses.replace(config, vocab_size=70_000), 10, args)
    assert wide["arrays"] == 10 * (1000 * 5 + 4)
    need = prepare.needs(config, 6, args)
    free = need["arrays"] + need["journal"]
    for missing, code in ((1, 2), (0, 0)):
        monkeypatch.setattr(prepare.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free - missing))  # noqa: B023
        assert run(prompts, *options, "--dry-run") == code
        out, error = capfd.readouterr()
        assert f"disk: {prepare.size_text(need['arrays'])} for the dataset" in out and "memory: weights" in out
        assert ("smaller --max-length" in error) == (code == 2) and not (tmp_path / "a").exists()


def test_the_device_decides_how_many_answers_are_written_together(targets, prompts, tmp_path, monkeypatch, capfd):
    """What it can hold beside the weights, and no more than there are to write; a number given wins."""
    asked = []
    monkeypatch.setattr(memory, "default_batch_size", lambda row, yet_to_load: asked.append((row, yet_to_load)) or 4)
    command = (prompts, "--target", targets["plain"], "--output", tmp_path / "set", "--dtype", "float32", "--dry-run")
    for options, chosen in (((), 4), (("--limit", 3), 3), (("--batch-size", 5), 5), (("--limit", 1, "--self-prompts", 2, "--max-prompt-tokens", 20), 2)):
        assert run(*command, *options) == 0
        assert f"for {chosen} answers at a time (--batch-size)" in capfd.readouterr().out
    sizes = prepare.needs(read_target_config(targets["plain"]), 6, prepare.parse_args([str(x) for x in (*command, "--batch-size", 1)]))
    assert len(asked) == 3 and {size for _, size in asked} == {sizes["weights"]} and asked[0][0] > sizes["cache"] / 2


def test_journal_fits_its_estimate(targets, prompts, tmp_path, monkeypatch):
    rows = [{"messages": [user("q" * 150 + str(i)), assistant("an answer" * 40)]} for i in range(20)]
    file = write_jsonl(tmp_path / "f.jsonl", rows)
    monkeypatch.setattr(prepare, "write", lambda *args: None)
    options = (file, "--target", targets["plain"], "--output", tmp_path / "set", "--keep-answers", "--max-length", 512)
    assert run(*options) == 0
    estimate = prepare.needs(read_target_config(targets["plain"]), 20, prepare.parse_args([str(x) for x in options]))["journal"]
    assert 0.9 * estimate < (tmp_path / "set" / NAME).stat().st_size < estimate + 2000


@pytest.mark.parametrize(
    "argv, words",
    [
        ((), "give JSONL files, or --self-prompts N"),
        (("f", "--keep-answers", "--temperature", "1"), "--temperature has an effect only without --keep-answers"),
        (("f", "--max-prompt-tokens", "9"), "--max-prompt-tokens has an effect only with --self-prompts"),
        (("--self-prompts", "3", "--keep-answers"), "no answers to keep"),
        (("--self-prompts", "3", "--strict"), "--strict speaks of rows of files"),
        (("--self-prompts", "3", "--prompt-temperature", "0"), "must be above 0"),
        (("f", "--max-length", "1"), "--max-length 1 must be at least 2"),
        (("f", "--seed", "-1"), "--seed -1 must lie in"),
        (("f", "--temperature", "nan"), "--temperature nan must be a finite number"),
        (("f", "--template-mode", "on"), "choose from"),
    ],
)
def test_bad_command_lines(argv, words, capsys):
    with pytest.raises(SystemExit) as stop:
        prepare.parse_args([*argv, "--target", "t", "--output", "o"])
    assert stop.value.code == 2 and words in capsys.readouterr().err


def test_bad_files_are_one_line_and_exit_code_2(targets, prompts, tmp_path, capfd):
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for argv, words in (
        ((tmp_path / "none.jsonl",), "none.jsonl does not exist"),
        ((tmp_path / "empty.jsonl",), "empty.jsonl holds no row"),
        ((prompts, "--max-length", 50_000), "--max-length: 50000 tokens are more than the"),
        ((prompts, "--top-p", 0), "top_p 0.0 must lie in"),
        ((prompts, "--output", tmp_path / "full"), "exists and is not empty"),
        ((prompts, "--target", tmp_path / "no-target"), "no-target: no such file or folder"),
        ((prompts, "--max-length", 10), "prompts.jsonl: no row can be used: 6 prompt too long for max_length"),
    ):
        assert run("--target", targets["plain"], "--output", tmp_path / "out", *argv) == 2
        error = capfd.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ") and words in error and not (tmp_path / "out").exists()


def test_limit_counts_rows_of_all_files(targets, tmp_path):
    files = [write_jsonl(tmp_path / f"{name}.jsonl", [{"messages": [user(f"{name}{i}"), assistant("yes")]} for i in range(3)]) for name in "abc"]
    assert run(*files, "--target", targets["plain"], "--output", tmp_path / "set", "--keep-answers", "--limit", 4) == 0
    texts = [load_tokenizer(targets["plain"]).decode(ids) for ids, _ in rows_of(tmp_path / "set")]
    assert [text[len("<|im_start|>user\n") :][:2] for text in texts] == ["a0", "a1", "a2", "b0"]


def test_identity_of_a_target_sees_its_weights(targets, tmp_path):
    folder = tmp_path / "t"
    folder.mkdir()
    for file in targets["plain"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    same = prepare.target_identity(folder)
    assert same.split(", ")[1] == prepare.target_identity(targets["plain"]).split(", ")[1]
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert prepare.target_identity(folder) != same
