"""Model sizes that the kernels' tests and benchmarks share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of a target and its drafter, in the letters of DESIGN.md 1."""

    hidden_size: int  # D
    transfer_size: int  # R
    vocab_size: int  # V
    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int  # C
    num_layers: int = 5  # L, of the drafter
    block_size: int = 16  # K
    num_candidates: int = 8  # P


MODELS = {
    "tiny": ModelShape(64, 24, 520, 4, 2, 16, num_layers=2, block_size=7, num_candidates=4),
    "smollm2-135m": ModelShape(576, 192, 49152, 9, 3, 64),
    "qwen3-4b": ModelShape(2560, 1024, 151936, 32, 8, 128),
    "qwen3-8b": ModelShape(4096, 1024, 151936, 32, 8, 128),
}
BATCHES = (1, 8, 32)
