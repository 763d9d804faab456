"""Losses: chunked cross-entropy, weights and denominators, and the whole objective against float64 loops."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.drafter_models import BAR, Reference, random_tokens, reference_of, relative_l2, tiny_drafter, tiny_target, weights_by_loops
from flax import nnx

from dspine_jax.anchors import Blocks, make_blocks
from dspine_jax.checkpoint_io import module_to_tensors
from dspine_jax.config import LossConfig
from dspine_jax.losses import cross_entropy, cross_entropy_dense, dpace_weights, feature_distance, slot_weights, weighted_mean
from dspine_jax.metrics import simulated_acceptance, slot_accuracy
from dspine_jax.objective import block_objective
from pallas_kernels.injection import unit

FULL_LOGITS = 64 * 16 * 32_768 * 4  # bytes of the fp32 logits of R13's case: 134,217,728 = 1024 positions x 32,768


# ---- chunked cross-entropy ----------------------------------------------------------------------


@functools.cache
def positions() -> tuple[np.ndarray, ...]:
    """hidden [2,512,24], rows [160,24] of which 150 are usable, labels and weights [2,512] (some exactly 0): 1024 positions."""
    rng = np.random.default_rng(1)
    hidden, rows = rng.normal(size=(2, 512, 24)).astype(np.float32), rng.normal(size=(160, 24)).astype(np.float32)
    labels = rng.integers(0, 150, (2, 512)).astype(np.int32)
    return hidden, rows, labels, (rng.random((2, 512)) * (rng.random((2, 512)) < 0.8)).astype(np.float32)


def cross_entropy_in_float64(hidden, rows, labels, weights, num_tokens):
    """(ce, argmax, gradient of sum(weights x ce)) with all logits in memory."""
    rows = np.asarray(rows, np.float64)[:num_tokens]
    logits = np.asarray(hidden, np.float64) @ rows.T
    top = logits.max(-1, keepdims=True)
    log_total = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    probs = np.exp(logits - log_total)
    ce = (log_total - np.take_along_axis(logits, labels[..., None], -1))[..., 0]
    gradient = ((probs - np.eye(num_tokens)[labels]) * weights[..., None]) @ rows
    return ce, logits.argmax(-1), gradient


@functools.partial(jax.jit, static_argnames=("function", "rest"))
def value_and_gradient(function, hidden, rows, labels, weights, rest):
    """(ce, argmax, d sum(weights x ce) / d hidden)."""

    def total(hidden):
        ce, best = function(hidden, rows, labels, *rest)
        return jnp.sum(ce * weights), (ce, best)

    (_, (ce, best)), gradient = jax.value_and_grad(total, has_aux=True)(hidden)
    return ce, best, gradient


@pytest.mark.parametrize("chunk", [128, 100, 5000])
def test_chunks_change_nothing(chunk):
    """R13: chunks of 128 and of 100 (which leaves a rest), and one wider than the row, against dense and against float64."""
    hidden, rows, labels, weights = positions()
    ce, best, gradient = value_and_gradient(cross_entropy, hidden, rows, labels, weights, (150, chunk))
    dense = value_and_gradient(cross_entropy_dense, hidden, rows, labels, weights, (150,))
    exact = cross_entropy_in_float64(hidden, rows, labels, weights, 150)
    assert ce.dtype == jnp.float32 and best.dtype == jnp.int32
    for theirs in (dense, exact):
        assert relative_l2(ce, theirs[0]) <= BAR
        np.testing.assert_array_equal(best, theirs[1])
        assert relative_l2(gradient, theirs[2]) <= BAR
    assert (np.asarray(gradient)[weights == 0] == 0).all()


@pytest.mark.parametrize("chunk", [128, 100])
def test_bf16_states_are_compared_and_summed_in_fp32(chunk):
    """Products of bf16 inputs are exact in fp32, so the loss keeps fp32 accuracy; only the gradient is rounded to bf16."""
    hidden, rows, labels, weights = positions()
    hidden, rows = jnp.asarray(hidden, jnp.bfloat16), np.asarray(jnp.asarray(rows, jnp.bfloat16), np.float32)
    ce, best, gradient = value_and_gradient(cross_entropy, hidden, rows, labels, weights, (150, chunk))
    exact = cross_entropy_in_float64(hidden.astype(jnp.float32), rows, labels, weights, 150)
    assert ce.dtype == jnp.float32 and gradient.dtype == jnp.bfloat16
    assert relative_l2(ce, exact[0]) <= BAR
    np.testing.assert_array_equal(best, exact[1])
    assert relative_l2(gradient, exact[2]) <= 1e-2


def test_bf16_gradient_of_confident_positions_keeps_its_accuracy():
    """Where the label has all but 1e-2 to 1e-6 of the probability, the gradient is a small difference: rounding its label's share would drown it."""
    rng = np.random.default_rng(5)
    rows = np.asarray(jnp.asarray(rng.normal(size=(160, 24)), jnp.bfloat16), np.float32)
    labels = rng.integers(0, 150, (2, 256)).astype(np.int32)
    hidden = jnp.asarray(rows[labels] * np.linspace(0.6, 1.2, 256)[None, :, None], jnp.bfloat16)
    weights = np.ones((2, 256), np.float32)
    _, _, gradient = value_and_gradient(cross_entropy, hidden, rows, labels, weights, (150, 100))
    exact = cross_entropy_in_float64(hidden.astype(jnp.float32), rows, labels, weights, 150)[2]
    size = np.linalg.norm(exact, axis=-1)
    error = np.linalg.norm(np.asarray(gradient, np.float32) - exact, axis=-1) / size
    assert (size < 1e-3).sum() > 50 and np.median(error) <= 1e-2
    assert np.quantile(error[size > 1e-3], 0.99) <= 2e-2


def test_label_far_below_the_rest():
    """Exact to 100 nats; from 114 nats on a position's loss saturates, finite and still pointing away from the winner."""
    rows = np.eye(8, dtype=np.float32)
    hidden = np.zeros((1, 4, 8), np.float32)
    hidden[0, :, 3] = [0.0, 100.0, 200.0, 3e4]
    labels, weights = np.zeros((1, 4), np.int32), np.ones((1, 4), np.float32)
    ce, best, gradient = (np.asarray(x) for x in value_and_gradient(cross_entropy, hidden, rows, labels, weights, (8, 3)))
    exact = cross_entropy_in_float64(hidden, rows, labels, weights, 8)
    np.testing.assert_allclose(ce[0, :2], exact[0][0, :2], rtol=1e-6)
    assert relative_l2(gradient[0, :2], exact[2][0, :2]) <= 1e-5 and best.tolist() == [[0, 3, 3, 3]]
    assert (ce[0, 2:] >= 114).all() and (ce[0, 2:] < 115).all()
    np.testing.assert_allclose(gradient[0, 2:], exact[2][0, 2:], atol=1e-5)


def test_padded_columns_are_no_part_of_the_loss():
    """T03: 130 usable rows padded to 256, every real logit -1 but id 7 at -0.5: argmax 7, loss and gradient as without padding."""
    rows = np.zeros((256, 8), np.float32)
    rows[:130, 0], rows[7, 0] = -1.0, -0.5
    rows[:130, 1:] = np.random.default_rng(2).normal(size=(130, 7))
    hidden = np.zeros((1, 5, 8), np.float32)
    hidden[..., 0] = 1.0
    labels, weights = np.array([[7, 0, 129, 64, 7]], np.int32), np.ones((1, 5), np.float32)
    padded = value_and_gradient(cross_entropy, hidden, rows, labels, weights, (130, 2))
    bare = value_and_gradient(cross_entropy_dense, hidden, rows[:130], labels, weights, (130,))
    assert (np.asarray(padded[1]) == 7).all()
    for ours, theirs in zip(padded, bare):
        assert relative_l2(ours, theirs) <= 1e-6
    unmasked = value_and_gradient(cross_entropy, hidden, rows, labels, weights, (256, 2))
    assert (np.asarray(unmasked[1]) >= 130).all() and relative_l2(unmasked[0], bare[0]) > 0.1  # the case does tell


def compiled_bytes(function, *shapes) -> int:
    """Temporary memory of a compiled function, from shapes alone."""
    return jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def test_full_logits_are_never_in_memory():
    """R13: 64 anchors x 16 slots over 32,768 ids, loss and gradient: below half of the fp32 logits; the dense form is above all of them."""
    shape = jax.ShapeDtypeStruct
    shapes = (shape((1, 1024, 64), jnp.float32), shape((32_768, 64), jnp.float32), shape((1, 1024), jnp.int32))

    def gradient_of(function, *rest):
        return jax.grad(lambda hidden, rows, labels: jnp.sum(function(hidden, rows, labels, *rest)[0]))

    assert FULL_LOGITS == 134_217_728
    for chunk in (128, 100, LossConfig().vocab_chunk):
        assert compiled_bytes(gradient_of(cross_entropy, 32_768, chunk), *shapes) < FULL_LOGITS / 2
    assert compiled_bytes(gradient_of(cross_entropy_dense, 32_768), *shapes) >= FULL_LOGITS


# ---- weights and denominators -------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "by_count"), [(4.0, 0.294), (7.0, 0.442)])
def test_the_decayed_loss_is_divided_by_its_weights(gamma, by_count):
    """R14: 15 slots of CE 1 give 1.0 whatever gamma is; dividing by the slot count would give ``by_count``."""
    weights = slot_weights(jnp.ones((1, 1, 15), bool), gamma)
    np.testing.assert_allclose(weights[0, 0], [np.exp(-j / gamma) for j in range(15)], rtol=1e-6)
    assert float(weighted_mean(jnp.ones((1, 1, 15)), weights)) == pytest.approx(1.0, abs=1e-6)
    assert float(weights.mean()) == pytest.approx(by_count, abs=5e-4)


def test_dpace_weights_are_the_accepted_length_still_to_come_and_carry_no_gradient():
    """Against loops, with holes; certain slots weigh by how many follow, and with alpha near 1 every block does."""
    rng = np.random.default_rng(8)
    ce, mask = rng.exponential(size=(3, 4, 6)).astype(np.float32), rng.random((3, 4, 6)) < 0.7
    weights = np.asarray(dpace_weights(jnp.asarray(ce), jnp.asarray(mask), 0.3))
    for b, n in np.ndindex(3, 4):
        np.testing.assert_allclose(weights[b, n], weights_by_loops(LossConfig(dpace_alpha=0.3), ce[b, n].tolist(), mask[b, n].tolist()), rtol=1e-5)
    assert (dpace_weights(jnp.zeros((1, 1, 4)), jnp.ones((1, 1, 4), bool), 0.5) == jnp.array([4, 3, 2, 1])).all()
    assert (jax.grad(lambda x: dpace_weights(x, jnp.asarray(mask), 0.3).sum())(jnp.asarray(ce)) == 0).all()


def test_unsupervised_slots_weigh_nothing_even_when_they_are_not_finite():
    mask = jnp.array([[[True, False, True, False]]])
    values = jnp.array([[[2.0, jnp.inf, 4.0, jnp.nan]]])
    weights = slot_weights(mask, 7.0)
    loss, gradient = jax.value_and_grad(weighted_mean)(values, weights)
    w2 = np.exp(-2 / 7)
    assert float(loss) == pytest.approx((2 + 4 * w2) / (1 + w2), rel=1e-6)
    np.testing.assert_allclose(gradient[0, 0], [1 / (1 + w2), 0, w2 / (1 + w2), 0], rtol=1e-6)


def test_nothing_weighted_is_exactly_0_with_zero_gradient():
    loss, gradient = jax.value_and_grad(weighted_mean)(jnp.full((3, 2), 5.0), jnp.zeros((3, 2)))
    assert float(loss) == 0.0 and (gradient == 0).all()


def test_the_feature_loss_is_one_minus_the_cosine():
    """Value by loops; slot 0 has no say; the gradient turns a prediction and never stretches it."""
    rng = np.random.default_rng(3)
    raw, tokens = rng.normal(size=(2, 3, 5, 8)).astype(np.float32), rng.normal(size=(2, 3, 4, 8)).astype(np.float32)
    weights = rng.random((2, 3, 4)).astype(np.float32)
    T = np.sqrt(8) * tokens / np.linalg.norm(tokens, axis=-1, keepdims=True)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(raw):
        distance = feature_distance(8**0.5 * unit(raw), jnp.asarray(T))
        return jnp.sum(distance * weights), distance

    (_, distance), gradient = loss(raw)
    raw, gradient = raw.astype(np.float64), np.asarray(gradient, np.float64)
    for index in np.ndindex(2, 3, 4):
        z, t = raw[index[:2]][index[2] + 1], tokens[index].astype(np.float64)
        cosine = z @ t / np.linalg.norm(z) / np.linalg.norm(t)
        assert float(distance[index]) == pytest.approx(1 - cosine, abs=1e-5)
        expected = -weights[index] * (t / np.linalg.norm(t) - cosine * z / np.linalg.norm(z)) / np.linalg.norm(z)
        np.testing.assert_allclose(gradient[index[:2]][index[2] + 1], expected, atol=1e-5)
    assert (gradient[:, :, 0] == 0).all()
    assert np.abs((gradient * raw).sum(-1)).max() < 1e-5


# ---- metrics ------------------------------------------------------------------------------------


def test_simulated_acceptance_and_slot_accuracy_equal_loops():
    rng = np.random.default_rng(4)
    correct, mask = rng.random((3, 7, 5)) < 0.7, rng.random((3, 7, 5)) < 0.8
    tau, blocks, hits, supervised = 0.0, 0, [0] * 5, [0] * 5
    for b, n in np.ndindex(3, 7):
        for j in range(5):
            supervised[j] += mask[b, n, j]
            hits[j] += mask[b, n, j] and correct[b, n, j]
        if not mask[b, n, 0]:
            continue
        blocks, leading = blocks + 1, 0
        while leading < 5 and mask[b, n, leading] and correct[b, n, leading]:
            leading += 1
        tau += 1 + leading
    total, count = simulated_acceptance(jnp.asarray(correct), jnp.asarray(mask))
    assert (float(total), float(count)) == (tau, blocks) and blocks not in (0, 21)
    ours = slot_accuracy(jnp.asarray(correct), jnp.asarray(mask))
    np.testing.assert_array_equal(ours, [hits, supervised])


# ---- the whole objective ------------------------------------------------------------------------

LOSS = LossConfig(loss_decay_gamma=2.0, base_weight=0.3, feature_weight=0.7, vocab_chunk=4)  # 6 positions a row: a rest of 2
OPTIONS = dataclasses.replace(LOSS, dpace_alpha=0.3, ce_weight=0.6, l1_weight=0.4)
VARIANTS = {
    "dflash": ("dflash", {"num_layers": 1}, LOSS),
    "dspine": ("dspine", {}, LOSS),
    "early_only": ("dspine", {"injection": {"layers": (0,)}}, LOSS),
    "dflash_options": ("dflash", {"num_layers": 1}, OPTIONS),
    "dspine_options": ("dspine", {}, OPTIONS),
}


@functools.cache
def target():
    return tiny_target()


@functools.cache
def built(variant: str):
    """(drafter, jitted ``(params, tokens, blocks) -> ((loss, metrics), gradients)``, params); compiled once for all tests."""
    method, changes, loss_config = VARIANTS[variant]
    drafter = tiny_drafter(target(), method, block_size=4, **changes)
    graph, params, rest = nnx.split(drafter, nnx.Param, ...)

    @jax.jit
    def run(params, tokens, blocks):
        loss = lambda params: block_objective(nnx.merge(graph, params, rest), target(), tokens, blocks, loss_config, jnp.float32)  # noqa: E731
        if variant == "early_only":  # only its value is tested
            return loss(params), None
        return jax.value_and_grad(loss, has_aux=True)(params)

    return drafter, run, params


@functools.cache
def batch() -> tuple[np.ndarray, Blocks]:
    """Two rows of two blocks; the second row has one supervised slot in all, so a mean of row means would be far off."""
    tokens = random_tokens(50, 2, 10)
    mask = np.ones((2, 10), bool)
    mask[0, 6] = False  # a hole inside a block
    mask[1] = False
    mask[1, 4:6] = True
    keep = jnp.array([[True, True], [True, False]])
    blocks = make_blocks(jnp.asarray(tokens), jnp.asarray(mask), jnp.array([[2, 5], [4, 0]]), keep, block_size=4, mask_token_id=3)
    return tokens, blocks


def objective_by_loops(reference: Reference, blocks: Blocks, loss_config: LossConfig, kept: dict | None = None) -> dict[str, float]:
    """Loss parts of DESIGN 5.6 and tau, one block and one slot at a time, with all logits of a slot at once.

    ``kept`` holds each block's weights from the first call on: no gradient goes through them.
    """
    layers = len(reference.c.injection_layers)
    total = {"weight": 0.0, "base": 0.0, "conditioned": 0.0, "feature": 0.0, "l1": 0.0}
    kept = {} if kept is None else kept
    cross_entropy = lambda logits, label: np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[label]  # noqa: E731
    leading, real = {"base": 0.0, "conditioned": 0.0}, 0
    paths = ["base", "conditioned"] if reference.c.redoes_last_write else ["base"]
    for b, n in np.ndindex(2, 2):
        if not np.asarray(blocks.eval_mask_BNJ[b, n]).any():
            continue
        anchor, token = int(blocks.context_len_BN[b, n]), int(blocks.noise_ids_BNK[b, n, 0])
        block = reference.block(taps()[b], token, anchor)
        alive = dict.fromkeys(paths, True)
        real += bool(blocks.eval_mask_BNJ[b, n, 0])
        predecessors, labels, supervision = (x[b, n].tolist() for x in (blocks.predecessors_BNJ, blocks.labels_BNJ, blocks.eval_mask_BNJ))
        logits = {"base": [reference.rows @ block["hidden"][slot] for slot in range(1, 4)]}
        if len(paths) == 2:
            logits["conditioned"] = [reference.rows @ reference.conditioned(block, slot, predecessors[slot - 1]) for slot in range(1, 4)]
        main = [cross_entropy(*both) for both in zip(logits[paths[-1]], labels)]
        weights = kept.setdefault((b, n), weights_by_loops(loss_config, main, supervision))
        for slot in range(1, 4):
            label, supervised, w = labels[slot - 1], supervision[slot - 1], weights[slot - 1]
            total["weight"] += w
            for path in paths:
                total[path] += w * cross_entropy(logits[path][slot - 1], label)
                alive[path] = alive[path] and supervised and int(logits[path][slot - 1].argmax()) == label
                leading[path] += alive[path]
            total["l1"] += w * np.abs(softmax(logits[paths[-1]][slot - 1]) - laws()[b, anchor + slot - 1]).sum() if supervised else 0.0
            for features in block["features"]:
                p, t = features[slot], reference.token_feature(label)
                total["feature"] += w * (1 - p @ t / np.linalg.norm(p) / np.linalg.norm(t)) / layers
    parts = {name: total[name] / total["weight"] for name in ("base", "conditioned", "feature", "l1")}
    loss = loss_config.ce_weight * parts[paths[-1]] + loss_config.l1_weight * parts["l1"]
    if len(paths) == 2:
        loss += loss_config.base_weight * parts["base"]
    parts["total"] = loss + loss_config.feature_weight * parts["feature"] if layers else loss
    return parts | {f"tau_{path}": (leading[path] + real, real) for path in paths}


@functools.cache
def taps() -> np.ndarray:
    """What every variant reads of the batch's rows."""
    return np.asarray(jax.jit(lambda tokens: target()(tokens, target_layer_ids=(0, 2)).tapped_BTE)(batch()[0]))


@functools.cache
def laws() -> np.ndarray:
    """The target's law of the next token at every position of the batch's rows."""
    law = jax.jit(lambda tokens: jax.nn.softmax(target().logits(target()(tokens, target_layer_ids=(0, 2)).hidden_BTD)))(batch()[0])
    return np.asarray(law, np.float64)[..., : target().config.num_tokens]


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max())
    return x / x.sum()


def with_some_right_labels(drafter, tokens: np.ndarray, blocks: Blocks) -> Blocks:
    """The first block's first two labels are what the drafter says, so that acceptance is not 0 everywhere."""
    reference = reference_of(drafter, target())
    block = reference.block(taps()[0], int(tokens[0, 2]), 2)
    labels = blocks.labels_BNJ
    for slot in (1, 2):
        conditioned = drafter.config.redoes_last_write and slot == 1
        hidden = reference.conditioned(block, slot, int(blocks.predecessors_BNJ[0, 0, 0])) if conditioned else block["hidden"][slot]
        labels = labels.at[0, 0, slot - 1].set(int((reference.rows @ hidden).argmax()))
    return dataclasses.replace(blocks, labels_BNJ=labels)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_objective_equals_the_sum_over_slots_written_out(variant):
    """Every part: DFlash's single path, DSpine's two paths and features, and the base path alone where the last write is not redone."""
    drafter, run, params = built(variant)
    tokens, blocks = batch()
    blocks = with_some_right_labels(drafter, tokens, blocks)
    (loss, metrics), _ = run(params, tokens, blocks)
    method, _, loss_config = VARIANTS[variant]
    expected = objective_by_loops(reference_of(drafter, target()), blocks, loss_config)
    twice = method == "dspine" and variant != "early_only"
    assert float(loss) == pytest.approx(expected["total"], rel=BAR) == float(metrics["loss/total"][0])
    assert float(metrics["loss/ce_base"][0]) == pytest.approx(expected["base"], rel=BAR)
    assert ("loss/ce_conditioned" in metrics) == twice
    if loss_config.l1_weight:
        assert float(metrics["loss/l1"][0]) == pytest.approx(expected["l1"], rel=BAR) and expected["l1"] > 0.1
    for path in ("base", "conditioned") if twice else ("base",):
        assert tuple(map(float, metrics[f"simulated_tau/{path}"])) == expected[f"tau_{path}"]
        assert float(metrics[f"accuracy_{path}"][1].sum()) == float(metrics["supervised_tokens"][0]) == 6
    tau = expected["tau_conditioned" if twice else "tau_base"]
    assert tau[0] > tau[1] == 2  # one kept block has its first slot masked
    if twice:
        assert float(metrics["loss/ce_conditioned"][0]) == pytest.approx(expected["conditioned"], rel=BAR)
        assert abs(expected["conditioned"] - expected["base"]) > 1e-2
    if method == "dspine":
        assert float(metrics["loss/feature"][0]) == pytest.approx(expected["feature"], rel=BAR)
        names = [name for name in metrics if name.startswith("loss/feature_layer")]
        assert names == [f"loss/feature_layer{layer}" for layer in drafter.config.injection_layers]


@pytest.mark.parametrize("variant", ["dspine", "dspine_options", "dflash_options"])
def test_gradients_of_the_objective_equal_differences_of_the_written_out_one(variant):
    """Every tensor of a drafter, along its own gradient and a random direction, in float64 central differences."""
    drafter, run, params = built(variant)
    tokens, blocks = batch()
    _, gradients = run(params, tokens, blocks)
    reference, constant = reference_of(drafter, target()), {}
    objective_by_loops(reference, blocks, VARIANTS[variant][2], constant)
    graph, _, rest = nnx.split(drafter, nnx.Param, ...)
    gradient_drafter = nnx.merge(graph, gradients, rest)
    rng, checked = np.random.default_rng(6), 0
    for name, gradient in module_to_tensors(gradient_drafter).items():
        if name.startswith("transfer."):
            continue  # frozen
        gradient = np.asarray(gradient, np.float64)
        size = np.linalg.norm(gradient)
        assert size > 1e-4, name
        kept = reference.t[name]
        for direction in (gradient, rng.normal(size=gradient.shape)):
            direction = direction / np.linalg.norm(direction)
            values = []
            for step in (1e-5, -1e-5):
                reference.t[name] = kept + step * direction
                values.append(objective_by_loops(reference, blocks, VARIANTS[variant][2], constant)["total"])
            reference.t[name] = kept
            slope = (values[0] - values[1]) / 2e-5
            assert abs(slope - float(np.sum(gradient * direction))) <= 1e-5 * size, name
        checked += 1
    assert checked == (3 + 11 if VARIANTS[variant][0] == "dflash" else 3 + 2 * (11 + 6))


@pytest.mark.parametrize("variant", ["dflash", "dspine", "dspine_options"])
def test_a_batch_without_labels_gives_exactly_nothing(variant):
    """D02: an all-masked batch has loss 0, all gradients 0 and no NaN, kept blocks or not."""
    _, run, params = built(variant)
    tokens, _ = batch()
    for keep in (False, True):
        arrays = (jnp.asarray(tokens), jnp.zeros((2, 10), bool), jnp.array([[2, 5], [4, 0]]), jnp.full((2, 2), keep))
        (loss, metrics), gradients = run(params, tokens, make_blocks(*arrays, block_size=4, mask_token_id=3))
        assert float(loss) == 0.0 and all((np.asarray(g) == 0).all() for g in jax.tree.leaves(gradients))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(metrics))
