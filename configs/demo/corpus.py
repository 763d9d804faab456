"""Text for the embedded demo target: conversations out of the stored answers of SmolLM2-135M-Instruct, as JSONL.

    python configs/demo/corpus.py train.npz --tokenizer smollm2/ --output work/

Only sources 0 (questions of GSM8K, MIT licence) and 2 (prompts the model wrote itself) are taken: weights that are given away may not be trained on source 1
(docs/data.md). Written: text.jsonl (conversations to learn), held_out.jsonl (one in fifty, for the loss), prompts.jsonl and evaluation.jsonl (user turns of the
two). An answer that was cut at the cap keeps its last whole sentence.
"""

import argparse
import json
import re
from pathlib import Path

import numpy as np

SOURCES = (0, 2)
HELD_OUT_EVERY = 50


def user_text(rendered: str) -> str | None:
    """The user's turn of a rendered prompt, or None where there is not exactly one."""
    found = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", rendered, flags=re.DOTALL)
    return found[0].strip() if len(found) == 1 and found[0].strip() else None


def whole_sentences(text: str) -> str:
    """Text up to its last sentence end or line end."""
    ends = [m.end() for m in re.finditer(r"[.!?](?=\s|$)|\n", text)]
    return text[: ends[-1]].rstrip() if ends else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("npz", type=Path, help="stored answers (docs/data.md)")
    parser.add_argument("--tokenizer", required=True, help="folder with the tokenizer of the answers")
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, local_files_only=True)
    data = np.load(args.npz)
    rows, seen = [], set()
    for tokens, pad, length, source in zip(data["tokens"], data["prompt_pad"], data["answer_len"], data["source"]):
        if source not in SOURCES:
            continue
        question = user_text(tokenizer.decode(tokens[pad:256]))
        answer = tokenizer.decode(tokens[256 : 256 + length])
        finished = answer.endswith("<|im_end|>")
        answer = answer.removesuffix("<|im_end|>").strip()
        answer = answer if finished else whole_sentences(answer)
        if question and answer and "<|" not in question + answer and (question, answer) not in seen:
            seen.add((question, answer))
            rows.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    order = np.random.default_rng(0).permutation(len(rows))
    args.output.mkdir(parents=True, exist_ok=True)
    held_out = set(order[: len(rows) // HELD_OUT_EVERY].tolist())
    for name, keep in (("text", lambda i: i not in held_out), ("held_out", lambda i: i in held_out)):
        chosen = [rows[i] for i in order if keep(i)]
        (args.output / f"{name}.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in chosen))
        prompts = list(dict.fromkeys(row[0]["content"] for row in chosen))
        target = {"text": "prompts", "held_out": "evaluation"}[name]
        (args.output / f"{target}.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        print(f"{name}: {len(chosen)} conversations, {len(prompts)} prompts")


if __name__ == "__main__":
    main()
