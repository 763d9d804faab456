"""How far a drafter could get: with true features at its layers, as it is or trained so, and with a tree of drafts read from its table.

At anchors along a stored greedy text both say how many drafts in a row would be accepted, so ``replay.walk_judged`` turns them into tau.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspine_jax.anchors import Blocks
from dspine_jax.config import DrafterConfig, LossConfig
from dspine_jax.drafter import Drafter
from dspine_jax.losses import cross_entropy, dpace_weights, slot_weights, weighted_mean
from dspine_jax.metrics import simulated_acceptance, slot_accuracy
from dspine_jax.objective import row_context, run_blocks
from dspine_jax.probes import STATIC, Context, block_input, check_sets, only_anchor, read_out, run_layer, slot_tokens
from dspine_jax.replay import compiled, over_anchors
from dspine_jax.selection import pair_table
from dspine_jax.sharding import constrain_batch
from dspine_jax.target import Target


def check_true_feature_sets(config: DrafterConfig, sets: tuple[tuple[int, ...], ...]) -> None:
    """Raises ValueError for a drafter without injection and for layers that do not inject."""
    if config.injection is None:
        raise ValueError(f"this {config.method} drafter injects nothing (drafter.injection): it reads no features that could be true")
    check_sets(sets, config.num_layers)
    silent = [layer for layers in sets for layer in layers if layer not in config.injection_layers]
    if silent:
        injecting = ",".join(map(str, config.injection_layers))
        raise ValueError(f"layer {silent[0]} does not inject, only {injecting} do: it reads no features that could be true")


def last_stream_with_true_features(drafter: Drafter, target: Target, context: Context, blocks: Blocks, layers: tuple[int, ...], dtype) -> jax.Array:
    """The stream that leaves the last layer, [B,N,K,D], where at ``layers`` slot i reads T of the text's token before it."""
    known_K = only_anchor(drafter.config)
    x, feature_BNKR = block_input(drafter, target, slot_tokens(blocks), known_K, dtype)
    for index in range(drafter.config.num_layers):
        x, _ = run_layer(drafter, index, x, context, blocks, feature_BNKR, jnp.ones_like(known_K) if index in layers else known_K)
    return x


def make_true_feature_drafting(
    drafter: Drafter, target: Target, sets: tuple[tuple[int, ...], ...], *, dtype, anchors_per_chunk: int
) -> Callable[[np.ndarray, np.ndarray], jax.Array]:
    """What DSpine would draft if slot i read T[y_{i-1}], its true predecessor's feature, instead of the predicted one, at the injected layers of a set.

    ``(tokens [B,S], anchors [B,N]) -> drafts [B,N,Z,J]`` for Z sets of layers, best tokens over the whole vocabulary. A slot counts only while all before
    it are right, and then its true predecessors are the drafted ones: the accepted length is that of drafting slot by slot. The last layer alone is
    the product's own path without its limit to P candidates; no layer is the base path. The drafter was trained with predicted features
    at the other layers, so this bounds what better predictions can bring *this* drafter; for what features can give at all, train one with true ones
    (``true_feature_objective``) and ask it.

    Raises ValueError for a drafter without injection and for layers that do not inject.
    """
    check_true_feature_sets(drafter.config, sets)
    return compiled(_true_features, drafter, target, dtype=jnp.dtype(dtype), anchors_per_chunk=anchors_per_chunk, sets=sets)


@functools.partial(jax.jit, static_argnames=(*STATIC, "sets"))
def _true_features(drafter_state, target_state, tokens_BS, anchors_BN, *, drafter_graph, target_graph, dtype, anchors_per_chunk, sets):
    drafter, target = nnx.merge(drafter_graph, drafter_state), nnx.merge(target_graph, target_state)

    def use(context, blocks):
        streams = [last_stream_with_true_features(drafter, target, context, blocks, layers, dtype) for layers in sets]
        return jnp.stack([read_out(drafter, target, x[:, :, 1:]) for x in streams], axis=2)

    return over_anchors(drafter, target, tokens_BS, anchors_BN, dtype, anchors_per_chunk, use)[0]


def true_feature_objective(
    layers: tuple[int, ...],
    drafter: Drafter,
    target: Target,
    tokens_BS: jax.Array,
    blocks: Blocks,
    loss_config: LossConfig,
    dtype,
    *,
    progress: jax.Array | float = 0.0,
) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    """In ``block_objective``'s place: trains a DSpine drafter that reads true features at ``layers``, for the bound of what features can give.

    The loss is ce_weight x CE of the last stream's logits, weighted as in ``block_objective``; base path and predicted features have no part in
    it. Raises ValueError for layers that do not inject and for a loss with L1.
    """
    check_true_feature_sets(drafter.config, (layers,))
    if loss_config.l1_weight > 0:
        raise ValueError(f"loss.l1_weight {loss_config.l1_weight} is not read by the bound with true features; set it to 0")
    read = target(tokens_BS, target_layer_ids=drafter.config.target_layer_ids, dtype=dtype)
    context = row_context(drafter, constrain_batch(jax.lax.stop_gradient(read.tapped_BTE)))
    x = last_stream_with_true_features(drafter, target, context, blocks, layers, dtype)
    hidden_BTD = constrain_batch(drafter.norm(x)[:, :, 1:].reshape(x.shape[0], -1, x.shape[-1]))
    labels_BNJ, mask_BNJ = blocks.labels_BNJ, blocks.eval_mask_BNJ
    labels_BT = labels_BNJ.reshape(len(labels_BNJ), -1)
    vocabulary = target.config.num_tokens, loss_config.vocab_chunk, drafter.kernels.head_softmax
    ce_BT, best_BT = cross_entropy(hidden_BTD, target.output_embedding_VD, labels_BT, *vocabulary)
    ce_BNJ, correct_BNJ = ce_BT.reshape(labels_BNJ.shape), (best_BT == labels_BT).reshape(labels_BNJ.shape)
    if loss_config.dpace_alpha is None:
        weights_BNJ = slot_weights(mask_BNJ, loss_config.loss_decay_gamma)
    else:
        weights_BNJ = dpace_weights(ce_BNJ, mask_BNJ, loss_config.dpace_alpha)
    loss = loss_config.ce_weight * weighted_mean(ce_BNJ, weights_BNJ)
    return loss, {
        "accuracy_conditioned": slot_accuracy(correct_BNJ, mask_BNJ),
        "simulated_tau/conditioned": simulated_acceptance(correct_BNJ, mask_BNJ),
        "loss/total": (loss, jnp.float32(1)),
        "supervised_tokens": (mask_BNJ.sum().astype(jnp.float32), jnp.float32(1)),
    }


def tree_accepted(table_xJPP: jax.Array, ids_xJP: jax.Array, text_xJ: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """How many drafts a best-first tree of each size gets accepted at temperature 0: the depth to which it follows the text.

    A node is a run of candidates from the first draft on; its score is the sum of log-softmaxes (over the P candidates) of the table's rows along it.
    A tree of n nodes, the anchor not counted, holds the n best: a parent is never worse than its child and wins ties, so the tree is connected;
    among equals the shallower node comes first, then the one of the better parent, then the earlier candidate. A smaller tree is a
    part of a larger one. table [...,J,P,P] fp32 with axes (draft, predecessor, candidate), ids [...,J,P], text [...,J] -> [...,Z] int32 for Z sizes.
    """
    return jnp.vectorize(lambda *arrays: _one_tree(*arrays, sizes), signature="(j,p,p),(j,p),(j)->(z)")(table_xJPP, ids_xJP, text_xJ)


def _one_tree(table_JPP, ids_JP, text_J, sizes):
    J, P = ids_JP.shape
    most = max(sizes)
    log_probs_JPP = jax.nn.log_softmax(table_JPP, axis=-1)

    def deeper(beam, draft):
        """The best ``most`` nodes one level down; at a level no tree holds more."""
        score_M, row_M, follows_M = beam
        log_probs_PP, ids_P, text = draft
        score_MP = score_M[:, None] + log_probs_PP[row_M]
        follows_MP = follows_M[:, None] & (ids_P == text)
        score_m, index_m = jax.lax.top_k(score_MP.reshape(-1), most)
        follows_m = follows_MP.reshape(-1)[index_m]
        return (score_m, index_m % P, follows_m), (score_m, follows_m)

    # The first draft's predecessor is the anchor, whose row every row of its table is.
    root = jnp.where(jnp.arange(most) == 0, 0.0, -jnp.inf), jnp.zeros(most, jnp.int32), jnp.arange(most) == 0
    _, (score_JM, follows_JM) = jax.lax.scan(deeper, root, (log_probs_JPP, ids_JP, text_J))
    order = jnp.argsort(-score_JM.reshape(-1), stable=True)
    reached = jnp.cumsum(follows_JM.reshape(-1)[order])
    return reached[jnp.minimum(jnp.array(sizes), J * most) - 1].astype(jnp.int32)


def make_tree_replay(
    drafter: Drafter, target: Target, sizes: tuple[int, ...], *, dtype, anchors_per_chunk: int
) -> Callable[[np.ndarray, np.ndarray], jax.Array]:
    """``(tokens [B,S], anchors [B,N]) -> accepted drafts [B,N,Z]`` of trees of these sizes (``tree_accepted``), of a drafter that ``scores_pairs``.

    Raises ValueError for other drafters and for sizes below 1.
    """
    if not drafter.config.scores_pairs:
        raise ValueError(f"this {drafter.config.method} drafter has no table of pairs to read a tree from")
    if min(sizes) < 1:
        raise ValueError(f"a tree of {min(sizes)} nodes drafts nothing; give sizes of at least 1")
    return compiled(_tree, drafter, target, dtype=jnp.dtype(dtype), anchors_per_chunk=anchors_per_chunk, sizes=sizes)


@functools.partial(jax.jit, static_argnames=(*STATIC, "sizes"))
def _tree(drafter_state, target_state, tokens_BS, anchors_BN, *, drafter_graph, target_graph, dtype, anchors_per_chunk, sizes):
    drafter, target = nnx.merge(drafter_graph, drafter_state), nnx.merge(target_graph, target_state)

    def use(context, blocks):
        block, feature = run_blocks(drafter, target, context, blocks, dtype)
        table_BNJPP, ids_BNJP = pair_table(drafter, target, block, blocks.noise_ids_BNK[..., 0], feature)
        return tree_accepted(table_BNJPP, ids_BNJP, blocks.labels_BNJ, sizes)

    return over_anchors(drafter, target, tokens_BS, anchors_BN, dtype, anchors_per_chunk, use)[0]
