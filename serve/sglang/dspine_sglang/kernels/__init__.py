"""The project's Triton kernels called from torch: injection, and the LM head with its best tokens.

``injection_triton`` and ``topk_triton`` are copies of pallas_kernels/injection/triton_kernels.py and pallas_kernels/topk_logits/triton_kernels.py; a test
keeps them and the launches below equal. Not yet measured inside of SGLang, so they have to be asked for: DSPINE_SGLANG_KERNELS=1.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

SWITCH = "DSPINE_SGLANG_KERNELS"
LEAST_ROWS = 16  # of a matrix product
# Kernel -> most rows of a call -> rows, columns, depth of a tile, warps, stages. Larger calls take the last one.
INJECTION = {
    "products": {16: (16, 32, 128, 1, 4), 64: (64, 64, 64, 4, 4), 128: (128, 128, 64, 8, 3)},
    "write": {16: (16, 32, 256, 2, 3), 64: (64, 32, 64, 4, 4), 128: (128, 32, 64, 8, 4)},
}
# Tokens of a program -> rows of the head, depth, warps, stages.
HEAD = {16: (128, 128, 4, 4), 32: (128, 128, 4, 4), 64: (128, 64, 4, 4), 128: (128, 64, 8, 4)}
SELECT_WARPS = 4
PREFETCH = True  # inline assembly, which Triton's interpreter has not


def wanted() -> bool:
    """Whether the environment asks for them."""
    return os.environ.get(SWITCH) == "1"


class InjectionWeights(NamedTuple):
    """An injection's matrices as the kernels read them: [in,out], contiguous."""

    norm_D: torch.Tensor
    feature_DR: torch.Tensor
    gate_hidden_DD: torch.Tensor
    gate_bias_D: torch.Tensor
    gate_predecessor_RD: torch.Tensor
    message_RD: torch.Tensor

    @classmethod
    def of(cls, injection) -> InjectionWeights:
        """Transposed copies of a ``reference.Injection``'s matrices."""
        turned = lambda linear: linear.weight.detach().T.contiguous()  # noqa: E731
        i = injection
        return cls(i.norm.weight, turned(i.feature), turned(i.gate_hidden), i.gate_hidden.bias, turned(i.gate_predecessor), turned(i.message))


def inject(x_NKD: torch.Tensor, anchor_feature_NR: torch.Tensor, weights: InjectionWeights, eps: float) -> torch.Tensor:
    """``reference.Injection.forward`` for 16-bit arrays."""
    from dspine_sglang.kernels import injection_triton as kernels

    N, K, D = x_NKD.shape
    T, R = N * K, weights.feature_DR.shape[1]
    x = x_NKD.reshape(T, D).contiguous()
    anchor = anchor_feature_NR.float().contiguous()
    empty = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=x.device)  # noqa: E731
    rows, columns, depth, warps, stages = _launch("products", T)
    tiles = _cdiv(R, columns)
    source, z, square, hidden_gate = empty(T, R, dtype=x.dtype), empty(T, R), empty(tiles, T), empty(T, D)
    kernels.products_kernel[(tiles + _cdiv(D, columns), _cdiv(T, rows))](
        x, anchor, weights.norm_D, weights.gate_bias_D, weights.feature_DR, weights.gate_hidden_DD, weights.gate_predecessor_RD, weights.message_RD,
        source, z, square, hidden_gate,
        T=T, D=D, R=R, SLOTS=K, EPS=eps, ROWS=rows, COLUMNS=columns, DEPTH=depth, PREFETCH=PREFETCH, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    rows, columns, depth, warps, stages = _launch("write", T)
    new = torch.empty_like(x)
    kernels.write_kernel[(_cdiv(D, columns), _cdiv(T, rows))](
        x, source, square, hidden_gate, weights.gate_predecessor_RD, weights.message_RD, new,
        T=T, D=D, R=R, SLOTS=K, TILES=tiles, TILES_POWER=_power(tiles), ROWS=rows, COLUMNS=columns, DEPTH=depth, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return new.view(N, K, D)


def best_tokens(hidden_TD: torch.Tensor, head_VD: torch.Tensor, count: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest of <hidden, head row> among the first ``num_tokens`` rows: (ids int64 [T,count], logits fp32), falling, equal ones by id.

    16-bit arrays, D a multiple of 16.
    """
    from dspine_sglang.kernels import topk_triton as kernels

    hidden = hidden_TD.contiguous()
    (T, D), V = hidden.shape, len(head_VD)
    tokens = min(max(LEAST_ROWS, _power(T)), max(HEAD))
    rows, depth, warps, stages = HEAD[tokens]
    C = _cdiv(V, rows)
    new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=hidden.device)  # noqa: E731
    logits, maxima, values, ids = new(T, C * rows), new(T, C), new(T, count), new(T, count, dtype=torch.int32)
    kernels.head_kernel[(_cdiv(T, tokens), C)](
        hidden, head_VD, logits, maxima,
        COUNT=T, ROWS=V, WIDTH=D, NUM_TOKENS=num_tokens, CHUNKS=C, BLOCK_T=tokens, BLOCK_V=rows, BLOCK_D=min(depth, D & -D),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    kernels.select_kernel[(T,)](
        maxima, logits, values, ids,
        WIDTH=C * rows, NUM_TOKENS=num_tokens, CHUNKS=C, CHUNK=rows, NUMBER=count, BLOCK_C=_power(C), SLOTS=_power(count), HELD=min(count, C),
        num_warps=SELECT_WARPS, num_stages=1,
    )  # fmt: skip
    return ids.long(), values


def _launch(kernel: str, rows: int) -> tuple[int, ...]:
    """The launch of a call with this many rows; its tile is no taller than the call."""
    launches = INJECTION[kernel]
    tall, *rest = next((launch for most, launch in launches.items() if rows <= most), list(launches.values())[-1])
    return (min(tall, max(LEAST_ROWS, _power(rows))), *rest)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()
