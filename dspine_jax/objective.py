"""From token rows and anchors to the training loss: the part of a step that is pure mathematics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from dspine_jax.anchors import Blocks
from dspine_jax.config import LossConfig
from dspine_jax.drafter import BlockOutput, Drafter
from dspine_jax.head_losses import selector_scores, slot_scores
from dspine_jax.losses import cross_entropy, dpace_weights, feature_distance, overlap, slot_weights, weighted_mean
from dspine_jax.metrics import simulated_acceptance, slot_accuracy, slot_sums
from dspine_jax.selection import anchor_features
from dspine_jax.sequential import SequentialHead, sequential_head, text_codes
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


def predicting_states(hidden_BSD: jax.Array, blocks: Blocks) -> jax.Array:
    """The target's states that predict each label: those at the token before it. [B,S,D] after the final norm -> [B,N,J,D]."""
    B, N, J = blocks.labels_BNJ.shape
    positions_BNJ = jnp.minimum(blocks.positions_BNK[..., :1] + jnp.arange(J), hidden_BSD.shape[1] - 1)
    return jnp.take_along_axis(hidden_BSD, positions_BNJ.reshape(B, N * J, 1), axis=1).reshape(B, N, J, -1)


def block_objective(
    drafter: Drafter,
    target: Target,
    tokens_BS: jax.Array,
    blocks: Blocks,
    loss_config: LossConfig,
    dtype,
    *,
    progress: jax.Array | float = 0.0,
) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    """Loss of DESIGN 5.6 and BASELINES 3 and 4, and metrics as (sum, weight) pairs. Every mean is sum w x / sum w.

    Slots weigh by the decay of loss_decay_gamma or, where dpace_alpha is set, by D-PACE along the main path; in every term alike.
    The main path, of the logits that the drafter drafts from, costs ce_weight x CE + l1_weight x sum over V of |q - p|, p the target's law.
    DFlash: the main path is all. DSpine: it is conditioned on the true predecessor; + beta x base CE + lambda x mean over injected
    layers of 1 - cos(p_i, T[y_i]); without a redone last write only its base path remains. DFlash2: + selector CE, over the slots
    whose label is a candidate. DSpark: the main path is corrected along the true text; + BCE of the confidence against 1 - |q - p| / 2.
    Domino: (1 - share) x main + share x base CE; the share falls from 1 to 0 as ``progress``, the share of the steps done, rises
    to base_decay_fraction.
    """
    config, kernels = drafter.config, drafter.kernels
    read = target(tokens_BS, target_layer_ids=config.target_layer_ids, dtype=dtype)
    block, _ = run_blocks(drafter, target, row_context(drafter, constrain_batch(jax.lax.stop_gradient(read.tapped_BTE))), blocks, dtype)
    rows_VD, num_tokens, chunk = target.output_embedding_VD, target.config.num_tokens, loss_config.vocab_chunk
    labels_BNJ, mask_BNJ = blocks.labels_BNJ, blocks.eval_mask_BNJ
    metrics: dict[str, tuple[jax.Array, jax.Array]] = {}
    flat = lambda x: constrain_batch(x.reshape(x.shape[0], -1, *x.shape[3:]))  # noqa: E731

    def scores(hidden_BNJD: jax.Array, labels_BNJ: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cross-entropy, and whether the label is the argmax, of every slot."""
        ce_BT, best_BT = cross_entropy(flat(hidden_BNJD), rows_VD, flat(labels_BNJ), num_tokens, chunk, kernels.head_softmax)
        return ce_BT.reshape(labels_BNJ.shape), best_BT.reshape(labels_BNJ.shape) == labels_BNJ

    def main_scores(hidden_BNJD: jax.Array, head: SequentialHead | None = None) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """``scores`` of the main path, corrected by a head, and its distance from the target's law where a term reads that."""
        distant = loss_config.l1_weight > 0 or config.confidence
        if head is None and not distant:
            return *scores(hidden_BNJD, labels_BNJ), None
        codes = None if head is None else (flat(text_codes(head, hidden_BNJD, blocks.predecessors_BNJ)), head.table_VR)
        states = flat(predicting_states(read.hidden_BTD, blocks)) if distant else None
        out = slot_scores(flat(hidden_BNJD), rows_VD, flat(labels_BNJ), num_tokens, chunk, corrected_by=codes, target_hidden_BTD=states)
        ce_BNJ, best_BNJ, distance_BNJ = (None if x is None else x.reshape(labels_BNJ.shape) for x in out)
        return ce_BNJ, best_BNJ == labels_BNJ, distance_BNJ

    hidden_BNJD = block.hidden_BNKD[:, :, config.first_slot :]
    head = sequential_head(drafter, target)
    if config.redoes_last_write:
        main = main_scores(drafter.conditioned(block, anchor_features(drafter, rows_VD, blocks.predecessors_BNJ)))
    else:
        main = main_scores(hidden_BNJD, head)
    if loss_config.dpace_alpha is None:
        weights_BNJ = slot_weights(mask_BNJ, loss_config.loss_decay_gamma)
    else:
        weights_BNJ = dpace_weights(main[0], mask_BNJ, loss_config.dpace_alpha)

    def path_loss(name: str, ce_BNJ: jax.Array, correct_BNJ: jax.Array) -> jax.Array:
        loss = weighted_mean(ce_BNJ, weights_BNJ)
        metrics[f"loss/ce_{name}"] = (loss, jnp.float32(1))
        metrics[f"accuracy_{name}"] = slot_accuracy(correct_BNJ, mask_BNJ)
        metrics[f"simulated_tau/{name}"] = simulated_acceptance(correct_BNJ, mask_BNJ)
        return loss

    def main_loss(name: str, ce_BNJ: jax.Array, correct_BNJ: jax.Array, distance_BNJ: jax.Array | None) -> jax.Array:
        loss = loss_config.ce_weight * path_loss(name, ce_BNJ, correct_BNJ)
        if distance_BNJ is not None:
            l1 = weighted_mean(distance_BNJ, weights_BNJ)
            metrics["loss/l1"] = (l1, jnp.float32(1))
            metrics["overlap"] = slot_sums(jax.lax.stop_gradient(overlap(distance_BNJ)), mask_BNJ)
            loss = loss + loss_config.l1_weight * l1
        return loss

    if config.redoes_last_write:
        # The first drafted slot's predecessor is the anchor on both paths: one pass over the vocabulary serves it twice.
        later = scores(hidden_BNJD[:, :, 1:], labels_BNJ[:, :, 1:])
        base = [jnp.concatenate([first[:, :, :1], rest], axis=2) for first, rest in zip(main, later)]
        loss = main_loss("conditioned", *main) + loss_config.base_weight * path_loss("base", *base)
    else:
        loss = main_loss("base" if head is None else "conditioned", *main)
    if config.gru is not None:
        share = jnp.maximum(1.0 - progress / loss_config.base_decay_fraction, 0.0)
        metrics["loss/base_share"] = (jnp.asarray(share, jnp.float32), jnp.float32(1))
        loss = (1.0 - share) * loss + share * path_loss("base", *scores(hidden_BNJD, labels_BNJ))
    if config.selector is not None:
        P = config.selector.num_candidates
        arrays = flat(hidden_BNJD), rows_VD, flat(blocks.predecessors_BNJ), flat(labels_BNJ)
        out = selector_scores(drafter.candidate_selector, *arrays, P, num_tokens, chunk, kernels.topk_logits)
        ce_BNJ, present_BNJ, chosen_BNJ = (x.reshape(labels_BNJ.shape) for x in out)
        selector_loss = weighted_mean(ce_BNJ, weights_BNJ * present_BNJ)
        metrics["loss/selector"] = (selector_loss, jnp.float32(1))
        metrics["candidate_recall"] = slot_accuracy(present_BNJ, mask_BNJ)
        metrics["accuracy_conditioned"] = slot_accuracy(chosen_BNJ == labels_BNJ, mask_BNJ)
        metrics["simulated_tau/conditioned"] = simulated_acceptance(chosen_BNJ == labels_BNJ, mask_BNJ)
        loss = loss + loss_config.selector_weight * selector_loss
    if config.confidence:
        accepted_BNJ = jax.lax.stop_gradient(overlap(main[2]))
        logits_BNJ = drafter.confidence_logits(hidden_BNJD, blocks.predecessors_BNJ)
        confidence_loss = weighted_mean(optax.sigmoid_binary_cross_entropy(logits_BNJ, accepted_BNJ), weights_BNJ)
        metrics["loss/confidence"] = (confidence_loss, jnp.float32(1))
        metrics["confidence"] = slot_sums(jax.nn.sigmoid(logits_BNJ), mask_BNJ)
        loss = loss + loss_config.confidence_weight * confidence_loss
    if block.features:
        token_features_BNJR = anchor_features(drafter, rows_VD, labels_BNJ)
        parts = [weighted_mean(feature_distance(p, token_features_BNJR), weights_BNJ) for p in block.features]
        for layer, part in zip(config.injection_layers, parts):
            metrics[f"loss/feature_layer{layer}"] = (part, jnp.float32(1))
        feature_loss = sum(parts) / len(parts)
        metrics["loss/feature"] = (feature_loss, jnp.float32(1))
        loss = loss + loss_config.feature_weight * feature_loss
    metrics["loss/total"] = (loss, jnp.float32(1))
    metrics["supervised_tokens"] = (mask_BNJ.sum().astype(jnp.float32), jnp.float32(1))
    return loss, metrics
