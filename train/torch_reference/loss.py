"""Cross-entropy against the frozen LM head in chunks, in PyTorch (train/torch_reference)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def chunk_loss(hidden_TD: Tensor, rows_VD: Tensor, labels_T: Tensor, weights_T: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of some positions and its gradient, while their logits exist.

    hidden [T,D] and rows U [V,D] in the compute dtype, labels [T] int, weights [T] fp32; columns >= num_tokens count for nothing.
    -> (sum of weight x CE, fp32; its gradient [T,D] with respect to hidden).
    """
    logits = (hidden_TD @ rows_VD.T).float()
    ids = torch.arange(logits.shape[1], device=logits.device)
    if num_tokens < logits.shape[1]:
        logits = torch.where(ids < num_tokens, logits, -torch.inf)
    # Spelt out, the compiler takes maximum and sum in one pass; torch.logsumexp's own care for infinite rows hides it.
    top = logits.amax(dim=-1, keepdim=True)
    log_total = top + (logits - top).exp().sum(dim=-1, keepdim=True).log()
    loss = (weights_T * (log_total - logits.gather(1, labels_T[:, None]))[:, 0]).sum()
    error = torch.exp(logits - log_total) - (ids == labels_T[:, None]).float()
    return loss, (error * weights_T[:, None]).to(hidden_TD.dtype) @ rows_VD


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, rows_VD, labels_T, weights_T, num_tokens, pieces, one_chunk):
        chunks = zip(hidden_TD.chunk(pieces), labels_T.chunk(pieces), weights_T.chunk(pieces))
        losses, gradients = zip(*(one_chunk(h, rows_VD, y, w, num_tokens) for h, y, w in chunks))
        ctx.save_for_backward(torch.cat(gradients))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx, loss_bar):
        (gradient_TD,) = ctx.saved_tensors
        return gradient_TD * loss_bar.to(gradient_TD.dtype), None, None, None, None, None, None


def chunked_cross_entropy(
    hidden_TD: Tensor, rows_VD: Tensor, labels_T: Tensor, weights_T: Tensor, *, num_tokens: int, chunk: int, one_chunk: Callable = chunk_loss
) -> Tensor:
    """Sum of weight x CE over all positions, at most ``chunk`` positions' logits at a time; differentiable in hidden alone.

    Chunks are equal (the largest even split that keeps to ``chunk``), so that a compiled ``one_chunk`` has one shape.
    """
    T = hidden_TD.shape[0]
    pieces = next(n for n in range(-(-T // chunk), T + 1) if T % n == 0)
    return _ChunkedLoss.apply(hidden_TD, rows_VD, labels_T, weights_T, num_tokens, pieces, one_chunk)
