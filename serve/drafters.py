"""What --drafter may name: a folder, or the drafter that needs none."""

from __future__ import annotations

from pathlib import Path

from dspine_jax.config import DEFAULT_KERNELS, KernelConfig, TargetConfig
from dspine_jax.drafter import Drafter
from dspine_jax.drafter_io import load_drafter
from dspine_jax.prompt_lookup import PromptLookup, PromptLookupConfig


def open_drafter(
    name: str | Path, target: TargetConfig, *, dtype, num_draft_tokens: int | None = None, kernels: KernelConfig = DEFAULT_KERNELS
) -> Drafter | PromptLookup:
    """The drafter in a folder or, for "prompt-lookup", one without a model that drafts ``num_draft_tokens`` (None: 15). Raises as ``load_drafter``.

    A folder of that name is ./prompt-lookup.
    """
    if str(name) == PromptLookupConfig.method:
        return PromptLookup(PromptLookupConfig() if num_draft_tokens is None else PromptLookupConfig(num_draft_tokens))
    return load_drafter(name, target, dtype=dtype, kernels=kernels)
