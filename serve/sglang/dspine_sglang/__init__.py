"""DSpine drafters in SGLang: ``register`` is the entry point of the group ``sglang.srt.plugins``."""

from __future__ import annotations

import os

ARCHITECTURE = "DSpineDraftModel"
SKIP_PREWARM = "DSPINE_SGLANG_SKIP_PREWARM"


def register() -> None:
    """Make the model class known to SGLang. What does not fit is raised where the model is built: an exception here would only be logged."""
    from sglang.srt.models.registry import ModelRegistry

    try:
        from dspine_sglang import compat

        compat.check()
        from dspine_sglang.models.dspine import DSpineDraftModel as model
    except Exception as error:
        model = _refusing(error)
    ModelRegistry.models[ARCHITECTURE] = model
    if os.environ.get(SKIP_PREWARM) == "1":
        _skip_prewarm()


def _refusing(error: Exception) -> type:
    """A stand-in whose constructor says why the model cannot be served."""
    from torch import nn

    class DSpineDraftModel(nn.Module):
        def __init__(self, *args, **kwargs):
            raise RuntimeError(f"dspine-sglang cannot serve here: {error}") from error

    return DSpineDraftModel


def _skip_prewarm() -> None:
    """Leave out the worker's rehearsal of a sampler that a drafter with a selector never uses; it compiles against flashinfer's headers."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def around(original, worker):
        return worker.model_runner.prewarm_sampling()

    HookRegistry.register("sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2.prewarm_sampling", around, HookType.AROUND)
