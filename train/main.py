"""Train a drafter: ``python -m train.main configs/smollm2_135m_dspine.py --set workdir=runs/a``."""

from __future__ import annotations

import argparse
import json
import sys

EPILOG = """examples:
  dspine-train configs/smollm2_135m_dspine.py --set target=SmolLM2-135M-Instruct.Q4_1.gguf --set data.path=data/smollm2
  dspine-train configs/smollm2_135m_dspine.py --set drafter.injection.layers=(4,) --set workdir=runs/last_only
  dspine-train my_config.py --set init_from=runs/a/drafter --set workdir=runs/b      start from a trained drafter's weights
  dspine-train my_config.py --set kernels.injection=xla     plain XLA for one operation; a choice that cannot run is an error
  dspine-train my_config.py --print-config          show the config with every override applied
The same command in the same workdir resumes at the last complete checkpoint."""


def build_parser() -> argparse.ArgumentParser:
    """Every option of ``dspine-train``."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("dspine-train", description=__doc__, epilog=EPILOG, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("config", help="Python file that defines `config = TrainConfig(...)`")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a config field by its dotted name; repeatable")
    parser.add_argument("--print-config", action="store_true", help="print the config as JSON and stop")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Console entry point. Returns 0, 2 for bad input or a file error, 3 for a run stopped by non-finite numbers, 130 for Ctrl-C."""
    args = build_parser().parse_args(argv)
    # JAX is imported only now, so --help and argument errors answer at once.
    from dspine_jax.config_io import apply_overrides, config_to_dict, load_config

    try:
        config = apply_overrides(load_config(args.config), args.set)
        if args.print_config:
            print(json.dumps(config_to_dict(config), indent=2))
            print("null sizes are taken from the target when the run starts; the resolved config is saved in the workdir", file=sys.stderr)
            return 0
        from train.loop import NonFiniteError, run

        try:
            print(f"drafter written to {run(config)}")
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
