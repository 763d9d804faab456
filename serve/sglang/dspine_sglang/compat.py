"""What of SGLang the model class leans on, so that a release which moved it is refused by name."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import os

TESTED = ("0.5.23",)
UNTESTED = "DSPINE_SGLANG_UNTESTED"  # 1: another release is a warning, not an error
DFLASH = "sglang.srt.models.dflash"

# Parameters by position; the DFLASH worker calls these, or we do.
SIGNATURES = {
    f"{DFLASH}:DFlashDraftModel.__init__": ("self", "config", "quant_config", "prefix"),
    f"{DFLASH}:DFlashDraftModel.forward": ("self", "input_ids", "positions", "forward_batch", "input_embeds", "get_embedding", "pp_proxy_tensors"),
    f"{DFLASH}:DFlashDraftModel.load_weights": ("self", "weights"),
    f"{DFLASH}:DFlashDraftModel.set_block_size": ("self", "block_size"),
    f"{DFLASH}:DFlashDecoderLayer.forward": ("self", "positions", "hidden_states", "forward_batch", "residual"),
    f"{DFLASH}:candidate_topk": ("hidden", "lm_head", "k", "with_partition"),
    f"{DFLASH}:CandidateSelector.build_lattice": ("self", "candidate_ids", "unary_logits", "hidden_states", "anchor_token_ids"),
    f"{DFLASH}:CandidateSelector.sample_path": ("self", "candidate_ids", "scores", "uniforms", "temperatures", "greedy_mask"),
}


def resolve(path: str):
    """The object at 'module:name.name'. Raises ImportError or AttributeError."""
    module, _, names = path.partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def differences(signatures: dict[str, tuple[str, ...]]) -> list[str]:
    """What of the table this installation does not have as recorded."""
    found = []
    for path, expected in signatures.items():
        try:
            parameters = tuple(inspect.signature(resolve(path)).parameters)
        except (ImportError, AttributeError) as error:
            found.append(f"{path} is gone ({error})")
            continue
        if parameters != expected:
            found.append(f"{path} takes {parameters}, not {expected}")
    return found


def check() -> None:
    """Raise RuntimeError unless SGLang is a tested release with the recorded signatures."""
    version = importlib.metadata.version("sglang")
    if version not in TESTED:
        message = f"sglang {version} is installed; this plugin was tested with {', '.join(TESTED)} (set {UNTESTED}=1 to try)"
        if os.environ.get(UNTESTED) != "1":
            raise RuntimeError(message)
        logging.getLogger(__name__).warning(message)
    found = differences(SIGNATURES)
    if not isinstance(resolve("sglang.srt.models.registry:ModelRegistry").models, dict):
        found.append("ModelRegistry.models is no dict")
    if found:
        raise RuntimeError(f"sglang {version} differs from what this plugin needs: {'; '.join(found)}")
