"""--kernel OP=IMPLEMENTATION of the commands that decode."""

from __future__ import annotations

import argparse

from dspine_jax.config import KernelConfig


def add_kernel_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--kernel``, a list of texts for ``kernels_of``."""
    parser.add_argument(
        "--kernel",
        action="append",
        default=[],
        metavar="OP=IMPLEMENTATION",
        help="run an operation by this implementation, as injection=xla, instead of the device's default; one that cannot run is an error; repeatable",
    )


def kernels_of(texts: list[str]) -> KernelConfig:
    """The choices of ``--kernel``. Raises ValueError for unknown names, NotImplementedError for kernels that cannot run on this device at all."""
    from dspine_jax.config_io import apply_overrides
    from pallas_kernels.dispatch import check_here

    for text in texts:
        if "=" not in text:
            raise ValueError(f"--kernel {text!r} is not of the form OP=IMPLEMENTATION, such as injection=xla")
    try:
        kernels = apply_overrides(KernelConfig(), texts)
        kernels.refuse(("head_softmax",), "decoding never calls it: set it where a drafter is trained")
    except ValueError as error:
        raise ValueError(f"--kernel: {error}") from error
    check_here(kernels.chosen)
    return kernels
