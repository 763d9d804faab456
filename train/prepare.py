"""Turn conversations into a dataset folder, with answers that the target itself writes.

Input are JSONL files whose rows hold "messages" (role, content), ShareGPT "conversations" (from, value), "turns" (texts of the user) or "prompt". Every
assistant turn is written anew by the target, in turn order, or kept with --keep-answers. With --self-prompts the target writes the prompts too.
A row that cannot be used is named on standard error and counted by reason; it never ends the run, unless --strict is given.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import math
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from dspine_jax.chat import TEMPLATE_MODES
from train.answers import PROMPT_TURN, TURN_STRIDE, Conversation, has_room, keep_answers, write_answers, write_prompts
from train.chat_files import RowError, parse_conversation, read_lines
from train.journal import NAME, Journal

EPILOG = """examples:
  dspine-prepare prompts.jsonl --target my-target/ --output data/mine
  dspine-prepare a.jsonl b.jsonl --target my-target/ --output data/mine --template-mode non-thinking --temperature 0.7 --top-p 0.8 --top-k 20
  dspine-prepare --self-prompts 5000 --target SmolLM2-135M-Instruct.Q4_1.gguf --output data/own
  dspine-prepare chats.jsonl --target my-target/ --output data/kept --keep-answers
  dspine-prepare prompts.jsonl --target my-target/ --output data/mine --dry-run      what it would need, and nothing else
The same command goes on where it was interrupted. Rows are padded, never packed (docs/data.md)."""

# Options that only writing uses; their defaults are filled in after parsing, so that one given in vain is refused.
SAMPLING = {"temperature": 0.7, "top_p": 0.95, "top_k": 0, "seed": 0, "max_new_tokens": 256, "batch_size": None, "dtype": "bfloat16"}
SELF_PROMPTS = {"prompt_temperature": 1.0, "max_prompt_tokens": 128}
SHOWN_PER_REASON = 3


def build_parser() -> argparse.ArgumentParser:
    """Every option of ``dspine-prepare``."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("dspine-prepare", description=__doc__, epilog=EPILOG, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("input", nargs="*", type=Path, help="JSONL files of conversations")
    parser.add_argument("--target", required=True, help="HF folder or GGUF file")
    parser.add_argument("--output", required=True, type=Path, help="dataset folder to write")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json, where the target has none")
    parser.add_argument(
        "--template-mode",
        choices=TEMPLATE_MODES,
        default="unset",
        help="what the chat template is told of reasoning (enable_thinking true, false, not given); stored with the data (default unset)",
    )
    parser.add_argument("--max-length", type=int, default=512, help="tokens of a row, prompt and answers together (default 512)")
    parser.add_argument("--limit", type=int, help="read at most this many rows of the files")
    parser.add_argument("--strict", action="store_true", help="stop at the first row that cannot be used")
    parser.add_argument("--overwrite", action="store_true", help="replace the dataset in the folder, or a begun one with other settings")
    parser.add_argument("--dry-run", action="store_true", help="check the input, print what is needed, write nothing")
    parser.add_argument("--keep-answers", action="store_true", help="keep the answers of the files")
    writing = parser.add_argument_group("answers written by the target")
    writing.add_argument("--temperature", type=float, help="0 is greedy (default 0.7)")
    writing.add_argument("--top-p", type=float, help="1 is off (default 0.95)")
    writing.add_argument("--top-k", type=int, help="0 is off (default)")
    writing.add_argument("--seed", type=int, help="default 0")
    writing.add_argument("--max-new-tokens", type=int, help="tokens of an answer (default 256)")
    batch_help = "answers written together (default: as many as fit the device, up to 1024; 32 on a CPU); in float32 it does not change the text"
    writing.add_argument("--batch-size", type=int, help=batch_help)
    writing.add_argument("--dtype", choices=("bfloat16", "float32"), help="compute precision (default bfloat16)")
    prompts = parser.add_argument_group("prompts written by the target")
    prompts.add_argument("--self-prompts", type=int, metavar="N", help="let the target write N prompts; doubles, empty and unfinished ones are left out")
    prompts.add_argument("--prompt-temperature", type=float, help="default 1.0")
    prompts.add_argument("--max-prompt-tokens", type=int, help="a prompt unfinished by then is left out (default 128)")
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; options without effect beside others are refused by name."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if not args.input and args.self_prompts is None:
        parser.error("give JSONL files, or --self-prompts N")
    if args.keep_answers and args.self_prompts is not None:
        parser.error("--self-prompts have no answers to keep; leave out --keep-answers")
    if args.strict and not args.input:
        parser.error("--strict speaks of rows of files; give one, or leave it out")
    own = args.self_prompts is not None
    for options, needed, has in ((SAMPLING, "without --keep-answers", not args.keep_answers), (SELF_PROMPTS, "with --self-prompts", own)):
        for name, default in options.items():
            if getattr(args, name) is None:
                setattr(args, name, default)  # None for the batch size: the device decides
            elif not has:
                parser.error(f"--{name.replace('_', '-')} has an effect only {needed}; leave it out")
    for name, least in (("max_length", 2), ("limit", 1), ("max_new_tokens", 1), ("batch_size", 1), ("self_prompts", 1), ("max_prompt_tokens", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} {value} must be at least {least}")
    if not 0 <= args.seed < 2**32:
        parser.error(f"--seed {args.seed} must lie in 0..{2**32 - 1}")
    for name in ("temperature", "prompt_temperature"):
        if not math.isfinite(getattr(args, name)):
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be a finite number")
    if own and args.prompt_temperature <= 0:
        parser.error(f"--prompt-temperature {args.prompt_temperature} must be above 0: greedy prompts would all be one")
    return args


# ---- rows left out ----------------------------------------------------------------------------


class Skips:
    """Counts rows left out by reason and names the first few of each on standard error. With ``strict`` the first one of a file raises ValueError."""

    def __init__(self, strict: bool):
        self.strict, self.counts, self.by_file = strict, Counter(), {}

    def add(self, place: str, reason: str, detail: str = "", file: str = "") -> None:
        """Count a row that is found at ``place``."""
        self.counts[reason] += 1
        self.by_file.setdefault(file, Counter())[reason] += 1
        words = f"{place}: {reason}" + (f" ({detail})" if detail else "")
        if self.strict and file:
            raise ValueError(f"{words}; mend the row, or leave out --strict")
        if self.counts[reason] <= SHOWN_PER_REASON:
            _say(f"left out: {words}")

    def summarise(self) -> None:
        """Say how many rows of each reason were not named."""
        for reason, count in self.counts.items():
            if count > SHOWN_PER_REASON:
                _say(f"left out: {count - SHOWN_PER_REASON:,} more rows: {reason}")


def _say(words: str) -> None:
    from tqdm import tqdm

    tqdm.write(words, file=sys.stderr)


def listing(counts: dict[str, int]) -> str:
    """Counts by reason for one line of text."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items())) or "none"


# ---- reading ----------------------------------------------------------------------------------


def read_conversations(args: argparse.Namespace, encoder, skips: Skips, seen: set) -> tuple[list[Conversation], int]:
    """(usable conversations of all files, rows read); ``seen`` collects digests. Raises ValueError for a file without one usable row."""
    from tqdm import tqdm

    found, index = [], 0
    for path in args.input:
        before, first = len(found), index
        for number, line in tqdm(read_lines(path), desc=f"reading {path.name}", unit="row", disable=None, leave=False):
            if args.limit is not None and index >= args.limit:
                break
            place = f"{path}, line {number}"
            try:
                found.append(usable(index, place, str(path), parse_conversation(line), args, encoder, seen))
            except RowError as error:
                skips.add(place, error.reason, error.detail, str(path))
            index += 1
        if index == first and (args.limit is None or index < args.limit):
            raise ValueError(f"{path} holds no row")
        if index > first and len(found) == before:
            raise ValueError(f"{path}: no row can be used: {listing(skips.by_file[str(path)])}")
    if index + (args.self_prompts or 0) > TURN_STRIDE:
        raise ValueError(f"{index:,} rows are more than the {TURN_STRIDE:,} of one dataset; split the files")
    return found, index


def usable(index: int, place: str, file: str, messages: list[dict], args: argparse.Namespace, encoder, seen: set) -> Conversation:
    """The conversation, when it is not a double of one in ``seen`` and leaves room for an answer. Raises RowError."""
    said = [m for m in messages if args.keep_answers or m["role"] != "assistant"]
    digest = hashlib.sha256(repr(said).encode()).digest()[:16]
    if digest in seen:
        raise RowError("the same conversation again")
    seen.add(digest)
    prompt_ids = None
    if args.keep_answers:
        if not any(m["role"] == "assistant" for m in messages) or any(m["content"] is None for m in messages):
            raise RowError("no answer tokens")
    else:
        first_answer = next(i for i, m in enumerate(messages) if m["role"] == "user") + 1
        prompt_ids = np.asarray(encoder.prompt_ids(messages[:first_answer]), np.int32)
        if not has_room(prompt_ids, args.max_length):
            raise RowError("prompt too long for max_length", f"{len(prompt_ids)} tokens, {args.max_length} with the answer")
        if sum(m["role"] == "user" for m in messages) >= PROMPT_TURN:
            raise RowError("too many turns", f"at most {PROMPT_TURN - 1}")
    return Conversation(index, place, file, messages, prompt_ids)


def own_conversations(rows_read: int, args: argparse.Namespace, encoder, journal: Journal, skips: Skips, seen: set) -> list[Conversation]:
    """The target's own prompts as conversations, in the order of their numbers."""
    found = []
    for record in sorted((record for record in journal.records if "prompt" in record), key=lambda record: record["prompt"]):
        place = f"own prompt {record['prompt'] + 1}"
        try:
            if "reason" in record:
                raise RowError(record["reason"])
            messages = [{"role": "user", "content": record["text"]}]
            found.append(usable(rows_read + record["prompt"], place, "", messages, args, encoder, seen))
        except RowError as error:
            skips.add(place, error.reason, error.detail)
    return found


# ---- what it needs ----------------------------------------------------------------------------


def count_rows(conversations: list[Conversation], args: argparse.Namespace) -> int:
    """Rows that may come of it, at most: one a conversation, or one an answer where the target writes them (docs/data.md)."""
    if args.keep_answers:
        return len(conversations)
    return sum(m["role"] == "user" for c in conversations for m in c.messages) + (args.self_prompts or 0)


def needs(config, rows: int, args: argparse.Namespace) -> dict[str, int]:
    """Bytes, at most: ``arrays`` and ``journal`` on disk; ``weights``, ``cache`` and ``logits`` where the target runs (0 where answers are kept)."""
    from dspine_jax.memory import cache_bytes, weight_bytes
    from dspine_jax.refill import group_size

    id_size = 2 if config.vocab_size <= 2**16 else 4
    sizes = {"arrays": rows * (args.max_length * (id_size + 1) + 4), "journal": rows * (args.max_length * 16 // 3 + 200), "weights": 0, "cache": 0, "logits": 0}
    if not args.keep_answers:
        sizes["weights"] = weight_bytes(config, args.dtype)
        sizes["cache"] = (args.batch_size + group_size(args.batch_size)) * cache_bytes(config, most_cache_rows(args), args.dtype)
        sizes["logits"] = 4 * args.batch_size * config.vocab_size
    return sizes


def most_cache_rows(args: argparse.Namespace) -> int:
    """Rows of the longest cache that is made."""
    from dspine_jax.refill import cache_rows

    return cache_rows(max(args.max_length, args.max_prompt_tokens if args.self_prompts else 1))


def choose_batch_size(config, most: int, args: argparse.Namespace) -> int:
    """As many answers together as the device holds, but not more than there are to write."""
    from dspine_jax.memory import default_batch_size, row_bytes, weight_bytes

    row = row_bytes(config, None, 0, most_cache_rows(args), args.dtype)
    return max(1, min(default_batch_size(row, yet_to_load=weight_bytes(config, args.dtype)), most))


def check_disk(sizes: dict[str, int], folder: Path, already: int, batch_size: int | None) -> None:
    """Print the needs. Raises ValueError when the disk of ``folder`` lacks room; ``already`` bytes of the journal are there."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free, wanted = shutil.disk_usage(place).free, sizes["arrays"] + max(0, sizes["journal"] - already)
    print(f"disk: {size_text(sizes['arrays'])} for the dataset at most, {size_text(sizes['journal'])} for the journal meanwhile; {size_text(free)} free")
    if sizes["weights"]:
        cache = f"KV cache {size_text(sizes['cache'])} for {batch_size:,} answers at a time (--batch-size)"
        print(f"memory: weights {size_text(sizes['weights'])}, {cache}, logits {size_text(sizes['logits'])}")
    if wanted > free:
        mend = "use fewer rows, a smaller --max-length, or another disk"
        raise ValueError(f"{folder}: {size_text(wanted)} are needed but the disk has {size_text(free)} free; {mend}")


def size_text(count: int) -> str:
    """Bytes for people: '1.5 GB'."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


# ---- the whole --------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    """Read, check, print the needs, write answers, write the dataset. Raises ValueError or OSError with a message for the user."""
    import jax.numpy as jnp

    from dspine_jax.chat import load_tokenizer
    from dspine_jax.sampling import SamplingConfig
    from dspine_jax.speculative import Decoder, DecodeSettings
    from dspine_jax.target_io import load_target, read_target_config
    from train.chat_rows import ChatEncoder
    from train.data import refuse_overwrite

    SamplingConfig(args.temperature, args.top_k, args.top_p)
    for path in args.input:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist or is not a file")
    config = read_target_config(args.target)
    encoder = ChatEncoder(load_tokenizer(args.target, args.tokenizer), args.template_mode, config.eos_token_ids, config.vocab_size)
    opening = len(encoder.user_turn_ids()) if args.self_prompts else 0
    own = [("--max-prompt-tokens", args.max_prompt_tokens + opening)] if args.self_prompts else []
    for name, value in [("--max-length", args.max_length), *own]:
        if value > config.max_position_embeddings:
            raise ValueError(f"{name}: {value} tokens are more than the {config.max_position_embeddings} positions of {args.target}")
    if args.template_mode != "unset" and "enable_thinking" not in str(encoder.tokenizer.chat_template):
        _say(f"warning: the chat template does not read enable_thinking; --template-mode {args.template_mode} changes no token")
    settings = describe_settings(args, encoder.tokenizer)
    journal = Journal(args.output, settings, overwrite=args.overwrite)
    if not journal.size or (args.output / "manifest.json").exists():
        refuse_overwrite(args.output, args.overwrite or only_journal(args.output))
    skips, seen = Skips(args.strict), set()
    conversations, rows_read = read_conversations(args, encoder, skips, seen)
    if not args.keep_answers and args.batch_size is None:
        args.batch_size = choose_batch_size(config, max(len(conversations), args.self_prompts or 0), args)
    check_disk(needs(config, count_rows(conversations, args), args), args.output, journal.size, args.batch_size)
    if args.dry_run:
        skips.summarise()
        print(f"{len(conversations):,} of {rows_read:,} rows can be used; left out: {listing(skips.counts)}")
        return
    target = None

    def decoder(temperature: float) -> Decoder:
        nonlocal target
        dtype = jnp.dtype(args.dtype)
        target = load_target(args.target, dtype=dtype) if target is None else target
        return Decoder(target, None, DecodeSettings(0, SamplingConfig(temperature, args.top_k, args.top_p), "own", config.eos_token_ids, args.dtype))

    journal.open()
    try:
        if args.self_prompts:
            if sum("prompt" in record for record in journal.records) < args.self_prompts:
                write_prompts(decoder, args, encoder, journal)
            conversations += own_conversations(rows_read, args, encoder, journal, skips, seen)
        finish_all(conversations, decoder, args, encoder, journal, skips)
    except KeyboardInterrupt:
        done = Counter(key for record in journal.records for key in ("prompt", "conversation") if key in record)
        own = f"{done['prompt']:,} of {args.self_prompts:,} own prompts and " if args.self_prompts else ""
        _say(f"interrupted: {own}{done['conversation']:,} of {len(conversations):,} conversations are kept in {journal.path}; the same command goes on")
        raise
    finally:
        journal.close()
    skips.summarise()
    write(args, settings, conversations, journal, skips)


def only_journal(folder: Path) -> bool:
    """Whether the folder holds a journal and nothing else: one that is of no use may be replaced without asking."""
    return folder.is_dir() and [path.name for path in folder.iterdir()] == [NAME]


def finish_all(conversations: list[Conversation], decoder, args: argparse.Namespace, encoder, journal: Journal, skips: Skips) -> None:
    """Bring every conversation into the journal."""
    from tqdm import tqdm

    by_index, begin, tokens = {c.index: c for c in conversations}, time.perf_counter(), 0

    def account(record: dict) -> None:
        conversation = by_index[record["conversation"]]
        for reason, count in record["skipped"].items():
            for _ in range(count):
                skips.add(conversation.place, reason, record.get("detail", ""), conversation.file)

    done = {record["conversation"]: record for record in journal.records if record.get("conversation") in by_index}
    with tqdm(total=len(conversations), initial=len(done), unit="row", desc="conversations", disable=None) as progress:

        def finish(record: dict) -> None:
            nonlocal tokens
            journal.add(record)
            tokens += sum(stop - start for row in record["rows"] for start, stop in row["spans"])
            progress.set_postfix_str(f"{tokens / (time.perf_counter() - begin):,.0f} answer tokens/s", refresh=False)
            progress.update()
            account(record)

        for record in done.values():
            account(record)
        left = [c for c in conversations if c.index not in done]
        if left and args.keep_answers:
            keep_answers(left, args, encoder, finish)
        elif left:
            write_answers(left, decoder, args, encoder, finish)


def write(args: argparse.Namespace, settings: dict, conversations: list[Conversation], journal: Journal, skips: Skips) -> None:
    """Write the dataset folder from the journal, remove the journal, print the summary. Raises ValueError naming a file none of whose rows is left."""
    from train.chat_rows import mask_of
    from train.data import Manifest, pad_rows, write_dataset

    records = {record["conversation"]: record for record in journal.records if "conversation" in record}
    records = [(c, records[c.index]) for c in conversations]
    kept = Counter()
    for conversation, record in records:
        kept[conversation.file] += len(record["rows"])
    for file in kept.keys() | ({""} if args.self_prompts else set()):
        if not kept[file]:
            raise ValueError(f"{file or 'own prompts'}: no row can give loss: {listing(skips.by_file.get(file, {}))}")
    rows = [row for _, record in records for row in record["rows"]]
    ids = [np.frombuffer(base64.b64decode(row["ids"]), "<u4") for row in rows]
    masks = [mask_of(row["spans"], len(x)) for row, x in zip(rows, ids)]
    manifest = Manifest(
        name=args.output.name,
        source=source_text(settings),
        target=settings["target"],
        template_mode=args.template_mode,
        tokenizer=settings["tokenizer"],
        tokenizer_sha256=settings["tokenizer_sha256"],
        skipped=dict(sorted(skips.counts.items())),
    )
    write_dataset(args.output, *pad_rows(ids, masks, max(map(len, ids))), manifest, overwrite=True)
    journal.path.unlink()
    total = Counter()
    for _, record in records:
        total.update({name: record.get(name, 0) for name in ("answers", "capped", "open")})
    tokens, supervised = sum(map(len, ids)), sum(int(mask.sum()) for mask in masks)
    width = max(map(len, ids))
    lines = [f"{args.output}: {len(ids):,} rows of width {width} from {len(records):,} conversations, {tokens:,} tokens, {supervised:,} of answers"]
    if not args.keep_answers:
        lines.append(f"{total['capped'] / total['answers']:.1%} of the {total['answers']:,} answers end at a limit, without an end token")
    for words, count in (
        ("rows with other ids when rendered and tokenised anew, kept as the target wrote them", sum(not row["renders"] for row in rows)),
        (f"rows cut to {args.max_length} tokens", sum(row["cut"] for row in rows)),
        ("user turns without an answer, for lack of room or because the template refused", total["open"]),
    ):
        if count:
            lines.append(f"{words}: {count:,}")
    print("\n".join([*lines, f"left out: {listing(skips.counts)}"]))


def describe_settings(args: argparse.Namespace, tokenizer) -> dict:
    """Everything that the rows depend on, as plain JSON values."""
    options = ["template_mode", "max_length", "limit", "keep_answers", "self_prompts"]
    options += [] if args.keep_answers else [name for name in SAMPLING if name != "batch_size"]
    options += list(SELF_PROMPTS) if args.self_prompts else []
    where = Path(args.tokenizer or args.target)
    file = where if where.is_file() else where / "tokenizer.json"
    # A GGUF file holds its tokenizer among its weights; the built tokenizer is hashed then.
    digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest() if where.is_file() else file_sha256(file)
    return {
        "inputs": [[path.name, file_sha256(path)] for path in args.input],
        "target": target_identity(Path(args.target)),
        "tokenizer": file.name,
        "tokenizer_sha256": digest,
        "chat_template_sha256": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest(),
    } | {name: getattr(args, name) for name in options}


def source_text(settings: dict) -> str:
    """Where the rows come from, for people."""
    origin = [f"{name} (sha256 {digest})" for name, digest in settings["inputs"]]
    if settings["self_prompts"]:
        origin.append(f"{settings['self_prompts']} prompts asked of the target at temperature {settings['prompt_temperature']}")
    options = [f"{name} {settings[name]}" for name in SAMPLING if name in settings]
    return f"{', '.join(origin)}; answers {'as in the files' if settings['keep_answers'] else 'of the target: ' + ', '.join(options)}"


def target_identity(path: Path) -> str:
    """Name of the target and a sha256 over config.json and, of each weights file, its name, its size and its first and last MiB."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    digest = hashlib.sha256(b"" if path.is_file() else (path / "config.json").read_bytes())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as content:
            digest.update(content.read(2**20))
            content.seek(max(0, size - 2**20))
            digest.update(content.read(2**20))
    return f"{path.resolve().name}, digest {digest.hexdigest()}"


def file_sha256(path: Path) -> str:
    """sha256 of a file, as hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Console entry point. Returns 0, 2 for bad input or a file error, 130 for Ctrl-C."""
    args = parse_args(argv)
    try:
        run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        from dspine_jax.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        print(f"error: out of memory; --batch-size {args.batch_size} is too many, the same command with fewer goes on: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
