"""Losses of heads that are trained against the vocabulary: corrected logits, distance from the target's law, and the candidate selector.

Unlike ``losses.cross_entropy``, whose head is frozen, these have parameters of their own in front of V, so logits are formed again in the backward
pass, a chunk of positions at a time: [B,N,K,V] never exists here either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dspine_jax.candidate_selector import CandidateSelector
from dspine_jax.sharding import constrain_batch
from dspine_jax.vocabulary import mask_padded_vocabulary, vocabulary_logits
from pallas_kernels.topk_logits import topk_logits


def by_chunks(function: Callable, chunk: int, *arrays_BT: jax.Array):
    """``function`` of position-wise arrays [B,T,...], on at most ``chunk`` positions of each row at a time; results [B,t,...] are joined.

    Nothing inside a chunk is kept for the backward pass. Chunks run along T, so the batch axis keeps its sharding.
    """
    B, T = arrays_BT[0].shape[:2]
    count = -(-T // chunk)
    chunk = -(-T // count)  # equal chunks leave the least to pad
    rest = count * chunk - T

    def cut(x):
        padded = jnp.pad(x, ((0, 0), (0, rest)) + ((0, 0),) * (x.ndim - 2))
        return padded.reshape(B, count, chunk, *x.shape[2:]).swapaxes(0, 1)

    pieces = jax.lax.scan(lambda _, piece: (None, jax.checkpoint(function)(*piece)), None, tuple(map(cut, arrays_BT)))[1]
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(B, T + rest, *x.shape[3:])[:, :T], pieces)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def table_product(x_BtR: jax.Array, table_VR: jax.Array, trained: bool) -> jax.Array:
    """x table^T in fp32 from products in x's dtype, backward too: an fp32 cotangent of size V would be multiplied at a fraction of the speed."""
    return jnp.einsum("btr,vr->btv", x_BtR, table_VR.astype(x_BtR.dtype), preferred_element_type=jnp.float32)


def _table_product_fwd(x_BtR, table_VR, trained):
    return table_product(x_BtR, table_VR, trained), (x_BtR, table_VR)


def _table_product_bwd(trained, kept, bar_BtV):
    x_BtR, table_VR = kept
    bar_BtV = bar_BtV.astype(x_BtR.dtype)
    x_bar = jnp.einsum("btv,vr->btr", bar_BtV, table_VR.astype(x_BtR.dtype), preferred_element_type=jnp.float32).astype(x_BtR.dtype)
    if not trained:
        return x_bar, None
    return x_bar, jnp.einsum("btv,btr->vr", bar_BtV, x_BtR, preferred_element_type=jnp.float32).astype(table_VR.dtype)


table_product.defvjp(_table_product_fwd, _table_product_bwd)


def slot_scores(
    hidden_BTD: jax.Array,
    rows_VD: jax.Array,
    labels_BT: jax.Array,
    num_tokens: int,
    chunk: int,
    *,
    corrected_by: tuple[jax.Array, jax.Array] | None = None,
    target_hidden_BTD: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Cross-entropy, argmax, and distance from the target's law of ``hidden U^T`` or, corrected, ``hidden U^T + codes table^T``.

    hidden [B,T,D], rows U [V,D] (frozen), labels [B,T]; corrected_by: (codes [B,T,R], table [V,R]); target_hidden [B,T,D]: the target's states after its
    final norm, without gradient. Softmax in fp32. -> (ce [B,T] fp32, argmax ids [B,T] int32, sum over V of |q - p| [B,T] fp32 or None).
    """
    rows_VD = jax.lax.stop_gradient(rows_VD)
    codes = () if corrected_by is None else corrected_by[:1]
    teacher = () if target_hidden_BTD is None else (jax.lax.stop_gradient(target_hidden_BTD),)

    def scores(hidden, labels, *others):
        logits = table_product(hidden, rows_VD, False)
        if codes:
            logits = logits + table_product(others[0], corrected_by[1], True)
        logits = mask_padded_vocabulary(logits, num_tokens)
        log_q = jax.nn.log_softmax(logits, axis=-1)
        ce = -jnp.take_along_axis(log_q, labels[..., None], axis=-1)[..., 0]
        best = jnp.argmax(jax.lax.stop_gradient(logits), axis=-1).astype(jnp.int32)
        if not teacher:
            return ce, best
        p = jax.nn.softmax(vocabulary_logits(others[-1], rows_VD, num_tokens), axis=-1)
        return ce, best, jnp.sum(jnp.abs(jnp.exp(log_q) - p), axis=-1)

    ce, best, *distance = by_chunks(scores, chunk, hidden_BTD, labels_BT, *codes, *teacher)
    return ce, best, distance[0] if distance else None


def selector_scores(
    selector: CandidateSelector,
    hidden_BTD: jax.Array,
    rows_VD: jax.Array,
    predecessors_BT: jax.Array,
    labels_BT: jax.Array,
    num_candidates: int,
    num_tokens: int,
    chunk: int,
    topk: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The selector's cross-entropy among the candidates after the true token before, where the label is one of them.

    Gradients reach the selector and, through it and the candidates' logits, the hidden states. -> (ce [B,T] fp32, label is a candidate [B,T] bool,
    chosen ids [B,T] int32); without the label among the candidates ce means nothing. topk: implementation of ``topk_logits``.
    """
    rows_VD = jax.lax.stop_gradient(rows_VD)

    def scores(hidden, predecessors, labels):
        ids = topk_logits(jax.lax.stop_gradient(hidden), rows_VD, num_candidates, num_tokens=num_tokens, implementation=topk)[1]
        candidates = constrain_batch(jnp.take(rows_VD, ids, axis=0).astype(hidden.dtype))
        unary = jnp.einsum("btd,btpd->btp", hidden, candidates, preferred_element_type=jnp.float32)
        total = unary + selector.pair_scores(hidden, predecessors[..., None], ids)[..., 0, :]
        is_label = ids == labels[..., None]
        picked = jnp.take_along_axis(total, jnp.argmax(is_label, axis=-1)[..., None], axis=-1)[..., 0]
        chosen = jnp.take_along_axis(ids, jnp.argmax(total, axis=-1)[..., None], axis=-1)[..., 0]
        return jax.scipy.special.logsumexp(total, axis=-1) - picked, is_label.any(axis=-1), chosen

    return by_chunks(scores, chunk, hidden_BTD, predecessors_BT, labels_BT)
