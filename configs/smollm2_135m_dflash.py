"""DFlash for SmolLM2-135M-Instruct, the lab recipe (1,500 steps of 32 rows x 48 anchors).

Data (docs/data.md): 21,485 rows answered by the target itself, as a dataset folder:
    dspine-convert train.npz --output data/smollm2
Command:
    dspine-train configs/smollm2_135m_dflash.py --set target=SmolLM2-135M-Instruct.Q4_1.gguf \\
        --set data.path=data/smollm2 --set workdir=runs/dflash
Hardware, time and expected acceptance length: the results table in README.md (one H200, minutes).
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
    workdir="runs/smollm2_135m_dflash",
    target="SmolLM2-135M-Instruct.Q4_1.gguf",
    steps=1500,
    drafter=DrafterConfig(
        mask_token_id=3,  # <repo_name>: never occurs in the data
        block_size=16,
        num_layers=5,
        target_layer_ids=(1, 8, 14, 20, 27),
    ),
    data=DataConfig(path="data/smollm2", batch_size=32),
    # With replacement: half of the answers are short, and every row shall fill its 48 blocks.
    anchors=AnchorConfig(num_anchors=48, replacement=True),
    loss=LossConfig(loss_decay_gamma=7.0, base_weight=0.5, feature_weight=0.5, vocab_chunk=240),
    optimizer=OptimizerConfig(learning_rate=1e-3, beta1=0.9, beta2=0.95, warmup_fraction=0.04, final_fraction=0.02, clip_norm=1.0),
    checkpoint=CheckpointConfig(every=500),
)
