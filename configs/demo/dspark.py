"""DSpark for the embedded demo target, its authors' loss and optimiser on the rows, anchors and steps of configs/demo/dspine.py.

Command:
    dspine-train configs/demo/dspark.py --set target=assets/demo/target --set data.path=assets/demo/data/train --set workdir=runs/demo_dspark
"""

import dataclasses
from pathlib import Path

from dspine_jax.config import LossConfig, MarkovConfig
from dspine_jax.config_io import load_config

dflash = load_config(Path(__file__).with_name("dflash.py"))
config = dataclasses.replace(
    dflash,
    workdir="runs/demo_dspark",
    drafter=dataclasses.replace(
        dflash.drafter,
        block_size=7,  # shifted: 7 drafts, as the others
        label_shift="shifted",
        markov=MarkovConfig(kind="vanilla", rank=32),
        confidence=True,
        confidence_with_markov=True,
    ),
    loss=LossConfig(loss_decay_gamma=4.0, ce_weight=0.1, l1_weight=0.9, confidence_weight=1.0, prefix_mask=True),
    optimizer=dataclasses.replace(dflash.optimizer, beta2=0.999, final_fraction=0.0),
)
