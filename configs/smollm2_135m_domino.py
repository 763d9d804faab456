"""Domino for SmolLM2-135M-Instruct with its authors' loss and optimiser, on the rows, batches, anchors and steps of the lab recipe.

23.20M trained parameters, 3.84M of them beyond DFlash's: a GRU of 256 and codes of 64 (the authors' 1024 and 256 belong to targets five times as wide).
Loss, AdamW and schedule as in SpecForge.
Data (docs/data.md): 21,485 rows answered by the target itself, as a dataset folder:
    dspine-convert train.npz --output data/smollm2
Command:
    dspine-train configs/smollm2_135m_domino.py --set target=SmolLM2-135M-Instruct.Q4_1.gguf \\
        --set data.path=data/smollm2 --set workdir=runs/domino
Not trained yet at this size: no acceptance length is promised.
"""

from dspine_jax.config import (
    AnchorConfig,
    CheckpointConfig,
    DataConfig,
    DrafterConfig,
    GRUConfig,
    LossConfig,
    OptimizerConfig,
    TrainConfig,
)

config = TrainConfig(
    workdir="runs/smollm2_135m_domino",
    target="SmolLM2-135M-Instruct.Q4_1.gguf",
    steps=1500,
    drafter=DrafterConfig(
        mask_token_id=3,  # <repo_name>: never occurs in the data
        block_size=16,  # shifted, but 15 drafts: the last slot is trained and not used
        num_layers=5,
        target_layer_ids=(1, 8, 14, 20, 27),
        label_shift="shifted",
        gru=GRUConfig(hidden_size=256, projection_size=64),
    ),
    data=DataConfig(path="data/smollm2", batch_size=32),
    # With replacement: half of the answers are short, and every row shall fill its 48 blocks.
    anchors=AnchorConfig(num_anchors=48, replacement=True),
    loss=LossConfig(loss_decay_gamma=7.0, base_decay_fraction=1.0, vocab_chunk=240),
    optimizer=OptimizerConfig(learning_rate=6e-4, beta1=0.9, beta2=0.999, warmup_fraction=0.04, final_fraction=0.0, clip_norm=1.0),
    checkpoint=CheckpointConfig(every=500),
)
