"""Every option of the nine command lines and every training setting does something (G01); unset means default (G04); dspine-generate as a whole.

A row of a table gives two settings of one option and what must differ between them. A report that only repeats the
option's value is no effect: rows look at text, rounds, arrays, shapes, files and exit codes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import shlex
import types
import typing
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scripted
import tiny
from chats import PLAIN as PLAIN_TEMPLATE
from chats import THINKING, assistant, make_tokenizer, user, write_chat_target, write_jsonl, write_text
from flax import nnx
from safetensors.numpy import load_file, save_file
from test_gguf_io import write_tokenizer

from dspine_jax import bounds, memory, probes, replay, speculative, weight_folder
from dspine_jax.config import DataConfig, DrafterConfig, KernelConfig, TargetConfig, TrainConfig
from dspine_jax.config_io import read_config, save_config
from dspine_jax.drafter import Drafter
from dspine_jax.drafter_io import save_drafter
from dspine_jax.generation import Generation
from dspine_jax.sampling import SamplingConfig
from dspine_jax.selection import transition_cache
from dspine_jax.sharding import tree_shardings
from dspine_jax.speculative import DecodeSettings
from dspine_jax.target import Target
from dspine_jax.target_io import read_target_config
from serve import decoding, evaluate, export, generate, plots, probe, probe_plots
from serve.environment import default_dtype
from train import bound, convert, data, loop, prepare, pretrain
from train import main as training
from train.data import Manifest, write_dataset
from train.step import _initial_state, abstract_state, make_train_step

pytestmark = pytest.mark.usefixtures("quick_compiler")
SMALL = dataclasses.replace(
    tiny.TARGET, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, intermediate_size=16, eos_token_ids=(2,), max_position_embeddings=64
)
WORDS = ["<pad>", "<unk>", "", "<mask>", "<user>", "<turn>", "<assistant>", *(f"w{i}" for i in range(7, 120))]  # as text; the end token is left out


@dataclasses.dataclass(frozen=True)
class Row:
    """An option, two settings of it, and what must differ between them. {name} in a setting is a path of the ``files`` fixture."""

    option: str
    first: str
    second: str
    observe: Callable | tuple[Callable, ...]  # each of several must differ
    common: str = ""  # beside both settings

    def check(self, first, second) -> None:
        for look in self.observe if isinstance(self.observe, tuple) else (self.observe,):
            assert look(first) != look(second)


def options(parser) -> set[str]:
    """The name of every option and argument."""
    return {(action.option_strings or [action.dest])[-1] for action in parser._actions}


# ---- files --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Targets, tokenizers, drafters, prompts, data and .npz files, all very small."""
    root = tmp_path_factory.mktemp("commands")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "TARGET", SMALL)
        for name in ("target", "other", "bare"):
            tiny.write_target(root / name)
        patch.setattr(tiny, "TARGET", dataclasses.replace(SMALL, max_position_embeddings=256))
        for name in ("chat", "other_chat"):
            write_chat_target(root / name, THINKING)
        patch.setattr(tiny, "TARGET", dataclasses.replace(SMALL, num_layers=4))
        tiny.write_target(root / "deep")
    for name in ("target", "other", "shuffled", "no_template"):
        tiny.write_tokenizer(root / name)
    for name, sign in (("target", 1), ("other", -1)):
        tensors = load_file(root / name / "model.safetensors")
        tensors["lm_head.weight"] *= sign
        tensors["lm_head.weight"][2] = 0  # the end token is never the likeliest: greedy texts have the length that is asked for
        save_file(tensors, root / name / "model.safetensors")
    tensors = load_file(root / "other_chat" / "model.safetensors")
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"][::-1].copy()}, root / "other_chat" / "model.safetensors")
    make_tokenizer(PLAIN_TEMPLATE).save_pretrained(root / "plain")
    talks = [{"messages": [user(question), assistant("an answer")]} for question in ("the cat", "x", "what is ab?")]
    write_jsonl(root / "talks.jsonl", talks)
    write_jsonl(root / "flawed.jsonl", [*talks, {"text": "x"}])
    write_jsonl(root / "other_talks.jsonl", [{"messages": [user("7*6"), assistant("another")]}])
    for name, seed in (("text", 0), ("other_text", 1)):
        write_text(root / name, seed)
    content = json.loads((root / "other_text" / "tokenizer" / "tokenizer.json").read_text())
    content["model"]["vocab"]["w120"] = 120
    (root / "other_text" / "tokenizer" / "tokenizer.json").write_text(json.dumps(content))
    content = json.loads((root / "shuffled" / "tokenizer.json").read_text())
    content["model"]["vocab"] = {word: i if i < 7 else 126 - i for word, i in content["model"]["vocab"].items()}
    (root / "shuffled" / "tokenizer.json").write_text(json.dumps(content))
    (root / "no_template" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    config = read_target_config(root / "target")
    kinds = (("dspine", "dspine", 1, 1), ("dflash", "dflash", 2, 1), ("twin", "dspine", 3, 1), ("dspark", "dspark", 4, 1), ("two_layers", "dspine", 5, 2))
    for name, method, seed, layers in kinds:
        sizes = {"num_layers": layers, "target_layer_ids": (0,)}
        drafter = Drafter(tiny.train_config(method, drafter=sizes, injection={"transfer_size": 8}).drafter.resolve(config), rngs=nnx.Rngs(seed))
        tiny.randomise(drafter, seed)
        if method == "dspine":
            drafter.transfer.basis.set_value(jnp.asarray(np.random.default_rng(seed - 1).normal(size=(16, 8)), jnp.float32))
        save_drafter(root / name, drafter)
    scored = {"folders": [str(root / "dspine")], "policy": "own", "benchmarks": {"one": {"full": {"rounds": 2, "tau_pooled": 2.5}}}, "full_average_tau": 2.5}
    (root / "results.json").write_text(json.dumps({"temperatures": {"T0.0": {"methods": {"dspine": scored}}}}))
    (root / "one.jsonl").write_text('{"prompt": "w10 w20"}\n')
    (root / "two.jsonl").write_text('{"prompt": "w10 w20"}\n{"turns": ["w30 w40 w50", "w60"]}\n')
    (root / "empty.jsonl").write_text("\n")
    mixed = ["w10", None, "", "w9 " * 65, "w11 w12", ""]
    (root / "mixed.jsonl").write_text("".join("\n" if text is None else json.dumps({"prompt": text}) + "\n" for text in mixed))
    (root / "many.jsonl").write_text("\n".join(json.dumps({"prompt": " ".join(f"w{10 + i + j}" for j in range(1 + 5 * i % 7))}) for i in range(9)) + "\n")
    (root / "nameless.jsonl").write_text('{"text": "w10"}\n')
    (root / "broken.jsonl").write_text('{"prompt": "w10"}\n{"prompt": \n')
    for name, count, seed in (("first", 3, 1), ("second", 2, 2)):
        write_dataset(root / "data" / name, *answers(count, seed), Manifest(name=name, source="random"))
    tiny.write_data(root / "rows")
    write_dataset(root / "more rows", *tiny.rows(9, seed=7), Manifest(name="more", source="random"))
    write_npz(root / "a.npz", 0)
    write_npz(root / "b.npz", 1)
    (root / "x.json").write_text("x")
    (root / "y.json").write_text("y")
    return root


def answers(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of 3 prompt tokens and 10 to 20 answer tokens: (tokens, loss mask, lengths)."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(13, 24, count)
    columns = np.arange(24)[None]
    inside = columns < lengths[:, None]
    return np.where(inside, rng.integers(7, 120, inside.shape), 0), inside & (columns >= 3), lengths


def write_npz(path: Path, seed: int) -> None:
    """Four rows, prompts in 256 columns, of two sources."""
    tokens = np.random.default_rng(seed).integers(4, 100, (4, 266))
    np.savez(path, tokens=tokens, prompt_pad=np.full(4, 240), answer_len=np.array([6, 7, 8, 9]), source=np.array([0, 1, 0, 2]))


def filled(text: str, root: Path) -> list[str]:
    """Words of a command line; {name} is a path below ``root``."""
    return [word.replace("{", f"{root}/").replace("}", "") if "{" in word else word for word in shlex.split(text)]


class Terminal(io.StringIO):
    """Output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@dataclasses.dataclass
class Outcome:
    """What a command printed, returned and did."""

    code: int = 0
    out: str = ""
    err: str = ""
    answers: list = dataclasses.field(default_factory=list)  # dspine-generate: with their rounds
    decoders: list = dataclasses.field(default_factory=list)  # every Decoder made
    started: list = dataclasses.field(default_factory=list)  # [B,S] of every prefill, or of the caches of a batch that is refilled
    judged: list = dataclasses.field(default_factory=list)  # dspine-evaluate, serve.probe: every replay call
    fed: list = dataclasses.field(default_factory=list)  # train.pretrain: tokens of every batch
    folder: Path | None = None

    @property
    def report(self) -> dict:
        return json.loads(self.out)

    @property
    def rounds(self) -> list:
        return [r for answer in self.answers for r in answer.rounds]


def call(main: Callable, argv: list[str], outcome: Outcome | None = None, out: io.StringIO | None = None) -> Outcome:
    """Run a command in this process."""
    outcome, out, err = outcome or Outcome(), out or io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            outcome.code = main(argv)
        except SystemExit as stop:
            outcome.code = stop.code
    outcome.out, outcome.err = out.getvalue(), err.getvalue()
    return outcome


@contextlib.contextmanager
def spied(outcome: Outcome):
    """Let an outcome see every Decoder, every prefill and every batch that is to be refilled."""
    make, start, idle = speculative.Decoder.__init__, speculative.Decoder.start, speculative.Decoder.idle

    def made(self, *args):
        make(self, *args)
        outcome.decoders.append(self)

    def started(self, prompts_BS, *args, **kwargs):
        outcome.started.append(prompts_BS.shape)
        return start(self, prompts_BS, *args, **kwargs)

    def refilled(self, batch, *, capacity, room):
        outcome.started.append((batch, capacity))
        return idle(self, batch, capacity=capacity, room=room)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculative.Decoder, "__init__", made)
        patch.setattr(speculative.Decoder, "start", started)
        patch.setattr(speculative.Decoder, "idle", refilled)
        yield patch


# ---- dspine-generate: G01 -----------------------------------------------------------------------

BASE = "--target {target} --dtype float32 --max-new-tokens 12"
DRAFTED = f"{BASE} --drafter {{dspine}} --no-baseline --json"
PLAIN = f"{BASE} --json"


def run_generate(root: Path, text: str, out: io.StringIO | None = None, interrupt_at: int | None = None) -> Outcome:
    """``interrupt_at``: Ctrl-C in that call of the decode loop; the first one only compiles."""
    outcome, run = Outcome(), speculative.Decoder.run
    calls = []
    make_report = generate.report_answers

    def reported(report, by_prompt, answers, *args, **kwargs):
        outcome.answers = answers
        return make_report(report, by_prompt, answers, *args, **kwargs)

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == interrupt_at:
            raise KeyboardInterrupt
        return run(self, *args, **kwargs)

    with spied(outcome) as patch:
        patch.setattr(speculative.Decoder, "run", interrupted)
        patch.setattr(generate, "report_answers", reported)
        return call(generate.main, filled(text, root), outcome, out)


def tokens(outcome: Outcome):
    return outcome.report["tokens"]


def weights_dtype(outcome: Outcome) -> str:
    return str(outcome.decoders[0].target.output_embedding_VD.dtype)


def drafter_kernels(outcome: Outcome):
    return outcome.decoders[0].drafter.kernels


def target_kernels(outcome: Outcome):
    return outcome.decoders[0].target.kernels


def most_proposed(outcome: Outcome) -> int:
    return max((r.proposed for r in outcome.rounds), default=0)


GENERATE = [
    Row("prompt", "'w10 w20'", "w11", tokens, PLAIN),
    Row("--prompts", "--prompts {one.jsonl}", "--prompts {two.jsonl}", tokens, PLAIN),
    Row("--target", "", "--target {other}", tokens, f"{PLAIN} 'w10 w20'"),
    Row("--drafter", "", "--drafter {dspine}", most_proposed, f"{PLAIN} --no-baseline 'w10 w20'"),
    Row("--tokenizer", "", "--tokenizer {shuffled}", tokens, f"{PLAIN} 'w10 w20'"),
    Row("--template-mode", "", "--template-mode non-thinking", tokens, f"{PLAIN} 'w10 w20'"),
    Row("--raw", "", "--raw", tokens, f"{PLAIN} 'w10 w20'"),
    Row("--max-new-tokens", "", "--max-new-tokens 5", lambda o: len(tokens(o)), f"{PLAIN} 'w10 w20'"),
    Row("--num-draft-tokens", "", "--num-draft-tokens 1", most_proposed, f"{DRAFTED} 'w10 w20'"),
    Row("--temperature", "", "--temperature 1", tokens, f"{DRAFTED} 'w10 w20'"),
    Row("--top-k", "", "--top-k 1", tokens, f"{PLAIN} --temperature 1 --prompts {{two.jsonl}} --batch-size 2"),
    Row("--top-p", "", "--top-p 1e-6", tokens, f"{PLAIN} --temperature 1 --prompts {{two.jsonl}} --batch-size 2"),
    Row("--policy", "", "--policy point_mass", lambda o: o.rounds, f"{DRAFTED} --temperature 1 'w10 w20'"),
    Row("--confidence-threshold", "", "--confidence-threshold 0.9999", most_proposed, f"{PLAIN} --no-baseline --drafter {{dspark}} 'w10 w20'"),
    Row("--seed", "", "--seed 1", tokens, f"{DRAFTED} --temperature 1 'w10 w20'"),
    Row("--batch-size", "", "--batch-size 1", lambda o: set(o.started), f"{PLAIN} --prompts {{two.jsonl}}"),
    Row("--dtype", "", "--dtype bfloat16", weights_dtype, f"{PLAIN} 'w10 w20'"),
    Row("--kernel", "", "--kernel injection=xla --kernel cached_attention=xla", (drafter_kernels, target_kernels), f"{DRAFTED} 'w10 w20'"),
    Row("--check", "", "--check", lambda o: o.code, f"{DRAFTED} 'w10 w20'"),  # with a careless loop
    Row("--no-baseline", "", "--no-baseline", lambda o: len(o.decoders), f"{BASE} --drafter {{dspine}} 'w10 w20'"),
    Row("--json", "", "--json", lambda o: o.out.startswith("{"), f"{BASE} 'w10 w20'"),
]


@pytest.fixture(scope="module")
def generated(files):
    """``run_generate``, once for each command line."""
    done = {}

    def run(text: str) -> Outcome:
        key = tuple(filled(text, files))
        if key not in done:
            done[key] = run_generate(files, text)
        return done[key]

    return run


@pytest.mark.parametrize("row", [row for row in GENERATE if row.option != "--check"], ids=lambda row: row.option)
def test_every_option_of_generate_changes_something(row, generated):
    """G01. A later setting replaces an earlier one of the same option."""
    first, second = (generated(f"{row.common} {setting}") for setting in (row.first, row.second))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    row.check(first, second)


def test_top_k_1_and_a_tiny_top_p_leave_the_greedy_text(generated):
    """What the two rows above must look like, not only that they differ."""
    common = f"{PLAIN} --prompts {{two.jsonl}} --batch-size 2"
    greedy = tokens(generated(common))
    assert tokens(generated(f"{common} --temperature 1 --top-k 1")) == greedy == tokens(generated(f"{common} --temperature 1 --top-p 1e-6"))


# ---- dspine-generate as a whole -----------------------------------------------------------------

SAMPLED = f"{BASE} --drafter {{dspine}} --no-baseline --temperature 1 'w10 w20'"
COLOURED = re.compile("\x1b\\[([12]);\\d+m(.*?)\x1b\\[0m", re.S)


@pytest.mark.parametrize("name", generate.UNSUPPORTED)
def test_sampling_options_that_are_not_computed_are_refused_by_name(name, capsys):
    """Wherever they stand, and in both spellings: ignoring one would change the law of the text without a word."""
    for extra in ([name, "0.1", "hello"], ["hello", name, "0.1"], ["hello", f"{name}=0.1"], ["hello", name]):
        with pytest.raises(SystemExit) as stop:
            generate.main(["--target", "nowhere", *extra])
        assert stop.value.code == 2
        assert f"{name} is not supported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "give one prompt, or a file with --prompts"),
        ("hello --prompts {one.jsonl}", "give one prompt, or a file with --prompts"),
        ("hello --check --drafter {dspine} --temperature 0.5", "--check compares with plain greedy decoding; it needs --temperature 0, not 0.5"),
        ("hello --max-new-tokens 0", "--max-new-tokens 0 must be at least 1"),
        ("--prompts {one.jsonl} --batch-size 0", "--batch-size 0 must be at least 1"),
        ("hello --temp 1", "unrecognized argument --temp"),
        ("hello --max-new-tokens many", "--max-new-tokens: invalid int value: 'many'"),
        ("hello --dtype float16", "--dtype: invalid choice: 'float16'"),
    ],
)
def test_impossible_command_lines_end_with_code_2(text, words, files):
    outcome = call(generate.main, filled(f"--target {{target}} {text}", files))
    assert outcome.code == 2 and words in outcome.err and not outcome.out


BAD_INPUT = [
    ("--prompts {missing.jsonl}", ["missing.jsonl"]),
    ("--prompts {data}", ["data"]),
    ("--prompts {broken.jsonl}", ["broken.jsonl, line 2: not JSON"]),
    ("--prompts {empty.jsonl}", ["empty.jsonl holds no prompt"]),
    ("--prompts {nameless.jsonl}", ["nameless.jsonl, line 1: needs"]),
    ("--raw ''", ["prompt 0 is empty"]),
    ("--prompts {mixed.jsonl} --raw", ["mixed.jsonl, line 3: prompt 1 is empty", "also of no use: lines 4, 6"]),
    (f"'{'w9 ' * 70}'", ["prompt 0 has 73 tokens", "context limit of 64"]),
    ("hello --temperature -1", ["temperature -1.0"]),
    ("hello --temperature nan", ["temperature nan"]),
    ("hello --temperature 1 --top-k -3", ["top_k -3"]),
    ("hello --temperature 1 --top-p 1.5", ["top_p 1.5"]),
    ("hello --drafter {dspine} --num-draft-tokens 4", ["num_draft_tokens 4 exceeds the 3"]),
    ("hello --drafter {dspine} --num-draft-tokens -1", ["num_draft_tokens -1"]),
    ("hello --num-draft-tokens 1", ["num_draft_tokens 1 needs a drafter"]),
    ("hello --drafter {dflash} --temperature 1 --policy tail_mixed", ["policy 'tail_mixed'", "dflash"]),
    ("hello --drafter {nowhere}", ["nowhere/config.json is missing"]),
    ("hello --target {nowhere}", ["nowhere: no such file or folder"]),
    ("hello --target {one.jsonl}", ["one.jsonl: not a .gguf file"]),
    ("hello --tokenizer {data}", ["data/tokenizer.json is missing"]),
    ("hello --kernel injektion=xla", ["--kernel: unknown key injektion; did you mean injection?"]),
    ("hello --kernel injection=fast", ["kernels.injection 'fast' is none of 'xla', 'pallas'"]),
    ("hello --kernel injection", ["--kernel 'injection' is not of the form OP=IMPLEMENTATION"]),
    ("hello --kernel head_softmax=xla", ["kernels.head_softmax is 'xla', but decoding never calls it"]),
    ("hello --kernel cached_attention=pallas", ["cached_attention: 'pallas'", "cannot run on a CPU"]),
    ("hello --tokenizer {no_template}", ["no chat template; use --raw"]),
]


@pytest.mark.parametrize(("text", "words"), BAD_INPUT, ids=[text[:40] for text, _ in BAD_INPUT])
def test_bad_input_is_named_in_one_line(text, words, files):
    outcome = call(generate.main, filled(f"--target {{target}} --dtype float32 {text}", files))
    assert outcome.code == 2 and not outcome.out
    assert outcome.err.startswith("error: ") and outcome.err.count("\n") == 1, outcome.err
    assert all(word in outcome.err for word in words), outcome.err


def test_json_is_one_object_of_what_was_decoded(generated):
    outcome = generated(f"{BASE} --drafter {{dspine}} --json 'w10 w20'")
    assert outcome.code == 0 and outcome.out.count("\n") == 1
    report, (answer,) = outcome.report, outcome.answers
    assert report["tokens"] == answer.tokens and len(answer.tokens) == 12
    assert report["text"] == " ".join(WORDS[token] for token in answer.tokens)
    assert (report["rounds"], report["tau"]) == (len(answer.rounds), pytest.approx(11 / len(answer.rounds)))
    assert report["prompt_tokens"] == 5 and report["finish_reason"] == "length" and report["interrupted"] is False
    assert report["tokens_per_s"] > 0 and report["plain_tokens_per_s"] > 0 and report["matches_greedy"] is True
    assert report["speedup"] == pytest.approx(report["tokens_per_s"] / report["plain_tokens_per_s"])


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_streamed_text_is_that_of_the_report(temperature, generated):
    """Round by round on one side, all at once on the other."""
    common = f"{BASE} --drafter {{dspine}} --no-baseline --temperature {temperature} 'w10 w20'"
    assert generated(common).out == generated(f"{common} --json").report["text"] + "\n"


def test_a_terminal_shows_accepted_drafts_bright_and_the_targets_tokens_dim(files, generated):
    outcome = run_generate(files, SAMPLED, Terminal())
    report = generated(f"{SAMPLED} --json").report
    assert re.sub("\x1b\\[[0-9;]*m", "", outcome.out) == report["text"] + "\n"
    shown = {"1": [], "2": []}
    for bright, text in COLOURED.findall(outcome.out):
        shown[bright] += text.split()
    expected = {"1": [], "2": []}
    for r in outcome.rounds:
        words = [WORDS[token] for token in report["tokens"][r.anchor + 1 : r.anchor + 1 + r.tokens]]
        expected["1"] += words[: r.accepted]
        expected["2"] += words[r.accepted :]
    assert shown == expected and shown["1"] and shown["2"]
    assert "\x1b" not in generated(SAMPLED).out


class Broken(Terminal):
    """A terminal at which Ctrl-C comes in the middle of a write."""

    writes = 0

    def write(self, text: str) -> int:
        self.writes += "\x1b" in text
        if self.writes == 4:
            super().write(text[: len(text) // 2])
            raise KeyboardInterrupt
        return super().write(text)


@pytest.mark.parametrize("out", [Terminal, Broken])
def test_ctrl_c_leaves_the_text_so_far_and_no_colour(out, files, generated):
    outcome = run_generate(files, SAMPLED, out(), interrupt_at=5 if out is Terminal else None)
    assert outcome.code == 130 and "interrupted" in outcome.err
    escapes = re.findall("\x1b\\[[0-9;]*m", outcome.out)
    assert len(escapes) > 4 and escapes[-1] == "\x1b[0m"
    words, whole = re.sub("\x1b\\[[0-9;]*m", "", outcome.out).split(), generated(f"{SAMPLED} --json").report["text"].split()
    assert 2 < len(words) < 12 and words[:-1] == whole[: len(words) - 1]
    if out is Terminal:  # the other one stopped inside a word
        assert words[-1] == whole[len(words) - 1]


def test_ctrl_c_without_a_terminal_prints_the_text_so_far(files, generated):
    outcome = run_generate(files, SAMPLED, interrupt_at=5)
    whole = generated(f"{SAMPLED} --json").report["text"]
    assert outcome.code == 130 and whole.startswith(outcome.out) and 2 < len(outcome.out.split()) < 12


def test_ctrl_c_with_json_reports_what_was_decoded(files, generated):
    """Call 1 compiles, call 2 runs 32 rounds, call 3 is interrupted."""
    text = f"{DRAFTED} --max-new-tokens 50 'w10 w20'"
    whole, outcome = generated(text).report, run_generate(files, text, interrupt_at=3)
    assert outcome.code == 130 and outcome.out.count("\n") == 1
    report = outcome.report
    assert report["interrupted"] is True and whole["interrupted"] is False
    assert 32 < len(report["tokens"]) < len(whole["tokens"]) == 50
    assert report["tokens"] == whole["tokens"][: len(report["tokens"])]
    assert report["text"] == " ".join(WORDS[token] for token in report["tokens"])
    assert report["rounds"] == 32 and report["tokens_per_s"] is None


@pytest.mark.parametrize("drafter", ["", "--drafter {dspine} --no-baseline"])
def test_ctrl_c_among_prompts_keeps_what_there_is(drafter, files, generated):
    """Call 1 compiles; later ones decode. Finished answers are whole and those begun are marked, each with the line of its prompt."""
    text = f"{PLAIN} {drafter} --prompts {{many.jsonl}} --batch-size 4 --max-new-tokens 50"
    whole, outcome = generated(text).report, run_generate(files, text, interrupt_at=5)
    report = outcome.report
    assert outcome.code == 130 and report["interrupted"] is True and report["tokens_per_s"] is None
    assert len({len(report[name]) for name in ("text", "tokens", "finish_reason", "prompt_tokens", "line")}) == 1
    finished = [line for line, reason in zip(report["line"], report["finish_reason"]) if reason != "unfinished"]
    assert 4 <= len(finished) < 9 and len(finished) < len(report["line"]) < 9 and report["line"] == sorted(report["line"])
    for i, line in enumerate(report["line"]):
        tokens, all_tokens = report["tokens"][i], whole["tokens"][line - 1]
        assert tokens == all_tokens if line in finished else 0 < len(tokens) < 50 and tokens == all_tokens[: len(tokens)]
        assert report["prompt_tokens"][i] == whole["prompt_tokens"][line - 1]
    shown = run_generate(files, text.replace("--json", ""), interrupt_at=5)
    assert shown.code == 130 and shown.out == "".join(text + "\n\n" for text in report["text"])
    assert f"interrupted: {len(finished)} answers are whole" in shown.err


def test_ctrl_c_in_the_plain_run_keeps_the_whole_text(files, generated):
    """The answer is there; only the comparison is missing."""
    text = f"{BASE} --drafter {{dspine}} --json 'w10 w20'"
    outcome = run_generate(files, text, interrupt_at=3)
    assert outcome.code == 130 and outcome.report["tokens"] == tokens(generated(text)) and "matches_greedy" not in outcome.report


def test_ctrl_c_while_loading_is_one_line(files, monkeypatch):
    def load(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "load", load)
    outcome = run_generate(files, f"{DRAFTED} hello")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "interrupted\n")


@pytest.mark.parametrize("law", ["", "--temperature 1"])
@pytest.mark.parametrize("drafter", ["", "--drafter {dspine} --no-baseline", "--drafter prompt-lookup --no-baseline"])
def test_prompts_of_a_file_are_answered_as_if_alone(law, drafter, files, generated):
    """In the order of the file, for every batch size; the first prompt's text is that of the prompt alone, as both have key 0."""
    text = f"{PLAIN} {law} {drafter}"
    one, three, chosen = (generated(f"{text} --prompts {{many.jsonl}} {size}") for size in ("--batch-size 1", "--batch-size 3", ""))
    assert len(tokens(one)) == 9 and len(set(map(tuple, tokens(one)))) == 9 and one.report["line"] == list(range(1, 10))
    assert tokens(one) == tokens(three) == tokens(chosen) and one.rounds == three.rounds == chosen.rounds
    assert [{B for B, _ in outcome.started} for outcome in (one, three, chosen)] == [{1}, {3}, {9}]
    assert "9 of 9 prompts are decoded together (--batch-size)" in chosen.err and "together" not in three.err
    assert tokens(generated(f"{text} w10")) == tokens(one)[0]
    shown = generated(f"{text} --prompts {{many.jsonl}} --batch-size 3".replace("--json", ""))
    assert shown.out == "".join(text + "\n\n" for text in three.report["text"])


def test_a_prompt_lookup_writes_the_text_of_plain_decoding(generated):
    """Alone and from a file; 15 drafts a round, or as many as are asked for; it has one policy."""
    for prompts in ("'w10 w20 w10'", "--prompts {many.jsonl} --batch-size 3"):
        drafted, plain = (generated(f"{PLAIN} --max-new-tokens 40 {drafter} {prompts}") for drafter in ("--drafter prompt-lookup --check", ""))
        assert drafted.code == 0 and drafted.report["matches_greedy"] and tokens(drafted) == tokens(plain)
        assert 4 < most_proposed(drafted) <= 15 and drafted.report["tau"] > 1
    assert most_proposed(generated(f"{PLAIN} --max-new-tokens 40 --drafter prompt-lookup --num-draft-tokens 2 --no-baseline 'w10 w20 w10'")) == 2
    refused = generated(f"{PLAIN} --temperature 1 --drafter prompt-lookup --policy point_mass w10")
    assert refused.code == 2 and "policy 'point_mass' cannot be served by a prompt-lookup drafter" in refused.err


def test_prompts_of_a_file_have_a_progress_bar_in_a_terminal(files, monkeypatch):
    """Answers, tokens a second and the time left."""
    err = Terminal()
    monkeypatch.setattr("sys.stderr", err)
    assert generate.main(filled(f"{PLAIN} --prompts {{many.jsonl}} --batch-size 3", files)) == 0
    last = err.getvalue().rstrip().split("\r")[-1]
    assert "decoding: 100%" in last and "9/9" in last and re.search(r"\d tokens/s", last) and re.search(r"<\d\d:\d\d", last)


def test_the_device_decides_how_many_prompts_are_decoded_together(files, generated, monkeypatch):
    """What it can hold, and no more than there are; a number given wins; out of memory is one line."""
    monkeypatch.setattr(memory, "default_batch_size", lambda row: 2)
    few = run_generate(files, f"{PLAIN} --prompts {{many.jsonl}}")
    assert "2 of 9 prompts are decoded together" in few.err and few.report["batch_size"] == 2 and {B for B, _ in few.started} == {2}
    assert tokens(few) == tokens(generated(f"{PLAIN} --prompts {{many.jsonl}} --batch-size 3"))
    assert run_generate(files, f"{PLAIN} --prompts {{many.jsonl}} --batch-size 5").report["batch_size"] == 5

    def full(*args, **kwargs):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")

    monkeypatch.setattr(speculative.Decoder, "idle", full)
    outcome = run_generate(files, f"{PLAIN} --prompts {{many.jsonl}} --batch-size 7")
    assert outcome.code == 2 and outcome.err.startswith("error: out of memory; --batch-size 7 is too many") and outcome.err.count("\n") == 1


def test_the_benchmark_of_prompts_compares_both_ways(files, tmp_path, capsys):
    """Texts of all four runs are equal, with and without a drafter; a table, and JSON."""
    from serve import bench_prompts

    options = filled(f"{BASE} --drafter {{dspine}} --prompts {{many.jsonl}} --batch-size 3", files)
    assert bench_prompts.main([*options, "--repeats", "2", "--limit", "7", "--output", str(tmp_path / "out" / "b.json")]) == 0
    report = json.loads((tmp_path / "out" / "b.json").read_text())
    ways = [(decoder, way) for decoder in ("plain", "drafter") for way in ("batches", "refill")]
    assert [(run["decoder"], run["way"]) for run in report["runs"]] == ways
    assert all(run["same_texts"] == 7 and run["tokens"] == report["runs"][0]["tokens"] and run["tokens_per_s"] > 0 for run in report["runs"])
    assert report["batch_size"] == 3 and report["max_new_tokens"] == 12
    assert capsys.readouterr().out.count("\n") == 6


# ---- edges --------------------------------------------------------------------------------------

FULL = f"'{'w9 ' * 61}'"  # with the template 64 tokens, all that the context holds


def test_a_prompt_that_fills_the_context_gives_an_empty_answer(files):
    """No token in no time: the speed-up is 0 / 0, which must not end the command."""
    outcome = run_generate(files, f"{BASE} --drafter {{dspine}} --json {FULL}")
    assert outcome.code == 0 and outcome.report["tokens"] == [] and outcome.report["speedup"] is None


def test_plain_decoding_warns_of_nothing(files):
    """Nothing accepted over nothing proposed is 0 / 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert run_generate(files, f"{PLAIN} 'w10 w20'").code == 0


def test_a_check_without_a_drafter_compares_or_is_refused(files):
    """An exit code of 0 must not mean that nothing was compared."""
    outcome = run_generate(files, f"{PLAIN} --check 'w10 w20'")
    assert outcome.code == 2 or "matches_greedy" in outcome.report


@pytest.mark.parametrize(
    ("text", "words"),
    [("hello --tokenizer {bare}", "bare"), ("--prompts {latin.jsonl}", "latin.jsonl")],
    ids=["a tokenizer.json without its fields", "prompts that are not UTF-8"],
)
def test_damaged_input_is_named_in_one_line(text, words, files):
    (files / "latin.jsonl").write_bytes('{"prompt": "caf\xe9"}\n'.encode("latin-1"))
    outcome = run_generate(files, f"{BASE} {text}")
    assert outcome.code == 2 and outcome.err.startswith("error: ") and outcome.err.count("\n") == 1 and words in outcome.err


def test_an_interrupted_report_does_not_call_the_answer_finished(files):
    report = run_generate(files, f"{PLAIN} --max-new-tokens 50 'w10 w20'", interrupt_at=3).report
    assert report["tokens"] and report["finish_reason"] not in ("length", "stop")


def test_an_answer_that_ends_inside_a_character_is_streamed_whole():
    """A length cap may cut a character; the report then ends with U+FFFD, and so must the stream."""
    pieces = {7: "a", 8: "\ufffd"}
    tokenizer = types.SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(pieces[i] for i in ids))
    out = io.StringIO()
    generate.Stream(tokenizer, out, False)([Generation([7, 8], [replay.Round(0, 0, 0, 1)], "length")])
    assert out.getvalue() == "a\ufffd"


# ---- dspine-evaluate: G01 -----------------------------------------------------------------------


def run_evaluate(root: Path, text: str, folder: Path) -> Outcome:
    """Replay judged by made-up drafts that depend on every weight, instead of compiled passes; generation and real decoding are real."""
    outcome = Outcome(folder=folder)

    def judging(kind: str):
        def make(drafter, target, *settings, dtype, anchors_per_chunk):
            weights = jax.tree.leaves((nnx.state(drafter), nnx.state(target)))
            number = zlib.crc32(b"".join(np.asarray(x).tobytes() for x in weights))

            def judge(tokens_BS, anchors_BN):
                shape, J = anchors_BN.shape, drafter.config.num_draft_tokens
                outcome.judged.append((kind, settings[1:], weights[-1].dtype, dtype, anchors_per_chunk, tokens_BS, anchors_BN))
                if kind == "odds":
                    return np.random.default_rng(number).uniform(size=(*shape, J))
                positions_BNJ = np.minimum(anchors_BN[..., None] + 1 + np.arange(J), tokens_BS.shape[1] - 1)
                right_BNJ = np.random.default_rng(number).uniform(size=positions_BNJ.shape) < 0.6
                return np.where(right_BNJ, tokens_BS[np.arange(shape[0])[:, None, None], positions_BNJ], -1)

            return judge

        return make

    with spied(outcome) as patch:
        patch.setattr(replay, "make_drafting", judging("drafts"))
        patch.setattr(decoding, "make_drafting", judging("drafts"))
        patch.setattr(replay, "make_accept_odds", judging("odds"))
        patch.setattr(plots, "draw", lambda content, temperature, path: None)
        return call(evaluate.main, [*filled(text, root), "--output", str(folder)], outcome)


def scored(outcome: Outcome) -> dict:
    """Rounds of every temperature, method and benchmark."""
    results = json.loads((outcome.folder / "results.json").read_text())["temperatures"]
    return {
        (temperature, name): entry["rounds"]
        for temperature, content in results.items()
        for method in content["methods"].values()
        for name, entry in method["benchmarks"].items()
    }


def texts(outcome: Outcome) -> list:
    """Token rows that were judged."""
    return [tokens_BS.tolist() for *_, tokens_BS, _ in outcome.judged]


def decoded(outcome: Outcome) -> list:
    """Rounds that real decoding ran."""
    contents = json.loads((outcome.folder / "results.json").read_text())["temperatures"]
    return [entry.get("rounds") for content in contents.values() for entry in content.get("decoding", [])]


def drafter_of_the_loop(outcome: Outcome):
    """What the timed decoding with a drafter was compiled with."""
    return next(decoder.drafter.kernels for decoder in outcome.decoders if decoder.drafter is not None)


def kernels_of_results(outcome: Outcome):
    return json.loads((outcome.folder / "results.json").read_text()).get("kernels")


STORED = "--target {target} --drafter {dspine} --data {data} --dtype float32 --max-new-tokens 12 --batch-size 2"
WRITTEN = STORED.replace("--data {data}", "--benchmarks {two.jsonl}")
HOT = f"{WRITTEN} --temperature 1"

EVALUATE = [
    Row("--target", "", "--target {other}", scored, STORED),
    Row("--drafter", "--drafter {dspine}", "--drafter {dflash}", scored, STORED.replace("--drafter {dspine}", "")),
    Row("--data", "", "--data {data/first}", scored, STORED),
    Row("--benchmarks", "", "--benchmarks {one.jsonl}", texts, WRITTEN),
    Row("--tokenizer", "", "--tokenizer {shuffled}", texts, WRITTEN),
    Row("--template-mode", "", "--template-mode non-thinking", texts, WRITTEN),
    Row("--prompts", "", "--prompts 1", lambda o: sum(len(prompts[0]["full"]) for prompts in scored(o).values()), STORED),
    Row("--temperature", "", "--temperature 0 1", lambda o: [kind for kind, *_ in o.judged], WRITTEN),
    Row("--top-k", "", "--top-k 1", texts, HOT),
    Row("--top-p", "", "--top-p 1e-6", texts, HOT),
    Row("--max-new-tokens", "", "--max-new-tokens 5", texts, WRITTEN),
    Row("--seed", "", "--seed 1", texts, HOT),
    Row("--decode", "", "--decode 1", lambda o: len(decoded(o)), STORED),
    Row("--decode-batch-size", "", "--decode-batch-size 2", lambda o: set(o.started), f"{STORED} --decode 1"),
    Row("--decode-drafts", "", "--decode-drafts 1", lambda o: max(r[1] for rounds in decoded(o)[1] for r in rounds), f"{STORED} --decode 1"),
    Row("--dtype", "", "--dtype bfloat16", lambda o: o.judged[0][2], STORED),
    Row("--kernel", "", "--kernel topk_logits=chunks", (drafter_of_the_loop, kernels_of_results), f"{STORED} --decode 1"),
    Row("--batch-size", "", "--batch-size 3", lambda o: o.judged[0][-2].shape[0], STORED),
    Row("--anchors-per-chunk", "", "--anchors-per-chunk 7", (lambda o: o.judged[0][4], lambda o: o.judged[0][-1].shape[1]), STORED),
]


@pytest.fixture(scope="module")
def evaluated(files, tmp_path_factory):
    """``run_evaluate`` into a new folder, once for each command line."""
    done = {}

    def run(text: str) -> Outcome:
        key = tuple(filled(text, files))
        if key not in done:
            done[key] = run_evaluate(files, text, tmp_path_factory.mktemp("results"))
        return done[key]

    return run


@pytest.mark.parametrize("row", EVALUATE, ids=lambda row: row.option)
def test_every_option_of_evaluate_changes_something(row, evaluated):
    """G01."""
    first, second = (evaluated(f"{row.common} {setting}") for setting in (row.first, row.second))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    row.check(first, second)


def test_evaluate_writes_where_output_says(evaluated):
    """The row of --output: the fixture gives every command line its own folder."""
    first, second = evaluated(STORED), evaluated(f"{STORED} --target {{other}}")
    assert first.folder != second.folder
    for outcome in (first, second):
        assert {path.name for path in outcome.folder.iterdir()} == {"parts", "results.json", "results.md"}


def test_sampled_continuations_of_top_k_1_and_a_tiny_top_p_are_the_greedy_ones(evaluated):
    greedy = texts(evaluated(WRITTEN))[0]
    assert texts(evaluated(f"{HOT} --top-k 1"))[0] == greedy == texts(evaluated(f"{HOT} --top-p 1e-6"))[0] != texts(evaluated(HOT))[0]


def test_a_prompt_that_fills_the_context_does_not_end_an_evaluation(files, tmp_path):
    """Plain decoding of an empty answer has no speed to divide by."""
    (tmp_path / "full.jsonl").write_text(json.dumps({"prompt": "w9 " * 61}) + "\n")
    assert run_evaluate(files, f"{WRITTEN} --benchmarks {tmp_path / 'full.jsonl'} --decode 1", tmp_path / "out").code == 0


# ---- serve.probe: G01 ---------------------------------------------------------------------------


def run_probe(root: Path, text: str, folder: Path) -> Outcome:
    """Made-up judgements that depend on every weight and on what is asked, instead of compiled passes."""
    outcome = Outcome(folder=folder)

    def judging(kind: str):
        def make(drafter, target, *settings, dtype, anchors_per_chunk):
            weights = jax.tree.leaves((nnx.state(drafter), nnx.state(target)))
            number = zlib.crc32(b"".join(np.asarray(x).tobytes() for x in weights) + repr(settings).encode())
            L, J, Z = drafter.config.num_layers, drafter.config.num_draft_tokens, len(settings[0]) if settings else 0

            def judge(tokens_BS, anchors_BN):
                outcome.judged.append((kind, settings, weights[-1].dtype, dtype, anchors_per_chunk, tokens_BS, anchors_BN))
                draw = lambda *shape: np.random.default_rng(number).uniform(size=(*anchors_BN.shape, *shape))  # noqa: E731
                if kind == "readout":
                    return draw(L, J) < 0.6
                if kind == "context":
                    by_m = {name: draw(J - 1) < 0.6 for name in ("correct", "undecided", "drafted", "draft_right")}
                    return by_m | {"plain": draw(J) < 0.6, "filled": draw(J - 1, Z, J) < 0.6, "supplied": draw(J - 1, Z) < 0.6}
                if kind == "injection":
                    return {name: draw(len(drafter.config.injection_layers), J) for name in ("gate", "write", "cosine", "nearest")}
                if kind == "tree":
                    return np.floor(draw(Z) * (J + 1)).astype(int)
                positions_BNJ = np.minimum(anchors_BN[..., None] + 1 + np.arange(J), tokens_BS.shape[1] - 1)
                text_BNJ = tokens_BS[np.arange(len(tokens_BS))[:, None, None], positions_BNJ]
                text = text_BNJ[:, :, None] if kind == "true" else text_BNJ
                return np.where(draw(Z, J) < 0.6 if kind == "true" else draw(J) < 0.6, text, -1)

            return judge

        return make

    with pytest.MonkeyPatch.context() as patch:
        for kind in ("readout", "context", "injection"):
            patch.setattr(probes, f"make_{kind}_probe", judging(kind))
        patch.setattr(replay, "make_drafting", judging("drafts"))
        patch.setattr(bounds, "make_true_feature_drafting", judging("true"))
        patch.setattr(bounds, "make_tree_replay", judging("tree"))
        patch.setattr(probe_plots, "draw", lambda results, path: None)
        return call(probe.main, [*filled(text, root), "--output", str(folder)], outcome)


def probed_figures(outcome: Outcome) -> dict:
    return json.loads((outcome.folder / "probe.json").read_text())["probes"]


def asked(outcome: Outcome) -> set:
    """What was asked with which settings."""
    return {(kind, settings) for kind, settings, *_ in outcome.judged}


PROBED = "--target {target} --drafter {two_layers} --data {data} --dtype float32 --batch-size 2"
PROBE = [
    Row("--target", "", "--target {other}", probed_figures, PROBED),
    Row("--drafter", "", "--drafter {dspine}", probed_figures, PROBED),
    Row("--data", "", "--data {data/first}", (texts, probed_figures), PROBED),
    Row("--probes", "", "--probes readout", lambda o: {kind for kind, *_ in o.judged}, PROBED),
    Row("--layers", "--layers a=0", "--layers a=1", (asked, probed_figures), PROBED),
    Row("--tree-nodes", "", "--tree-nodes 4", asked, PROBED),
    Row("--prompts", "", "--prompts 1", (texts, probed_figures), PROBED),
    Row("--every", "", "--every 2", (lambda o: [judged[-1].tolist() for judged in o.judged], probed_figures), PROBED),
    Row("--dtype", "", "--dtype bfloat16", (lambda o: {judged[2] for judged in o.judged}, lambda o: {judged[3] for judged in o.judged}), PROBED),
    Row("--batch-size", "", "--batch-size 3", lambda o: {len(text) for text in texts(o)}, PROBED),
    Row("--anchors-per-chunk", "", "--anchors-per-chunk 5", lambda o: {judged[4] for judged in o.judged}, PROBED),
]


@pytest.fixture(scope="module")
def probed(files, tmp_path_factory):
    return once_each(run_probe, files, lambda: tmp_path_factory.mktemp("probed"))


@pytest.mark.parametrize("row", PROBE, ids=lambda row: row.option)
def test_every_option_of_probe_changes_something(row, probed):
    """G01."""
    first, second = (probed(f"{row.common} {setting}") for setting in (row.first, row.second))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    row.check(first, second)


def test_probe_writes_where_output_says_and_takes_over_what_is_finished(files, probed):
    """The row of --output; only what was made from other inputs is asked again."""
    first, second = probed(PROBED), probed(f"{PROBED} --target {{other}}")
    assert first.folder != second.folder
    assert all({path.name for path in outcome.folder.iterdir()} == {"parts", "probe.json", "probe.md"} for outcome in (first, second))
    before, written = probed_figures(first), (first.folder / "probe.md").read_text()
    again = run_probe(files, PROBED, first.folder)
    assert again.code == 0 and not again.judged and probed_figures(again) == before and again.out == written
    assert {kind for kind, *_ in run_probe(files, f"{PROBED} --tree-nodes 4", first.folder).judged} == {"drafts", "true", "tree"}
    assert {kind for kind, *_ in run_probe(files, f"{PROBED} --every 2", first.folder).judged} == {"readout", "context", "injection", "drafts", "true", "tree"}


# ---- dspine-convert: G01 ------------------------------------------------------------------------


def run_convert(root: Path, text: str, folder: Path) -> Outcome:
    return call(convert.main, [*filled(text, root), "--output", str(folder)], Outcome(folder=folder))


def array(name: str) -> Callable:
    return lambda outcome: np.load(outcome.folder / f"{name}.npy").tolist()


def manifest(name: str) -> Callable:
    return lambda outcome: json.loads((outcome.folder / "manifest.json").read_text())[name]


def exit_code(outcome: Outcome):
    return outcome.code


CONVERT = [
    Row("input", "{a.npz}", "{b.npz}", array("tokens")),
    Row("--sources", "", "--sources 0,2", array("lengths"), "{a.npz}"),
    Row("--limit", "", "--limit 2", array("lengths"), "{a.npz}"),
    Row("--vocab-size", "", "--vocab-size 20", exit_code, "{a.npz}"),
    Row("--prompt-columns", "", "--prompt-columns 250", array("loss_mask"), "{a.npz}"),
    Row("--tokenizer", "--tokenizer {x.json}", "--tokenizer {y.json}", manifest("tokenizer_sha256"), "{a.npz}"),
    # These two are kept for people, beside the data they tell of; nothing reads them back.
    Row("--target", "", "--target model.gguf", manifest("target"), "{a.npz}"),
    Row("--template-mode", "", "--template-mode thinking", manifest("template_mode"), "{a.npz}"),
]


@pytest.mark.parametrize("row", CONVERT, ids=lambda row: row.option)
def test_every_option_of_convert_changes_something(row, files, tmp_path):
    """G01."""
    first, second = (run_convert(files, f"{row.common} {setting}", tmp_path / name) for name, setting in (("1", row.first), ("2", row.second)))
    assert first.code == 0, first.err
    assert second.code == 0 or row.observe is exit_code
    row.check(first, second)


def test_convert_writes_where_output_says_and_over_a_folder_only_when_told(files, tmp_path):
    """The rows of --output and --overwrite."""
    first, second = (run_convert(files, "{a.npz}", tmp_path / name) for name in ("1", "2"))
    assert tiny.fingerprints(first.folder) != {} and {path.name for path in tmp_path.iterdir()} == {"1", "2"}
    assert array("tokens")(first) == array("tokens")(second)
    refused = run_convert(files, "{b.npz}", tmp_path / "2")
    assert refused.code == 2 and "is not empty" in refused.err and array("tokens")(refused) == array("tokens")(first)
    replaced = run_convert(files, "{b.npz} --overwrite", tmp_path / "2")
    assert replaced.code == 0 and array("tokens")(replaced) != array("tokens")(first)


# ---- dspine-export: G01 -------------------------------------------------------------------------


def run_export(root: Path, text: str, folder: Path) -> Outcome:
    return call(export.main, [*filled(text, root), "--output", str(folder)], Outcome(folder=folder))


def weights(outcome: Outcome) -> dict:
    return {name: (str(x.dtype), x.tobytes()) for name, x in load_file(outcome.folder / "model.safetensors").items()}


EXPORT = [
    Row("drafter", "{dspine}", "{dflash}", weights, "--target {target}"),
    Row("--target", "", "--target {other}", weights, "{dspine} --target {target}"),  # the other LM head has another table T
    Row("--import", "", "--import", lambda o: "architectures" in json.loads((o.folder / "config.json").read_text()), "{dspine} --target {target}"),
    Row("--dtype", "", "--dtype float32", weights, "{dspine} --target {target}"),
    Row("--verify", "", "--verify", exit_code, "{dspine} --target {target}"),  # with a careless disk
    Row("--results", "", "--results {results.json}", lambda o: "2.50" in (o.folder / "README.md").read_text(), "{dspine} --target {target}"),
]


@pytest.mark.parametrize("row", EXPORT, ids=lambda row: row.option)
def test_every_option_of_export_changes_something(row, files, tmp_path, monkeypatch):
    """G01."""
    if row.option == "--verify":
        write = weight_folder.write_tensors
        monkeypatch.setattr(weight_folder, "write_tensors", lambda folder, tensors: write(folder, tensors | {"norm.weight": -tensors["norm.weight"]}))
    first, second = (run_export(files, f"{row.common} {setting}", tmp_path / name) for name, setting in (("1", row.first), ("2", row.second)))
    assert first.code == 0, first.err
    assert second.code == 0 or row.observe is exit_code
    row.check(first, second)


def test_export_writes_where_it_is_told_and_over_a_folder_only_when_told(files, tmp_path):
    """The rows of --output, --overwrite and --target-output."""
    first, second = (run_export(files, "{dspine} --target {target}", tmp_path / name) for name in ("1", "2"))
    assert weights(first) == weights(second) and {path.name for path in tmp_path.iterdir()} == {"1", "2"}
    refused = run_export(files, "{dflash} --target {target}", tmp_path / "2")
    assert refused.code == 2 and "is not empty" in refused.err and weights(refused) == weights(first)
    replaced = run_export(files, "{dflash} --target {target} --overwrite", tmp_path / "2")
    assert replaced.code == 0 and weights(replaced) != weights(first)
    write_tokenizer(tmp_path / "target.gguf", "smollm")
    assert call(export.main, ["--target", str(tmp_path / "target.gguf"), "--target-output", str(tmp_path / "3")]).code == 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "3").iterdir()}


# ---- dspine-prepare: G01 ------------------------------------------------------------------------

KEPT = "{talks.jsonl} --target {chat} --keep-answers --max-length 60"
ANSWERED = "{talks.jsonl} --target {chat} --dtype float32 --max-length 60 --max-new-tokens 12 --batch-size 2"
OWN = f"{ANSWERED} --self-prompts 30 --max-prompt-tokens 40"


def run_prepare(root: Path, text: str, folder: Path) -> Outcome:
    outcome = Outcome(folder=folder)
    with spied(outcome):
        return call(prepare.main, [*filled(text, root), "--output", str(folder)], outcome)


def files_written(outcome: Outcome) -> set[str]:
    return {path.name for path in outcome.folder.iterdir()} if outcome.folder.exists() else set()


def rows_accounted_for(outcome: Outcome) -> int:
    return manifest("rows")(outcome) + sum(manifest("skipped")(outcome).values())


PREPARE = [
    Row("input", "{talks.jsonl}", "{other_talks.jsonl}", array("tokens"), KEPT.replace("{talks.jsonl}", "")),
    Row("--target", "", "--target {other_chat}", (array("tokens"), manifest("target")), ANSWERED),
    Row("--tokenizer", "", "--tokenizer {plain}", array("tokens"), KEPT),
    Row("--template-mode", "", "--template-mode non-thinking", (array("tokens"), manifest("template_mode")), ANSWERED),
    Row("--max-length", "", "--max-length 40", array("lengths"), KEPT),
    Row("--limit", "", "--limit 2", array("lengths"), KEPT),
    Row("--strict", "", "--strict", exit_code, KEPT.replace("talks", "flawed")),
    Row("--dry-run", "", "--dry-run", files_written, KEPT),
    Row("--keep-answers", "", "--keep-answers", array("tokens"), "{talks.jsonl} --target {chat} --max-length 60"),
    Row("--temperature", "", "--temperature 0", array("tokens"), ANSWERED),
    Row("--top-p", "", "--top-p 1e-6", array("tokens"), ANSWERED),
    Row("--top-k", "", "--top-k 1", array("tokens"), ANSWERED),
    Row("--seed", "", "--seed 1", array("tokens"), ANSWERED),
    Row("--max-new-tokens", "", "--max-new-tokens 5", array("lengths"), ANSWERED),
    Row("--batch-size", "", "--batch-size 3", lambda o: set(o.started), ANSWERED),
    Row("--dtype", "", "--dtype bfloat16", weights_dtype, ANSWERED),
    Row("--self-prompts", "", "--self-prompts 24", rows_accounted_for, OWN),
    Row("--prompt-temperature", "", "--prompt-temperature 2", array("tokens"), OWN),
    Row("--max-prompt-tokens", "", "--max-prompt-tokens 20", (array("tokens"), manifest("skipped")), OWN),
]


def once_each(command, files, new_folder):
    """``command(files, text, folder)`` into a new folder, once for each command line."""
    done = {}

    def run(text: str) -> Outcome:
        key = tuple(filled(text, files))
        if key not in done:
            done[key] = command(files, text, new_folder())
        return done[key]

    return run


@pytest.fixture(scope="module")
def prepared(files, tmp_path_factory):
    return once_each(run_prepare, files, lambda: tmp_path_factory.mktemp("prepared") / "set")


@pytest.mark.parametrize("row", PREPARE, ids=lambda row: row.option)
def test_every_option_of_prepare_changes_something(row, prepared):
    """G01."""
    first, second = (prepared(f"{row.common} {setting}") for setting in (row.first, row.second))
    assert first.code == 0, first.err
    assert second.code == 0 or row.observe is exit_code, second.err
    row.check(first, second)


def test_the_rows_of_prepare_look_as_they_should(prepared):
    """Not only that they differ."""
    greedy = array("tokens")(prepared(f"{ANSWERED} --temperature 0"))
    assert array("tokens")(prepared(f"{ANSWERED} --top-k 1")) == greedy == array("tokens")(prepared(f"{ANSWERED} --top-p 1e-6"))
    assert array("tokens")(prepared(f"{ANSWERED} --batch-size 3")) == array("tokens")(prepared(ANSWERED))
    assert max(array("loss_mask")(prepared(f"{ANSWERED} --max-new-tokens 5")), key=sum).count(1) == 5
    assert array("lengths")(prepared(f"{KEPT} --limit 2")) == array("lengths")(prepared(KEPT))[:2]
    refused = prepared(f"{KEPT.replace('talks', 'flawed')} --strict")
    assert refused.code == 2 and "flawed.jsonl, line 4: no messages" in refused.err and not refused.folder.exists()
    dry = prepared(f"{KEPT} --dry-run")
    assert files_written(dry) == set() and "3 of 3 rows can be used" in dry.out
    assert rows_accounted_for(prepared(OWN)) == 3 + 30 and rows_accounted_for(prepared(f"{OWN} --self-prompts 24")) == 3 + 24


def test_prepare_writes_where_output_says_and_over_a_folder_only_when_told(files, tmp_path):
    """The rows of --output and --overwrite."""
    first, second = (run_prepare(files, KEPT, tmp_path / name) for name in ("1", "2"))
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2"} and array("tokens")(first) == array("tokens")(second)
    other = KEPT.replace("{talks", "{other_talks")
    refused = run_prepare(files, other, tmp_path / "2")
    assert refused.code == 2 and "is not empty" in refused.err and array("tokens")(refused) == array("tokens")(first)
    replaced = run_prepare(files, f"{other} --overwrite", tmp_path / "2")
    assert replaced.code == 0 and array("tokens")(replaced) != array("tokens")(first)


# ---- python -m train.pretrain: G01 --------------------------------------------------------------

PRETRAINED = "--data {text/rows} --tokenizer {text/tokenizer} --hidden-size 16 --num-layers 1 --head-dim 8 --num-kv-heads 1 --intermediate-size 32"
PRETRAINED += " --steps 3 --batch-size 8 --max-length 16 --learning-rate 0.05 --dtype float32"
SIZED = f"{PRETRAINED} --config-only"


def run_pretrain(root: Path, text: str, folder: Path) -> Outcome:
    outcome, make = Outcome(folder=folder), data.make_iterator

    def watched(*args, **kwargs):
        for batch in make(*args, **kwargs):
            outcome.fed.append(batch["tokens"].tolist())
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "make_iterator", watched)
        return call(pretrain.main, [*filled(text, root), "--output", str(folder)], outcome)


def learned(outcome: Outcome) -> dict:
    """Every weight that was written."""
    return {name: x.tobytes() for name, x in load_file(outcome.folder / "model.safetensors").items()}


def weight_shapes(outcome: Outcome) -> dict:
    """Of a target as config.json describes it: the one that is trained (tests/test_pretrain.py)."""
    target = nnx.eval_shape(lambda: Target(read_target_config(outcome.folder), rngs=nnx.Rngs(0)))
    return {path: variable.get_value().shape for path, variable in nnx.to_flat_state(nnx.state(target))}


def attention_shape(axis: int) -> Callable:
    """Heads (1) or their width (2) of the queries."""
    return lambda outcome: next(shape[axis] for path, shape in weight_shapes(outcome).items() if path[-2:] == ("q_proj", "kernel"))


def last_record(outcome: Outcome) -> dict:
    return json.loads((outcome.folder / "metrics.jsonl").read_text().splitlines()[-1])


PRETRAIN = [
    Row("--data", "", "--data {other_text/rows}", learned, PRETRAINED),
    Row("--config-only", "", "--config-only", files_written, PRETRAINED),
    Row("--held-out", "--held-out {text/rows}", "--held-out {other_text/rows}", lambda o: last_record(o)["held_out_loss"], PRETRAINED),
    Row("--tokenizer", "", "--tokenizer {other_text/tokenizer}", (weight_shapes, lambda o: tiny.fingerprints(o.folder)["tokenizer.json"]), SIZED),
    Row("--hidden-size", "", "--hidden-size 24", (weight_shapes, attention_shape(1)), SIZED),
    Row("--num-layers", "", "--num-layers 2", weight_shapes, SIZED),
    Row("--head-dim", "", "--head-dim 4", (attention_shape(1), attention_shape(2)), SIZED),
    Row("--num-kv-heads", "", "--num-kv-heads 2", weight_shapes, SIZED),
    Row("--intermediate-size", "", "--intermediate-size 24", weight_shapes, SIZED),
    Row("--steps", "", "--steps 4", (learned, lambda o: last_record(o)["step"]), PRETRAINED),
    Row("--batch-size", "", "--batch-size 5", (learned, lambda o: len(o.fed[0])), PRETRAINED),
    Row("--max-length", "", "--max-length 9", learned, PRETRAINED),
    Row("--learning-rate", "", "--learning-rate 0.01", learned, PRETRAINED),
    Row("--weight-decay", "", "--weight-decay 5", learned, PRETRAINED),
    Row("--seed", "", "--seed 1", (learned, lambda o: o.fed), f"{PRETRAINED} --learning-rate 1e-12"),  # what is written is the start
    Row("--dtype", "", "--dtype bfloat16", (learned, lambda o: last_record(o)["loss"]), PRETRAINED),
]


@pytest.fixture(scope="module")
def pretrained(files, tmp_path_factory):
    return once_each(run_pretrain, files, lambda: tmp_path_factory.mktemp("pretrained") / "target")


@pytest.mark.parametrize("row", PRETRAIN, ids=lambda row: row.option)
def test_every_option_of_pretrain_changes_something(row, pretrained):
    """G01."""
    first, second = (pretrained(f"{row.common} {setting}") for setting in (row.first, row.second))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    row.check(first, second)


def test_the_rows_of_pretrain_look_as_they_should(files, pretrained, tmp_path):
    """Not only that they differ; and --output is where it writes, the same for the same command."""
    whole, alone = pretrained(PRETRAINED), pretrained(SIZED)
    assert files_written(alone) == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert files_written(whole) == files_written(alone) | {"model.safetensors", "metrics.jsonl"}
    assert "held_out_loss" not in last_record(whole) and last_record(pretrained(f"{PRETRAINED} --steps 4"))["step"] == 4
    again = run_pretrain(files, PRETRAINED, tmp_path / "elsewhere")
    assert learned(again) == learned(whole) and [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


# ---- dspine-train: G01 --------------------------------------------------------------------------


class Ready(Exception):
    """All that a run needs is there; the first step would come next."""


def plan(root: Path, argv: list[str], observe: Callable | None = None, main: Callable = training.main) -> tuple:
    """Run dspine-train up to its first step. -> (exit code or what ``observe`` says of the run, standard output, standard error).

    ``observe`` gets a namespace of what the loop was given. The state holds shapes and layouts only: no random draw is compiled.
    """
    seen = types.SimpleNamespace()

    def shapes_only(config, mesh):
        seen.start = lambda: str(jax.make_jaxpr(lambda: _initial_state(config))())
        abstract = abstract_state(config)[1]
        return jax.tree.map(lambda x, plan: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=plan), abstract, tree_shardings(abstract, mesh))

    def stop(config, mesh, graphdef, target, state, iterator, checkpointer, identity, workdir, objective):
        given = dict(config=config, mesh=mesh, graphdef=graphdef, target=target, state=state, iterator=iterator, workdir=workdir, objective=objective)
        vars(seen).update(given)
        seen.result = observe(seen) if observe else None
        raise Ready

    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(loop, "initial_state", shapes_only)
        patch.setattr(loop, "_train", stop)
        try:
            result = main(argv)
        except Ready:
            result = seen.result
    return result, out.getvalue(), err.getvalue()


def write_config(path: Path, config: TrainConfig) -> Path:
    """A config file that holds ``config``."""
    save_config(config, path.with_suffix(".json"))
    path.write_text(f"from dspine_jax.config_io import read_config\nconfig = read_config({str(path.with_suffix('.json'))!r})\n")
    return path


@pytest.fixture(scope="module")
def base_config(files) -> Path:
    """DSpine for the small target; every weight of the loss and the optimiser counts."""
    sizes = {"num_layers": 1, "target_layer_ids": (0,)}
    config = tiny.train_config("dspine", drafter=sizes, injection={"transfer_size": 8}, optimizer={"weight_decay": 0.1})
    changes = dict(workdir=str(files / "run"), target=str(files / "target"), data=DataConfig(path=str(files / "rows"), batch_size=8))
    return write_config(files / "base.py", dataclasses.replace(config, **changes))


def traced(seen):
    """The training step for the shapes of the iterator's first batch."""
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in next(seen.iterator).items() if name in ("tokens", "loss_mask")}
    return make_train_step(seen.config, seen.mesh, seen.graphdef, seen.target, seen.objective).trace(seen.state, nnx.split(seen.target)[1], batch)


def step_text(seen) -> str:
    """Every operation, shape, dtype and scalar constant of the training step."""
    return str(traced(seen).jaxpr)


def graph_text(seen) -> str:
    """The drafter's static part, for what changes the step on an accelerator alone."""
    return str(seen.graphdef)


def lowered_text(seen) -> str:
    """The lowered training step, which also holds the values of constant arrays."""
    return traced(seen).lower().as_text()


def start_text(seen) -> str:
    """The traced drawing of the initial state."""
    return seen.start()


def start_weights(seen) -> list:
    """The weights that training starts from; shapes where they would be drawn."""
    return [np.asarray(x).tobytes() if isinstance(x, jax.Array) else x.shape for x in jax.tree.leaves(seen.state.params)]


def first_batches(seen) -> list:
    return [{name: x.tolist() for name, x in next(seen.iterator).items()} for _ in range(2)]


def reader(seen) -> str:
    """Which iterator reads: another one for worker processes, which are not started here."""
    return str(type(seen.iterator))


def target_weights(seen) -> tuple:
    rows_VD = seen.target.output_embedding_VD
    return str(rows_VD.dtype), np.asarray(rows_VD, np.float32).tobytes()


def layout(seen) -> dict:
    """The part of each target weight that one device holds."""
    held = {}
    for path, variable in nnx.to_flat_state(nnx.split(seen.target)[1]):
        x = variable.get_value()
        held["/".join(map(str, path))] = x.addressable_shards[0].data.shape
    return held


def transfer_space(seen) -> list:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(seen.state.frozen)]


def decoding_table(seen) -> tuple:
    """Shape of the table that decoding of this drafter reads."""
    drafter, c = nnx.merge(seen.graphdef, seen.state.params, seen.state.frozen), seen.config.drafter

    def make(drafter, rows_VD):
        empty = (jnp.zeros((1, 1, c.num_kv_heads, c.head_dim)),) * c.num_layers
        feature = jnp.zeros((1, 1, c.injection.transfer_size))
        block = drafter(jnp.zeros((1, 1, c.block_size, c.hidden_size)), empty, empty, jnp.zeros((1, 1), int), jnp.zeros((1, 1, c.block_size), int), feature)
        return transition_cache(drafter, block, rows_VD, feature, num_tokens=c.vocab_size)[0]

    return nnx.eval_shape(make, drafter, seen.target.output_embedding_VD).shape


def config_place(seen) -> Path:
    """Where the resolved config was written."""
    assert (seen.workdir / "config.json").is_file()
    return seen.workdir


@dataclasses.dataclass
class Counted:
    """A run of six steps whose compiled step is a stand-in that only counts; loop, log and checkpoints are real."""

    code: int
    workdir: Path

    @property
    def logged(self) -> list[int]:
        return [json.loads(line)["step"] for line in (self.workdir / "metrics.jsonl").read_text().splitlines()]

    @property
    def kept(self) -> list[int]:
        return sorted(int(path.name) for path in (self.workdir / "checkpoints").iterdir() if path.name.isdigit())


def counting_run(base: Path, overrides: list[str], workdir: Path) -> Counted:
    """Every step says that it was skipped, like all steps before it."""

    def zeros(config, mesh):
        state = abstract_state(config)[1]
        return jax.device_put(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state), tree_shardings(state, mesh))

    def make_step(*_):
        def step(state, target_state, batch):
            state = dataclasses.replace(state, step=state.step + 1)
            names = ("loss/total", "optimizer/skipped_steps", "optimizer/consecutive_skips")
            return state, {name: (np.float32(state.step), np.float32(1)) for name in names}

        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "initial_state", zeros)
        patch.setattr(loop, "make_train_step", make_step)
        patch.setattr(loop, "make_mesh", lambda config, real=loop.make_mesh: real(config, jax.devices()[:1]))
        sets = [f"--set={text}" for text in ("drafter.injection=none", "steps=6", "checkpoint.every=2", "checkpoint.keep=9", *overrides)]
        return Counted(call(training.main, [str(base), f"--set=workdir={workdir}", *sets]).code, workdir)


def exit_code_of_run(run: Counted) -> int:
    return run.code


def logged_steps(run: Counted) -> list[int]:
    return run.logged


def kept_steps(run: Counted) -> list[int]:
    return run.kept


RUNS = (exit_code_of_run, logged_steps, kept_steps)
DEEP = "target={deep} drafter.target_layer_ids=(0,1)"
FLASH = "drafter.injection=none"
SELECTING, MARKOV, SURE, GRU = (f"{FLASH} drafter.{part}" for part in ("selector.rank=8", "markov.rank=4", "confidence=true", "gru.hidden_size=8"))


def config_row(name: str, second: object, *observe: Callable, first: object = None, common: str = "") -> tuple:
    """A setting, two values of it (``first`` None: the one in ``base_config``), and everything that must differ."""
    return name, first, second, observe, common


CONFIG = [
    config_row("workdir", "{another}", config_place),
    config_row("target", "{other}", target_weights),
    config_row("init_from", "{twin}", start_weights, transfer_space, first="{dspine}"),
    config_row("steps", 77, step_text),
    config_row("epochs", 50, step_text, first=3),
    config_row("seed", 1, start_text, first_batches),
    config_row("compute_dtype", "bfloat16", step_text, target_weights),
    config_row("remat", True, step_text),
    config_row("drafter.mask_token_id", 5, step_text),
    config_row("drafter.block_size", 5, step_text),
    config_row("drafter.num_layers", 2, step_text),
    config_row("drafter.target_layer_ids", "(1,)", step_text, common=DEEP),
    config_row("drafter.block_attention", "causal", step_text, common="drafter.injection=none"),
    config_row("drafter.injection.layers", "(0,)", step_text, common="drafter.num_layers=2"),
    config_row("drafter.injection.transfer_size", 4, step_text, transfer_space),
    config_row("drafter.injection.whiten", False, transfer_space),
    config_row("drafter.injection.message_init_std", 0.5, start_text),
    config_row("drafter.injection.num_candidates", 8, decoding_table),
    config_row("drafter.label_shift", "shifted", step_text, common=FLASH),
    config_row("drafter.convolution.taps", 3, step_text, first=2, common=FLASH),
    config_row("drafter.convolution.group_size", 8, step_text, first=16, common=FLASH),
    config_row("drafter.selector.rank", 4, step_text, first=8, common=FLASH),
    config_row("drafter.selector.num_candidates", 4, step_text, first=8, common=SELECTING),
    config_row("drafter.markov.kind", "gated", step_text, first="vanilla", common=MARKOV),
    config_row("drafter.markov.rank", 8, step_text, first=4, common=FLASH),
    config_row("drafter.confidence", True, step_text, common=FLASH),
    config_row("drafter.confidence_with_markov", True, step_text, common=f"{MARKOV} drafter.confidence=true"),
    config_row("drafter.gru.hidden_size", 4, step_text, first=8, common=FLASH),
    config_row("drafter.gru.projection_size", 4, step_text, first=8, common=GRU),
    config_row("drafter.num_heads", 4, step_text),
    config_row("drafter.num_kv_heads", 1, step_text),
    config_row("drafter.head_dim", 4, step_text),
    config_row("drafter.intermediate_size", 32, step_text),
    config_row("drafter.rope_theta", 500.0, lowered_text),
    config_row("drafter.rms_norm_eps", 1e-5, step_text),
    config_row("data.path", "{more rows}", first_batches),
    config_row("data.batch_size", 16, first_batches),
    config_row("data.max_length", 9, first_batches),
    config_row("data.num_workers", 1, reader),
    config_row("anchors.num_anchors", 3, step_text),
    config_row("anchors.replacement", True, step_text),
    config_row("loss.loss_decay_gamma", 2.0, step_text),
    config_row("loss.base_weight", 0.25, step_text),
    config_row("loss.feature_weight", 0.25, step_text),
    config_row("loss.vocab_chunk", 5, step_text),
    config_row("loss.ce_weight", 0.25, step_text),
    config_row("loss.l1_weight", 0.25, step_text),
    config_row("loss.prefix_mask", True, step_text),
    config_row("loss.dpace_alpha", 0.5, step_text),
    config_row("loss.selector_weight", 0.25, step_text, common=SELECTING),
    config_row("loss.confidence_weight", 0.25, step_text, common=SURE),
    config_row("loss.base_decay_fraction", 0.25, step_text, common=GRU),
    config_row("optimizer.learning_rate", 0.1, step_text),
    config_row("optimizer.beta1", 0.5, step_text),
    config_row("optimizer.beta2", 0.5, step_text),
    config_row("optimizer.weight_decay", 0.5, step_text),
    config_row("optimizer.warmup_fraction", 0.5, step_text),
    config_row("optimizer.final_fraction", 0.5, step_text),
    config_row("optimizer.clip_norm", 0.5, step_text),
    config_row("optimizer.ema_decay", 0.5, step_text),
    config_row("optimizer.on_nonfinite", "stop", exit_code_of_run),
    config_row("optimizer.max_consecutive_skips", 3, exit_code_of_run),
    config_row("mesh.data", 2, layout, first=4, common="mesh.fsdp=-1"),  # eight devices: the other axis takes the rest
    config_row("mesh.fsdp", 2, layout, first=1),
    config_row("mesh.tensor", 2, layout, first=1),
    config_row("checkpoint.every", 3, kept_steps),
    config_row("checkpoint.keep", 1, kept_steps),
    config_row("log.every", 4, logged_steps),
    config_row("kernels.injection", "xla", step_text),
    config_row("kernels.block_attention", "xla", step_text, common="compute_dtype=bfloat16 drafter.head_dim=16"),
    config_row("kernels.topk_logits", "chunks", step_text, common=SELECTING),
    config_row("kernels.head_softmax", "xla", graph_text),
]
# What a checkpoint carries, or nothing in training reads, and another value is refused for: (value that goes on, value that is refused, the words).
CARRIED = {
    "drafter.hidden_size": (16, 32, "drafter.hidden_size is 32 but the target has 16"),
    "drafter.vocab_size": (128, 64, "drafter.vocab_size is 64 but the target has 128"),
    "drafter.num_target_layers": (2, 9, "drafter.num_target_layers is 9 but the target has 2"),
    "kernels.transition": (None, "xla", "kernels.transition is 'xla', but training never calls it"),
    "kernels.cached_attention": (None, "xla", "kernels.cached_attention is 'xla', but training never calls it"),
    "drafter.template_mode": (None, "thinking", "does not record its template mode, but 'thinking' is asked for"),
}


def leaves(cls: type, prefix: str = "") -> list[str]:
    """Every setting of a config class by its dotted name, those of optional groups too."""
    names = []
    for name, annotation in typing.get_type_hints(cls).items():
        group = next((option for option in (annotation, *typing.get_args(annotation)) if dataclasses.is_dataclass(option)), None)
        names += leaves(group, f"{prefix}{name}.") if group else [f"{prefix}{name}"]
    return names


@pytest.fixture(scope="module")
def planned(files, base_config):
    """What one observation says of a run with these overrides; each is made once."""
    done = {}

    def run(overrides: str, observe: Callable):
        sets = tuple(filled(overrides, files))
        if (sets, observe) not in done:
            result, _, err = plan(files, [str(base_config), *(f"--set={text}" for text in sets)], observe)
            assert not isinstance(result, int), err
            done[sets, observe] = result
        return done[sets, observe]

    return run


@pytest.fixture(scope="module")
def counted(files, base_config):
    """``counting_run``, once for each list of overrides."""
    done = {}

    def run(overrides: str) -> Counted:
        if overrides not in done:
            done[overrides] = counting_run(base_config, overrides.split(), files / f"counted {len(done)}")
        return done[overrides]

    return run


def test_every_training_setting_has_a_row():
    """G01: a new field without a row fails here."""
    names = [name for name, *_ in CONFIG]
    assert len(set(names)) == len(names)
    assert set(leaves(TrainConfig)) == {*names, *CARRIED}


@pytest.mark.parametrize(("name", "first", "second", "observe", "common"), CONFIG, ids=[row[0] for row in CONFIG])
def test_every_training_setting_changes_something(name, first, second, observe, common, planned, counted):
    """G01, from the command line to what the run was about to do. A later override replaces an earlier one."""
    settings = [f"{common} {name}='{value}'" if value is not None else common for value in (first, second)]
    for look in observe:
        if look in RUNS:
            before, after = (look(counted(text.replace("'", ""))) for text in settings)
        else:
            before, after = (planned(text, look) for text in settings)
        assert before != after, look.__name__


def test_a_kernel_that_cannot_run_is_refused_in_one_line(files, base_config):
    """Before the workdir is made."""
    outcome = call(training.main, [str(base_config), f"--set=workdir={files / 'no kernel'}", "--set=kernels.injection=pallas"])
    assert (outcome.code, outcome.out, (files / "no kernel").exists()) == (2, "", False)
    assert outcome.err == "error: injection: 'pallas' is a kernel of an accelerator and cannot run on a CPU; use 'xla' or the default\n"


@pytest.mark.parametrize("name", CARRIED)
def test_what_a_checkpoint_carries_is_refused_by_name(name, files, base_config):
    good, bad, words = CARRIED[name]
    reached, _, err = plan(files, [str(base_config), f"--set={name}={good}"], lambda seen: "reached")
    assert reached == "reached", err
    code, _, err = plan(files, [str(base_config), f"--set={name}={bad}"], lambda seen: "reached")
    assert code == 2 and err.startswith("error: ") and words in err and err.count("\n") == 1


def test_what_is_compared_is_reproducible(files, base_config, planned):
    """Or the rows above would prove nothing."""
    for observe in (step_text, lowered_text, start_text, first_batches, target_weights, transfer_space, layout):
        again, _, _ = plan(files, [str(base_config)], observe)
        assert again == planned("", observe), observe.__name__


def test_a_counting_run_logs_and_keeps_what_was_asked(counted):
    """What the rows above must look like, not only that they differ."""
    assert (counted("").code, counted("").logged, counted("").kept) == (0, [1, 2, 3, 4, 5, 6], [2, 4, 6])
    assert counted(" log.every=4").logged == [4, 6] and counted(" checkpoint.every=3").kept == [3, 6] and counted(" checkpoint.keep=1").kept == [6]
    assert counted(" optimizer.on_nonfinite=stop").code == counted(" optimizer.max_consecutive_skips=3").code == 3
    assert counted(" optimizer.max_consecutive_skips=3").kept == [2] and counted(" optimizer.on_nonfinite=stop").kept == []


def test_every_option_of_train_changes_something(files, base_config):
    """G01: the config file, --set and --print-config."""
    other = write_config(files / "flash.py", dataclasses.replace(read_config(base_config.with_suffix(".json")), drafter=DrafterConfig(
        mask_token_id=3, block_size=4, num_layers=1, target_layer_ids=(0,)), workdir=str(files / "flash")))  # fmt: skip
    parameters = lambda seen: sum(x.size for x in jax.tree.leaves(seen.state.params))  # noqa: E731
    spine, flash = (plan(files, [str(path)], parameters) for path in (base_config, other))
    assert spine[0] > flash[0] > 0 and spine[1].startswith("dspine: ") and flash[1].startswith("dflash: ")
    wide = plan(files, [str(base_config), "--set", "drafter.intermediate_size=32", "--set", "drafter.num_layers=2"], parameters)
    assert wide[0] > 2 * spine[0] - flash[0]
    code, out, _ = plan(files, [str(base_config), "--set", f"workdir={files / 'never'}", "--print-config"], parameters)
    assert code == 0 and json.loads(out)["workdir"] == str(files / "never") and not (files / "never").exists()


def test_every_option_of_bound_changes_something(files, base_config, planned):
    """G01: other layers are another step, and so is the product's; --set as in dspine-train."""
    deeper = ["--set", "drafter.num_layers=2"]

    def of_bound(layers: str, *sets: str) -> tuple:
        argv = [str(base_config), "--layers", layers, "--set", f"workdir={files / f'bound {layers}'}", *deeper, *sets]
        return plan(files, argv, step_text, bound.main)

    steps = [of_bound(layers)[0] for layers in ("0", "1", "all")]
    assert len({*steps, plan(files, [str(base_config), *deeper], step_text)[0]}) == 4 and all(isinstance(step, str) for step in steps)
    assert of_bound("all", "--set", "loss.loss_decay_gamma=2")[0] not in steps
    assert of_bound("all", "--set", "loss.loss_decay_gama=2")[0] == 2
    flash = write_config(files / "bound_flash.py", dataclasses.replace(read_config(base_config.with_suffix(".json")), drafter=DrafterConfig(
        mask_token_id=3, block_size=4, num_layers=2, target_layer_ids=(0,))))  # fmt: skip
    code, _, err = plan(files, [str(flash), "--layers", "all"], step_text, bound.main)
    assert code == 2 and "this dflash drafter injects nothing" in err


# ---- no option without a row --------------------------------------------------------------------

SEPARATE = {  # rows that are tests of their own
    "dspine-generate": set(),
    "dspine-evaluate": {"--output"},
    "dspine-convert": {"--output", "--overwrite"},
    "dspine-export": {"--output", "--overwrite", "--target-output"},
    "dspine-prepare": {"--output", "--overwrite"},
    "python -m train.pretrain": {"--output"},
    "dspine-train": {"config", "--set", "--print-config"},
    "python -m serve.probe": {"--output"},
    "python -m train.bound": {"config", "--layers", "--set"},
}
COMMANDS = {
    "dspine-generate": (generate, GENERATE, "--target t hello"),
    "dspine-evaluate": (evaluate, EVALUATE, "--target t --drafter d --data x --output o"),
    "dspine-convert": (convert, CONVERT, "a.npz --output o"),
    "dspine-export": (export, EXPORT, "d --target t --output o"),
    "dspine-prepare": (prepare, PREPARE, "a.jsonl --self-prompts 3 --target t --output o"),  # else the options of own prompts are refused
    "python -m train.pretrain": (pretrain, PRETRAIN, "--tokenizer t --output o"),
    "dspine-train": (training, [], "config.py"),
    "python -m serve.probe": (probe, PROBE, "--target t --drafter d --data x"),
    "python -m train.bound": (bound, [], "config.py --layers all"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_row(command):
    """G01: a new option without a row fails here."""
    module, rows, _ = COMMANDS[command]
    names = [row.option for row in rows]
    assert len(set(names)) == len(names)
    assert options(module.build_parser()) == {"--help", *names, *SEPARATE[command]}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option(command):
    module = COMMANDS[command][0]
    outcome = call(module.main, ["--help"])
    assert outcome.code == 0 and not outcome.err
    for name in options(module.build_parser()):
        assert name in outcome.out


# ---- G04: unset means default -------------------------------------------------------------------

PARSERS = {
    "dspine-generate": generate.parse_args,
    "dspine-evaluate": evaluate.parse_args,
    "dspine-convert": convert._parse_args,
    "dspine-export": export.parse_args,
    "dspine-prepare": prepare.parse_args,
    "python -m train.pretrain": lambda argv: pretrain.build_parser().parse_args(argv),
    "dspine-train": lambda argv: training.build_parser().parse_args(argv),
    "python -m serve.probe": probe.parse_args,
    "python -m train.bound": lambda argv: bound.build_parser().parse_args(argv),
}
# Options that stay None when they are not given, and what that means.
MAY_BE_NONE = {
    "dspine-generate": {
        "prompts": "one prompt is given instead",
        "drafter": "the target decodes alone",
        "tokenizer": "the target's own",
        "num_draft_tokens": "as many as the drafter was trained for",
        "template_mode": "as the drafter was trained",
        "policy": "own",
        "dtype": "bfloat16, on a CPU float32",
        "batch_size": "as many as fit the device",
    },
    "dspine-evaluate": {
        "benchmarks": "--data is given instead",
        "tokenizer": "the target's own",
        "prompts": "all of them",
        "decode_drafts": "as many as the drafters were trained for",
        "template_mode": "as the drafters were trained",
        "decode_batch_size": "1",
        "dtype": "bfloat16, on a CPU float32",
    },
    "dspine-convert": {
        "sources": "rows of every source",
        "limit": "all rows",
        "vocab_size": "any id",
        "prompt_columns": "256, in a benchmark file 512",
        "template_mode": "not recorded",
        "tokenizer": "not recorded",
    },
    "dspine-export": {
        "results": "the model card says that nothing was measured",
        "target_output": "the target is not written",
    },
    "dspine-prepare": {
        "tokenizer": "the target's own",
        "limit": "all rows",
        "batch_size": "as many as fit the device",
    },
    "python -m train.pretrain": {
        "data": "--config-only is given, or it is asked for",
        "held_out": "no such loss is reported",
    },
    "dspine-train": {},
    "python -m serve.probe": {
        "layers": "early and late half, and all",
        "prompts": "all of them",
        "dtype": "bfloat16, on a CPU float32",
    },
    "python -m train.bound": {},
}


def unset(data: dict, prefix: str = "") -> set[str]:
    """Dotted names of what is None."""
    nested = [unset(value, f"{prefix}{name}.") for name, value in data.items() if isinstance(value, dict)]
    return {f"{prefix}{name}" for name, value in data.items() if value is None}.union(*nested)


def written_out(parser, args) -> list[str]:
    """A command line that gives every value of ``args`` by hand."""
    argv = []
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if value is None or value is False or value == []:
            continue
        values = [str(entry) for entry in value] if isinstance(value, list) else [str(value)]
        flag = action.option_strings[-1:]
        if value is True:
            argv += flag
        elif type(action).__name__ == "_AppendAction":
            argv += [part for entry in values for part in (*flag, entry)]
        else:
            argv += flag + values
    return argv


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_line_without_options_leaves_none_only_where_it_means_something(command):
    module, _, required = COMMANDS[command]
    args = PARSERS[command](required.split())
    assert unset(vars(args)) == set(MAY_BE_NONE[command])
    again = written_out(module.build_parser(), args)
    assert len(again) >= len(required.split()) and PARSERS[command](again) == args


def same_again(config, path: Path) -> bool:
    """Whether a saved config reads back as itself, to the byte when saved again."""
    save_config(config, path)
    text = path.read_bytes()
    again = read_config(path, type(config))
    save_config(again, path)
    return again == config and hash(again) == hash(config) and path.read_bytes() == text


def test_generate_resolves_what_is_left_out(files, tmp_path):
    for drafter, drafts in (("", 0), ("--drafter {dspine}", 3), ("--drafter {dflash}", 3)):
        text = f"--target {{target}} {drafter} hello"
        *_, module, settings = generate.load(generate.parse_args(filled(text, files)))
        assert unset(dataclasses.asdict(settings)) == set()
        assert settings == DecodeSettings(drafts, SamplingConfig(0.0, 0, 1.0), "own", (2,), "float32")  # the tests run on a CPU
        assert same_again(settings, tmp_path / "settings.json")
        assert module is None if not drafter else same_again(module.config, tmp_path / "drafter.json")
        *_, explicit = generate.load(generate.parse_args(filled(f"{text} --num-draft-tokens {drafts} --top-p 1 --top-k 0", files)))
        assert explicit == settings


@pytest.mark.parametrize(("backend", "dtype"), [("cpu", "float32"), ("gpu", "bfloat16"), ("tpu", "bfloat16")])
def test_the_compute_precision_left_out_is_the_fast_one_of_the_device(backend, dtype, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert default_dtype() == dtype


OTHER_PARTS = {"convolution", "selector", "markov", "gru"}  # of methods that a drafter is not


def test_evaluate_resolves_what_is_left_out(files, tmp_path):
    required = ["--target", "{target}", "--drafter", "{dspine}", "--data", "{data}", "--output", "{evaluation}"]
    evaluation = evaluate.Evaluation(evaluate.parse_args(filled(shlex.join(required), files)))
    assert evaluation.args.dtype == "float32" and evaluation.decode_drafts == [3] and evaluation.samplings == [SamplingConfig(0.0, 0, 1.0)]
    assert [len(benchmark.prompts) for benchmark in evaluation.benchmarks] == [3, 2]
    resolved = [*evaluation.samplings, evaluation.config, *(drafter.config for _, _, drafter, _ in evaluation.drafters)]
    assert {type(config) for config in resolved} == {SamplingConfig, TargetConfig, DrafterConfig}
    for config in resolved:
        assert unset(dataclasses.asdict(config)) <= {"template_mode", *OTHER_PARTS} and same_again(config, tmp_path / "config.json")


def test_convert_resolves_what_is_left_out(files, tmp_path):
    outcome = run_convert(files, "{a.npz}", tmp_path / "plain")
    written = (outcome.folder / "manifest.json").read_bytes()
    content = read_config(outcome.folder / "manifest.json", Manifest)
    assert unset(dataclasses.asdict(content)) == {"template_mode", "tokenizer", "tokenizer_sha256"}  # not recorded
    save_config(content, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == written
    explicit = run_convert(files, "{a.npz} --prompt-columns 256 --limit 4 --sources 0,1,2", tmp_path / "explicit")
    assert array("tokens")(outcome) == array("tokens")(explicit) and array("loss_mask")(outcome) == array("loss_mask")(explicit)


def test_prepare_resolves_what_is_left_out(files, prepared, tmp_path):
    """What has a default, written out, gives the same files to the byte."""
    text = "{talks.jsonl} --target {chat} --max-length 60"
    plain, args = prepared(text), prepare.parse_args([*filled(text, files), "--output", str(tmp_path / "set")])
    assert unset(vars(args)) == {*MAY_BE_NONE["dspine-prepare"], "self_prompts"}
    args.prompt_temperature = args.max_prompt_tokens = None  # refused where the target writes no prompts
    args.batch_size = 32
    argv = written_out(prepare.build_parser(), args)
    explicit = call(prepare.main, argv)
    assert {"--temperature", "--top-p", "--top-k", "--seed", "--max-new-tokens", "--batch-size", "--dtype"} <= set(argv) and explicit.code == 0, explicit.err
    assert tiny.fingerprints(tmp_path / "set") == tiny.fingerprints(plain.folder) != {}
    assert unset(dataclasses.asdict(read_config(tmp_path / "set" / "manifest.json", Manifest))) == set()


# Random weights; steps, not epochs; the folder's width; parts of other methods; exponential decay; and these data record no mode.
TRAIN_MAY_BE_NONE = {"init_from", "epochs", "data.max_length", "loss.dpace_alpha", "drafter.template_mode"}
TRAIN_MAY_BE_NONE |= {f"drafter.{part}" for part in OTHER_PARTS} | {f"kernels.{field.name}" for field in dataclasses.fields(KernelConfig)}


@pytest.mark.parametrize("method", tiny.METHODS)
def test_train_resolves_what_is_left_out_and_its_saved_config_gives_the_same_run(method, files, tmp_path):
    """Only what has no default is given: places, the mask id, and for DSpine a width that fits so small a target."""
    sets = [f"workdir={tmp_path / 'run'}", f"target={files / 'deep'}", f"data.path={files / 'rows'}", "drafter.mask_token_id=3"]
    if method == "dspine":
        sets += ["drafter.injection.transfer_size=8"]
    write_config(tmp_path / "given.py", TrainConfig())
    reached, _, err = plan(files, [str(tmp_path / "given.py"), *(f"--set={text}" for text in sets)], lambda seen: seen.config)
    assert isinstance(reached, TrainConfig), err
    saved = tmp_path / "run" / "config.json"
    first = saved.read_bytes()
    assert unset(json.loads(first)) == TRAIN_MAY_BE_NONE | ({"drafter.injection"} if method == "dflash" else set())
    assert read_config(saved) == reached and same_again(reached, tmp_path / "copy.json") and (tmp_path / "copy.json").read_bytes() == first
    saved.unlink()
    (tmp_path / "again.py").write_text(f"from dspine_jax.config_io import read_config\nconfig = read_config({str(tmp_path / 'copy.json')!r})\n")
    again, _, err = plan(files, [str(tmp_path / "again.py")], lambda seen: seen.config)
    assert again == reached, err
    assert saved.read_bytes() == first


# ---- last, because it empties the cache of compiled loops ----------------------------------------


def test_check_fails_where_the_loop_is_careless(files, generated, monkeypatch):
    """The row of --check: one loop that accepts everything, with the option and without. A sound loop passes."""
    (row,) = (row for row in GENERATE if row.option == "--check")
    text = f"{row.common} {row.second}"
    sound = generated(text)
    assert sound.code == 0 and sound.report["matches_greedy"] is True

    monkeypatch.setattr(speculative, "judge_greedy", scripted.accept_everything)
    speculative._run_rounds.clear_cache()
    try:
        unchecked, checked = (run_generate(files, f"{row.common} {setting}") for setting in (row.first, row.second))
        shown = run_generate(files, text.replace("--json", ""))
    finally:
        speculative._run_rounds.clear_cache()
    assert row.observe(unchecked) == 0 and row.observe(checked) == 1 == shown.code
    assert tokens(checked) == tokens(unchecked) != tokens(sound)
    assert checked.report["matches_greedy"] is False and checked.report["largest_gap"] > 0 == sound.report["largest_gap"]
    assert "DIFFERENT from plain greedy decoding" in shown.err
