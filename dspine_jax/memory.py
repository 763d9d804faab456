"""Device memory of batched decoding: what weights and rows need, and how many rows to decode together where nobody says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dspine_jax.config import DrafterConfig, TargetConfig
from dspine_jax.prompt_lookup import PromptLookupConfig
from dspine_jax.target import Target

ROWS_WITHOUT_COUNT = 32  # on a CPU, and where the device does not tell its memory
MOST_ROWS = 1024  # a small target gains a quarter by twice as many, for twice the memory and longer waits (results.json, regenerate/...)
SHARE = 0.8  # of the free memory; prefill, activations and gaps get the rest
# Arrays of the size of a round's fp32 logits that live at once. Compiled for an H200, SmolLM2's and Qwen3-4B's sizes need 1.2 to 4.4 of them, most of
# all with top-p; compiled for a CPU up to 7.
LOGITS_COPIES = 8
SCORE_COPIES = 3  # of one layer's fp32 attention scores


def weight_bytes(config: TargetConfig, dtype: str) -> int:
    """Bytes of the target's parameters."""
    shapes = jax.tree.leaves(nnx.state(nnx.eval_shape(lambda: Target(config, rngs=nnx.Rngs(0))), nnx.Param))
    return jnp.dtype(dtype).itemsize * sum(leaf.size for leaf in shapes)


def cache_bytes(config: TargetConfig | DrafterConfig, capacity: int, dtype: str) -> int:
    """Bytes of keys and values of one row; a drafter's config must be resolved."""
    return 2 * config.num_layers * capacity * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize


def row_bytes(target: TargetConfig, drafter: DrafterConfig | PromptLookupConfig | None, num_draft_tokens: int, capacity: int, dtype: str) -> int:
    """Bytes that one more row of a batch needs in the decode loop, at most: caches, and what a round keeps of logits and scores."""
    caches = cache_bytes(target, capacity, dtype)
    if isinstance(drafter, DrafterConfig):
        caches += cache_bytes(drafter, capacity, dtype)
    elif drafter is not None:
        caches += 4 * capacity  # the text itself
    return caches + 4 * (num_draft_tokens + 1) * (LOGITS_COPIES * target.vocab_size + SCORE_COPIES * target.num_heads * capacity)


def default_batch_size(row: int, yet_to_load: int = 0) -> int:
    """The power of two of rows of ``row`` bytes that fits the first device beside ``yet_to_load`` bytes, 1 to 1024; 32 on a CPU."""
    stats = None if jax.default_backend() == "cpu" else jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return ROWS_WITHOUT_COUNT
    free = stats["bytes_limit"] - stats["bytes_in_use"] - yet_to_load
    fitting = min(MOST_ROWS, max(1, int(SHARE * free) // row))
    return 1 << fitting.bit_length() - 1


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether the device said that it had no room left."""
    return "RESOURCE_EXHAUSTED" in str(error)
