"""DSpine for Qwen3-8B: DFlash's setting with an injection after every layer, and the loss of configs/smollm2_135m_dspine.py.

Setting, data and what else a run needs: configs/qwen3_8b_dflash.py.
Command:
    dspine-train configs/qwen3_8b_dspine.py --set target=Qwen3-8B --set data.path=data/qwen3_8b --set workdir=runs/qwen3_8b_dspine
1,195.5M trained parameters, 146.8M of them beyond DFlash's.
Reckoned, not measured (train/estimate.py): 8 x H200, rows of 3072 tokens: 65 GiB a GPU, 0.98 s a step.
Not trained yet: no acceptance length is promised.
"""

import dataclasses
from pathlib import Path

from dspine_jax.config import InjectionConfig, LossConfig
from dspine_jax.config_io import load_config

dflash = load_config(Path(__file__).with_name("qwen3_8b_dflash.py"))
config = dataclasses.replace(
    dflash,
    workdir="runs/qwen3_8b_dspine",
    drafter=dataclasses.replace(dflash.drafter, injection=InjectionConfig(transfer_size=1024, num_candidates=8)),
    loss=LossConfig(loss_decay_gamma=7.0, base_weight=0.5, feature_weight=0.5, vocab_chunk=512),
)
