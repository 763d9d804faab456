"""Target, drafter and injection in PyTorch (train/torch_reference). Axis letters as in DESIGN.md 1; T = N * K block slots of a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention

from dspine_jax.config import DrafterConfig, TargetConfig

BlockAttention = Literal["flex", "dense"]
TILE = 128  # queries and keys of a tile of flex_attention, its default


def rope_table(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0..length-1, fp32 [length,C/2] each; rounded as ``dspine_jax.layers.rope_inv_freq``."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / (theta ** exponent.double()).float()
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inv_freq
    return angles.cos(), angles.sin()


def rotate(x_BTHC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding with half-split pairing in fp32; cos, sin [B or 1,T,C/2]."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    first, second = x_BTHC.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BTHC.dtype)


def joined(x: Tensor, layers: Iterable[nn.Linear]) -> tuple[Tensor, ...]:
    """Projections of one input as one product, biases left to the caller: their fp32 weights are cast to x's dtype and joined."""
    layers = tuple(layers)
    weights = [layer.weight.to(x.dtype) for layer in layers]
    return F.linear(x, torch.cat(weights) if len(weights) > 1 else weights[0]).split([layer.out_features for layer in layers], dim=-1)


def unit(x: Tensor) -> Tensor:
    """x / |x| over the last axis in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class RMSNorm(nn.Module):
    """weight * x / rms(x) over the last axis, in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [...,size] -> same shape and dtype."""
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()).to(x.dtype)


class TargetLayer(nn.Module):
    """Decoder layer with merged projections."""

    def __init__(self, config: TargetConfig):
        super().__init__()
        D, H, G, C, eps = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        self.heads = (H, G, G)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(D, eps), RMSNorm(D, eps)
        self.qkv_proj = nn.Linear(D, (H + 2 * G) * C, bias=False)
        self.o_proj = nn.Linear(H * C, D, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(C, eps), RMSNorm(C, eps)) if config.qk_norm else (nn.Identity(), nn.Identity())
        self.gate_up_proj = nn.Linear(D, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, D, bias=False)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B,S,D] -> [B,S,D]."""
        heads = self.qkv_proj(self.input_layernorm(x_BSD)).unflatten(-1, (sum(self.heads), -1))
        q, k, v = heads.split(self.heads, dim=2)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True)
        x_BSD = x_BSD + self.o_proj(out.transpose(1, 2).flatten(2))
        gate, up = self.gate_up_proj(self.post_attention_layernorm(x_BSD)).chunk(2, dim=-1)
        return x_BSD + self.down_proj(F.silu(gate) * up)


class Target(nn.Module):
    """The frozen target up to its last tapped layer, with its two embedding tables; everything in ``dtype``."""

    def __init__(self, config: TargetConfig, target_layer_ids: tuple[int, ...], width: int, *, device, dtype: torch.dtype):
        super().__init__()
        self.target_layer_ids = target_layer_ids
        with torch.device(device):
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
            self.lm_head = self.embed_tokens if config.tie_embeddings else nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
            self.layers = nn.ModuleList([TargetLayer(config).to(dtype) for _ in range(target_layer_ids[-1] + 1)])
        cos, sin = rope_table(width, config.head_dim, config.rope_theta)
        self.register_buffer("cos", cos.to(device), persistent=False)
        self.register_buffer("sin", sin.to(device), persistent=False)
        self.requires_grad_(False)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy weights under their Hugging Face names (without "model."); what lies after the last tap is not read."""
        merged = {"qkv_proj": ("self_attn", ("q_proj", "k_proj", "v_proj")), "gate_up_proj": ("mlp", ("gate_proj", "up_proj"))}
        folder = {"q_norm": "self_attn.", "k_norm": "self_attn.", "o_proj": "self_attn.", "down_proj": "mlp."}
        for name, parameter in self.named_parameters():
            *head, part, leaf = name.split(".")
            if part in merged:
                parent, parts = merged[part]
                value = torch.cat([tensors[".".join([*head, parent, p, leaf])] for p in parts])
            else:
                value = tensors[".".join([*head, folder.get(part, "") + part, leaf])]
            parameter.copy_(value)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """tokens [B,S] -> tapped layer outputs [B,S,M*D]."""
        S = tokens_BS.shape[1]
        cos, sin = self.cos[None, :S], self.sin[None, :S]
        x, taps = self.embed_tokens(tokens_BS), []
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin)
            if index in self.target_layer_ids:
                taps.append(x)
        return torch.cat(taps, dim=-1)


class Attention(nn.Module):
    """Projections and q/k norm of a draft layer, with dflash's names."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        D, H, G, C = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.head_dim = C
        self.q_proj = nn.Linear(D, H * C, bias=False)
        self.k_proj, self.v_proj = nn.Linear(D, G * C, bias=False), nn.Linear(D, G * C, bias=False)
        self.o_proj = nn.Linear(H * C, D, bias=False)
        self.q_norm, self.k_norm = RMSNorm(C, config.rms_norm_eps), RMSNorm(C, config.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        """[B,T,heads*C] -> [B,T,heads,C]."""
        return x.unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [...,D] -> [...,D]."""
        gate, up = joined(x, (self.gate_proj, self.up_proj))
        return joined(F.silu(gate) * up, (self.down_proj,))[0]


def visibility(context_len_BN: Tensor, width: int, block_size: int, *, causal: bool):
    """flex_attention's mask function over keys [context of ``width`` | all block slots] (BASELINES 2.2)."""

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block, slot = q // block_size, kv - width
        own = (kv >= width) & (slot // block_size == block)
        if causal:
            own = own & (slot <= q)
        # No context length exceeds the width, so this never holds for a block slot.
        return (kv < context_len_BN[b, block]) | own

    return visible


def listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """As flex_attention lists the tiles of a row: how many are true, and the ids of the true ones, then of the others. bool [...,n] -> int32 [...], [...,n]."""
    count = tiles.sum(-1, keepdim=True)
    place = torch.where(tiles, tiles.cumsum(-1) - 1, count + (~tiles).cumsum(-1) - 1)
    ids = torch.arange(tiles.shape[-1], device=tiles.device).expand_as(place)
    return count[..., 0].int(), torch.zeros_like(place).scatter(-1, place, ids).int()


def block_mask(visible, batch: int, queries: int, keys: int, device) -> BlockMask:
    """``create_block_mask`` without its sorts: over the tiles of a long row Triton compiles those for minutes."""
    seen = F.pad(create_mask(visible, batch, 1, queries, keys, device=device), (0, -keys % TILE, 0, -queries % TILE))
    count = seen.unflatten(3, (-1, TILE)).unflatten(2, (-1, TILE)).sum((3, 5))
    full = count == TILE * TILE
    partial = (count > 0) & ~full
    (kv_num, kv), (full_kv_num, full_kv) = listed(partial), listed(full)
    (q_num, q), (full_q_num, full_q) = listed(partial.transpose(2, 3)), listed(full.transpose(2, 3))
    return BlockMask(
        seq_lengths=(queries, keys), BLOCK_SIZE=(TILE, TILE), mask_mod=visible,
        kv_num_blocks=kv_num, kv_indices=kv, full_kv_num_blocks=full_kv_num, full_kv_indices=full_kv,
        q_num_blocks=q_num, q_indices=q, full_q_num_blocks=full_q_num, full_q_indices=full_q,
    )  # fmt: skip


def attention_mask(context_len_BN: Tensor, width: int, block_size: int, *, causal: bool, attention: BlockAttention) -> BlockMask | Tensor:
    """What ``attend_blocks`` takes: a BlockMask, or a bool [B,1,T,S+T]."""
    B, N = context_len_BN.shape
    T = N * block_size
    visible = visibility(context_len_BN, width, block_size, causal=causal)
    if attention == "flex":
        return block_mask(visible, B, T, width + T, context_len_BN.device)
    return create_mask(visible, B, 1, T, width + T, context_len_BN.device)


def attend_blocks(q_BTHC: Tensor, k_BEGC: Tensor, v_BEGC: Tensor, mask: BlockMask | Tensor) -> Tensor:
    """q [B,T,H,C] over E = S + T keys -> [B,T,H*C]."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHC, k_BEGC, v_BEGC))
    if isinstance(mask, BlockMask):
        # Every slot sees itself, so no row of the softmax is empty.
        out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options={"ROWS_GUARANTEED_SAFE": True})
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


class DrafterLayer(nn.Module):
    """Qwen3-style layer over block slots, with context keys and values given."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_BTD: Tensor, ctx_k_BSGC: Tensor, ctx_v_BSGC: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | Tensor) -> Tensor:
        """x [B,T,D] -> [B,T,D]."""
        a = self.self_attn
        q, k, v = (a.heads(y) for y in joined(self.input_layernorm(x_BTD), (a.q_proj, a.k_proj, a.v_proj)))
        q, k = rotate(a.q_norm(q), cos, sin), rotate(a.k_norm(k), cos, sin)
        attended = attend_blocks(q, torch.cat([ctx_k_BSGC, k], dim=1), torch.cat([ctx_v_BSGC, v], dim=1), mask)
        x_BTD = x_BTD + joined(attended, (a.o_proj,))[0]
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Injection(nn.Module):
    """One adjacent causal injection (DESIGN 5.2, 5.3)."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        D, R = config.hidden_size, config.injection.transfer_size
        self.norm = RMSNorm(D, config.rms_norm_eps)
        self.feature = nn.Linear(D, R, bias=False)
        self.gate_predecessor = nn.Linear(R, D, bias=False)
        self.gate_hidden = nn.Linear(D, D)
        self.message = nn.Linear(R, D, bias=False)

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [...,D] -> (predicted feature [...,R], hidden part of the gate [...,D]), both fp32."""
        raw, gate = joined(self.norm(x), (self.feature, self.gate_hidden))
        return self.feature.out_features**0.5 * unit(raw), gate.float() + self.gate_hidden.bias

    def write(self, x: Tensor, hidden_gate: Tensor, feature: Tensor) -> Tensor:
        """x + sigmoid(Gp f + hidden_gate) * (M f), in x's dtype."""
        gate, message = joined(feature.to(x.dtype), (self.gate_predecessor, self.message))
        return (x.float() + torch.sigmoid(gate.float() + hidden_gate) * message.float()).to(x.dtype)


class TransferSpace(nn.Module):
    """T of LM-head rows (DESIGN 5.1), fp32; fixed."""

    def __init__(self, hidden_size: int, transfer_size: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(hidden_size))
        self.register_buffer("basis", torch.zeros(hidden_size, transfer_size))

    def forward(self, rows: Tensor) -> Tensor:
        """rows [...,D] -> [...,R] of norm sqrt(R)."""
        return self.basis.shape[1] ** 0.5 * unit((rows.float() - self.mean) @ self.basis)


class Drafter(nn.Module):
    """DFlash or DSpine with fp32 masters; state_dict has the tensor names of our drafter folders."""

    def __init__(self, config: DrafterConfig, width: int, *, device, attention: BlockAttention = "flex"):
        """``config`` resolved; ``width`` S tokens of a row."""
        super().__init__()
        D, M = config.hidden_size, len(config.target_layer_ids)
        self.config, self.attention = config, attention
        with torch.device(device):
            self.fc = nn.Linear(M * D, D, bias=False)
            self.hidden_norm, self.norm = RMSNorm(D, config.rms_norm_eps), RMSNorm(D, config.rms_norm_eps)
            self.layers = nn.ModuleList([DrafterLayer(config) for _ in range(config.num_layers)])
            if config.injection is not None:
                self.injections = nn.ModuleDict({str(i): Injection(config) for i in config.injection_layers})
                self.transfer = TransferSpace(D, config.injection.transfer_size)
        cos, sin = rope_table(width + config.block_size, config.head_dim, config.rope_theta)
        self.register_buffer("cos", cos.to(device), persistent=False)
        self.register_buffer("sin", sin.to(device), persistent=False)

    def context_kv(self, tapped_BSE: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Rotated keys and values [B,S,G,C] of every layer's context."""
        S = tapped_BSE.shape[1]
        ctx_BSD = self.hidden_norm(joined(tapped_BSE, (self.fc,))[0])
        attentions = [layer.self_attn for layer in self.layers]
        flat = iter(joined(ctx_BSD, [projection for a in attentions for projection in (a.k_proj, a.v_proj)]))
        return [(rotate(a.k_norm(a.heads(k)), self.cos[None, :S], self.sin[None, :S]), a.heads(v)) for a, k, v in zip(attentions, flat, flat)]

    def forward(
        self, tapped_BSE: Tensor, noise_BNKD: Tensor, context_len_BN: Tensor, positions_BNK: Tensor, token_features_BNKR: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Blocks through all layers.

        tapped [B,S,M*D] and noise [B,N,K,D] in the compute dtype; token_features: T of the block's true tokens (DSpine), fp32.
        -> (final-normed hidden states [B,N,K-1,D] of the drafted slots: with the true predecessor where the last write is redone, then
        the base path; predicted features [B,N,K-1,R] of each injected layer).
        """
        B, N, K, D = noise_BNKD.shape
        c = self.config
        context = self.context_kv(tapped_BSE)
        mask = attention_mask(context_len_BN, tapped_BSE.shape[1], K, causal=c.block_attention == "causal", attention=self.attention)
        cos, sin = self.cos[positions_BNK.flatten(1)], self.sin[positions_BNK.flatten(1)]
        x, features = noise_BNKD.flatten(1, 2), []
        for index, (layer, (ctx_k, ctx_v)) in enumerate(zip(self.layers, context)):
            x = layer(x, ctx_k, ctx_v, cos, sin, mask)
            if index in c.injection_layers:
                injection, pre_write = self.injections[str(index)], x.view(B, N, K, D)
                predicted, gate = injection.read(pre_write)
                # Slot 0 receives nothing: the message of a zero feature is zero.
                anchor = token_features_BNKR[:, :, :1]
                received = torch.cat([torch.zeros_like(anchor), anchor, predicted[:, :, 1:-1]], dim=2)
                x = injection.write(pre_write, gate, received).flatten(1, 2)
                features.append(predicted[:, :, 1:])
        hidden = [self.norm(x.view(B, N, K, D)[:, :, 1:])]
        if c.redoes_last_write:
            redone = injection.write(pre_write[:, :, 1:], gate[:, :, 1:], token_features_BNKR[:, :, :-1])
            hidden.insert(0, self.norm(redone))
        return hidden, features
