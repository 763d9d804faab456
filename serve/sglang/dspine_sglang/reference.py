"""The DSpine drafter in plain torch, one module a part: what every faster form has to equal. No SGLang, no JAX.

Letters: N blocks, S context rows, K block slots, J = K-1 drafted slots, D width, H query heads, G key/value heads, C head width, V vocabulary rows,
R transfer width, P candidates of a slot, M tapped target layers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspine_sglang.config import DSpineKeys

UNIT_EPS = 1e-6


def unit(x: Tensor) -> Tensor:
    """x / |x| over the last axis, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding with half-split pairing in fp32. x [...,T,heads,C], positions [...,T]."""
    C = x.shape[-1]
    exponent = torch.arange(0, C, 2, dtype=torch.float32, device=x.device) / C
    angles = positions[..., None].float() * (1.0 / (theta ** exponent.double()).float())
    cos, sin = angles.cos()[..., None, :], angles.sin()[..., None, :]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


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


@dataclass(frozen=True)
class Config:
    """Sizes of a served folder's config.json."""

    keys: DSpineKeys
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_taps: int
    mask_token_id: int
    rope_theta: float
    rms_norm_eps: float

    @classmethod
    def read(cls, data: dict) -> Config:
        """Raises ValueError for another architecture or keys that do not fit, KeyError for a missing size."""
        if data.get("architectures") != ["DSpineDraftModel"]:
            raise ValueError(f"architectures is {data.get('architectures')}, expected ['DSpineDraftModel']")
        own, L = data["dflash_config"], data["num_hidden_layers"]
        return cls(
            DSpineKeys.read(own, L), data["hidden_size"], L, data["num_attention_heads"], data["num_key_value_heads"], data["head_dim"],
            data["intermediate_size"], data["vocab_size"], len(own["target_layer_ids"]), own["mask_token_id"], data["rope_parameters"]["rope_theta"],
            data["rms_norm_eps"],
        )  # fmt: skip


class Attention(nn.Module):
    """Grouped-query attention of block slots over a context and their own block, causal inside it."""

    def __init__(self, c: Config):
        super().__init__()
        D, H, G, C = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim
        self.head_dim, self.theta = C, c.rope_theta
        self.q_proj = nn.Linear(D, H * C, bias=False)
        self.k_proj, self.v_proj = nn.Linear(D, G * C, bias=False), nn.Linear(D, G * C, bias=False)
        self.o_proj = nn.Linear(H * C, D, bias=False)
        self.q_norm, self.k_norm = RMSNorm(C, c.rms_norm_eps), RMSNorm(C, c.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        """[...,heads*C] -> [...,heads,C]."""
        return x.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [...,T,D], positions [...,T] -> rotated keys and values [...,T,G,C]."""
        return rotate(self.k_norm(self.heads(self.k_proj(x))), positions, self.theta), self.heads(self.v_proj(x))

    def forward(self, x_NKD: Tensor, ctx_k_NSGC: Tensor, ctx_v_NSGC: Tensor, context_len_N: Tensor, positions_NK: Tensor) -> Tensor:
        """x [N,K,D] -> [N,K,D]; context row j is visible where j < context_len."""
        K, S = x_NKD.shape[1], ctx_k_NSGC.shape[1]
        q = rotate(self.q_norm(self.heads(self.q_proj(x_NKD))), positions_NK, self.theta)
        own_k, own_v = self.keys_values(x_NKD, positions_NK)
        k, v = torch.cat([ctx_k_NSGC, own_k], dim=1), torch.cat([ctx_v_NSGC, own_v], dim=1)
        context_NKS = (torch.arange(S, device=q.device) < context_len_N[:, None])[:, None].expand(-1, K, -1)
        own_NKK = torch.ones(K, K, dtype=torch.bool, device=q.device).tril().expand(len(q), -1, -1)
        shared = q.shape[2] // k.shape[2]
        scores = torch.einsum("nkhc,nshc->nhks", q.float(), k.repeat_interleave(shared, dim=2).float()) * self.head_dim**-0.5
        scores = scores.masked_fill(~torch.cat([context_NKS, own_NKK], dim=-1)[:, None], float("-inf"))
        out = torch.einsum("nhks,nshc->nkhc", scores.softmax(-1), v.repeat_interleave(shared, dim=2).float())
        return self.o_proj(out.to(x_NKD.dtype).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: Config):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [...,D] -> [...,D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm layer over block slots."""

    def __init__(self, c: Config):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x_NKD: Tensor, *attention: Tensor) -> Tensor:
        """x [N,K,D] -> [N,K,D]."""
        x_NKD = x_NKD + self.self_attn(self.input_layernorm(x_NKD), *attention)
        return x_NKD + self.mlp(self.post_attention_layernorm(x_NKD))


class Injection(nn.Module):
    """Adjacent causal injection: every slot hears its predecessor's feature, predicted or decoded."""

    def __init__(self, hidden_size: int, rank: int, eps: float):
        super().__init__()
        self.norm = RMSNorm(hidden_size, eps)
        self.feature = nn.Linear(hidden_size, rank, bias=False)
        self.gate_predecessor = nn.Linear(rank, hidden_size, bias=False)
        self.gate_hidden = nn.Linear(hidden_size, hidden_size)
        self.message = nn.Linear(rank, hidden_size, bias=False)

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Stream before the write, [...,D] -> (its normed form [...,D], hidden part of the gate [...,D] fp32)."""
        normed = self.norm(x)
        # The bias is added in fp32, as in training; a bf16 linear layer would round the sum.
        return normed, F.linear(normed, self.gate_hidden.weight).float() + self.gate_hidden.bias.float()

    def write(self, x: Tensor, hidden_gate: Tensor, feature: Tensor) -> Tensor:
        """x + sigmoid(Gp f + hidden gate) * M f in x's dtype; leading axes of x, gate [...,D] and feature [...,R] broadcast."""
        f = feature.to(x.dtype)
        return (x.float() + torch.sigmoid(self.gate_predecessor(f).float() + hidden_gate) * self.message(f).float()).to(x.dtype)

    def forward(self, x_NKD: Tensor, anchor_feature_NR: Tensor) -> Tensor:
        """The stream with every slot's message in its successor; slot 0 hears none, slot 1 the anchor's T."""
        normed, gate = self.read(x_NKD)
        p_NKR = self.feature.out_features**0.5 * unit(self.feature(normed))
        heard = torch.cat([anchor_feature_NR[:, None].float(), p_NKR[:, 1:-1]], dim=1)
        return torch.cat([x_NKD[:, :1], self.write(x_NKD[:, 1:], gate[:, 1:], heard)], dim=1)

    def redo(self, x_NJD: Tensor, feature_NJPR: Tensor) -> Tensor:
        """The write of drafted slots done again for P decoded predecessors each, from the stream before it -> [N,J,P,D]."""
        x = x_NJD[:, :, None]
        return self.write(x, self.read(x)[1], feature_NJPR)


class Transfer(nn.Module):
    """T of every vocabulary row, with the mean and basis that it was made from."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int):
        super().__init__()
        self.table = nn.Parameter(torch.empty(vocab_size, rank), requires_grad=False)
        # fp32 whatever the model's dtype: T made anew from them must point where the stored one does.
        self.mean = nn.Parameter(torch.empty(hidden_size, dtype=torch.float32), requires_grad=False)
        self.basis = nn.Parameter(torch.empty(hidden_size, rank, dtype=torch.float32), requires_grad=False)

    def of_rows(self, rows: Tensor) -> Tensor:
        """T of LM-head rows [...,D] -> [...,R], fp32."""
        return self.basis.shape[1] ** 0.5 * unit((rows.float() - self.mean) @ self.basis)


@dataclass(frozen=True)
class Block:
    """hidden_NKD after the final norm, and pre_write_NKD, the last layer's stream before its write."""

    hidden_NKD: Tensor
    pre_write_NKD: Tensor


class Drafter(nn.Module):
    """The whole drafter under the tensor names of a served folder; embedding and LM head are the target's, given with each call."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = c = config
        self.fc = nn.Linear(c.num_taps * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList([Layer(c) for _ in range(c.num_layers)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.injections = nn.ModuleDict({str(i): Injection(c.hidden_size, c.keys.rank, c.rms_norm_eps) for i in c.keys.layers})
        self.transfer = Transfer(c.vocab_size, c.hidden_size, c.keys.rank)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Drafter:
        """A served folder, every tensor used and none left out. Raises FileNotFoundError, ValueError (config), RuntimeError (tensors)."""
        from safetensors.torch import load_file

        folder = Path(folder)
        drafter = cls(Config.read(json.loads((folder / "config.json").read_text(encoding="utf-8"))))
        drafter.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
        return drafter.eval().requires_grad_(False)

    def context(self, taps_NSE: Tensor, positions_NS: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [N,S,G,C] of every layer from the target's tapped states [N,S,M*D]."""
        ctx = self.hidden_norm(self.fc(taps_NSE))
        return [layer.self_attn.keys_values(ctx, positions_NS) for layer in self.layers]

    def forward(self, anchor_N: Tensor, embedding_VD: Tensor, context: list[tuple[Tensor, Tensor]], context_len_N: Tensor) -> Block:
        """Blocks [anchor, mask x (K-1)] at positions context_len, context_len + 1, ... of their rows."""
        c = self.config
        ids_NK = torch.full((len(anchor_N), c.keys.block_size), c.mask_token_id, device=anchor_N.device)
        ids_NK[:, 0] = anchor_N
        positions_NK = context_len_N[:, None] + torch.arange(c.keys.block_size, device=anchor_N.device)
        x = embedding_VD[ids_NK]
        for index, layer in enumerate(self.layers):
            x = layer(x, *context[index], context_len_N, positions_NK)
            if str(index) in self.injections:
                pre_write = x
                x = self.injections[str(index)](x, self.transfer.table[anchor_N])
        return Block(self.norm(x), pre_write)

    def candidates(self, block: Block, head_VD: Tensor) -> tuple[Tensor, Tensor]:
        """The P best usable tokens of every drafted slot by base logit, falling, equal ones by id: ids [N,J,P], logits [N,J,P] fp32."""
        logits = block.hidden_NKD[:, 1:].float() @ head_VD[: self.config.keys.num_tokens].float().T
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return ids[..., : self.config.keys.top_k], values[..., : self.config.keys.top_k]

    def table(self, block: Block, ids_NJP: Tensor, anchor_N: Tensor, head_VD: Tensor) -> Tensor:
        """Score of every candidate after every possible predecessor, [N,J,P (predecessor),P (candidate)] fp32; slot 1's predecessor is the anchor."""
        features = self.transfer.table[predecessors(anchor_N, ids_NJP)]
        redone = self.injections[str(self.config.num_layers - 1)].redo(block.pre_write_NKD[:, 1:], features)
        return torch.einsum("njad,njbd->njab", self.norm(redone).float(), head_VD[ids_NJP].float())

    def propose(self, anchor_N: Tensor, embedding_VD: Tensor, head_VD: Tensor, context: list[tuple[Tensor, Tensor]], context_len_N: Tensor) -> Tensor:
        """Greedily drafted tokens [N,J]."""
        block = self(anchor_N, embedding_VD, context, context_len_N)
        ids_NJP, _ = self.candidates(block, head_VD)
        return greedy_walk(self.table(block, ids_NJP, anchor_N, head_VD), ids_NJP)


def predecessors(anchor_N: Tensor, ids_NJP: Tensor) -> Tensor:
    """What may stand before each drafted slot: the anchor P times, then the candidates of the slot before. [N,J,P]."""
    return torch.cat([anchor_N[:, None, None].expand(-1, 1, ids_NJP.shape[2]), ids_NJP[:, :-1]], dim=1)


def greedy_walk(table_NJPP: Tensor, ids_NJP: Tensor) -> Tensor:
    """k_j = argmax_b table[j, k_(j-1), b], equal scores to the lowest token id -> tokens [N,J]."""
    N, J, P = ids_NJP.shape
    tokens = torch.empty(N, J, dtype=ids_NJP.dtype, device=ids_NJP.device)
    for n in range(N):
        row = 0
        for j in range(J):
            row = max(range(P), key=lambda b: (float(table_NJPP[n, j, row, b]), -int(ids_NJP[n, j, b])))  # noqa: B023
            tokens[n, j] = ids_NJP[n, j, row]
    return tokens
