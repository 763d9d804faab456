"""The model class driven as SGLang's DFLASH worker drives it, with an attention of ours in place of its GPU kernels."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_loader.loader import get_model_loader
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.plugins import load_plugins
from transformers import AutoConfig


class Context:
    """Stands for the draft model's KV pool: per-layer context keys and values [n,S,G,C] of a batch, the first context_len rows visible."""

    def __init__(self, context_len_n: torch.Tensor):
        self.context_len_n = context_len_n
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attention(self, layer: RadixAttention, q, k, v, forward_batch, save_kv_cache=True, **kwargs) -> torch.Tensor:
        """Replaces RadixAttention.forward: rows [n*B, heads*C] over the context and their own block."""
        n, G, C, dtype = forward_batch.batch_size, layer.tp_k_head_num, layer.head_dim, q.dtype
        q, k, v = (x.reshape(n, -1, heads, C).float() for x, heads in ((q, layer.tp_q_head_num), (k, G), (v, G)))
        B = q.shape[1]
        ctx_k, ctx_v = (x.float() for x in self.layers[layer.layer_id])
        visible = (torch.arange(ctx_k.shape[1], device=q.device) < self.context_len_n[:, None])[:, None].expand(-1, B, -1)
        own = torch.ones(B, B, dtype=torch.bool, device=q.device)
        own = (own.tril() if layer.attn_type == AttentionType.DECODER else own).expand(n, -1, -1)
        shared = q.shape[2] // G
        scores = torch.einsum("nqhc,nkhc->nhqk", q, torch.cat([ctx_k, k], 1).repeat_interleave(shared, 2)) * layer.scaling
        scores = scores.masked_fill(~torch.cat([visible, own], -1)[:, None], float("-inf"))
        out = torch.einsum("nhqk,nkhc->nqhc", scores.softmax(-1), torch.cat([ctx_v, v], 1).repeat_interleave(shared, 2))
        return out.reshape(n * B, -1).to(dtype)

    def fill(self, model, taps_BSE: torch.Tensor, row_n: torch.Tensor) -> None:
        """Context keys and values from tapped states, by the calls that the worker makes; row_n says which row each request of the batch reads."""
        B, S = taps_BSE.shape[:2]
        hidden = model.project_target_hidden(taps_BSE.flatten(0, 1))
        positions = torch.arange(S, device=hidden.device).repeat(B)
        for index, layer in enumerate(model.layers):
            attention = layer.self_attn
            k, v = attention.kv_proj_only(model.prepare_context_hidden_for_kv(layer, hidden))
            k = attention.apply_k_rope(positions, attention.apply_k_norm(k))
            shape = (B, S, attention.num_kv_heads, attention.head_dim)
            self.layers[index] = (k.view(shape)[row_n], v.view(shape)[row_n])


def head_of(weight_VD: torch.Tensor, **changes) -> torch.nn.Module:
    """A target's LM head as far as the drafter looks at it."""
    head = torch.nn.Module()
    head.weight = torch.nn.Parameter(weight_VD, requires_grad=False)
    shard = SimpleNamespace(num_added_elements=0, num_org_elements=len(weight_VD), org_vocab_start_index=0)
    for name, value in ({"org_vocab_size": len(weight_VD), "quant_method": None, "shard_indices": shard} | changes).items():
        setattr(head, name, value)
    return head


def config_of(folder: Path):
    """As SGLang reads it."""
    return AutoConfig.from_pretrained(folder)


def load(folder: Path, dtype: torch.dtype, device: str) -> torch.nn.Module:
    """A folder by SGLang's own config reader and loader."""
    load_plugins()
    config = ModelConfig(str(folder), dtype=str(dtype).removeprefix("torch."), is_draft_model=True)
    return get_model_loader(LoadConfig(), config).load_model(model_config=config, device_config=DeviceConfig(device, gpu_id=0 if device == "cuda" else -1))


def build(config, weights: Iterable | None = None, **options):
    """The class that SGLang resolves for the config, in the default dtype, with its weights."""
    load_plugins()
    cls, architecture = ModelRegistry.resolve_model_cls(config.architectures)
    assert [architecture] == config.architectures, architecture
    model = cls(config=config, **options)
    if weights is not None:
        model.load_weights(weights)
    return model.eval()


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def golden_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(x) for name, x in np.load(folder / "golden.npz").items()}


class Case:
    """A built model with the golden requests of its folder as one batch."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, head=head_of, device: str = "cpu"):
        self.folder, self.dtype, self.device = folder / "drafter", dtype, device
        self.golden = {name: x.to(device) for name, x in golden_of(folder).items()}
        self.model = load(self.folder, dtype, device)
        for layer in self.model.layers:
            if device == "cpu":
                layer.self_attn.use_table_qk_norm_rope = False  # a Triton kernel, chosen by dtype alone
        if dtype == torch.float32:  # GPU kernels of the layers are for 16-bit types
            for module in self.model.modules():
                if hasattr(module, "_forward_method"):
                    module._forward_method = module.forward_native
        self.model.lm_head = head(self.golden["head"].to(dtype))

    def inputs(self, chosen: slice, block_size: int | None = None, embeds_change=None) -> dict:
        """What the worker hands to a draft forward of the chosen requests, their context filled."""
        g, model = self.golden, self.model
        model.set_block_size(block_size or model.config.dflash_config["block_size"])
        B, anchor, context_len = model.block_size, g["anchor"][chosen].long(), g["context_len"][chosen].long()
        self.ids = torch.full((len(anchor), B), model.config.dflash_config["mask_token_id"], device=self.device)
        self.ids[:, 0] = anchor
        self.context = Context(context_len)
        with torch.no_grad():
            self.context.fill(model, g["taps"].to(self.dtype), g["row"][chosen].long())
        embeds = g["embedding"][self.ids].to(self.dtype)
        if embeds_change is not None:
            embeds = embeds_change(embeds)
        positions = (context_len[:, None] + torch.arange(B, device=self.device)).reshape(-1)
        batch = SimpleNamespace(batch_size=len(anchor))
        return dict(input_ids=self.ids.reshape(-1), positions=positions, forward_batch=batch, input_embeds=embeds.flatten(0, 1))

    def forward(self, inputs: dict) -> torch.Tensor:
        """Draft forward -> rows [n*B,2D]."""
        context = self.context
        original, RadixAttention.forward = RadixAttention.forward, lambda layer, *args, **kwargs: context.attention(layer, *args, **kwargs)
        try:
            with torch.no_grad():
                return self.model(**inputs).hidden_states
        finally:
            RadixAttention.forward = original

    def run(self, chosen: slice = slice(None), block_size: int | None = None, embeds_change=None) -> torch.Tensor:
        """Draft forward of the chosen requests -> rows [n,B,2D]."""
        rows = self.forward(self.inputs(chosen, block_size, embeds_change))
        return rows.view(-1, self.model.block_size, rows.shape[-1])
