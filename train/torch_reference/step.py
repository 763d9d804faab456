"""The training step in PyTorch (train/torch_reference): anchors, objective, update."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dspine_jax.config import OptimizerConfig, TrainConfig
from train.torch_reference.loss import chunk_loss, chunked_cross_entropy
from train.torch_reference.model import Drafter, Target


def draw_anchors(loss_mask_BS: Tensor, num_anchors: int, *, replacement: bool) -> tuple[Tensor, Tensor]:
    """Anchors as ``dspine_jax.anchors.draw_anchors`` draws them, in rising order: (positions [B,N] int64, kept [B,N] bool)."""
    following = torch.cat([loss_mask_BS[:, 1:], torch.zeros_like(loss_mask_BS[:, :1])], dim=1)
    candidates_BS = loss_mask_BS & following
    S = candidates_BS.shape[1]
    count_B1 = candidates_BS.sum(dim=1, keepdim=True)
    if replacement:
        order_BS = torch.argsort((~candidates_BS).int(), dim=1, stable=True)
        uniform_BN = torch.rand(len(candidates_BS), num_anchors, device=candidates_BS.device)
        pick_BN = torch.minimum((uniform_BN * count_B1).long(), (count_B1 - 1).clamp(min=0))
        keep_BN = (count_B1 > 0).expand_as(pick_BN)
        anchors_BN = order_BS.gather(1, pick_BN).sort(dim=1).values
    else:
        uniform_BS = torch.rand(candidates_BS.shape, device=candidates_BS.device).masked_fill(~candidates_BS, 2.0)
        first_BN = torch.argsort(uniform_BS, dim=1)[:, :num_anchors]
        keep_BN = torch.arange(num_anchors, device=first_BN.device) < count_B1
        anchors_BN = first_BN.masked_fill(~keep_BN, S).sort(dim=1).values
    return anchors_BN.masked_fill(~keep_BN, 0), keep_BN


def learning_rate(config: OptimizerConfig, steps: int, step: int) -> float:
    """The rate of step 0, 1, ... as ``train.step.learning_rate_schedule`` gives it."""
    peak, warmup = config.learning_rate, int(round(config.warmup_fraction * steps))
    if step < warmup:
        return peak * (1 / (warmup + 1) + (1 - 1 / (warmup + 1)) * step / warmup)
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return peak * ((1 - config.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress)) + config.final_fraction)


class TorchStep:
    """Target, drafter and optimizer with one call for a step. ``mode``: torch.compile's, or None for eager PyTorch."""

    def __init__(self, config: TrainConfig, target: Target, drafter: Drafter, *, num_tokens: int, chunk: int, mode: str | None):
        """``config.drafter`` resolved; ``num_tokens`` usable vocabulary rows; ``chunk`` positions whose logits exist at one time."""
        self.config, self.drafter, self.num_tokens, self.chunk = config, drafter, num_tokens, chunk
        compiled = (lambda f: f) if mode is None else (lambda f: torch.compile(f, mode=mode, fullgraph=True, dynamic=False))  # noqa: E731
        self._rows_VD, self._embedding_VD = target.lm_head.weight, target.embed_tokens.weight
        # Drawing anchors stays as it is: a dozen tiny kernels, whose sorts take longest of all to compile.
        self._target, self._blocks, self._chunk_loss = compiled(target), compiled(self._run_blocks), compiled(chunk_loss)
        self.parameters = list(drafter.parameters())
        device = self.parameters[0].device
        o = config.optimizer
        self._rate = torch.zeros((), device=device)
        self._optimizer = torch.optim.AdamW(
            self.parameters, lr=self._rate, betas=(o.beta1, o.beta2), eps=1e-8, weight_decay=o.weight_decay, fused=True, capturable=device.type == "cuda"
        )
        self._count = 0

    def _run_blocks(self, tokens_BS: Tensor, loss_mask_BS: Tensor, tapped_BSE: Tensor, anchors_BN: Tensor, keep_BN: Tensor):
        """-> ((hidden states [T,D], labels [T], weights [T]) of each path, whose weighted cross-entropies add up to the loss; feature loss or None)."""
        c, loss = self.config.drafter, self.config.loss
        B, S = tokens_BS.shape
        K = c.block_size
        positions_BNK = anchors_BN[..., None] + torch.arange(K, device=tokens_BS.device)
        inside_BT = positions_BNK.clamp(max=S - 1).flatten(1)
        text_BNK = tokens_BS.gather(1, inside_BT).view_as(positions_BNK)
        supervised_BNK = loss_mask_BS.gather(1, inside_BT).view_as(positions_BNK) & (positions_BNK < S) & keep_BN[..., None]
        noise_ids_BNK = torch.cat([text_BNK[..., :1], torch.full_like(text_BNK[..., 1:], c.mask_token_id)], dim=-1)
        token_features_BNKR = None
        if c.injection is not None:
            with torch.no_grad():
                features_BSR = self.drafter.transfer(self._rows_VD[tokens_BS])
                token_features_BNKR = features_BSR[torch.arange(B, device=tokens_BS.device)[:, None], inside_BT].unflatten(1, positions_BNK.shape[1:])
        # An unkept block stands at position 0 and sees no context.
        hidden, features = self.drafter(tapped_BSE, self._embedding_VD[noise_ids_BNK], anchors_BN, positions_BNK, token_features_BNKR)

        decay_J = torch.exp(-torch.arange(K - 1, dtype=torch.float32, device=tokens_BS.device) / loss.loss_decay_gamma)
        weights_BNJ = supervised_BNK[..., 1:] * decay_J
        total = weights_BNJ.sum()
        weights_BNJ = weights_BNJ / torch.where(total == 0, 1.0, total)
        feature_loss = None
        if features:
            cosines = [(p * token_features_BNKR[:, :, 1:]).sum(-1) / p.shape[-1] for p in features]
            feature_loss = sum((weights_BNJ * (1.0 - cosine)).sum() for cosine in cosines) / len(cosines)
        labels_BNJ = text_BNK[..., 1:]
        paths = [(hidden[0].flatten(0, 2), labels_BNJ.flatten(), weights_BNJ.flatten())]
        if len(hidden) == 2:
            # The first slot's predecessor is the anchor on both paths: one pass over the vocabulary serves it twice.
            twice_J = torch.ones_like(decay_J)
            twice_J[0] += loss.base_weight
            later = hidden[1][:, :, 1:].flatten(0, 2), labels_BNJ[..., 1:].flatten(), (loss.base_weight * weights_BNJ[..., 1:]).flatten()
            paths = [(paths[0][0], paths[0][1], (weights_BNJ * twice_J).flatten()), later]
        return paths, feature_loss

    def loss(self, tokens_BS: Tensor, loss_mask_BS: Tensor, anchors_BN: Tensor, keep_BN: Tensor) -> Tensor:
        """The loss of ``dspine_jax.objective.block_objective``. tokens [B,S] int, loss_mask [B,S] bool, anchors [B,N] int, kept [B,N] bool."""
        with torch.no_grad():
            tapped_BSE = self._target(tokens_BS)
        paths, feature_loss = self._blocks(tokens_BS, loss_mask_BS, tapped_BSE, anchors_BN, keep_BN)
        how = {"num_tokens": self.num_tokens, "chunk": self.chunk, "one_chunk": self._chunk_loss}
        loss = sum(chunked_cross_entropy(hidden, self._rows_VD, labels, weights, **how) for hidden, labels, weights in paths)
        return loss if feature_loss is None else loss + self.config.loss.feature_weight * feature_loss

    def update(self, loss: Tensor) -> Tensor:
        """One AdamW update from the gradients at hand, clipped; none where loss or gradient is not finite. -> gradient norm."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters], foreach=True)
        # The fused kernel divides by the one and leaves everything as it was for the other (both made for loss scaling): no pass of its own, no waiting.
        self._optimizer.grad_scale = (norm / self.config.optimizer.clip_norm).clamp(min=1.0)
        self._optimizer.found_inf = (~(loss.isfinite() & norm.isfinite())).float()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def device_work(self, tokens_BS: Tensor, loss_mask_BS: Tensor) -> tuple[Tensor, Tensor]:
        """What a step does on the device: (loss, gradient norm). Nothing in it depends on values the host knows, so a CUDA graph can hold it."""
        anchors = self.config.anchors
        loss = self.loss(tokens_BS, loss_mask_BS, *draw_anchors(loss_mask_BS, anchors.num_anchors, replacement=anchors.replacement))
        loss.backward()
        return loss.detach(), self.update(loss.detach())

    def set_learning_rate(self) -> None:
        """The rate of the next step, by the number of steps so far."""
        self._rate.fill_(learning_rate(self.config.optimizer, self.config.steps, self._count))
        self._count += 1

    def __call__(self, tokens_BS: Tensor, loss_mask_BS: Tensor) -> tuple[Tensor, Tensor]:
        """One step: (loss, gradient norm)."""
        self.set_learning_rate()
        return self.device_work(tokens_BS, loss_mask_BS)
