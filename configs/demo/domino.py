"""Domino for the embedded demo target, its authors' loss and optimiser on the rows, anchors and steps of configs/demo/dspine.py.

Command:
    dspine-train configs/demo/domino.py --set target=assets/demo/target --set data.path=assets/demo/data/train --set workdir=runs/demo_domino
"""

import dataclasses
from pathlib import Path

from dspine_jax.config import GRUConfig, LossConfig
from dspine_jax.config_io import load_config

dflash = load_config(Path(__file__).with_name("dflash.py"))
config = dataclasses.replace(
    dflash,
    workdir="runs/demo_domino",
    # Shifted, but 7 drafts: the last slot is trained and not used.
    drafter=dataclasses.replace(dflash.drafter, label_shift="shifted", gru=GRUConfig(hidden_size=128, projection_size=32)),
    loss=LossConfig(loss_decay_gamma=4.0, base_decay_fraction=1.0),
    optimizer=dataclasses.replace(dflash.optimizer, beta2=0.999, final_fraction=0.0),
)
