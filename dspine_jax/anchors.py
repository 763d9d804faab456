"""Which positions become blocks, and what each block reads and must predict (BASELINES 2)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """Inputs and labels of N blocks a row; J predicting slots (K-1, shifted K), all int32 but eval_mask.

    noise_ids_BNK: [anchor token, mask x (K-1)]; positions_BNK: anchor + slot; context_len_BN: the
    anchor's position, so that context strictly before the anchor is visible; labels_BNJ: token at
    anchor + 1 + j; predecessors_BNJ: token at anchor + j; eval_mask_BNJ: supervised slots. In terms of j
    the two layouts differ only in the slot that holds draft j: ``DrafterConfig.first_slot`` + j.
    """

    noise_ids_BNK: jax.Array
    positions_BNK: jax.Array
    context_len_BN: jax.Array
    labels_BNJ: jax.Array
    predecessors_BNJ: jax.Array
    eval_mask_BNJ: jax.Array


def candidate_anchors(loss_mask_BS: jax.Array) -> jax.Array:
    """Position i can be an anchor iff it and its successor are both supervised. [B,S] bool -> [B,S] bool."""
    following = jnp.concatenate([loss_mask_BS[:, 1:], jnp.zeros_like(loss_mask_BS[:, :1])], axis=1)
    return loss_mask_BS & following


def draw_anchors(key: jax.Array, loss_mask_BS: jax.Array, num_anchors: int, *, replacement: bool) -> tuple[jax.Array, jax.Array]:
    """Draw N anchors of each row uniformly among its candidates.

    Without replacement a row with fewer than N candidates keeps that many blocks; with replacement
    it keeps N as long as it has one candidate. Kept anchors come first and in rising order
    (without replacement); unkept ones are at position 0. -> (anchor_positions [B,N] int32,
    block_keep_mask [B,N] bool).
    """
    candidates_BS = candidate_anchors(loss_mask_BS)
    B, S = candidates_BS.shape
    count_B = candidates_BS.sum(axis=1)
    if replacement:
        order_BS = jnp.argsort(~candidates_BS, axis=1, stable=True)
        uniform_BN = jax.random.uniform(key, (B, num_anchors))
        pick_BN = jnp.minimum((uniform_BN * count_B[:, None]).astype(jnp.int32), jnp.maximum(count_B - 1, 0)[:, None])
        anchors_BN = jnp.take_along_axis(order_BS, pick_BN, axis=1)
        keep_BN = jnp.broadcast_to(count_B[:, None] > 0, anchors_BN.shape)
    else:
        if num_anchors > S:
            raise ValueError(f"anchors.num_anchors {num_anchors} exceeds the row width {S}; lower it or set anchors.replacement")
        uniform_BS = jnp.where(candidates_BS, jax.random.uniform(key, (B, S)), 2.0)
        first_BN = jnp.argsort(uniform_BS, axis=1)[:, :num_anchors]
        keep_BN = jnp.arange(num_anchors)[None] < count_B[:, None]
        anchors_BN = jnp.sort(jnp.where(keep_BN, first_BN, S), axis=1)
    return jnp.where(keep_BN, anchors_BN, 0).astype(jnp.int32), keep_BN


def make_blocks(
    tokens_BS: jax.Array,
    loss_mask_BS: jax.Array,
    anchors_BN: jax.Array,
    keep_BN: jax.Array,
    *,
    block_size: int,
    mask_token_id: int,
    num_predicting_slots: int | None = None,
    prefix_mask: bool = False,
) -> Blocks:
    """Inputs, labels and masks of the drawn blocks; ids, masks and positions share one index.

    An unkept block gets no context and no label: it sees only its own slots, which keeps it finite.
    Labels past the row's end or outside the loss mask are not supervised; later ones of the same
    block keep their weight, unless ``prefix_mask`` lets a block end there. ``num_predicting_slots`` J is that of the
    layout (``DrafterConfig.num_predicting_slots``; default K-1, the same-position layout).
    """
    S = tokens_BS.shape[1]
    B, N = anchors_BN.shape
    J = block_size - 1 if num_predicting_slots is None else num_predicting_slots
    slots = jnp.arange(block_size, dtype=jnp.int32)
    text_positions_BNT = anchors_BN[..., None] + jnp.arange(J + 1, dtype=jnp.int32)
    inside = jnp.minimum(text_positions_BNT, S - 1).reshape(B, -1)
    text_BNT = jnp.take_along_axis(tokens_BS, inside, axis=1).reshape(B, N, J + 1)
    supervised_BNT = jnp.take_along_axis(loss_mask_BS, inside, axis=1).reshape(B, N, J + 1)
    eval_mask_BNJ = (supervised_BNT & (text_positions_BNT < S) & keep_BN[..., None])[..., 1:]
    if prefix_mask:
        eval_mask_BNJ = jnp.cumprod(eval_mask_BNJ.astype(jnp.int32), axis=-1).astype(bool)
    return Blocks(
        noise_ids_BNK=jnp.where(slots == 0, text_BNT[..., :1], mask_token_id),
        positions_BNK=anchors_BN[..., None] + slots,
        context_len_BN=jnp.where(keep_BN, anchors_BN, 0),
        labels_BNJ=text_BNT[..., 1:],
        predecessors_BNJ=text_BNT[..., :-1],
        eval_mask_BNJ=eval_mask_BNJ,
    )
