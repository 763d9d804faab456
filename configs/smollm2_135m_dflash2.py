"""DFlash2 for SmolLM2-135M-Instruct with its authors' loss and optimiser, on the rows, batches, anchors and steps of the lab recipe.

26.54M trained parameters, 7.18M of them beyond DFlash's: codebooks of rank 64 (the authors' 256 would outweigh the backbone here) and
convolutions. AdamW and schedule as in NeMo Automodel's recipe; report the selector path (simulated_tau/conditioned).
Data (docs/data.md): 21,485 rows answered by the target itself, as a dataset folder:
    dspine-convert train.npz --output data/smollm2
Command:
    dspine-train configs/smollm2_135m_dflash2.py --set target=SmolLM2-135M-Instruct.Q4_1.gguf \\
        --set data.path=data/smollm2 --set workdir=runs/dflash2
Not trained yet at this size: no acceptance length is promised.
"""

from dspine_jax.config import (
    AnchorConfig,
    CheckpointConfig,
    ConvolutionConfig,
    DataConfig,
    DrafterConfig,
    LossConfig,
    OptimizerConfig,
    SelectorConfig,
    TrainConfig,
)

config = TrainConfig(
    workdir="runs/smollm2_135m_dflash2",
    target="SmolLM2-135M-Instruct.Q4_1.gguf",
    steps=1500,
    drafter=DrafterConfig(
        mask_token_id=3,  # <repo_name>: never occurs in the data
        block_size=16,
        num_layers=5,
        target_layer_ids=(1, 8, 14, 20, 27),
        convolution=ConvolutionConfig(taps=2, group_size=16),
        selector=SelectorConfig(rank=64, num_candidates=16),
    ),
    data=DataConfig(path="data/smollm2", batch_size=32),
    # With replacement: half of the answers are short, and every row shall fill its 48 blocks.
    anchors=AnchorConfig(num_anchors=48, replacement=True),
    loss=LossConfig(loss_decay_gamma=7.0, selector_weight=1.0, vocab_chunk=240),
    optimizer=OptimizerConfig(learning_rate=6e-4, beta1=0.9, beta2=0.95, warmup_fraction=0.04, final_fraction=0.1, clip_norm=1.0),
    checkpoint=CheckpointConfig(every=500),
)
