"""DFlash2 for the embedded demo target, its authors' loss and optimiser on the rows, anchors and steps of configs/demo/dspine.py.

Command:
    dspine-train configs/demo/dflash2.py --set target=assets/demo/target --set data.path=assets/demo/data/train --set workdir=runs/demo_dflash2
"""

import dataclasses
from pathlib import Path

from dspine_jax.config import ConvolutionConfig, LossConfig, SelectorConfig
from dspine_jax.config_io import load_config

dflash = load_config(Path(__file__).with_name("dflash.py"))
config = dataclasses.replace(
    dflash,
    workdir="runs/demo_dflash2",
    drafter=dataclasses.replace(dflash.drafter, convolution=ConvolutionConfig(taps=2, group_size=16), selector=SelectorConfig(rank=32, num_candidates=8)),
    loss=LossConfig(loss_decay_gamma=4.0, selector_weight=1.0),
    optimizer=dataclasses.replace(dflash.optimizer, final_fraction=0.1),
)
