"""Write drafters and targets as folders that PyTorch servers read, and bring such folders back."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from dspine_jax.config import DrafterConfig, TargetConfig

EPILOG = """examples:
  dspine-export runs/dspine/drafter --target Qwen3-8B --output out/served --results out/eval/results.json --verify
  dspine-export z-lab/Qwen3-8B-DFlash-b16 --import --target Qwen3-8B --output runs/dflash/drafter
  dspine-export --target SmolLM2-135M-Instruct.Q4_1.gguf --target-output out/SmolLM2-135M-Instruct
The folder written holds config.json and model.safetensors in the layout that SGLang reads (docs/serving.md), and README.md, a model card.
--import reads that layout, z-lab's and SpecForge's DFlash folders among it, and writes a drafter folder of this project, in fp32.
Sizes are compared with the target's before any weight is read. Nothing in a folder is executed, and pickles are refused."""
MASK_TOKEN = "<|MASK|>"  # servers look it up in the tokenizer and put its id before the config's
PROBES = 64  # vocabulary rows by which an imported drafter's target is recognised


def build_parser() -> argparse.ArgumentParser:
    """Every option of ``dspine-export``."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("dspine-export", description=__doc__, epilog=EPILOG, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("drafter", nargs="?", type=Path, help="drafter folder; with --import one in a server's layout")
    parser.add_argument("--target", required=True, help="HF folder or GGUF file of the target that the drafter belongs to")
    parser.add_argument("--output", type=Path, help="folder to write")
    parser.add_argument("--import", dest="bring", action="store_true", help="from a server's layout to a drafter folder of this project")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the weights written (default bfloat16; --import writes float32)")
    parser.add_argument("--verify", action="store_true", help="read what was written and compare every tensor; exit code 1 on a difference")
    parser.add_argument("--results", type=Path, help="results.json of dspine-evaluate, for the model card")
    parser.add_argument("--target-output", type=Path, help="write the target, a GGUF file, as an HF folder with its tokenizer")
    parser.add_argument("--overwrite", action="store_true", help="replace what is in the output folders")
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if (args.drafter is None) != (args.output is None):
        parser.error("a drafter folder and --output belong together")
    if args.drafter is None and args.target_output is None:
        parser.error("nothing to write: give a drafter folder with --output, or --target-output")
    for name, given in (("--import", args.bring), ("--verify", args.verify), ("--results", args.results)):
        if given and args.drafter is None:
            parser.error(f"{name} is about a drafter; give its folder and --output")
    if args.bring and args.results:
        parser.error("--results is for the model card, which --import does not write")
    if args.bring and args.dtype:
        parser.error(f"--dtype {args.dtype} is about what servers read; --import keeps every bit in float32")
    args.dtype = args.dtype or "bfloat16"
    return args


def served_table(drafter, rows_VD, dtype):
    """``transfer.table``: T of every LM-head row as the server holds them, [V,R] of ``dtype``.

    A draft model of SGLang sees no LM head when it is loaded, so T is stored; with mean and basis it stays checkable.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from dspine_jax.transfer import token_table

    return np.asarray(jax.jit(token_table, static_argnames="dtype")(drafter.transfer, jnp.asarray(rows_VD).astype(dtype), dtype=jnp.dtype(dtype)))


def served_tensors(drafter, rows_VD, dtype) -> dict:
    """Tensors of the served folder by name: ours, and those that the method's layout derives."""
    from dspine_jax.drafter_io import drafter_tensors
    from dspine_jax.public_drafters import LAYOUTS

    derived = {"transfer.table": served_table}
    return drafter_tensors(drafter, dtype) | {name: derived[name](drafter, rows_VD, dtype) for name in LAYOUTS[drafter.config.method].derived}


def export_drafter(source: Path, target_path: str, output: Path, *, dtype: str, results: Path | None = None) -> None:
    """Write the served folder of a drafter: weights, config, model card.

    Raises FileNotFoundError for missing files, ValueError for a drafter of another target or one that its server could not run.
    """
    import jax.numpy as jnp

    from dspine_jax.drafter_io import load_drafter, read_drafter_config
    from dspine_jax.public_drafters import LAYOUTS, public_config
    from dspine_jax.target_io import load_head_rows, read_target_config
    from dspine_jax.weight_folder import write_tensors

    target = read_target_config(target_path)
    config = read_drafter_config(source, target)
    check_mask_token(config, Path(target_path))
    if config.method == "dspine" and not config.redoes_last_write:
        raise ValueError(f"{source}: injects after layers {list(config.injection_layers)}, the last one not among them: no write to redo, which is not served")
    content, card = public_config(config, target, dtype=dtype), model_card(config, target, source, target_path, dtype, results)
    rows_VD = load_head_rows(target_path) if LAYOUTS[config.method].derived else None
    write_tensors(output, served_tensors(load_drafter(source, target), rows_VD, jnp.dtype(dtype)))
    _write_text(output / "config.json", json.dumps(content, indent=2) + "\n")
    _write_text(output / "README.md", card)


def import_drafter(source: Path, target_path: str, output: Path) -> None:
    """Write a folder in a server's layout as a drafter folder of this project, in fp32.

    Raises as ``export_drafter``; ValueError also where the stored T is not that of the target's LM head.
    """
    from dspine_jax.drafter_io import load_drafter, save_drafter
    from dspine_jax.public_drafters import LAYOUTS
    from dspine_jax.target_io import load_head_rows, read_target_config
    from dspine_jax.weight_folder import folder_tensors

    drafter = load_drafter(source, read_target_config(target_path))
    tensors = folder_tensors(source)
    for name in LAYOUTS[drafter.config.method].derived:
        if name in tensors:  # a folder of ours has none
            check_table(drafter, load_head_rows(target_path), tensors[name], f"{source}: {name}")
    save_drafter(output, drafter)


def check_table(drafter, rows_VD, table_VR, source: str) -> None:
    """Raise ValueError unless ``PROBES`` rows of a stored T point where those of the target's LM head do."""
    import numpy as np

    if table_VR.shape != (len(rows_VD), drafter.config.injection.transfer_size):
        raise ValueError(f"{source} has shape {list(table_VR.shape)}, expected {[len(rows_VD), drafter.config.injection.transfer_size]}")
    probes = np.linspace(0, len(rows_VD) - 1, PROBES).astype(int)
    ours, theirs = np.asarray(drafter.transfer(rows_VD[probes])), table_VR[probes].astype(np.float32)
    cosine = (ours * theirs).sum(-1) / np.maximum(np.linalg.norm(ours, axis=-1) * np.linalg.norm(theirs, axis=-1), 1e-9)
    if cosine.mean() < 0.99:
        raise ValueError(f"{source} does not fit the target's LM head (mean cosine {cosine.mean():.3f}): this drafter belongs to another target")


def check_mask_token(config: DrafterConfig, target_path: Path) -> None:
    """Raise ValueError where the target's tokenizer has a mask token of its own with another id: servers would use that."""
    file = target_path / "tokenizer.json"
    if not file.is_file():
        return
    from dspine_jax.weight_folder import read_json

    found = [token["id"] for token in read_json(file).get("added_tokens") or () if token.get("content") == MASK_TOKEN]
    if found and found != [config.mask_token_id]:
        raise ValueError(f"{file}: {MASK_TOKEN} has id {found[0]}, the drafter was trained with mask_token_id {config.mask_token_id}")


def differences(source: Path, output: Path, target_path: str, dtype: str, *, bring: bool) -> list[str]:
    """What of ``output``, read again, is not exactly what ``source`` holds in that type; empty when all is."""
    import jax.numpy as jnp

    from dspine_jax.drafter_io import drafter_tensors, load_drafter
    from dspine_jax.public_drafters import LAYOUTS
    from dspine_jax.target_io import load_head_rows, read_target_config
    from dspine_jax.weight_folder import folder_tensors

    target = read_target_config(target_path)
    drafter, again, stored = load_drafter(source, target), load_drafter(output, target), folder_tensors(output)
    found = [] if drafter.config == again.config else [f"config: {drafter.config} became {again.config}"]
    if bring:
        expected = drafter_tensors(drafter)
    else:
        rows_VD = load_head_rows(target_path) if LAYOUTS[drafter.config.method].derived else None
        expected = served_tensors(drafter, rows_VD, jnp.dtype(dtype))
    found += [f"{name}: in one of the two only" for name in sorted(set(expected) ^ set(stored))]
    for name in sorted(set(expected) & set(stored)):
        a, b = expected[name], stored[name]
        if a.shape != b.shape or a.dtype != b.dtype or a.tobytes() != b.tobytes():
            found.append(f"{name}: {a.dtype}{list(a.shape)} was written, {b.dtype}{list(b.shape)} with other bits is there")
    return found


def write_hf_target(target_path: str, output: Path, *, dtype: str) -> None:
    """Write a GGUF target as an HF folder with its tokenizer, weights as ``dtype``. Raises ValueError for a target that is a folder already."""
    import jax.numpy as jnp

    from dspine_jax.gguf_io import gguf_tokenizer
    from dspine_jax.target_io import load_target, save_target

    if Path(target_path).is_dir():
        raise ValueError(f"{target_path} is an HF folder already; --target-output is for GGUF files")
    save_target(output, load_target(target_path, dtype=jnp.dtype(dtype)), dtype=jnp.dtype(dtype))
    gguf_tokenizer(target_path).save_pretrained(output)


# ---- model card -----------------------------------------------------------------------------------


def model_card(config: DrafterConfig, target: TargetConfig, source: Path, target_path: str, dtype: str, results: Path | None) -> str:
    """README.md of a served folder: what the drafter is, its target, its data, measured tau, how to launch it."""
    K, name = config.block_size, Path(target_path).name
    title = {"dflash": "DFlash", "dflash2": "DFlash2", "domino": "Domino", "dspine": "DSpine"}[config.method]
    shape = f"{config.num_layers} layers, {config.block_attention} attention in the block, taps after target layers {list(config.target_layer_ids)}"
    lines = [
        f"# {title} drafter for {name}",
        "",
        f"A block-parallel drafter for speculative decoding: {shape}, mask token {config.mask_token_id}, weights in {dtype}.",
        "",
        "| | |",
        "|---|---|",
        f"| target | {name}: {target.family}, {target.num_layers} layers, width {target.hidden_size}, {target.vocab_size} embedding rows; no other |",
        f"| block size | {K}: the last verified token and {K - 1} drafts; a verify pass of the target is {K} tokens wide |",
        f"| chat template mode of the training prompts | {config.template_mode or 'not recorded'} |",
        *(f"| {key} | {value} |" for key, value in _training(source)),
        "",
        "## Acceptance length",
        "",
        *_tau_table(source, results),
        "",
        "## Launch",
        "",
        "```",
        *(["pip install dspine-sglang          # the model class; serve/sglang of the repository"] if config.method == "dspine" else []),
        "python -m sglang.launch_server \\",
        f"  --model-path {name} --dtype bfloat16 \\",
        "  --speculative-algorithm DFLASH \\",
        "  --speculative-draft-model-path <this folder> \\",
        f"  --speculative-num-draft-tokens {K} \\",
        "  --speculative-draft-model-quantization unquant \\",
        "  --speculative-draft-attention-backend triton",
        "```",
        "",
        f"SGLang counts the block ({K}), vLLM's `num_speculative_tokens` the drafts ({K - 1}). Every drafted token is verified by the target.",
    ]
    return "\n".join(lines) + "\n"


def _training(source: Path) -> list[tuple[str, str]]:
    """What the run beside a trained drafter's folder says of its training."""
    from dspine_jax.config_io import read_config

    file = source.parent / "config.json"
    try:
        run = read_config(file)
    except (FileNotFoundError, ValueError):
        return [("training data", "not recorded")]
    rows = [("training data", Path(run.data.path).name), ("steps", f"{run.steps} of {run.data.batch_size} rows x {run.anchors.num_anchors} anchors")]
    manifest = Path(run.data.path) / "manifest.json"
    if manifest.is_file():
        content = json.loads(manifest.read_text(encoding="utf-8"))
        by = content.get("target") or "not recorded"
        rows[0] = ("training data", f"{content.get('name')}, {content.get('rows')} rows: {content.get('source')}; answers by: {by}")
    return rows


def _tau_table(source: Path, results: Path | None) -> list[str]:
    """tau by benchmark, of the method whose folders include ``source``. Raises ValueError where the file has none."""
    if results is None:
        return ["Not measured."]
    from dspine_jax.weight_folder import read_json

    lines: list[str] = []
    for temperature, content in (read_json(results).get("temperatures") or {}).items():
        for method in content["methods"].values():
            if source.resolve() not in [Path(folder).resolve() for folder in method["folders"]]:
                continue
            scores = {name: entry["full"]["tau_pooled"] for name, entry in method["benchmarks"].items() if entry["full"]["rounds"]}
            if not lines:
                lines = ["| temperature | policy | " + " | ".join(method["benchmarks"]) + " | average |", "|---" * (len(method["benchmarks"]) + 3) + "|"]
            cells = [f"{scores[name]:.2f}" if name in scores else "-" for name in method["benchmarks"]]
            average = method["full_average_tau"]
            cells.append("-" if average is None else f"{average:.2f}")
            lines.append(f"| {temperature.removeprefix('T')} | {method['policy']} | " + " | ".join(cells) + " |")
    if not lines:
        raise ValueError(f"{results}: no method was scored with the drafter {source}")
    return [*lines, "", "Tokens a round, the bonus token counted; pooled over prompts, full text, by replay (`dspine-evaluate`)."]


# ---- command --------------------------------------------------------------------------------------


def _write_text(file: Path, text: str) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)


def _refuse_overwrite(folder: Path, overwrite: bool) -> None:
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; give another folder, or --overwrite to replace what it holds")


def run(args: argparse.Namespace) -> int:
    """Do what the command line asks for. Returns 0, or 1 where --verify found a difference."""
    for folder in (args.output, args.target_output):
        if folder is not None:
            if args.drafter is not None and folder.resolve() == args.drafter.resolve():
                raise ValueError(f"{folder} is the drafter's own folder; write to another one")
            _refuse_overwrite(folder, args.overwrite)
    if args.target_output is not None:
        write_hf_target(args.target, args.target_output, dtype=args.dtype)
        print(f"{args.target_output}: target, {args.dtype}")
    if args.drafter is None:
        return 0
    if args.bring:
        import_drafter(args.drafter, args.target, args.output)
    else:
        export_drafter(args.drafter, args.target, args.output, dtype=args.dtype, results=args.results)
    print(f"{args.output}: drafter, {'float32' if args.bring else args.dtype}")
    if args.verify:
        found = differences(args.drafter, args.output, args.target, args.dtype, bring=args.bring)
        for difference in found:
            print(f"differs: {difference}", file=sys.stderr)
        if found:
            return 1
        print("verified: config and every tensor are as they were meant")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Console entry point. Returns 0, 1 for a difference, 2 for bad input or a file error, 130 for Ctrl-C."""
    args = parse_args(argv)
    try:
        return run(args)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
