"""DSpark for SmolLM2-135M-Instruct with its authors' loss and optimiser, on the rows, batches, anchors and steps of the lab recipe.

25.65M trained parameters, 6.29M of them beyond DFlash's: a Markov head of rank 64 (the authors' 256 would outweigh the backbone here) and the
confidence head. Loss, decay, prefix mask, AdamW and schedule as in DeepSpec.
Data (docs/data.md): 21,485 rows answered by the target itself, as a dataset folder:
    dspine-convert train.npz --output data/smollm2
Command:
    dspine-train configs/smollm2_135m_dspark.py --set target=SmolLM2-135M-Instruct.Q4_1.gguf \\
        --set data.path=data/smollm2 --set workdir=runs/dspark
Not trained yet at this size: no acceptance length is promised.
"""

from dspine_jax.config import (
    AnchorConfig,
    CheckpointConfig,
    DataConfig,
    DrafterConfig,
    LossConfig,
    MarkovConfig,
    OptimizerConfig,
    TrainConfig,
)

config = TrainConfig(
    workdir="runs/smollm2_135m_dspark",
    target="SmolLM2-135M-Instruct.Q4_1.gguf",
    steps=1500,
    drafter=DrafterConfig(
        mask_token_id=3,  # <repo_name>: never occurs in the data
        block_size=15,  # shifted: 15 drafts, as the others
        num_layers=5,
        target_layer_ids=(1, 8, 14, 20, 27),
        label_shift="shifted",
        markov=MarkovConfig(kind="vanilla", rank=64),
        confidence=True,
        confidence_with_markov=True,
    ),
    data=DataConfig(path="data/smollm2", batch_size=32),
    # With replacement: half of the answers are short, and every row shall fill its 48 blocks.
    anchors=AnchorConfig(num_anchors=48, replacement=True),
    loss=LossConfig(loss_decay_gamma=4.0, ce_weight=0.1, l1_weight=0.9, confidence_weight=1.0, prefix_mask=True, vocab_chunk=240),
    optimizer=OptimizerConfig(learning_rate=6e-4, beta1=0.9, beta2=0.999, warmup_fraction=0.04, final_fraction=0.0, clip_norm=1.0),
    checkpoint=CheckpointConfig(every=500),
)
