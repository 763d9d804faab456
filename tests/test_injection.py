"""DSpine against float64 loops over slots: injection, redone write, transition cache, walk, and the transfer space."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.drafter_models import BAR, random_tokens, reference_of, relative_l2, tiny_drafter, tiny_target

from dspine_jax import transfer
from dspine_jax.drafter import Drafter
from dspine_jax.selection import anchor_features, select_greedy, transition_cache
from dspine_jax.speculative import with_token_table
from dspine_jax.transfer import TransferSpace, build_transfer_space
from pallas_kernels.injection import InjectionWeights, injection, write
from pallas_kernels.topk_logits import topk_logits
from pallas_kernels.transition import greedy_walk

ANCHORS = (4, 1, 6)
ROW = 8
TARGET_ROWS = 120


@functools.cache
def target():
    return tiny_target()


@functools.cache
def row() -> tuple[np.ndarray, np.ndarray]:
    """Tokens [S] and drafter features [S,M*D] of one row."""
    return random_tokens(20, ROW), np.random.default_rng(21).normal(size=(ROW, 128)).astype(np.float32)


def run_block(drafter: Drafter, block_size: int | None = None):
    """(BlockOutput, anchor features) of blocks at ANCHORS of ``row``; call it inside one jit."""
    tokens, taps = (jnp.asarray(x) for x in row())
    K = block_size or drafter.config.block_size
    anchors_BN = jnp.array([ANCHORS])
    ids_BNK = jnp.pad(tokens[anchors_BN][..., None], ((0, 0), (0, 0), (0, K - 1)), constant_values=drafter.config.mask_token_id)
    feature_BNR = anchor_features(drafter, target().output_embedding_VD, ids_BNK[..., 0])
    context = drafter.context_kv(taps[None], jnp.arange(ROW)[None])
    noise = jnp.take(target().input_embedding_VD, ids_BNK, axis=0)
    return drafter(noise, *context, anchors_BN, anchors_BN[..., None] + jnp.arange(K), feature_BNR), feature_BNR


def everything(drafter: Drafter, predecessors_BNJ: np.ndarray | None = None, block_size: int | None = None) -> dict:
    """All that a block pass gives, under one jit."""

    @jax.jit
    def run():
        rows_VD, num_tokens = target().output_embedding_VD, target().config.num_tokens
        block, feature = run_block(drafter, block_size)
        out = {"hidden": block.hidden_BNKD, "features": block.features, "pre_write": block.pre_write_BNKD, "gate": block.hidden_gate_BNKD}
        out["tokens"] = select_greedy(drafter, target(), block, jnp.asarray(row()[0])[jnp.array([ANCHORS])], feature)
        if drafter.config.redoes_last_write:
            out["table"], out["candidates"] = transition_cache(drafter, block, rows_VD, feature, num_tokens=num_tokens)
            # Redoing the write with the predicted features themselves must give the base path back.
            predicted = jnp.concatenate([feature[:, :, None], block.features[-1][:, :, 1:-1]], axis=2)
            out["redone"] = drafter.conditioned(block, predicted)
            if predecessors_BNJ is not None:
                out["conditioned"] = drafter.conditioned(block, anchor_features(drafter, rows_VD, predecessors_BNJ))
        return out

    return jax.tree.map(np.asarray, run())


# ---- the write ----------------------------------------------------------------------------------


def random_injection(seed: int, K: int, D: int = 20, R: int = 12) -> tuple[np.ndarray, np.ndarray, InjectionWeights]:
    """Stream [1,1,K,D], anchor feature [1,1,R] and weights, with a gate that is far from constant."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    weights = InjectionWeights(rng.uniform(0.5, 1.5, D).astype(np.float32), draw(D, R), draw(R, D), draw(D, D), draw(D), draw(R, D))
    return draw(1, 1, K, D), draw(1, 1, R), weights


def injection_by_loop(x_KD, anchor_R, weights: InjectionWeights, *, from_written: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(new stream, features, hidden gates) slot by slot; ``from_written`` predicts from slots already written (a wrong reading)."""
    w = InjectionWeights(*(np.asarray(a, np.float64) for a in weights))
    x_KD, anchor_R = np.asarray(x_KD, np.float64), np.asarray(anchor_R, np.float64)
    R = w.feature_DR.shape[1]

    def normed(x):
        return w.norm_D * x / np.sqrt(np.mean(x**2) + 1e-6)

    def feature(x):
        z = normed(x) @ w.feature_DR
        return np.sqrt(R) * z / np.sqrt(np.sum(z**2) + 1e-6)

    new = [x_KD[0]]
    for i in range(1, len(x_KD)):
        f = anchor_R if i == 1 else feature((new if from_written else x_KD)[i - 1])
        gate = 1 / (1 + np.exp(-(f @ w.gate_predecessor_RD + normed(x_KD[i]) @ w.gate_hidden_DD + w.gate_bias_D)))
        new.append(x_KD[i] + gate * (f @ w.message_RD))
    return np.stack(new), np.stack([feature(x) for x in x_KD]), np.stack([normed(x) @ w.gate_hidden_DD + w.gate_bias_D for x in x_KD])


run_injection = jax.jit(functools.partial(injection, eps=1e-6))


@pytest.mark.parametrize("K", [2, 3, 7])
def test_injection_equals_a_loop_over_slots(K):
    """Slot 0 stays, slot 1 reads T[anchor], slot i reads p_{i-1} of the stream before any write."""
    x, anchor, weights = random_injection(K, K)
    new, p, gate = run_injection(x, anchor, weights)
    for ours, theirs in zip((new, p, gate), injection_by_loop(x[0, 0], anchor[0, 0], weights)):
        assert relative_l2(ours[0, 0], theirs) <= BAR
    np.testing.assert_array_equal(new[:, :, 0], x[:, :, 0])
    np.testing.assert_allclose(np.linalg.norm(p, axis=-1), np.sqrt(12), rtol=1e-5)
    wrong = injection_by_loop(x[0, 0], anchor[0, 0], weights, from_written=True)[0]
    assert (relative_l2(new[0, 0], wrong) > 1e-2) == (K > 2)  # the loop tells a sequential write apart as soon as there are two


def test_a_slot_reaches_itself_and_its_successor_only():
    """Exact zeros elsewhere; slot 0's own state reaches no one, because slot 1 reads the anchor's embedding instead."""
    x, anchor, weights = random_injection(1, 6)
    plain = np.asarray(run_injection(x, anchor, weights)[0])[0, 0]
    for j in range(6):
        moved = x.copy()
        moved[:, :, j] += 1.0
        changed = np.any(np.asarray(run_injection(moved, anchor, weights)[0])[0, 0] != plain, axis=-1)
        assert np.nonzero(changed)[0].tolist() == ([0] if j == 0 else [j, j + 1] if j < 5 else [5])
    changed = np.any(np.asarray(run_injection(x, -anchor, weights)[0])[0, 0] != plain, axis=-1)
    assert np.nonzero(changed)[0].tolist() == [1]


def test_bf16_streams_keep_features_and_gates_in_fp32():
    x, anchor, weights = random_injection(2, 5)
    new, p, gate = run_injection(jnp.asarray(x, jnp.bfloat16), anchor, weights)
    assert (new.dtype, p.dtype, gate.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    for ours, theirs in zip((new, p, gate), injection_by_loop(x[0, 0], anchor[0, 0], weights)):
        assert relative_l2(ours[0, 0], theirs) <= 3e-2


def test_a_silent_slot_stays_finite_with_finite_gradients():
    """A zero stream has no direction: its feature is 0, not NaN."""
    x, anchor, weights = random_injection(3, 4)
    x[:, :, 2] = 0.0

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(x, weights):
        new, p, _ = injection(x, anchor, weights, eps=1e-6)
        return jnp.sum(jnp.sin(new)) + jnp.sum(jnp.sin(p))

    assert (np.asarray(run_injection(x, anchor, weights)[1])[0, 0, 2] == 0).all()
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients(x, weights)))


def test_one_stream_can_be_written_with_many_predecessors():
    """Leading axes broadcast, which is what the transition table relies on."""
    x, _, weights = random_injection(4, 3)
    features = np.random.default_rng(5).normal(size=(1, 1, 3, 4, 12)).astype(np.float32)
    gate = np.asarray(run_injection(x, features[:, :, 0, 0], weights)[2])
    many = write(x[..., None, :], gate[..., None, :], features, weights)
    for a in range(4):
        assert relative_l2(many[..., a, :], write(x, gate, features[..., a, :], weights)) <= 1e-6


# ---- whole drafters -----------------------------------------------------------------------------


@pytest.mark.parametrize("P", [2, 4, 8])
def test_block_conditioning_table_and_walk_equal_the_reference(P):
    """Base path, features, redone writes, every pair of the table, and the walk against brute force."""
    drafter = tiny_drafter(target(), "dspine", injection={"num_candidates": P})
    predecessors = random_tokens(30, 1, len(ANCHORS), 5)
    out = everything(drafter, predecessors)
    reference, (tokens, taps) = reference_of(drafter, target()), row()
    assert relative_l2(out["redone"], out["hidden"][:, :, 1:]) <= 1e-6
    differs = 0
    for n, anchor in enumerate(ANCHORS):
        block = reference.block(taps, tokens[anchor], anchor)
        assert relative_l2(out["hidden"][0, n], np.stack(block["hidden"])) <= BAR
        assert relative_l2(out["pre_write"][0, n], np.stack(block["pre_write"])) <= BAR
        assert relative_l2(out["gate"][0, n], np.stack(block["gate"])) <= BAR
        for ours, theirs in zip(out["features"], block["features"], strict=True):
            assert relative_l2(ours[0, n], np.stack(theirs)) <= BAR
        conditioned = np.stack([reference.conditioned(block, slot, predecessors[0, n, slot - 1]) for slot in range(1, 6)])
        assert relative_l2(out["conditioned"][0, n], conditioned) <= BAR
        drafts, candidates = reference.greedy(block, tokens[anchor], P)
        np.testing.assert_array_equal(out["candidates"][0, n], candidates)
        table = np.empty((5, P, P))
        for j in range(5):
            for a in range(P):
                hidden = reference.conditioned(block, j + 1, tokens[anchor] if j == 0 else candidates[j - 1][a])
                table[j, a] = reference.rows[candidates[j]] @ hidden
        assert relative_l2(out["table"][0, n], table) <= BAR
        assert (out["table"][0, n, 0] == out["table"][0, n, 0, :1]).all()  # the anchor is known: all rows of slot 1 are equal
        assert out["tokens"][0, n].tolist() == drafts
        differs += sum(draft != best[0] for draft, best in zip(drafts, candidates))
    assert differs >= 3  # the walk really leaves the base path's argmax


@pytest.mark.parametrize(("layers", "redoes"), [((1,), True), ((0,), False)])
def test_injection_works_at_any_set_of_layers(layers, redoes):
    """Without an injection after the last layer there is no conditioned path, and the base path drafts."""
    drafter = tiny_drafter(target(), "dspine", injection={"layers": layers})
    out = everything(drafter)
    assert drafter.config.redoes_last_write == redoes and sorted(drafter.injections) == [str(i) for i in layers]
    assert (out["pre_write"] is None) == (out["gate"] is None) == (not redoes)
    reference, (tokens, taps) = reference_of(drafter, target()), row()
    for n, anchor in enumerate(ANCHORS):
        block = reference.block(taps, tokens[anchor], anchor)
        assert relative_l2(out["hidden"][0, n], np.stack(block["hidden"])) <= BAR
        assert len(out["features"]) == len(layers)
        for ours, theirs in zip(out["features"], block["features"], strict=True):
            assert relative_l2(ours[0, n], np.stack(theirs)) <= BAR
        base = [int(np.argmax(reference.rows @ h)) for h in block["hidden"][1:]]
        assert out["tokens"][0, n].tolist() == (reference.greedy(block, tokens[anchor], 4)[0] if redoes else base)


def test_a_smaller_block_is_a_prefix_of_a_larger_one():
    """The draft length is a run-time choice; two-way attention would not allow it."""
    drafter = tiny_drafter(target(), "dspine", block_size=7)
    large = everything(drafter)
    small = everything(drafter, block_size=4)
    np.testing.assert_array_equal(small["tokens"], large["tokens"][:, :, :3])
    np.testing.assert_array_equal(small["candidates"], large["candidates"][:, :, :3])
    assert relative_l2(small["table"], large["table"][:, :, :3]) <= 2e-6
    assert relative_l2(small["hidden"], large["hidden"][:, :, :4]) <= 2e-6
    for a, b in zip(small["features"], large["features"]):
        assert relative_l2(a, b[:, :, :4]) <= 2e-6
    two_way = tiny_drafter(target(), "dflash", block_size=7)
    assert relative_l2(everything(two_way, block_size=4)["hidden"], everything(two_way)["hidden"][:, :, :4]) > 1e-3


# ---- candidates and walk ------------------------------------------------------------------------


def walk_by_loop(table_JPP, ids_JP) -> list[int]:
    """Best candidate by slot, the smallest id among equals."""
    tokens, row_index = [], 0
    for scores_PP, ids_P in zip(table_JPP, ids_JP):
        token = min(ids_P, key=lambda v: (-scores_PP[row_index][list(ids_P).index(v)], v))  # noqa: B023
        row_index = list(ids_P).index(token)
        tokens.append(int(token))
    return tokens


@pytest.mark.parametrize("P", [1, 2, 4, 8])
def test_the_walk_equals_a_loop_and_ties_go_to_the_lowest_id(P):
    """Scores of few levels, so that most slots are tied, and candidates in no order of ids."""
    rng = np.random.default_rng(P)
    B, N, J = 3, 5, 6
    table = rng.integers(0, 3, (B, N, J, P, P)).astype(np.float32)
    ids = np.array([[[rng.permutation(40)[:P] for _ in range(J)] for _ in range(N)] for _ in range(B)], np.int32)
    walked = np.asarray(jax.jit(greedy_walk)(table, ids))
    expected = np.array([[walk_by_loop(table[b, n], ids[b, n]) for n in range(N)] for b in range(B)])
    np.testing.assert_array_equal(walked, expected)
    if P > 1:  # a plain argmax takes the first column of a tie: the inputs tell it apart
        first = np.take_along_axis(ids[:, :, 0], table[:, :, 0, 0].argmax(-1)[..., None], axis=-1)[..., 0]
        assert (first != expected[:, :, 0]).any()


def test_equal_logits_give_candidates_by_rising_id_and_no_padded_row():
    rows = np.zeros((12, 4), np.float32)
    rows[[9, 2, 5], 0] = -1.0  # ties below zero; unset rows score -2, padded rows 0
    rows[[0, 1, 3, 4, 6, 7, 8], 0] = -2.0
    values, ids = topk_logits(jnp.ones((1, 4)), jnp.asarray(rows), 4, num_tokens=10)
    assert ids[0].tolist() == [2, 5, 9, 0] and values[0].tolist() == [-1.0, -1.0, -1.0, -2.0]


# ---- transfer space -----------------------------------------------------------------------------


@functools.cache
def skewed_head() -> tuple[np.ndarray, np.ndarray]:
    """Rows U [400,24] whose 60 used tokens sit apart from the rest, and their counts [400]: what real heads look like."""
    rng = np.random.default_rng(40)
    rows = rng.normal(size=(400, 24)) * np.linspace(2.0, 0.6, 24)
    rows[:60] += 4 * rng.normal(size=24)
    counts = np.zeros(400)
    counts[:60] = rng.integers(200, 4000, 60)
    return rows.astype(np.float32), counts


def features_of(mean: np.ndarray, basis: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """T of rows by the library."""
    space = TransferSpace(*basis.shape)
    space.mean.set_value(jnp.asarray(mean))
    space.basis.set_value(jnp.asarray(basis))
    return np.asarray(space(jnp.asarray(rows)))


def mean_cosine(features: np.ndarray) -> float:
    """Mean cosine over pairs of different rows."""
    units = features / np.linalg.norm(features, axis=1, keepdims=True)
    gram = units @ units.T
    return float((gram.sum() - len(gram)) / (len(gram) * (len(gram) - 1)))


def test_used_tokens_point_every_way():
    """Frequency-weighted centring: used tokens have a mean cosine near 0; with the plain vocabulary mean they would all look alike."""
    rows, counts = skewed_head()
    weighted = build_transfer_space(rows, counts, 16, whiten=True, num_tokens=400)
    plain = build_transfer_space(rows, np.zeros(400), 16, whiten=True, num_tokens=400)
    assert abs(mean_cosine(features_of(*weighted, rows[:60]))) < 0.03
    assert mean_cosine(features_of(*plain, rows[:60])) > 0.2


@pytest.mark.parametrize("whiten", [True, False])
def test_projected_rows_have_the_promised_weighted_mean_and_covariance(whiten):
    """Mean 0; covariance diagonal: the eigenvalues, or e / (e + 0.01 mean e) when whitened, all in float64 loops over tokens."""
    rows, counts = skewed_head()
    mean, basis = build_transfer_space(rows, counts, 24, whiten=whiten, num_tokens=300)
    assert mean.dtype == basis.dtype == np.float32 and mean.shape == (24,) and basis.shape == (24, 24)
    total = sum(counts[v] + 0.5 for v in range(300))
    centre = sum((counts[v] + 0.5) / total * rows[v].astype(np.float64) for v in range(300))
    np.testing.assert_allclose(mean, centre, rtol=1e-5, atol=1e-6)
    covariance = sum((counts[v] + 0.5) / total * np.outer(rows[v] - centre, rows[v] - centre) for v in range(300))
    eigenvalues = np.sort(np.linalg.eigvalsh(covariance))[::-1]
    projected = basis.astype(np.float64).T @ covariance @ basis
    expected = eigenvalues / (eigenvalues + 0.01 * eigenvalues.mean()) if whiten else eigenvalues
    np.testing.assert_allclose(projected, np.diag(expected), atol=2e-5 * expected.max())
    if whiten:
        assert expected.min() > 0.8 and relative_l2(projected, np.eye(24)) < 0.1  # nearly the identity


def test_fewer_directions_are_the_leading_ones():
    rows, counts = skewed_head()
    wide, narrow = (build_transfer_space(rows, counts, R, whiten=True, num_tokens=400)[1] for R in (24, 6))
    np.testing.assert_array_equal(wide[:, :6], narrow)


def test_padded_rows_have_no_say():
    rows, counts = skewed_head()
    garbage, more = rows.copy(), counts.copy()
    garbage[380:] = 1e4
    more[380:] = 1e6
    clean = build_transfer_space(rows, counts, 8, whiten=True, num_tokens=380)
    for a, b in zip(clean, build_transfer_space(garbage, more, 8, whiten=True, num_tokens=380)):
        np.testing.assert_array_equal(a, b)
    assert relative_l2(build_transfer_space(garbage, more, 8, whiten=True, num_tokens=400)[0], clean[0]) > 1


def test_signs_are_fixed_so_that_a_rebuild_is_equal():
    """An eigenvector's sign is arbitrary: its largest entry is made positive, whatever the order of the rows."""
    rows, counts = skewed_head()
    mean, basis = build_transfer_space(rows, counts, 16, whiten=True, num_tokens=400)
    again = build_transfer_space(rows, counts, 16, whiten=True, num_tokens=400)
    np.testing.assert_array_equal(mean, again[0])
    np.testing.assert_array_equal(basis, again[1])
    assert (basis[np.abs(basis).argmax(axis=0), np.arange(16)] > 0).all()
    order = np.random.default_rng(41).permutation(400)
    np.testing.assert_allclose(build_transfer_space(rows[order], counts[order], 16, whiten=True, num_tokens=400)[1], basis, rtol=1e-3, atol=1e-4)


def test_token_features_have_norm_sqrt_r_in_fp32():
    rows, counts = skewed_head()
    mean, basis = build_transfer_space(rows, counts, 16, whiten=True, num_tokens=400)
    features = features_of(mean, basis, rows)
    projected = (rows.astype(np.float64) - mean) @ basis
    assert relative_l2(features, np.sqrt(16) * projected / np.linalg.norm(projected, axis=1, keepdims=True)) <= BAR
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 4.0, rtol=1e-5)
    half = features_of(mean, basis, jnp.asarray(rows, jnp.bfloat16))
    assert half.dtype == np.float32 and relative_l2(half, features) <= 2e-2
    assert np.isfinite(features_of(mean, basis, mean[None])).all()


def test_token_features_of_ids_equal_the_reference_and_dflash_has_none():
    drafter = tiny_drafter(target(), "dspine")
    ids = np.arange(0, TARGET_ROWS, 7)
    ours = anchor_features(drafter, target().output_embedding_VD, ids)
    reference = reference_of(drafter, target())
    assert relative_l2(ours, np.stack([reference.token_feature(v) for v in ids])) <= BAR
    assert anchor_features(tiny_drafter(target(), "dflash"), target().output_embedding_VD, ids) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decoders_table_of_features_holds_what_training_computes(dtype, monkeypatch):
    """In the stream's type, to which a write casts them anyway; the drafter itself stays as it was. Three chunks of rows, the last one partial."""
    monkeypatch.setattr(transfer, "TABLE_CHUNK", 40)
    drafter, rows_VD = tiny_drafter(target(), "dspine"), target().output_embedding_VD
    ids = jnp.arange(len(rows_VD))
    computed = anchor_features(drafter, rows_VD, ids)
    looked_up = anchor_features(with_token_table(drafter, target(), dtype), rows_VD, ids)
    assert looked_up.dtype == jnp.float32 and drafter.transfer.table is None
    assert relative_l2(looked_up, computed) < {"float32": 1e-6, "bfloat16": 3e-3}[dtype]
    np.testing.assert_array_equal(looked_up, looked_up.astype(dtype).astype(jnp.float32))


def test_counts_of_another_vocabulary_are_refused():
    rows, counts = skewed_head()
    with pytest.raises(ValueError, match=r"token frequencies have shape \(399,\), the LM head has 400 rows"):
        build_transfer_space(rows, counts[:-1], 8, whiten=True, num_tokens=400)
