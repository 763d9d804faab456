"""Train a DSpine drafter that reads its predecessors' true features: the bound of what features can give, not a drafter to decode with.

    python -m train.bound configs/smollm2_135m_dspine.py --layers all --set workdir=runs/bound

Same config, data, anchors, start and schedule as the product's training, another loss (dspine_jax.bounds). ``python -m serve.probe --probes tau`` then
scores it: its way "true, all" (or the set it was trained for) is the bound; its other ways mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path

MARK = "true_features.json"  # tells a workdir of the bound from the product's
EPILOG = """examples:
  python -m train.bound configs/demo/dspine.py --layers all --set workdir=runs/bound
  python -m train.bound my_config.py --layers 0,1 --set init_from=runs/dspine/drafter --set steps=1000 --set workdir=runs/bound_early
The same command in the same workdir resumes at the last complete checkpoint."""


def build_parser() -> argparse.ArgumentParser:
    """Every option."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m train.bound", description=__doc__, epilog=EPILOG, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("config", help="Python file that defines `config = TrainConfig(...)` of a DSpine drafter")
    parser.add_argument("--layers", required=True, help="injecting layers that read true features: all, or numbers as 0,1")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config field by its dotted name; repeatable")
    return parser


def chosen_layers(text: str, config) -> tuple[int, ...]:
    """'all' or '0,1' as layers of a drafter config that inject. Raises ValueError."""
    from dspine_jax.bounds import check_true_feature_sets

    if text == "all":
        layers = config.injection_layers
    else:
        try:
            layers = tuple(sorted({int(layer) for layer in text.split(",")}))
        except ValueError:
            raise ValueError(f"--layers {text!r} is no set of layers; write all, or numbers as 0,1") from None
    check_true_feature_sets(config, (layers,))
    return layers


def mark(workdir: Path, layers: tuple[int, ...]) -> None:
    """Leave in the workdir what is trained there. Raises ValueError where something else is."""
    stored = json.loads((workdir / MARK).read_text()) if (workdir / MARK).is_file() else None
    if stored != list(layers) and (stored is not None or (workdir / "checkpoints").exists()):
        found = "the product's training" if stored is None else f"a bound with true features at {','.join(map(str, stored))}"
        raise ValueError(f"{workdir} holds {found}; use a new workdir for true features at {','.join(map(str, layers))}")
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / MARK).write_text(json.dumps(layers))


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns as ``train.main``."""
    args = build_parser().parse_args(argv)
    from dspine_jax.bounds import true_feature_objective
    from dspine_jax.config_io import apply_overrides, load_config

    try:
        config = apply_overrides(load_config(args.config), args.set)
        layers = chosen_layers(args.layers, config.drafter)
        if config.loss.l1_weight > 0:
            raise ValueError(f"loss.l1_weight {config.loss.l1_weight} is not read by the bound with true features; set it to 0")
        if not config.workdir:
            raise ValueError("workdir is not set; give it in the config file or with --set workdir=...")
        mark(Path(config.workdir), layers)
        from train.loop import NonFiniteError, run

        try:
            print(f"drafter written to {run(config, functools.partial(true_feature_objective, layers))}")
        except NonFiniteError as error:
            print(f"stopped: {error}", file=sys.stderr)
            return 3
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
