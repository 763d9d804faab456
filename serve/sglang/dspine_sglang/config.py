"""The keys of a served DSpine folder's config.json that the backbone of the family does not have. No torch, no SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VERSION = 1


@dataclass(frozen=True)
class DSpineKeys:
    """``dflash_config.dspine_*`` and what DSpine needs of the common keys."""

    rank: int  # width of the transfer space
    top_k: int  # candidates of a slot
    layers: tuple[int, ...]  # draft layers after which the injection runs
    block_size: int  # the anchor slot included
    num_tokens: int  # usable vocabulary rows; higher ids are never candidates

    @property
    def num_draft_tokens(self) -> int:
        """Slots 1..block_size-1."""
        return self.block_size - 1

    @classmethod
    def read(cls, dflash_config: Mapping, num_layers: int) -> DSpineKeys:
        """Keys of a config; raises ValueError naming what is missing, mistyped or not served."""
        version = dflash_config.get("dspine_version")
        if version != VERSION:
            raise ValueError(f"dflash_config.dspine_version is {version!r}; this release serves version {VERSION}: install the dspine-sglang of the exporter")

        def whole(key: str) -> int:
            value = dflash_config.get(key)
            if type(value) is not int or value < 1:
                raise ValueError(f"dflash_config.{key} is {value!r}, expected a whole number; export the drafter again with dspine-export")
            return value

        layers = dflash_config.get("dspine_layers")
        if not isinstance(layers, (list, tuple)) or not layers or any(type(i) is not int or not 0 <= i < num_layers for i in layers):
            raise ValueError(f"dflash_config.dspine_layers is {layers!r}, expected draft layers of 0..{num_layers - 1}")
        if layers[-1] != num_layers - 1:
            raise ValueError(f"dflash_config.dspine_layers is {list(layers)}: without an injection after the last layer there is no write to redo, not served")
        top_k = whole("dspine_top_k")
        if top_k < 2 or top_k & (top_k - 1):
            raise ValueError(f"dflash_config.dspine_top_k is {top_k}; the walk's GPU kernel needs a power of two of at least 2")
        if dflash_config.get("label_shift", "same_position") != "same_position":
            raise ValueError(f"dflash_config.label_shift is {dflash_config['label_shift']!r}; only 'same_position' is served")
        return cls(whole("dspine_rank"), top_k, tuple(layers), whole("block_size"), whole("num_tokens"))
