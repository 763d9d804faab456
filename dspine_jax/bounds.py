"""How far a drafter could get without being changed: with true features, and with a tree of drafts read from its table.

Both give, at anchors along a stored greedy text, how many drafts in a row would be accepted, so ``replay.walk_judged`` turns them into tau.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspine_jax.drafter import Drafter
from dspine_jax.objective import run_blocks
from dspine_jax.probes import STATIC, block_input, check_sets, only_anchor, read_out, run_layer, slot_tokens
from dspine_jax.replay import compiled, over_anchors
from dspine_jax.selection import pair_table
from dspine_jax.target import Target


def make_true_feature_drafting(
    drafter: Drafter, target: Target, sets: tuple[tuple[int, ...], ...], *, dtype, anchors_per_chunk: int
) -> Callable[[np.ndarray, np.ndarray], jax.Array]:
    """What DSpine would draft if slot i read T[y_{i-1}], its true predecessor's feature, instead of the predicted one, at the injected layers of a set.

    ``(tokens [B,S], anchors [B,N]) -> drafts [B,N,Z,J]`` for Z sets of layers, best tokens over the whole vocabulary. A slot counts only while all before
    it are right, and then its true predecessors are the drafted ones: the accepted length is that of drafting slot by slot. The last layer alone is
    the product's own path without its limit to P candidates; no layer is the base path. The drafter was trained with predicted features
    at the other layers, so this bounds what better predictions can bring *this* drafter, not what training with true ones would.

    Raises ValueError for a drafter without injection and for layers that do not inject.
    """
    if drafter.config.injection is None:
        raise ValueError(f"this {drafter.config.method} drafter injects nothing (drafter.injection): it reads no features that could be true")
    check_sets(sets, drafter.config.num_layers)
    silent = [layer for layers in sets for layer in layers if layer not in drafter.config.injection_layers]
    if silent:
        injecting = ",".join(map(str, drafter.config.injection_layers))
        raise ValueError(f"layer {silent[0]} does not inject, only {injecting} do: it reads no features that could be true")
    return compiled(_true_features, drafter, target, dtype=jnp.dtype(dtype), anchors_per_chunk=anchors_per_chunk, sets=sets)


@functools.partial(jax.jit, static_argnames=(*STATIC, "sets"))
def _true_features(drafter_state, target_state, tokens_BS, anchors_BN, *, drafter_graph, target_graph, dtype, anchors_per_chunk, sets):
    drafter, target = nnx.merge(drafter_graph, drafter_state), nnx.merge(target_graph, target_state)

    def use(context, blocks):
        known_K = only_anchor(drafter.config)
        noise, feature_BNKR = block_input(drafter, target, slot_tokens(blocks), known_K, dtype)
        drafts = []
        for layers in sets:
            x = noise
            for index in range(drafter.config.num_layers):
                x, _ = run_layer(drafter, index, x, context, blocks, feature_BNKR, jnp.ones_like(known_K) if index in layers else known_K)
            drafts.append(read_out(drafter, target, x[:, :, 1:]))
        return jnp.stack(drafts, axis=2)

    return over_anchors(drafter, target, tokens_BS, anchors_BN, dtype, anchors_per_chunk, use)[0]


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
