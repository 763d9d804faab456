"""DFlash for Qwen3-8B in the setting that DSpine's page compares drafters in: five layers, blocks of 16, six epochs of ShareGPT.

The page gives no more than that. Length, anchors, rows and optimiser are SpecForge's for DFlash, and are the same for every drafter of configs/qwen3_*.py
but for what a drafter's own file says. The mask token is the first row of the table that no token uses, as in the published drafters.
Data: the questions of ShareGPT answered by the target itself, without thinking (docs/data.md):
    dspine-prepare sharegpt.jsonl --target Qwen3-8B --output data/qwen3_8b --template-mode non-thinking --max-length 3072 --max-new-tokens 2048 \\
        --temperature 0.7 --top-p 0.8 --top-k 20
Command:
    dspine-train configs/qwen3_8b_dflash.py --set target=Qwen3-8B --set data.path=data/qwen3_8b --set workdir=runs/qwen3_8b_dflash
On fewer GPUs fewer rows: --set data.batch_size=4 on one. To stop early: --set epochs=none --set steps=2000.
1,048.6M trained parameters, 0.0M of them beyond DFlash's.
Reckoned, not measured (train/estimate.py): 8 x H200, rows of 3072 tokens: 55 GiB a GPU, 0.80 s a step.
Not trained yet: no acceptance length is promised.
"""

from dspine_jax.config import (
    AnchorConfig,
    CheckpointConfig,
    DataConfig,
    DrafterConfig,
    LossConfig,
    OptimizerConfig,
    TrainConfig,
)

config = TrainConfig(
    workdir="runs/qwen3_8b_dflash",
    target="Qwen3-8B",
    epochs=6,
    drafter=DrafterConfig(
        mask_token_id=151669,
        block_size=16,
        num_layers=5,
        target_layer_ids=(1, 9, 17, 25, 33),
    ),
    data=DataConfig(path="data/qwen3_8b", batch_size=32, max_length=3072),
    anchors=AnchorConfig(num_anchors=512),
    loss=LossConfig(loss_decay_gamma=7.0, vocab_chunk=512),
    optimizer=OptimizerConfig(learning_rate=6e-4, beta1=0.9, beta2=0.999, warmup_fraction=0.04, final_fraction=0.0, clip_norm=1.0),
    checkpoint=CheckpointConfig(every=1000),
)
