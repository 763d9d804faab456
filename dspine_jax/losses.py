"""Losses over blocks: chunked cross-entropy against the frozen LM head, and the feature loss.

Every term is (global sum of weight x value) / (global sum of weight): under one jit over the whole
mesh the sums are global, so devices and short rows weigh by their tokens, never by mean of means.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from dspine_jax.vocabulary import vocabulary_logits
from pallas_kernels.head_softmax import head_softmax, position_multiple

# Softmax weights are exp(logit - label logit - HEADROOM), capped at exp(LARGEST_EXPONENT): the sum of a million capped ones is below the largest float.
# The label's own weight is a power of two, which bf16 holds exactly; rounded, it would bias every gradient by the same fraction of the label's row.
HEADROOM, LARGEST_EXPONENT = 58 * math.log(2), 74.0


def slot_weights(eval_mask_BNJ: jax.Array, loss_decay_gamma: float) -> jax.Array:
    """w_i = exp(-(i-1)/gamma) for drafted slots i = 1..J, 0 where unsupervised. [B,N,J] fp32."""
    decay_J = jnp.exp(-jnp.arange(eval_mask_BNJ.shape[-1], dtype=jnp.float32) / loss_decay_gamma)
    return eval_mask_BNJ * decay_J


def dpace_weights(ce_BNJ: jax.Array, eval_mask_BNJ: jax.Array, alpha: float) -> jax.Array:
    """D-PACE (BASELINES 3.3): a slot weighs by how much of the accepted length its block still hopes for at it and behind it.

    s = (1 - alpha) exp(-CE) + alpha, and 1 where unsupervised; w_k = sum over supervised j >= k of s_0 ... s_j, which falls with k, and 0 where
    unsupervised. ce [B,N,J] of the path that drafts, without gradient here. -> [B,N,J] fp32.
    """
    chance_BNJ = (1.0 - alpha) * jnp.exp(-jax.lax.stop_gradient(ce_BNJ)) + alpha
    reached_BNJ = jnp.cumprod(jnp.where(eval_mask_BNJ, chance_BNJ, 1.0), axis=-1) * eval_mask_BNJ
    return eval_mask_BNJ * jnp.cumsum(reached_BNJ[..., ::-1], axis=-1)[..., ::-1]


def weighted_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """sum(weights * values) / sum(weights); exactly 0, with zero gradient, where nothing is weighted."""
    total = jnp.sum(weights)
    return jnp.sum(jnp.where(weights > 0, values, 0.0) * weights) / jnp.where(total == 0.0, 1.0, total)


def cross_entropy_dense(hidden_BTD: jax.Array, rows_VD: jax.Array, labels_BT: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Reference: cross-entropy and argmax of every row with all logits [B,T,V] in memory. -> ([B,T] fp32, [B,T] int32)."""
    logits = vocabulary_logits(hidden_BTD, rows_VD, num_tokens)
    log_total = jax.scipy.special.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, labels_BT[..., None], axis=-1)[..., 0]
    return log_total - picked, jnp.argmax(logits, axis=-1).astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def cross_entropy(
    hidden_BTD: jax.Array, rows_VD: jax.Array, labels_BT: jax.Array, num_tokens: int, chunk: int, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy and argmax per position, at most ``chunk`` positions of each row at a time.

    The LM head is frozen, so the only gradient is with respect to hidden and a position's loss
    depends on its own hidden state alone: the forward pass can already form d CE / d hidden while
    the chunk's logits exist. Nothing of size [B,T,V] is kept or recomputed. Chunks run along T, so
    the batch axis keeps its sharding.

    A logit that exceeds its position's label logit by more than HEADROOM + LARGEST_EXPONENT = 114 counts as if it did by 114:
    a position's loss saturates there (at 114 nats and the log of how many do), where e^114 : 1 against the label no longer matters.

    hidden [B,T,D], rows U [V,D], labels [B,T] int -> (ce [B,T] fp32, argmax ids [B,T] int32). implementation: of ``head_softmax``.
    """
    ce, best, _ = _cross_entropy_chunks(hidden_BTD, rows_VD, labels_BT, num_tokens, chunk, implementation, with_gradient=False)
    return ce, best


def _cross_entropy_chunks(hidden_BTD, rows_VD, labels_BT, num_tokens, chunk, implementation, *, with_gradient):
    B, T, D = hidden_BTD.shape
    count = -(-T // chunk)
    chunk = -(-T // max(count, 1))  # equal chunks leave the least to pad
    if chunk > (multiple := position_multiple(B)):
        chunk = -(-chunk // multiple) * multiple
        count = -(-T // chunk)
    rest = count * chunk - T
    hidden = jnp.pad(hidden_BTD, ((0, 0), (0, rest), (0, 0))).reshape(B, count, chunk, D).swapaxes(0, 1)
    labels = jnp.pad(labels_BT, ((0, 0), (0, rest))).reshape(B, count, chunk).swapaxes(0, 1)

    def one(_, piece):
        h_BtD, y_Bt = piece
        label_rows_BtD = jnp.take(rows_VD, y_Bt, axis=0).astype(h_BtD.dtype)
        label_logits = jnp.einsum("btd,btd->bt", h_BtD, label_rows_BtD, preferred_element_type=jnp.float32)
        # Exponents relative to a point known beforehand, not to the largest logit: one pass over the logits gives everything.
        options = dict(num_tokens=num_tokens, largest=LARGEST_EXPONENT, implementation=implementation)
        weights, total, best = head_softmax(h_BtD, rows_VD, label_logits + HEADROOM, **options)
        ce = jnp.log(total) + HEADROOM
        if not with_gradient:
            return None, (ce, best)
        mean_rows = jnp.einsum("btv,vd->btd", weights, rows_VD.astype(h_BtD.dtype), preferred_element_type=jnp.float32)
        return None, (ce, best, (mean_rows / total[..., None] - label_rows_BtD).astype(h_BtD.dtype))

    _, out = jax.lax.scan(one, None, (hidden, labels))
    joined = [x.swapaxes(0, 1).reshape(B, T + rest, *x.shape[3:])[:, :T] for x in out]
    return joined if with_gradient else (*joined, None)


def _cross_entropy_fwd(hidden_BTD, rows_VD, labels_BT, num_tokens, chunk, implementation):
    ce, best, gradient_BTD = _cross_entropy_chunks(hidden_BTD, rows_VD, labels_BT, num_tokens, chunk, implementation, with_gradient=True)
    return (ce, best), gradient_BTD


def _cross_entropy_bwd(num_tokens, chunk, implementation, gradient_BTD, cotangents):
    ce_bar_BT, _ = cotangents
    return (gradient_BTD.astype(jnp.float32) * ce_bar_BT[..., None]).astype(gradient_BTD.dtype), None, None


cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


def overlap(distance: jax.Array) -> jax.Array:
    """sum over V of min(p, q), the probability that a draft drawn from q is accepted by p, of the distance sum |q - p|."""
    return jnp.clip(1.0 - 0.5 * distance, 0.0, 1.0)


def feature_distance(features_BNKR: jax.Array, token_features_BNJR: jax.Array) -> jax.Array:
    """1 - cos(p_i, T[y_i]) for drafted slots. features [B,N,K,R], T [B,N,J,R], both of norm sqrt(R) -> [B,N,J]."""
    R = features_BNKR.shape[-1]
    return 1.0 - jnp.sum(features_BNKR[:, :, 1:] * token_features_BNJR, axis=-1) / R
