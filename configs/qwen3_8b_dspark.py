"""DSpark for Qwen3-8B: blocks of 15 in the shifted layout (15 drafts, as the others), Markov and confidence heads; loss, decay and prefix mask are DeepSpec's.

Setting, data and what else a run needs: configs/qwen3_8b_dflash.py.
Command:
    dspine-train configs/qwen3_8b_dspark.py --set target=Qwen3-8B --set data.path=data/qwen3_8b --set workdir=runs/qwen3_8b_dspark
1,126.4M trained parameters, 77.8M of them beyond DFlash's.
Reckoned, not measured (train/estimate.py): 8 x H200, rows of 3072 tokens: 56 GiB a GPU, 1.01 s a step.
Not trained yet: no acceptance length is promised.
"""

import dataclasses
from pathlib import Path

from dspine_jax.config import LossConfig, MarkovConfig
from dspine_jax.config_io import load_config

dflash = load_config(Path(__file__).with_name("qwen3_8b_dflash.py"))
config = dataclasses.replace(
    dflash,
    workdir="runs/qwen3_8b_dspark",
    drafter=dataclasses.replace(
        dflash.drafter,
        block_size=15,
        label_shift="shifted",
        markov=MarkovConfig(kind="vanilla", rank=256),
        confidence=True,
        confidence_with_markov=True,
    ),
    loss=LossConfig(loss_decay_gamma=4.0, ce_weight=0.1, l1_weight=0.9, confidence_weight=1.0, prefix_mask=True, vocab_chunk=128),
)
