"""DFlash2 for Qwen3-8B: DFlash's setting with convolutions and selector; loss and optimiser are NeMo Automodel's.

Setting, data and what else a run needs: configs/qwen3_8b_dflash.py.
Command:
    dspine-train configs/qwen3_8b_dflash2.py --set target=Qwen3-8B --set data.path=data/qwen3_8b --set workdir=runs/qwen3_8b_dflash2
1,169.6M trained parameters, 120.9M of them beyond DFlash's.
Reckoned, not measured (train/estimate.py): 8 x H200, rows of 3072 tokens: 62 GiB a GPU, 0.95 s a step.
Not trained yet: no acceptance length is promised.
"""

import dataclasses
from pathlib import Path

from dspine_jax.config import ConvolutionConfig, LossConfig, SelectorConfig
from dspine_jax.config_io import load_config

dflash = load_config(Path(__file__).with_name("qwen3_8b_dflash.py"))
config = dataclasses.replace(
    dflash,
    workdir="runs/qwen3_8b_dflash2",
    drafter=dataclasses.replace(
        dflash.drafter, convolution=ConvolutionConfig(taps=2, group_size=16), selector=SelectorConfig(rank=256, num_candidates=16)
    ),
    loss=LossConfig(loss_decay_gamma=7.0, selector_weight=1.0, vocab_chunk=128),
    optimizer=dataclasses.replace(dflash.optimizer, beta2=0.95, final_fraction=0.1),
)
