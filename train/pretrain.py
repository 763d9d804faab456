"""Train a small target from nothing on a dataset folder: the model behind the embedded demo, and a target for trying ideas."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

EPILOG = """examples:
  python -m train.pretrain --data data/demo_text --tokenizer data/demo_tokenizer --output runs/demo_target
  python -m train.pretrain ... --num-layers 4 --hidden-size 128 --intermediate-size 384 --steps 500
Every token of a row is learned, the prompt's too. Written: an HF folder (Qwen3 architecture, tied embeddings, bf16) and metrics.jsonl."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def build_parser() -> argparse.ArgumentParser:
    """Every option of the command."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m train.pretrain", description=__doc__, epilog=EPILOG, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("--data", help="dataset folder (docs/data.md)")
    parser.add_argument("--config-only", action="store_true", help="write config.json and the tokenizer and stop: dspine-prepare --keep-answers needs no more")
    parser.add_argument("--held-out", help="dataset folder whose loss is reported")
    parser.add_argument("--tokenizer", required=True, type=Path, help="folder with tokenizer.json, copied into the target")
    parser.add_argument("--output", required=True, type=Path, help="folder to write")
    parser.add_argument("--hidden-size", type=int, default=256, help="default 256")
    parser.add_argument("--num-layers", type=int, default=10, help="default 10")
    parser.add_argument("--head-dim", type=int, default=32, help="default 32; the hidden size divided by it gives the query heads")
    parser.add_argument("--num-kv-heads", type=int, default=2, help="default 2")
    parser.add_argument("--intermediate-size", type=int, default=640, help="default 640")
    parser.add_argument("--steps", type=int, default=3500, help="default 3500")
    parser.add_argument("--batch-size", type=int, default=32, help="rows a step (default 32)")
    parser.add_argument("--max-length", type=int, default=512, help="tokens of a row (default 512)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak, after 5%% warm-up, cosine to a tenth (default 2e-3)")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="default 0.1")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="compute precision (default bfloat16)")
    return parser


def target_config(args: argparse.Namespace):
    """The target's TargetConfig: sizes of the command line, vocabulary and end token of the tokenizer."""
    from dspine_jax.config import TargetConfig

    spec = json.loads((args.tokenizer / "tokenizer.json").read_text())
    added = {token["content"]: token["id"] for token in spec["added_tokens"]}
    settings = json.loads((args.tokenizer / "tokenizer_config.json").read_text())
    num_tokens = 1 + max(max(spec["model"]["vocab"].values()), *added.values())
    return TargetConfig(
        family="qwen3",
        vocab_size=num_tokens,
        num_tokens=num_tokens,
        hidden_size=args.hidden_size,
        num_layers=args.num_layers,
        num_heads=args.hidden_size // args.head_dim,
        num_kv_heads=args.num_kv_heads,
        head_dim=args.head_dim,
        intermediate_size=args.intermediate_size,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        tie_embeddings=True,
        eos_token_ids=(added[settings["eos_token"]],),
        max_position_embeddings=2 * args.max_length,
    )


def write_tokenizer(args: argparse.Namespace) -> None:
    """Copy the tokenizer into the target's folder."""
    for name in TOKENIZER_FILES:
        if (args.tokenizer / name).is_file():
            shutil.copyfile(args.tokenizer / name, args.output / name)


def train(args: argparse.Namespace) -> dict[str, float]:
    """Train and write the target. -> the last record. Raises ValueError or OSError for bad input."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from tqdm import tqdm

    from dspine_jax.config import DataConfig
    from dspine_jax.target import Target
    from dspine_jax.target_io import save_target
    from train.data import DatasetFolder, make_iterator

    config = target_config(args)
    num_tokens = config.num_tokens
    dtype = jnp.dtype(args.dtype)
    data_config = DataConfig(path=args.data, batch_size=args.batch_size, max_length=args.max_length)
    batches = make_iterator(DatasetFolder(args.data, vocab_size=num_tokens), data_config=data_config, seed=args.seed)
    warmup = max(1, args.steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.learning_rate, warmup, max(args.steps, warmup + 1), 0.1 * args.learning_rate)
    # Norm weights and embeddings are not pulled to zero.
    decayed = lambda params: jax.tree.map_with_path(lambda path, _: "kernel" in jax.tree_util.keystr(path), params)  # noqa: E731
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=args.weight_decay, mask=decayed))
    target = Target(config, rngs=nnx.Rngs(args.seed))
    target.embed_tokens.embedding.set_value(target.embed_tokens.embedding[...] * 0.5)  # tied: also the head, whose first logits should be small
    graph, params = nnx.split(target)
    moments = optimizer.init(params)

    def loss_sums(params, tokens_BS, lengths_B):
        target = nnx.merge(graph, params)
        logits_BTV = target.logits(target(tokens_BS, dtype=dtype).hidden_BTD[:, :-1])
        nll_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BS[:, 1:])
        real_BT = jnp.arange(1, tokens_BS.shape[1]) < lengths_B[:, None]
        return (nll_BT * real_BT).sum(), real_BT.sum()

    @jax.jit
    def step(params, moments, tokens_BS, lengths_B):
        def mean(params):
            total, count = loss_sums(params, tokens_BS, lengths_B)
            return total / count

        loss, gradients = jax.value_and_grad(mean)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    def held_out_loss() -> float:
        folder = DatasetFolder(args.held_out, vocab_size=num_tokens)
        sums = jax.jit(loss_sums)
        total = count = 0.0
        for first in range(0, folder.num_rows - args.batch_size + 1, args.batch_size):
            rows = slice(first, first + args.batch_size)
            t, n = sums(params, jnp.asarray(folder.tokens[rows, : args.max_length], jnp.int32), jnp.asarray(folder.lengths[rows]))
            total, count = total + float(t), count + float(n)
        if not count:
            raise ValueError(f"{args.held_out}: {folder.num_rows} rows are fewer than a batch of {args.batch_size}; lower --batch-size")
        return total / count

    args.output.mkdir(parents=True, exist_ok=True)
    with open(args.output / "metrics.jsonl", "w") as log, tqdm(total=args.steps, unit="step", mininterval=0.5 if sys.stderr.isatty() else 30) as progress:
        record: dict[str, float] = {}
        for index in range(1, args.steps + 1):
            batch = next(batches)
            params, moments, loss = step(params, moments, batch["tokens"], batch["lengths"])
            progress.update(1)
            if index % 100 == 0 or index == args.steps:
                record = {"step": index, "loss": float(loss), "parameters": sum(x.size for x in jax.tree.leaves(params))}
                if args.held_out and (index % 1000 == 0 or index == args.steps):
                    record["held_out_loss"] = held_out_loss()
                progress.set_postfix(loss=f"{loss:.3f}")
                log.write(json.dumps(record) + "\n")
                log.flush()
    save_target(args.output, nnx.merge(graph, params))
    write_tokenizer(args)
    return record


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns 0, 2 for bad input, 130 for Ctrl-C."""
    args = build_parser().parse_args(argv)
    try:
        if args.config_only:
            from dspine_jax.target_io import save_target_config

            save_target_config(args.output, target_config(args))
            write_tokenizer(args)
            return 0
        if not args.data:
            raise ValueError("give the text to learn with --data")
        record = train(args)
    except (ValueError, OSError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"target written to {args.output}: {record['parameters'] / 1e6:.2f}M parameters, loss {record['loss']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
