"""Which positions become blocks, and that ids, labels, masks and positions of a block share one index."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspine_jax.anchors import candidate_anchors, draw_anchors, make_blocks

MASK = 99
LOSS_MASKS = np.array(
    [
        [0, 0, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1],  # two turns and the row's end
        [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1],  # no position has a supervised successor
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],  # nothing supervised
        [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0],  # one candidate
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    ],
    bool,
)


def candidates_by_loop(loss_mask_BS: np.ndarray) -> list[list[int]]:
    """Positions of each row that are supervised and have a supervised successor."""
    return [[i for i in range(len(row) - 1) if row[i] and row[i + 1]] for row in loss_mask_BS]


@functools.cache
def draws(num_anchors: int, replacement: bool, repeats: int = 600) -> tuple[np.ndarray, np.ndarray]:
    """Anchors and keep masks [repeats,B,N] of LOSS_MASKS under different keys."""
    one = lambda key: draw_anchors(key, jnp.asarray(LOSS_MASKS), num_anchors, replacement=replacement)  # noqa: E731
    anchors, keep = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(3), repeats))
    return np.asarray(anchors), np.asarray(keep)


def test_candidates_are_supervised_with_a_supervised_successor():
    got = np.asarray(candidate_anchors(jnp.asarray(LOSS_MASKS)))
    assert [list(np.nonzero(row)[0]) for row in got] == candidates_by_loop(LOSS_MASKS)
    assert candidates_by_loop(LOSS_MASKS)[:4] == [[2, 3, 4, 7, 10], [], [], [4]]
    assert not got[:, -1].any()


@pytest.mark.parametrize("replacement", [False, True])
def test_only_candidates_are_drawn_and_unkept_blocks_stand_at_0(replacement):
    anchors, keep = draws(7, replacement)
    assert anchors.dtype == np.int32 and keep.dtype == bool and anchors.shape == keep.shape == (600, 5, 7)
    assert (anchors[~keep] == 0).all()
    for row, allowed in enumerate(candidates_by_loop(LOSS_MASKS)):
        kept = anchors[:, row][keep[:, row]]
        assert set(kept.tolist()) == set(allowed)  # every candidate is reached, nothing else
        expected = (7 if allowed else 0) if replacement else min(7, len(allowed))
        assert (keep[:, row].sum(axis=1) == expected).all()
        assert (keep[:, row] == (np.arange(7) < expected)).all()  # kept blocks come first


def test_without_replacement_anchors_rise_strictly():
    anchors, keep = draws(7, False)
    both = keep[..., 1:] & keep[..., :-1]
    assert (np.diff(anchors, axis=-1)[both] > 0).all() and both.any()


def test_with_replacement_a_short_answer_still_fills_all_blocks():
    anchors, keep = draws(7, True)
    assert keep[:, 3].all() and (anchors[:, 3] == 4).all()
    repeats = [len(set(row)) < 7 for row in anchors[:, 4].tolist()]
    # All seven distinct among eleven candidates: 11!/4!/11^7 = 8.5%.
    assert np.mean(repeats) == pytest.approx(1 - 0.0853, abs=0.05)


@pytest.mark.parametrize("replacement", [False, True])
def test_candidates_are_drawn_uniformly(replacement):
    """Each of the 11 candidates of a full row, and each of the 5 of a broken one, within five standard deviations."""
    anchors, _ = draws(3, replacement, repeats=4000)
    for row, candidates in ((4, list(range(11))), (0, [2, 3, 4, 7, 10])):
        counts = np.array([(anchors[:, row] == c).sum() for c in candidates])
        expected = 3 * 4000 / len(candidates)
        assert np.abs(counts - expected).max() < 5 * np.sqrt(expected), counts
    # Without replacement, all of a row's sets are equally likely, not only its positions.
    if not replacement:
        sets, counts = np.unique(anchors[:, 0], axis=0, return_counts=True)
        assert len(sets) == 10 and np.abs(counts - 400).max() < 5 * np.sqrt(400)


def test_the_key_decides_the_anchors():
    mask = jnp.asarray(LOSS_MASKS)
    first, again, other = (draw_anchors(jax.random.key(seed), mask, 4, replacement=False)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (np.asarray(first) != np.asarray(other)).any()


def test_more_anchors_than_positions_are_refused_without_replacement():
    mask = jnp.ones((1, 4), bool)
    with pytest.raises(ValueError, match=r"anchors\.num_anchors 5 exceeds the row width 4.*anchors\.replacement"):
        draw_anchors(jax.random.key(0), mask, 5, replacement=False)
    anchors, keep = draw_anchors(jax.random.key(0), mask, 5, replacement=True)
    assert keep.all() and anchors.shape == (1, 5)


# ---- R02: one index -----------------------------------------------------------------------------


def blocks_of(anchors: list[int], *, loss_mask=None, block_size: int = 4, keep: list[bool] | None = None, **layout):
    """Blocks over ids 10..19 at positions 0..9."""
    tokens = jnp.arange(10, 20)[None]
    mask = jnp.ones((1, 10), bool) if loss_mask is None else jnp.asarray(loss_mask, bool)[None]
    keep = jnp.ones((1, len(anchors)), bool) if keep is None else jnp.array([keep])
    return make_blocks(tokens, mask, jnp.array([anchors], jnp.int32), keep, block_size=block_size, mask_token_id=MASK, **layout)


def labels_in_words(blocks, n: int) -> list[int | None]:
    """Labels of block n by slot; None where nothing is supervised (slot 0 of the fill-in layout always)."""
    pairs = zip(blocks.labels_BNJ[0, n].tolist(), blocks.eval_mask_BNJ[0, n].tolist())
    silent = blocks.noise_ids_BNK.shape[-1] - blocks.labels_BNJ.shape[-1]
    return [None] * silent + [label if supervised else None for label, supervised in pairs]


def test_ids_labels_and_visible_features_share_one_index():
    """R02, fill-in layout: anchor at 3 reads [13, M, M, M] with features 0..2 and predicts [none, 14, 15, 16]; at 8 [none, 19, none, none]."""
    blocks = blocks_of([3, 8])
    assert blocks.noise_ids_BNK[0].tolist() == [[13, MASK, MASK, MASK], [18, MASK, MASK, MASK]]
    assert blocks.context_len_BN[0].tolist() == [3, 8]
    assert labels_in_words(blocks, 0) == [None, 14, 15, 16]
    assert labels_in_words(blocks, 1) == [None, 19, None, None]
    assert blocks.positions_BNK[0].tolist() == [[3, 4, 5, 6], [8, 9, 10, 11]]  # never clamped
    assert blocks.predecessors_BNJ[0, 0].tolist() == [13, 14, 15]


def test_in_the_shifted_layout_every_slot_says_the_token_after_its_own():
    """R02, next-token layout: the anchor at 3 reads the same block and predicts [14, 15, 16, 17]; at 8 [19, none, none, none]."""
    fill_in, blocks = blocks_of([3, 8]), blocks_of([3, 8], num_predicting_slots=4)
    for name in ("noise_ids_BNK", "context_len_BN", "positions_BNK"):
        np.testing.assert_array_equal(getattr(blocks, name), getattr(fill_in, name))
    assert labels_in_words(blocks, 0) == [14, 15, 16, 17]
    assert labels_in_words(blocks, 1) == [19, None, None, None]
    assert blocks.predecessors_BNJ[0, 0].tolist() == [13, 14, 15, 16]


@pytest.mark.parametrize("slots, labels", [(3, [None, 14, None, 16]), (4, [14, None, 16, 17])])
def test_the_prefix_mask_ends_a_block_at_the_first_hole(slots, labels):
    """R02: loss mask 0 at position 5 silences the slot that must say 15, and under the prefix mask every later slot of the block."""
    mask = np.ones(10, bool)
    mask[5] = False
    first = labels.index(14)
    assert labels_in_words(blocks_of([3], loss_mask=mask, num_predicting_slots=slots), 0) == labels
    cut = blocks_of([3, 6], loss_mask=mask, num_predicting_slots=slots, prefix_mask=True)
    assert labels_in_words(cut, 0) == labels[: first + 1] + [None] * (3 - first)
    assert labels_in_words(cut, 1)[first:] == [17, 18, 19, None][: 4 - first], "a block without a hole keeps all"


def test_a_hole_in_the_loss_mask_takes_out_the_slot_whose_label_it_is():
    """R02: loss mask 0 at position 5 -> only the slot that must say 15 loses its weight."""
    mask = np.ones(10, bool)
    mask[5] = False
    assert labels_in_words(blocks_of([3], loss_mask=mask), 0) == [None, 14, None, 16]


def test_an_unkept_block_has_no_context_and_no_label():
    blocks = blocks_of([3, 5], keep=[True, False])
    assert blocks.context_len_BN[0].tolist() == [3, 0]
    assert labels_in_words(blocks, 1) == [None] * 4 and labels_in_words(blocks, 0) == [None, 14, 15, 16]


@pytest.mark.parametrize("block_size, shift", [(2, 0), (5, 0), (4, 1)])
def test_blocks_of_random_rows_equal_a_loop(block_size, shift):
    rng = np.random.default_rng(block_size)
    B, S, N = 3, 11, 6
    tokens, mask = rng.integers(0, 90, (B, S)), rng.random((B, S)) < 0.6
    anchors, keep = rng.integers(0, S, (B, N)).astype(np.int32), rng.random((B, N)) < 0.7
    arrays = map(jnp.asarray, (tokens, mask, anchors, keep))
    blocks = make_blocks(*arrays, block_size=block_size, mask_token_id=MASK, num_predicting_slots=block_size - 1 + shift)
    assert blocks.labels_BNJ.shape == (B, N, block_size - 1 + shift)
    for b in range(B):
        for n in range(N):
            anchor = int(anchors[b, n])
            assert blocks.noise_ids_BNK[b, n].tolist() == [tokens[b, anchor]] + [MASK] * (block_size - 1)
            assert int(blocks.context_len_BN[b, n]) == (anchor if keep[b, n] else 0)
            assert blocks.positions_BNK[b, n].tolist() == list(range(anchor, anchor + block_size))
            for slot in range(1 - shift, block_size):
                at, j = anchor + slot + shift, slot - 1 + shift
                supervised = bool(keep[b, n] and at < S and mask[b, at])
                assert bool(blocks.eval_mask_BNJ[b, n, j]) == supervised
                if supervised:
                    assert int(blocks.labels_BNJ[b, n, j]) == tokens[b, at]
                    assert int(blocks.predecessors_BNJ[b, n, j]) == tokens[b, at - 1]


def test_every_drawn_anchor_has_a_label_in_its_first_slot():
    """The candidate rule and the block's mask agree: no kept block trains on nothing."""
    anchors, keep = draws(7, True)
    mask = jnp.asarray(LOSS_MASKS)
    tokens = jnp.broadcast_to(jnp.arange(12), LOSS_MASKS.shape)
    blocks = make_blocks(tokens, mask, jnp.asarray(anchors[0]), jnp.asarray(keep[0]), block_size=4, mask_token_id=MASK)
    np.testing.assert_array_equal(blocks.eval_mask_BNJ[..., 0], keep[0])
