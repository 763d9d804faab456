"""Domino for Qwen3-8B: the shifted layout (15 drafts of 16 slots) and a GRU; the loss is SpecForge's.

Setting, data and what else a run needs: configs/qwen3_8b_dflash.py.
Command:
    dspine-train configs/qwen3_8b_domino.py --set target=Qwen3-8B --set data.path=data/qwen3_8b --set workdir=runs/qwen3_8b_domino
1,104.6M trained parameters, 55.9M of them beyond DFlash's.
Reckoned, not measured (train/estimate.py): 8 x H200, rows of 3072 tokens: 57 GiB a GPU, 1.05 s a step.
Not trained yet: no acceptance length is promised.
"""

import dataclasses
from pathlib import Path

from dspine_jax.config import GRUConfig, LossConfig
from dspine_jax.config_io import load_config

dflash = load_config(Path(__file__).with_name("qwen3_8b_dflash.py"))
config = dataclasses.replace(
    dflash,
    workdir="runs/qwen3_8b_domino",
    drafter=dataclasses.replace(dflash.drafter, label_shift="shifted", gru=GRUConfig(hidden_size=1024, projection_size=256)),
    loss=LossConfig(loss_decay_gamma=7.0, base_decay_fraction=1.0, vocab_chunk=128),
)
