"""Domino for Qwen3-4B: configs/qwen3_8b_domino.py with the other target, whose taps and mask token are the same.

Setting, data and what else a run needs: configs/qwen3_8b_dflash.py.
Command:
    dspine-train configs/qwen3_4b_domino.py --set target=Qwen3-4B --set data.path=data/qwen3_4b --set workdir=runs/qwen3_4b_domino
588.3M trained parameters, 50.8M of them beyond DFlash's.
Reckoned, not measured (train/estimate.py): 8 x H200, rows of 3072 tokens: 36 GiB a GPU, 0.61 s a step.
Not trained yet: no acceptance length is promised.
"""

import dataclasses
from pathlib import Path

from dspine_jax.config_io import load_config

large = load_config(Path(__file__).with_name("qwen3_8b_domino.py"))
config = dataclasses.replace(
    large, workdir="runs/qwen3_4b_domino", target="Qwen3-4B", data=dataclasses.replace(large.data, path="data/qwen3_4b")
)
