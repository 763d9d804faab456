"""DSpine for the embedded demo target (two layers, blocks of 8).

Data: configs/demo/make.sh makes them; `make demo` uses those in assets/demo.
Command:
    dspine-train configs/demo/dspine.py --set target=assets/demo/target --set data.path=assets/demo/data/train --set workdir=runs/demo_dspine
Hardware and time: two minutes on two CPU cores for 240 steps (README.md).
"""

from dspine_jax.config import (
    AnchorConfig,
    CheckpointConfig,
    DataConfig,
    DrafterConfig,
    InjectionConfig,
    LogConfig,
    LossConfig,
    OptimizerConfig,
    TrainConfig,
)

config = TrainConfig(
    workdir="runs/demo_dspine",
    target="assets/demo/target",
    steps=240,
    compute_dtype="float32",  # the CPU has no fast bf16
    drafter=DrafterConfig(
        mask_token_id=3,  # <|mask|>, a token of its own
        block_size=8,
        num_layers=2,
        injection=InjectionConfig(transfer_size=64, num_candidates=8),
    ),
    data=DataConfig(path="assets/demo/data/train", batch_size=4, max_length=256),
    anchors=AnchorConfig(num_anchors=48, replacement=True),  # many blocks a row: on a CPU the target's pass over the rows costs most
    loss=LossConfig(loss_decay_gamma=4.0, base_weight=0.5, feature_weight=0.5),
    optimizer=OptimizerConfig(learning_rate=2e-3, beta1=0.9, beta2=0.95, warmup_fraction=0.04, final_fraction=0.02, clip_norm=1.0),
    checkpoint=CheckpointConfig(every=1000),
    log=LogConfig(every=10),
)
