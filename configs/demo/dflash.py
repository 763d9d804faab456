"""DFlash for the embedded demo target: the recipe of configs/demo/dspine.py without injection.

Command:
    dspine-train configs/demo/dflash.py --set target=assets/demo/target --set data.path=assets/demo/data/train --set workdir=runs/demo_dflash
"""

from dspine_jax.config import AnchorConfig, CheckpointConfig, DataConfig, DrafterConfig, LogConfig, LossConfig, OptimizerConfig, TrainConfig

config = TrainConfig(
    workdir="runs/demo_dflash",
    target="assets/demo/target",
    steps=300,
    compute_dtype="float32",
    drafter=DrafterConfig(mask_token_id=3, block_size=8, num_layers=2),
    data=DataConfig(path="assets/demo/data/train", batch_size=8, max_length=256),
    anchors=AnchorConfig(num_anchors=24, replacement=True),
    loss=LossConfig(loss_decay_gamma=4.0, base_weight=0.5, feature_weight=0.5),
    optimizer=OptimizerConfig(learning_rate=2e-3, beta1=0.9, beta2=0.95, warmup_fraction=0.04, final_fraction=0.02, clip_norm=1.0),
    checkpoint=CheckpointConfig(every=1000),
    log=LogConfig(every=10),
)
