"""Tokenizer of the embedded demo target: byte-level BPE with digits apart, trained on the demo's own text, and a ChatML template.

    python configs/demo/tokenizer.py work/text.jsonl --output work/tokenizer
"""

import argparse
import json
from pathlib import Path

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="JSONL of conversations")
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument("--vocab-size", type=int, default=4096, help="default 4096")
    args = parser.parse_args()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=args.vocab_size, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    rows = [json.loads(line)["messages"] for line in args.text.read_text().split("\n") if line]
    tokenizer.train_from_iterator((message["content"] for row in rows for message in row), trainer)
    args.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.output / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    settings |= {"clean_up_tokenization_spaces": False, "model_max_length": 1024}
    (args.output / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    print(f"{tokenizer.get_vocab_size()} tokens, mask id {tokenizer.token_to_id('<|mask|>')}")


if __name__ == "__main__":
    main()
