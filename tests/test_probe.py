"""Probes: every figure against a slow and obviously right one on tiny models, and the command from files to figures."""

import dataclasses
import functools
import heapq
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from dspine_jax import probes
from dspine_jax.anchors import make_blocks
from dspine_jax.bounds import make_tree_replay, make_true_feature_drafting, tree_accepted, true_feature_objective
from dspine_jax.config import DataConfig, LogConfig, LossConfig
from dspine_jax.config_io import save_config
from dspine_jax.drafter import Drafter
from dspine_jax.drafter_io import load_drafter, save_drafter
from dspine_jax.layers import rms_norm
from dspine_jax.objective import block_objective, row_context, run_blocks
from dspine_jax.replay import make_drafting, replay_rows, replay_shape
from dspine_jax.selection import anchor_features
from dspine_jax.sharding import make_mesh
from dspine_jax.target_io import read_target_config
from dspine_jax.vocabulary import vocabulary_logits
from pallas_kernels.transition import greedy_walk
from serve import probe, probe_scores
from train import bound, loop
from train.data import Manifest, write_dataset

FEW = dict(vocab_size=16, num_tokens=6, eos_token_ids=(), num_layers=2)  # so that untrained drafters are right now and then
K, LAYERS = 5, 3
SETS = ((), (1,), (0, 1, 2))
METHODS = ("dspine, layers 0 and 2", "dflash2")  # causal with writes; two-way with convolutions
DTYPE = dict(dtype=jnp.float32, anchors_per_chunk=3)


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_compiler):
    yield


@pytest.fixture(scope="module")
def target():
    return tiny.tiny_target(**FEW)


@pytest.fixture(scope="module")
def text():
    """Rows [2,S] and anchors [2,6], the last of which have labels past the row's end."""
    rng = np.random.default_rng(3)
    return rng.integers(4, 6, (2, 20)).astype(np.int32), np.stack([rng.permutation(np.arange(2, 18))[:6], [3, 4, 5, 16, 17, 18]]).astype(np.int32)


def make_drafter(target, name: str) -> Drafter:
    injected = {"layers": (0, 2)} if "layers" in name else {}
    sizes = {"block_size": K, "num_layers": LAYERS, "target_layer_ids": (0,)}
    config = tiny.train_config(name.split(",")[0], injection=injected, drafter=sizes).drafter.resolve(target.config)
    drafter = Drafter(config, rngs=nnx.Rngs(4))
    tiny.randomise(drafter, 5)
    if config.injection is not None:
        drafter.transfer.basis.set_value(jnp.asarray(np.random.default_rng(6).normal(size=(64, 16)), jnp.float32))
        for module in drafter.injections.values():  # strong enough to change what is read
            module.message.kernel.set_value(8 * module.message.kernel[...])
    return drafter


@pytest.fixture(scope="module", params=METHODS)
def drafter(request, target):
    return make_drafter(target, request.param)


# ---- slow and right: one block at a time, slot by slot --------------------------------------------


@nnx.jit
def context_of(drafter, target, tokens_BS):
    return row_context(drafter, target(tokens_BS, target_layer_ids=drafter.config.target_layer_ids, dtype=jnp.float32).tapped_BTE)


@nnx.jit
def backbone_layer(module, x_KD, keys, values, anchor):
    return module(x_KD[None, None], keys, values, anchor[None, None], jnp.arange(K)[None, None] + anchor)[0, 0]


@jax.jit
def write_by_slot(x_KD, w, known_K, T_KR):
    """DESIGN 5.2 and 5.3, one slot after the other."""
    normed = rms_norm(x_KD, w.norm_D, tiny.TARGET.rms_norm_eps)
    rows = [x_KD[0]]
    for i in range(1, K):
        z = normed[i - 1] @ w.feature_DR
        f = jnp.where(known_K[i - 1], T_KR[i - 1], len(z) ** 0.5 * z / jnp.linalg.norm(z))
        gate = jax.nn.sigmoid(f @ w.gate_predecessor_RD + normed[i] @ w.gate_hidden_DD + w.gate_bias_D)
        rows.append(x_KD[i] + gate * (f @ w.message_RD))
    return jnp.stack(rows)


class Slow:
    """One block of one row, run after run, with the filled slots' readers taken apart by hand."""

    def __init__(self, drafter, target, row_S, anchor):
        self.drafter, self.target, self.anchor = drafter, target, int(anchor)
        self.keys, self.values = context_of(drafter, target, row_S[None])
        self.text_K = np.asarray(row_S)[np.minimum(self.anchor + np.arange(K), len(row_S) - 1)]

    def backbone(self, index, x_KD):
        return backbone_layer(self.drafter.layers[index], x_KD, self.keys[index], self.values[index], jnp.int32(self.anchor))

    def layer(self, index, x_KD, known, tokens_K):
        x_KD = self.backbone(index, x_KD)
        if index not in self.drafter.config.injection_layers:
            return x_KD
        T_KR = self.drafter.transfer(self.target.output_embedding_VD[tokens_K])
        return write_by_slot(x_KD, self.drafter.injections[str(index)].weights, jnp.array(known), T_KR)

    def streams(self, tokens_K, known, donor=None, filled=(), layers=()):
        known = [k == 0 or k in known for k in range(K)]
        ids = [int(tokens_K[k]) if known[k] else tiny.MASK_ID for k in range(K)]
        x = self.target.input_embedding_VD[jnp.array(ids)]
        streams = [x]
        for index in range(LAYERS):
            own = self.layer(index, x, known, tokens_K)
            if index in layers:
                mixed = jnp.stack([donor[index][k] if k in filled else x[k] for k in range(K)])
                seen = self.layer(index, mixed, [known[k] or k in filled for k in range(K)], tokens_K)
                own = jnp.stack([own[k] if k in filled else seen[k] for k in range(K)])
            x = own
            streams.append(x)
        return streams

    def best(self, x_KD):
        """The best token of every slot, in numpy."""
        normed = np.asarray(rms_norm(x_KD, self.drafter.norm.weight[...], self.drafter.config.rms_norm_eps), np.float64)
        return (normed @ np.asarray(self.target.output_embedding_VD, np.float64).T)[:, : FEW["num_tokens"]].argmax(-1)


@pytest.mark.parametrize("drafter", ["dspine, layers 0 and 2"], indirect=True)  # the streams of others: below
def test_readout_and_context_equal_slow_ones(drafter, target, text):
    """All arrays of both probes, at every m; an empty set fills nothing, all layers give what the donor gives."""
    tokens_BS, anchors_BN = text
    readout = np.asarray(probes.make_readout_probe(drafter, target, **DTYPE)(tokens_BS, anchors_BN))
    seen = jax.tree.map(np.asarray, probes.make_context_probe(drafter, target, SETS, **DTYPE)(tokens_BS, anchors_BN))
    drafts = np.asarray(make_drafting(drafter, target, **DTYPE)(tokens_BS, anchors_BN))
    assert readout.shape == (2, 6, LAYERS, K - 1) and seen["filled"].shape == (2, 6, K - 2, len(SETS), K - 1)
    for b, n in ((0, 1), (0, 4), (1, 5)):  # the last one's labels go past the row's end
        slow = Slow(drafter, target, jnp.asarray(tokens_BS[b]), anchors_BN[b, n])
        right = lambda x, slow=slow: slow.best(x)[1:] == slow.text_K[1:]  # noqa: E731
        known = [slow.streams(slow.text_K, range(1, m + 1)) for m in range(K - 1)]  # by how many tokens are known
        np.testing.assert_array_equal(readout[b, n], [right(x) for x in known[0][1:]])
        np.testing.assert_array_equal(seen["plain"][b, n], right(known[0][-1]))
        for m in range(1, K - 1):
            swapped_K = slow.text_K.copy()
            swapped_K[m] = drafts[b, n, m - 1]
            assert seen["draft_right"][b, n, m - 1] == (swapped_K[m] == slow.text_K[m])
            drafted = slow.streams(swapped_K, range(1, m + 1))
            for name, streams in (("correct", known[m]), ("undecided", known[m - 1]), ("drafted", drafted)):
                assert seen[name][b, n, m - 1] == right(streams[-1])[m], name
            for z, layers in enumerate(SETS):
                filled = slow.streams(slow.text_K, (), known[m], range(1, m + 1), layers)
                np.testing.assert_array_equal(seen["filled"][b, n, m - 1, z], right(filled[-1]))
                supplied = slow.streams(slow.text_K, range(1, m), known[m], (m,), layers)
                assert seen["supplied"][b, n, m - 1, z] == right(supplied[-1])[m]
    np.testing.assert_array_equal(seen["filled"][:, :, :, 0], np.broadcast_to(seen["plain"][:, :, None], seen["filled"][:, :, :, 0].shape))
    np.testing.assert_array_equal(seen["supplied"][..., 0], seen["undecided"])
    np.testing.assert_array_equal(seen["supplied"][..., -1], seen["correct"])
    # Otherwise nothing was compared.
    assert all((seen["correct"] != seen[name]).any() for name in ("undecided", "drafted", "draft_right"))
    assert (seen["filled"][:, :, :, 0] != seen["filled"][:, :, :, -1]).any()


def test_streams_equal_slow_ones_and_keep_to_the_product_and_the_donor(drafter, target, text):
    """In value, at every layer. The plain run is the product's pass. Filled from itself nothing changes; filled everywhere the other slots are as in the
    donor's run; filled somewhere they are not, and each set of one size differs."""
    tokens_BS, anchors_BN = (jnp.asarray(x) for x in text)
    singles = [(layer,) for layer in range(LAYERS)]
    chosen = (*singles, (0, 2), (0, 1, 2))

    @nnx.jit
    def everything(drafter, target):
        context = context_of(drafter, target, tokens_BS)
        keep, supervised = jnp.ones_like(anchors_BN, bool), jnp.ones_like(tokens_BS, bool)
        blocks = make_blocks(tokens_BS, supervised, anchors_BN, keep, block_size=K, mask_token_id=tiny.MASK_ID)
        slots = jnp.arange(K)
        prefix_K, last_K = (slots >= 1) & (slots <= 2), slots == 2

        run = lambda known_K, **fill: probes.block_streams(  # noqa: E731
            drafter, target, context, blocks, jnp.float32, tokens_BNK=probes.slot_tokens(blocks), known_K=known_K, **fill
        )
        donor, plain = run(slots <= 2), run(slots == 0)
        cases = [(slots <= 2, prefix_K, (0, 1, 2)), (slots <= 1, last_K, (0, 2)), *((slots == 0, prefix_K, layers) for layers in chosen)]
        known, filled, layers = (jnp.stack(x) for x in zip(*((k, f, jnp.isin(jnp.arange(LAYERS), jnp.array(layers))) for k, f, layers in cases)))
        of_cases = jax.lax.map(lambda case: run(case[0], donor=donor, filled_K=case[1], layers_L=case[2]), (known, filled, layers))
        itself, supplied, *filled = ([x[z] for x in of_cases] for z in range(len(cases)))
        block, _ = run_blocks(drafter, target, context, blocks, jnp.float32)
        return drafter.norm(plain[-1]), block.hidden_BNKD, donor, plain, itself, dict(zip(chosen, filled)), supplied

    ours, product, donor, plain, itself, filled, supplied = jax.tree.map(np.asarray, everything(drafter, target))
    assert tiny.relative_l2(ours, product) < 1e-6
    assert all(tiny.relative_l2(a, b) < 1e-6 for a, b in zip(itself, donor))
    others = [0, 3, 4]
    assert tiny.relative_l2(filled[(0, 1, 2)][-1][:, :, others], donor[-1][:, :, others]) < 1e-6
    apart = [x[-1][:, :, 3:] for x in (*(filled[layers] for layers in singles), plain, donor)]
    assert all(tiny.relative_l2(a, b) > 1e-3 for a, b in itertools.combinations(apart, 2))
    if drafter.config.block_attention == "causal":  # the filled slots' own streams go on as they were
        assert tiny.relative_l2(filled[(0,)][-1][:, :, :3], plain[-1][:, :, :3]) < 1e-6
    b, n = 1, 2
    slow = Slow(drafter, target, tokens_BS[b], anchors_BN[b, n])
    slow_donor = slow.streams(slow.text_K, (1, 2))
    pairs = [(donor, slow_donor), (plain, slow.streams(slow.text_K, ())), (supplied, slow.streams(slow.text_K, (1,), slow_donor, (2,), (0, 2)))]
    pairs += [(streams, slow.streams(slow.text_K, (), slow_donor, (1, 2), layers)) for layers, streams in filled.items()]
    assert all(tiny.relative_l2(a[b, n], slow_KD) < 1e-5 for fast, slower in pairs for a, slow_KD in zip(fast, slower))


@pytest.mark.parametrize("method", ["dspark rnn"])
def test_a_shifted_drafter_is_read_and_its_prefix_refused(target, text, method):
    drafter = make_drafter(target, method)
    tokens_BS, anchors_BN = text
    right = np.asarray(probes.make_readout_probe(drafter, target, **DTYPE)(tokens_BS, anchors_BN))
    slow = Slow(drafter, target, jnp.asarray(tokens_BS[0]), anchors_BN[0, 2])
    after_S = np.append(tokens_BS[0], tokens_BS[0, -1])
    labels = after_S[np.minimum(anchors_BN[0, 2] + 1 + np.arange(drafter.config.num_draft_tokens), 19)]
    for x, row in zip(slow.streams(slow.text_K, ())[1:], right[0, 2]):
        np.testing.assert_array_equal(row, slow.best(x)[: len(labels)] == labels)
    with pytest.raises(ValueError, match="shifted layout"):
        probes.make_context_probe(drafter, target, SETS, **DTYPE)


# ---- DSpine's own views and the bound ------------------------------------------------------------


def test_injection_views_and_true_features_equal_slow_ones(target, text):
    drafter = make_drafter(target, "dspine, layers 0 and 2")
    tokens_BS, anchors_BN = text
    injected = drafter.config.injection_layers
    sets = ((), (2,), (0,), injected)
    views = jax.tree.map(np.asarray, probes.make_injection_probe(drafter, target, **DTYPE)(tokens_BS, anchors_BN))
    drafts = np.asarray(make_true_feature_drafting(drafter, target, sets, **DTYPE)(tokens_BS, anchors_BN))
    T_VR = np.asarray(drafter.transfer(target.output_embedding_VD), np.float64)[: FEW["num_tokens"]]
    for b, n in ((0, 0), (1, 3)):
        slow = Slow(drafter, target, jnp.asarray(tokens_BS[b]), anchors_BN[b, n])
        known = [k == 0 for k in range(K)]
        x = slow.streams(slow.text_K, ())[0]
        for index in range(LAYERS):
            before = slow.backbone(index, x)
            x = slow.layer(index, x, known, slow.text_K)
            if index not in injected:
                continue
            i, w = injected.index(index), drafter.injections[str(index)].weights
            normed = rms_norm(before, w.norm_D, drafter.config.rms_norm_eps)
            z = np.asarray(normed @ w.feature_DR, np.float64)
            cosines = (z / np.linalg.norm(z, axis=-1, keepdims=True)) @ (T_VR / np.linalg.norm(T_VR, axis=-1, keepdims=True)).T
            for k in range(1, K):
                f = T_VR[slow.text_K[0]] if k == 1 else 4 * z[k - 1] / np.linalg.norm(z[k - 1])  # 4 = sqrt(R)
                gate = 1 / (1 + np.exp(-np.asarray(f @ np.asarray(w.gate_predecessor_RD) + normed[k] @ w.gate_hidden_DD + w.gate_bias_D)))
                assert views["gate"][b, n, i, k - 1] == pytest.approx(gate.mean(), abs=1e-5)
                added = np.linalg.norm(gate * (f @ np.asarray(w.message_RD))) / np.linalg.norm(before[k])
                assert views["write"][b, n, i, k - 1] == pytest.approx(added, rel=1e-4)
                assert views["cosine"][b, n, i, k - 1] == pytest.approx(cosines[k, slow.text_K[k]], abs=1e-5)
                assert views["nearest"][b, n, i, k - 1] == (cosines[k].argmax() == slow.text_K[k])
        for z, layers in enumerate(sets):
            x = slow.streams(slow.text_K, ())[0]
            for index in range(LAYERS):
                x = slow.layer(index, x, [True] * K if index in layers else known, slow.text_K)
            np.testing.assert_array_equal(drafts[b, n, z], slow.best(x)[1:])
    assert len({drafts[:, :, z].tobytes() for z in range(len(sets))}) == len(sets)


def test_true_features_in_the_last_write_alone_are_the_conditioned_path(target, text):
    drafter = make_drafter(target, "dspine")
    tokens_BS, anchors_BN = (jnp.asarray(x) for x in text)

    @nnx.jit
    def conditioned(drafter, target):
        out = target(tokens_BS, target_layer_ids=drafter.config.target_layer_ids, dtype=jnp.float32)
        keep, supervised = jnp.ones_like(anchors_BN, bool), jnp.ones_like(tokens_BS, bool)
        blocks = make_blocks(tokens_BS, supervised, anchors_BN, keep, block_size=K, mask_token_id=tiny.MASK_ID)
        block, _ = run_blocks(drafter, target, row_context(drafter, out.tapped_BTE), blocks, jnp.float32)
        hidden = drafter.conditioned(block, anchor_features(drafter, target.output_embedding_VD, blocks.predecessors_BNJ))
        logits = [vocabulary_logits(h, target.output_embedding_VD, target.config.num_tokens) for h in (block.hidden_BNKD[:, :, 1:], hidden)]
        return [x.argmax(-1) for x in logits]

    drafts = make_true_feature_drafting(drafter, target, ((), (LAYERS - 1,)), **DTYPE)(*text)
    for z, expected in enumerate(conditioned(drafter, target)):
        np.testing.assert_array_equal(drafts[:, :, z], expected)


def test_the_loss_with_true_features_is_the_conditioned_one_and_a_slow_one(target, text):
    """Of the last layer alone: the product's loss without its base and feature terms, gradients too. Of all: by hand."""
    drafter = make_drafter(target, "dspine")
    tokens_BS, anchors_BN = jnp.asarray(text[0]), jnp.asarray(text[1][:, 2:4])
    supervised = jnp.arange(20)[None] >= jnp.array([[5], [0]])
    blocks = make_blocks(tokens_BS, supervised, anchors_BN, jnp.ones_like(anchors_BN, bool), block_size=K, mask_token_id=tiny.MASK_ID)
    loss_config = LossConfig(base_weight=0.0, feature_weight=0.0, loss_decay_gamma=3.0, ce_weight=0.7)
    graph, params, rest = nnx.split(drafter, nnx.Param, ...)

    def loss_of(objective):
        return lambda p: objective(nnx.merge(graph, p, rest), target, tokens_BS, blocks, loss_config, jnp.float32)[0]

    of_last, of_all = (loss_of(functools.partial(true_feature_objective, layers)) for layers in ((LAYERS - 1,), (0, 1, 2)))
    (ours, gradient), (product, expected) = (jax.jit(jax.value_and_grad(f))(params) for f in (of_last, loss_of(block_objective)))
    assert float(ours) == pytest.approx(float(product), rel=1e-5)
    assert all(tiny.relative_l2(a, b) < 1e-4 for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected)))

    total = weight = 0.0
    for b, n in itertools.product(range(2), range(2)):
        slow = Slow(drafter, target, tokens_BS[b], anchors_BN[b, n])
        x = slow.streams(slow.text_K, ())[0]
        for index in range(LAYERS):
            x = slow.layer(index, x, [True] * K, slow.text_K)
        logits_KV = rms_norm(x, drafter.norm.weight[...], 1e-6) @ target.output_embedding_VD[: FEW["num_tokens"]].T
        for k in range(1, K):
            if anchors_BN[b, n] + k < 20 and supervised[b, anchors_BN[b, n] + k]:
                w = np.exp(-(k - 1) / 3.0)
                total, weight = total - w * float(jax.nn.log_softmax(logits_KV[k])[slow.text_K[k]]), weight + w
    every = jax.jit(of_all)(params)
    assert float(every) == pytest.approx(0.7 * total / weight, rel=1e-5) and float(every) != pytest.approx(float(ours), rel=1e-4)


# ---- trees ---------------------------------------------------------------------------------------


tree_of = jax.jit(tree_accepted, static_argnums=3)


def slow_tree(table_JPP, ids_JP, size: int) -> set[tuple[int, ...]]:
    """The nodes of a best-first tree, as token paths, by a heap."""
    log_probs = np.asarray(jax.nn.log_softmax(table_JPP, axis=-1))
    heap, nodes = [], set()
    P = ids_JP.shape[1]

    def push(score, path):
        if len(path) < len(ids_JP):
            row = path[-1] if path else 0
            for c in range(P):
                heapq.heappush(heap, (-np.float32(score + log_probs[len(path), row, c]), len(path), (*path, c)))

    push(np.float32(0), ())
    while heap and len(nodes) < size:
        score, _, path = heapq.heappop(heap)
        nodes.add(path)
        push(-score, path)
    return {tuple(int(ids_JP[j, c]) for j, c in enumerate(path)) for path in nodes}


def tables(seed: int, shape=(6,), J=4, P=4, scale=2.0):
    """Random tables whose first draft's rows are all equal, candidates, and texts that are often among them."""
    rng = np.random.default_rng(seed)
    table = rng.normal(scale=scale, size=(*shape, J, P, P)).astype(np.float32)
    table[..., 0, :, :] = table[..., 0, :1, :]
    ids = np.argsort(rng.random((*shape, J, 9)), axis=-1)[..., :P].astype(np.int32)
    text = np.take_along_axis(ids, rng.integers(0, P, (*shape, J, 1)), axis=-1)[..., 0]
    return table, ids, np.where(rng.random(text.shape) < 0.1, 9, text).astype(np.int32)


@pytest.mark.parametrize("sizes", [(1, 2, 3, 7, 15, 32), (300, 340, 400)])
def test_a_tree_follows_the_text_as_far_as_one_built_by_a_heap(sizes):
    """To sizes beyond the 340 nodes there are."""
    table, ids, text = tables(0, (12,))
    accepted = np.asarray(tree_of(table, ids, text, sizes))
    for n, z in itertools.product(range(12), range(len(sizes))):
        nodes = slow_tree(table[n], ids[n], sizes[z])
        assert len(nodes) == min(sizes[z], 340)
        assert accepted[n, z] == max(d for d in range(5) if d == 0 or tuple(text[n, :d]) in nodes)
    assert (np.diff(accepted, axis=1) >= 0).all() and len(np.unique(accepted)) > 1  # a larger tree holds the smaller one


def test_a_tree_of_one_path_is_the_greedy_walk():
    """Scores so far apart that the best path is worth more than any turn off it; texts that leave the walk at every depth."""
    table, ids, _ = tables(1, (3, 40), scale=1e4)
    walked = np.asarray(greedy_walk(jnp.asarray(table), jnp.asarray(ids)))
    for depth in range(5):
        text = walked.copy()
        text[..., depth:] = 9
        np.testing.assert_array_equal(tree_of(table, ids, text, (1, 2, 4)), np.minimum(depth, [1, 2, 4]) * np.ones((3, 40, 1), int))


@pytest.mark.parametrize("name", ["dspine"])
def test_a_tree_of_all_paths_accepts_at_least_the_product_and_a_small_one_less(target, text, name):
    tokens_BS, anchors_BN = text
    drafter = make_drafter(target, name)
    drafts = np.asarray(make_drafting(drafter, target, **DTYPE)(tokens_BS, anchors_BN))
    label = np.stack([row[np.minimum(a[:, None] + 1 + np.arange(K - 1), 19)] for row, a in zip(tokens_BS, anchors_BN)])
    chain = np.cumprod(drafts == label, axis=-1).sum(-1)
    accepted = np.asarray(make_tree_replay(drafter, target, (1, 8, 340), **DTYPE)(tokens_BS, anchors_BN))
    np.testing.assert_array_equal(accepted[..., 0], drafts[..., 0] == label[..., 0])
    assert (accepted[..., 2] >= chain).all() and (np.diff(accepted) >= 0).all() and accepted.max() > 1


# ---- figures -------------------------------------------------------------------------------------


def test_gains_equal_loops_over_anchors():
    """Rows of unequal lengths, labels past the end, anchors at every second token."""
    rng, J, Z, every = np.random.default_rng(0), 4, 2, 2
    lengths, rows, valid = (9, 1, 4, 12), [], []
    for length in lengths:
        n = len(range(0, length - 1, every))
        draw = lambda *shape, n=n: rng.random((n, *shape)) < 0.7  # noqa: E731
        rows.append({"plain": draw(J), "filled": draw(J - 1, Z, J), "supplied": draw(J - 1, Z)})
        rows[-1] |= {name: draw(J - 1) for name in ("correct", "drafted", "undecided", "draft_right")}
        valid.append(probe_scores.valid_labels(length, J, every))
        expected = [[t + 1 + j < length for j in range(J)] for t in range(0, length - 1, every)]
        np.testing.assert_array_equal(valid[-1], np.array(expected, bool).reshape(n, J))
    prefix, before = (f(rows, valid, ["a", "b"]) for f in (probe_scores.prefix_gains, probe_scores.predecessor_gains))

    def streak(right_J, start, t, length) -> int:
        count = 0
        while start + count < J and t + 1 + start + count < length and right_J[start + count]:
            count += 1
        return count

    for m in range(1, J):
        places = [(row, i, t, length) for row, length in zip(rows, lengths) for i, t in enumerate(range(0, length - 1, every)) if t + 1 + m < length]
        plain = np.mean([streak(row["plain"][i], m, t, length) for row, i, t, length in places])
        of_m, of_slot = prefix["by_length"][m - 1], before["by_slot"][m - 1]
        assert (of_m["known"], of_slot["slot"], of_m["anchors"], of_slot["anchors"]) == (m, m + 1, len(places), len(places))
        assert of_m["plain_tokens"] == pytest.approx(plain)
        accuracy = {name: 100 * np.mean([row[name][i, m - 1] for row, i, *_ in places]) for name in ("correct", "drafted", "undecided")}
        assert all(of_slot[f"{name}_percent"] == pytest.approx(value) for name, value in accuracy.items())
        assert of_slot["loss_points"] == pytest.approx(accuracy["correct"] - accuracy["drafted"])
        wrong = [(row, i) for row, i, *_ in places if not row["draft_right"][i, m - 1]]
        assert of_slot["wrong_drafts_percent"] == pytest.approx(100 * len(wrong) / len(places))
        lost = [float(row["correct"][i, m - 1]) - float(row["drafted"][i, m - 1]) for row, i in wrong]
        assert of_slot["loss_where_wrong_points"] == (pytest.approx(100 * np.mean(lost)) if lost else None)
        for z, label in enumerate("ab"):
            filled = np.mean([streak(row["filled"][i, m - 1, z], m, t, length) for row, i, t, length in places])
            gains = of_m["sets"][label]
            assert (gains["tokens"], gains["gain_tokens"]) == (pytest.approx(filled), pytest.approx(filled - plain))
            assert gains["gain_percent"] == (pytest.approx(100 * (filled / plain - 1)) if plain else None)
            supplied = 100 * np.mean([row["supplied"][i, m - 1, z] for row, i, *_ in places])
            assert of_slot["sets"][label]["gain_points"] == pytest.approx(supplied - accuracy["undecided"])
            low, high = of_slot["sets"][label]["gain_points_interval"]
            assert low <= of_slot["sets"][label]["gain_points"] <= high and low < high
    counts = np.array([entry["anchors"] for entry in prefix["by_length"]])
    assert prefix["all"]["plain_tokens"] == pytest.approx(np.average([e["plain_tokens"] for e in prefix["by_length"]], weights=counts))
    assert before["all"]["correct_percent"] == pytest.approx(np.average([e["correct_percent"] for e in before["by_slot"]], weights=counts))


def test_rows_are_replayed_at_every_nth_anchor():
    prompts, answers = [[1, 2], [3]], [np.arange(10, 17), np.arange(30, 32)]
    judging = lambda tokens, anchors: {"anchor": anchors[..., None], "token": np.take_along_axis(tokens, anchors, axis=1)[..., None]}  # noqa: E731
    shape = replay_shape(prompts, answers, batch_size=3, anchors_per_chunk=2, every=3)
    assert shape["num_anchors"] == 4
    judged = replay_rows(judging, prompts, answers, **shape)
    assert [row["anchor"].ravel().tolist() for row in judged] == [[2, 5], [1]]
    assert [row["token"].ravel().tolist() for row in judged] == [[10, 13], [30]]


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target folder, a DSpine and a DFlash drafter, and two datasets."""
    root = tmp_path_factory.mktemp("probe")
    tiny.write_target(root / "target")
    config = dataclasses.replace(tiny.TARGET, eos_token_ids=(2,))
    for name in ("dflash", "dspine", "dspark rnn"):
        drafter = Drafter(tiny.train_config(name).drafter.resolve(config), rngs=nnx.Rngs(1))
        if name == "dspine":
            drafter.transfer.basis.set_value(jnp.asarray(np.random.default_rng(0).normal(size=(64, 16)), jnp.float32))
        save_drafter(root / name, drafter)
    for seed, name in enumerate(("first", "second")):
        tokens, _, lengths = tiny.rows(3, seed=seed)
        places = np.arange(tokens.shape[1])[None]
        write_dataset(root / "data" / name, tokens, (places >= 4) & (places < lengths[:, None]), lengths, Manifest(name=name, source="random"))
    return root


def arguments(files, drafter: str, *extra: str) -> list[str]:
    options = ["--target", str(files / "target"), "--drafter", str(files / drafter), "--data", str(files / "data"), "--output", str(files / "out")]
    return [*options, "--anchors-per-chunk", "4", *extra]


def test_from_files_to_figures(files, capsys):
    """Every option has an effect; table, JSON and picture are written, with units and origin."""
    extra = ["--layers", "first=0", "--layers", "1", "--tree-nodes", "2", "5", "--prompts", "2", "--every", "2", "--batch-size", "2", "--dtype", "float32"]
    assert probe.main(arguments(files, "dspine", *extra)) == 0
    results = json.loads((files / "out" / "probe.json").read_text())
    assert (files / "out" / "probe.md").read_text() == capsys.readouterr().out and (files / "out" / "probe.png").stat().st_size > 10_000
    assert results["sets"] == {"first": [0], "1": [1]} and results["prompts"] == 4 and results["environment"]["versions"]["jax"] and results["left_out"] == {}
    found = results["probes"]
    assert set(found) == set(probe.PROBES) and len(found["readout"]["accuracy"]) == 2 and found["injection"]["layers"] == [0, 1]
    assert set(found["tau"]["full"]) == {
        *("product", "predicted features", "true, last write", "true, first", "true, first and last write", "true, 1"),
        *("tree of 2", "tree of 5"),
    }
    assert found["tau"]["bound_layers"]["true, first and last write"] == [0, 1] and found["tau"]["full"]["true, 1"] == found["tau"]["full"]["true, last write"]
    assert all(1 <= entry["tau"] <= 4 for scope in ("full", "onset") for entry in found["tau"][scope].values())
    assert set(found["prefix"]["all"]["sets"]) == set(found["predecessor"]["all"]["sets"]) == {"first", "1"}
    rows = [tiny.rows(3, seed=seed)[2][:2] for seed in range(2)]  # answers begin at 4
    assert found["readout"]["anchors"][0] == sum(len(range(0, length - 4 - 1, 2)) for lengths in rows for length in lengths)


def test_what_a_drafter_cannot_be_asked_is_left_out_and_said(files, capsys):
    assert probe.main(arguments(files, "dspark rnn", "--prompts", "1", "--probes", "prefix", "predecessor", "injection", "tau")) == 0
    results = json.loads((files / "out" / "probe.json").read_text())
    assert set(results["probes"]) == {"tau"} and set(results["left_out"]) == {"prefix", "predecessor", "injection", "bound", "tree"}
    assert "prefix: left out, in the shifted layout" in capsys.readouterr().out
    assert set(results["probes"]["tau"]["full"]) == {"product"}


def test_a_bound_is_trained_in_a_workdir_of_its_own(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loop, "make_mesh", lambda config: make_mesh(config, jax.devices()[:1]))
    small = {"num_layers": 1, "target_layer_ids": (0,), "block_size": 3}
    config = tiny.train_config("dspine", steps=2, target=str(files / "target"), workdir=str(tmp_path / "bound"), log=LogConfig(every=1), drafter=small)
    config = dataclasses.replace(config, data=DataConfig(path=str(files / "data" / "first"), batch_size=8))
    save_config(config, tmp_path / "c.json")
    (tmp_path / "c.py").write_text(f"from dspine_jax.config_io import read_config\nconfig = read_config({str(tmp_path / 'c.json')!r})\n")
    command = [str(tmp_path / "c.py"), "--layers"]
    assert bound.main([*command, "all"]) == 0
    assert load_drafter(tmp_path / "bound" / "drafter", read_target_config(files / "target")).config.injection_layers == (0,)
    logged = [json.loads(line) for line in (tmp_path / "bound" / "metrics.jsonl").read_text().splitlines()]
    assert len(logged) == 2 and not any("loss/feature" in line for line in logged)
    capsys.readouterr()
    (tmp_path / "product" / "checkpoints").mkdir(parents=True)
    for extra, words in [
        (["0,1", "--set", "drafter.num_layers=2"], f"{tmp_path / 'bound'} holds a bound with true features at 0; use a new workdir for true features at 0,1"),
        (["all", "--set", f"workdir={tmp_path / 'product'}"], "holds the product's training"),
        (["5"], "layer 5 of the set 5 is outside 0..0"),
        (["x"], "--layers 'x' is no set of layers"),
        (["all", "--set", "drafter.injection=none"], "injects nothing"),
        (["all", "--set", "loss.l1_weight=1"], "loss.l1_weight 1.0 is not read"),
    ]:
        assert bound.main([*command, *extra]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "extra, words",
    [
        (["--layers", "late=1,2"], "layer 2 of the set 1,2 is outside 0..1"),
        (["--drafter", "prompt-lookup"], "prompt-lookup has no layers"),
        (["--data", "nowhere"], "nowhere holds no dataset folder"),
        (["--layers", "a=x"], "'a=x' is no set of layers; write LABEL=0,1"),
        (["--layers", "a=0", "--layers", "a=1"], "--layers gives one label twice"),
        (["--layers", "1,1"], "'1,1' names a layer twice"),
        (["--tree-nodes", "0"], "--tree-nodes 0 must be at least 1"),
        (["--every", "0"], "--every 0 must be at least 1"),
        (["--output", __file__], "is a file; give a folder"),
    ],
)
def test_bad_input_is_named(files, capsys, extra, words):
    try:
        code = probe.main(arguments(files, "dflash", *extra))
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and "error: " in error and words in error and "Traceback" not in error


def test_the_demo_is_the_default():
    args = probe.parse_args([])
    assert args.target.endswith("demo/target") and args.drafter.endswith("demo/dspine") and (args.data / "manifest.json").is_file()
    assert probe.default_sets(5) == {"early": (0, 1), "late": (3, 4), "all": (0, 1, 2, 3, 4)} and probe.default_sets(1) == {"all": (0,)}
    for missing in (["--target", "t"], ["--target", "t", "--drafter", "d"]):
        with pytest.raises(SystemExit):
            probe.parse_args(missing)
