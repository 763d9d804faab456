"""From token rows and anchors to the training loss: the part of a step that is pure mathematics."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspine_jax.anchors import Blocks
from dspine_jax.config import LossConfig
from dspine_jax.drafter import BlockOutput, Drafter
from dspine_jax.losses import cross_entropy, feature_distance, slot_weights, weighted_mean
from dspine_jax.metrics import simulated_acceptance, slot_accuracy
from dspine_jax.selection import anchor_features
from dspine_jax.sharding import constrain_batch
from dspine_jax.target import Target


def row_context(drafter: Drafter, tapped_BSE: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Context keys and values of whole rows, whose tokens sit at positions 0..S-1. tapped [B,S,M*D]."""
    positions_BS = jnp.broadcast_to(jnp.arange(tapped_BSE.shape[1], dtype=jnp.int32), tapped_BSE.shape[:2])
    return drafter.context_kv(tapped_BSE, positions_BS)


def run_blocks(
    drafter: Drafter, target: Target, context: tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]], blocks: Blocks, dtype
) -> tuple[BlockOutput, jax.Array | None]:
    """Run the drafter on prepared blocks of rows whose context is ``row_context``.

    -> (BlockOutput, T[anchor] [B,N,R] or None).
    """
    noise_BNKD = constrain_batch(jnp.take(target.input_embedding_VD, blocks.noise_ids_BNK, axis=0).astype(dtype))
    feature_BNR = anchor_features(drafter, target.output_embedding_VD, blocks.noise_ids_BNK[..., 0])
    return drafter(noise_BNKD, *context, blocks.context_len_BN, blocks.positions_BNK, feature_BNR), feature_BNR


def block_objective(
    drafter: Drafter, target: Target, tokens_BS: jax.Array, blocks: Blocks, loss_config: LossConfig, dtype
) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    """Loss of DESIGN 5.6 and metrics as (sum, weight) pairs.

    DFlash: sum w CE / sum w. DSpine: conditioned CE with the true predecessor + beta x base CE
    + lambda x mean over injected layers of sum w (1 - cos(p_i, T[y_i])) / sum w. Without a redone
    last write the base path is the only one and takes the full weight.
    """
    config = drafter.config
    tapped_BSE = jax.lax.stop_gradient(target(tokens_BS, target_layer_ids=config.target_layer_ids, dtype=dtype).tapped_BTE)
    block, _ = run_blocks(drafter, target, row_context(drafter, constrain_batch(tapped_BSE)), blocks, dtype)
    rows_VD = target.output_embedding_VD
    weights_BNJ = slot_weights(blocks.eval_mask_BNJ, loss_config.loss_decay_gamma)
    metrics: dict[str, tuple[jax.Array, jax.Array]] = {}

    def scores(hidden_BNJD: jax.Array, labels_BNJ: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cross-entropy, and whether the label is the argmax, of every slot."""
        B, N, J, D = hidden_BNJD.shape
        hidden_BTD, labels_BT = constrain_batch(hidden_BNJD.reshape(B, N * J, D)), labels_BNJ.reshape(B, N * J)
        ce_BT, best_BT = cross_entropy(hidden_BTD, rows_VD, labels_BT, target.config.num_tokens, loss_config.vocab_chunk)
        return ce_BT.reshape(B, N, J), (best_BT == labels_BT).reshape(B, N, J)

    def path_loss(name: str, ce_BNJ: jax.Array, correct_BNJ: jax.Array) -> jax.Array:
        loss = weighted_mean(ce_BNJ, weights_BNJ)
        metrics[f"loss/ce_{name}"] = (loss, jnp.float32(1))
        metrics[f"accuracy_{name}"] = slot_accuracy(correct_BNJ, blocks.eval_mask_BNJ)
        metrics[f"simulated_tau/{name}"] = simulated_acceptance(correct_BNJ, blocks.eval_mask_BNJ)
        return loss

    labels_BNJ = blocks.labels_BNJ
    if config.redoes_last_write:
        predecessor_BNJR = anchor_features(drafter, rows_VD, blocks.predecessors_BNJ)
        conditioned = scores(drafter.conditioned(block, predecessor_BNJR), labels_BNJ)
        # The first drafted slot's predecessor is the anchor on both paths: one pass over the vocabulary serves it twice.
        later = scores(block.hidden_BNKD[:, :, 2:], labels_BNJ[:, :, 1:])
        base = [jnp.concatenate([first[:, :, :1], rest], axis=2) for first, rest in zip(conditioned, later)]
        loss = path_loss("conditioned", *conditioned) + loss_config.base_weight * path_loss("base", *base)
    else:
        loss = path_loss("base", *scores(block.hidden_BNKD[:, :, config.first_slot :], labels_BNJ))
    if block.features:
        token_features_BNJR = anchor_features(drafter, rows_VD, blocks.labels_BNJ)
        parts = [weighted_mean(feature_distance(p, token_features_BNJR), weights_BNJ) for p in block.features]
        for layer, part in zip(config.injection_layers, parts):
            metrics[f"loss/feature_layer{layer}"] = (part, jnp.float32(1))
        feature_loss = sum(parts) / len(parts)
        metrics["loss/feature"] = (feature_loss, jnp.float32(1))
        loss = loss + loss_config.feature_weight * feature_loss
    metrics["loss/total"] = (loss, jnp.float32(1))
    metrics["supervised_tokens"] = (blocks.eval_mask_BNJ.sum().astype(jnp.float32), jnp.float32(1))
    return loss, metrics
