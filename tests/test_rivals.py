"""DFlash2, DSpark and Domino: heads, drafts, laws and losses against loops over the slots in float64, and their known failures."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from fixtures.drafter_models import BAR, Reference, random_tokens, reference_of, relative_l2, tiny_drafter, tiny_target, weights_by_loops
from flax import nnx

from dspine_jax.anchors import Blocks, make_blocks
from dspine_jax.checkpoint_io import module_to_tensors
from dspine_jax.config import DrafterConfig, LossConfig, MarkovConfig
from dspine_jax.drafter import BlockOutput, Drafter
from dspine_jax.drafter_io import load_drafter, save_drafter
from dspine_jax.generation import generate
from dspine_jax.objective import block_objective, predicting_states, row_context, run_blocks
from dspine_jax.sampling import SamplingConfig
from dspine_jax.selection import drafting_states, pair_table, select_greedy, select_on_candidates, select_sequentially
from dspine_jax.sequential import correction, sequential_head, text_codes
from dspine_jax.speculative import Decoder, DecodeSettings
from dspine_jax.vocabulary import vocabulary_logits

SAMPLING = SamplingConfig(temperature=2.0)
ANCHORS = (2, 5, 9)
SEQUENTIAL = [name for name in tiny.RIVALS if name != "dflash2"]


@functools.cache
def target():
    return tiny_target()


@functools.cache
def row() -> tuple[np.ndarray, np.ndarray]:
    """(tokens [16], taps [16,E])."""
    tokens = random_tokens(3, 16)
    return tokens, np.asarray(jax.jit(lambda t: target()(t, target_layer_ids=(0, 2)).tapped_BTE)(tokens[None])[0])


@functools.cache
def drafter_of(name: str) -> Drafter:
    """A random drafter whose head is strong enough to change drafts."""
    drafter = tiny_drafter(target(), name, block_size=4)
    for _, variable in nnx.to_flat_state(nnx.state(drafter, nnx.Param)):
        if variable.get_value().shape[0] == target().config.vocab_size:
            variable.set_value(6.0 * variable.get_value())
    return drafter


@functools.cache
def passed(name: str) -> dict:
    """What the library says of blocks at ANCHORS of ``row``, under one jit."""
    drafter = drafter_of(name)
    c, T = drafter.config, target().config.num_tokens
    given = row()

    @jax.jit
    def run():
        tokens, taps = (jnp.asarray(x)[None] for x in given)
        anchors, keep = jnp.array([ANCHORS]), jnp.ones((1, len(ANCHORS)), bool)
        kw = dict(block_size=4, mask_token_id=c.mask_token_id, num_predicting_slots=c.num_predicting_slots)
        blocks = make_blocks(tokens, jnp.ones_like(tokens, bool), anchors, keep, **kw)
        block, _ = run_blocks(drafter, target(), row_context(drafter, taps), blocks, jnp.float32)
        ids_BN, hidden, keys = blocks.noise_ids_BNK[..., 0], drafting_states(c, block), jax.random.split(jax.random.key(1), len(ANCHORS))
        out = {"hidden": block.hidden_BNKD, "tokens": select_greedy(drafter, target(), block, ids_BN, None)}
        if c.selector is not None:
            table, candidates = pair_table(drafter, target(), block, ids_BN, None)
            return out | {"table": table, "candidates": candidates, "draft": select_on_candidates(table[0], candidates[0], keys, SAMPLING)}
        head, logits = sequential_head(drafter, target()), vocabulary_logits(hidden, target().output_embedding_VD, T)
        out["draft"] = select_sequentially(head, hidden[0], logits[0], ids_BN[0], keys, SAMPLING)
        every = block.hidden_BNKD[:, :, c.first_slot :]
        added = correction(head, text_codes(head, every, blocks.predecessors_BNJ))
        out["corrected"] = (vocabulary_logits(every, target().output_embedding_VD, T) + added)[..., :T]
        if c.confidence:
            out["confidence"] = drafter.confidence_logits(every, blocks.predecessors_BNJ)
        return out

    return jax.tree.map(np.asarray, run())


def text_after(anchor: int, count: int) -> list[int]:
    return [int(t) for t in row()[0][anchor : anchor + count]]


def best(logits) -> int:
    return min(range(len(logits)), key=lambda v: (-logits[v], v))


def softmax(x):
    x = np.exp(np.asarray(x) - np.max(x))
    return x / x.sum()


# ---- against loops over slots --------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.RIVALS)
def test_states_scores_and_greedy_drafts_equal_the_loops(name):
    """Hidden states (through DFlash2's convolutions), scores after the true text, and the greedy walk, from every anchor."""
    drafter, got = drafter_of(name), passed(name)
    reference, J = reference_of(drafter, target()), drafter.config.num_draft_tokens
    changed = 0
    for n, anchor in enumerate(ANCHORS):
        block = reference.block(row()[1], int(row()[0][anchor]), anchor)
        assert relative_l2(got["hidden"][0, n], np.stack(block["hidden"])) <= BAR
        hidden, previous = reference.drafting(block), text_after(anchor, 4)
        drafts = [int(row()[0][anchor])]
        if name == "dflash2":
            for j in range(J):
                ids, scores = reference.selector_scores(hidden[j], drafts[-1])
                assert got["candidates"][0, n, j].tolist() == ids
                came_from = 0 if j == 0 else got["candidates"][0, n, j - 1].tolist().index(drafts[-1])
                assert relative_l2(got["table"][0, n, j, came_from], np.array(scores)) <= BAR
                drafts.append(ids[best(scores)])
        else:
            assert relative_l2(got["corrected"][0, n], np.stack(reference.corrected(hidden, previous))) <= BAR
            for j in range(J):
                drafts.append(best(reference.corrected(hidden[: j + 1], drafts)[j]))
        if drafter.config.confidence:
            assert relative_l2(got["confidence"][0, n], np.array([reference.confidence(h, t) for h, t in zip(hidden, previous)])) <= BAR
        assert got["tokens"][0, n].tolist() == drafts[1:]
        changed += drafts[1:] != [best(reference.rows @ h) for h in hidden[:J]]
    assert changed == len(ANCHORS), "a head that changes no draft proves nothing"


@pytest.mark.parametrize("name", tiny.RIVALS)
def test_a_sampled_draft_carries_the_law_it_was_drawn_from(name):
    """q of every slot is the law that the loops give after the tokens really drawn, and the token's own share of it."""
    drafter, draft = drafter_of(name), passed(name)["draft"]
    reference, parted = reference_of(drafter, target()), 0
    for n, anchor in enumerate(ANCHORS):
        hidden = reference.drafting(reference.block(row()[1], int(row()[0][anchor]), anchor))
        previous = [int(row()[0][anchor]), *draft.tokens_BJ[n].tolist()]
        for j, token in enumerate(draft.tokens_BJ[n].tolist()):
            law = np.zeros(len(reference.rows))
            if name == "dflash2":
                ids, scores = reference.selector_scores(hidden[j], previous[j])
                law[ids] = softmax(np.array(scores) / SAMPLING.temperature)
            else:
                law = softmax(reference.corrected(hidden[: j + 1], previous)[j] / SAMPLING.temperature)
            dense = draft.law_at(jnp.full(len(ANCHORS), j), target().config.vocab_size)[n]
            np.testing.assert_allclose(dense[: len(law)], law, atol=1e-5)
            np.testing.assert_allclose(draft.token_prob_BJ[n, j], law[token], atol=1e-5)
            parted += token != int(law.argmax())
    assert parted >= 2, "draws that are all the best token would hide a wrong predecessor"


# ---- losses --------------------------------------------------------------------------------------

LOSS = LossConfig(loss_decay_gamma=3.0, ce_weight=0.3, l1_weight=0.9, confidence_weight=0.7, selector_weight=0.6, vocab_chunk=3)
DPACE = dataclasses.replace(LOSS, dpace_alpha=0.3)
PROGRESS = 0.25


@functools.cache
def batch(name: str) -> tuple[np.ndarray, Blocks]:
    """Two rows of two blocks with a hole in the loss mask, a short row, and the last target state at a row's end."""
    c = drafter_of(name).config
    tokens, mask = random_tokens(50, 2, 10), np.ones((2, 10), bool)
    mask[0, 6] = False
    mask[1] = False
    mask[1, 4:6] = True
    keep = jnp.array([[True, True], [True, False]])
    kw = dict(block_size=4, mask_token_id=c.mask_token_id, num_predicting_slots=c.num_predicting_slots)
    return tokens, make_blocks(jnp.asarray(tokens), jnp.asarray(mask), jnp.array([[2, 7], [4, 0]]), keep, **kw)


@functools.cache
def built(name: str, loss_config: LossConfig):
    """(jitted ``(params, blocks) -> ((loss, metrics), gradients)``, params)."""
    graph, params, rest = nnx.split(drafter_of(name), nnx.Param, ...)
    tokens = jnp.asarray(batch(name)[0])
    loss = lambda params, blocks: block_objective(  # noqa: E731
        nnx.merge(graph, params, rest), target(), tokens, blocks, loss_config, jnp.float32, progress=PROGRESS
    )
    return jax.jit(jax.value_and_grad(loss, has_aux=True)), params


@functools.cache
def target_read() -> tuple[np.ndarray, np.ndarray]:
    """(taps, laws p of the next token) at every position of the batch's rows: p from ``target.logits`` itself."""
    tokens = batch("dspark")[0]
    out = jax.jit(lambda t: (lambda o: (o.tapped_BTE, jax.nn.softmax(target().logits(o.hidden_BTD))))(target()(t, target_layer_ids=(0, 2))))(tokens)
    return np.asarray(out[0]), np.asarray(out[1], np.float64)[..., : target().config.num_tokens]


def objective_by_loops(reference: Reference, tokens, blocks: Blocks, loss: LossConfig, kept: dict) -> dict[str, float]:
    """The loss of BASELINES 3 and 4, a slot at a time, with all logits of a slot at once.

    ``kept`` holds slot weights and what the confidence is to say from the first call on: no gradient goes through them.
    """
    c, sums = reference.c, dict.fromkeys(("weight", "base", "main", "l1", "bce", "selector", "present"), 0.0)
    cross_entropy = lambda logits, label: np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[label]  # noqa: E731
    for b, n in np.ndindex(2, 2):
        if not np.asarray(blocks.eval_mask_BNJ[b, n]).any():
            continue
        anchor = int(blocks.context_len_BN[b, n])
        hidden = reference.drafting(reference.block(target_read()[0][b], int(tokens[b, anchor]), anchor))
        previous = blocks.predecessors_BNJ[b, n].tolist()
        logits = reference.corrected(hidden, previous)
        main = [cross_entropy(logits[j], int(blocks.labels_BNJ[b, n, j])) for j in range(len(hidden))]
        weights = kept.setdefault((b, n), weights_by_loops(loss, main, blocks.eval_mask_BNJ[b, n].tolist()))
        for j, h in enumerate(hidden):
            if not bool(blocks.eval_mask_BNJ[b, n, j]):
                continue
            w, label = weights[j], int(blocks.labels_BNJ[b, n, j])
            sums["weight"] += w
            sums["base"] += w * cross_entropy(reference.rows @ h, label)
            sums["main"] += w * main[j]
            q, p = softmax(logits[j]), target_read()[1][b, anchor + j]
            sums["l1"] += w * np.abs(q - p).sum()
            if c.confidence:
                z, share = reference.confidence(h, previous[j]), kept.setdefault((b, n, j), np.minimum(p, q).sum())
                sums["bce"] -= w * (share * np.log(1 / (1 + np.exp(-z))) + (1 - share) * np.log(1 / (1 + np.exp(z))))
            if c.selector is not None:
                ids, scores = reference.selector_scores(h, previous[j])
                if label in ids:
                    sums["present"] += w
                    sums["selector"] += w * cross_entropy(np.array(scores), ids.index(label))
    mean = {name: sums[name] / sums["weight"] for name in ("base", "main", "l1", "bce")}
    mean["selector"] = sums["selector"] / sums["present"] if sums["present"] else 0.0
    total = loss.ce_weight * mean["main"] + loss.l1_weight * mean["l1"]
    if c.gru is not None:
        share = 1 - PROGRESS / loss.base_decay_fraction
        total = (1 - share) * total + share * mean["base"]
    total += loss.confidence_weight * mean["bce"] * c.confidence + loss.selector_weight * mean["selector"]
    return mean | {"total": total}


def with_a_candidate(name: str, blocks: Blocks) -> Blocks:
    """For DFlash2: the first block's first label is its third candidate, so that the selector has something to learn."""
    if name != "dflash2":
        return blocks
    tokens, reference = batch(name)[0], reference_of(drafter_of(name), target())
    hidden = reference.drafting(reference.block(target_read()[0][0], int(tokens[0, 2]), 2))
    return dataclasses.replace(blocks, labels_BNJ=blocks.labels_BNJ.at[0, 0, 0].set(reference.selector_scores(hidden[0], int(tokens[0, 2]))[0][2]))


OBJECTIVES = [(name, LOSS) for name in tiny.RIVALS] + [(name, DPACE) for name in ("dflash2", "dspark", "domino")]


@pytest.mark.parametrize("name, loss_config", OBJECTIVES, ids=[f"{name}{' dpace' * (config is DPACE)}" for name, config in OBJECTIVES])
def test_the_objective_and_its_gradients_equal_the_sum_over_slots(name, loss_config):
    """Every term, and the slope along the gradient of every tensor, in float64 central differences."""
    run, params = built(name, loss_config)
    tokens, blocks = batch(name)
    blocks = with_a_candidate(name, blocks)
    (loss, metrics), gradients = run(params, blocks)
    reference, kept = reference_of(drafter_of(name), target()), {}
    expected = objective_by_loops(reference, tokens, blocks, loss_config, kept)
    assert float(loss) == pytest.approx(expected["total"], rel=BAR)
    main = "base" if name == "dflash2" else "conditioned"
    assert float(metrics[f"loss/ce_{main}"][0]) == pytest.approx(expected["main"], rel=BAR)
    assert float(metrics["loss/l1"][0]) == pytest.approx(expected["l1"], rel=BAR)
    if name == "dflash2":
        assert float(metrics["loss/selector"][0]) == pytest.approx(expected["selector"], rel=BAR) and expected["selector"] > 0
        assert float(metrics["candidate_recall"][0].sum()) >= 1

    graph, _, rest = nnx.split(drafter_of(name), nnx.Param, ...)
    rng = np.random.default_rng(6)
    for tensor, gradient in module_to_tensors(nnx.merge(graph, gradients, rest)).items():
        gradient = np.asarray(gradient, np.float64)
        size, weights = np.linalg.norm(gradient), reference.t[tensor]
        assert size > 1e-6, tensor
        direction = gradient / size + rng.normal(size=gradient.shape) / np.sqrt(gradient.size)
        values = []
        for step in (1e-5, -1e-5):
            reference.t[tensor] = weights + step * direction
            values.append(objective_by_loops(reference, tokens, blocks, loss_config, kept)["total"])
        reference.t[tensor] = weights
        slope = (values[0] - values[1]) / 2e-5
        assert abs(slope - float(np.sum(gradient * direction))) <= 2e-4 * size, (tensor, slope, float(np.sum(gradient * direction)))


def test_no_logits_of_a_whole_batch_exist_at_one_time():
    """The loss of corrected logits, forward and backward, in 16 chunks: its temporary memory is below one array [B,N,K,V] in fp32."""
    from dspine_jax.head_losses import slot_scores

    B, T, D, R, V = 2, 512, 32, 8, 8192
    arrays = (jnp.ones((B, T, D)), jnp.ones((V, D)), jnp.zeros((B, T), jnp.int32), jnp.ones((B, T, R)), jnp.ones((V, R)), jnp.ones((B, T, D)))

    def loss(chunk, hidden, rows, labels, codes, table, states):
        ce, _, distance = slot_scores(hidden, rows, labels, V - 5, chunk, corrected_by=(codes, table), target_hidden_BTD=states)
        return ce.sum() + distance.sum()

    def temporary(chunk):
        step = jax.jit(jax.grad(functools.partial(loss, chunk), argnums=(0, 3, 4)))
        return step.lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    whole = B * T * V * 4
    assert temporary(T) > whole, "otherwise this memory says nothing"
    assert temporary(T // 16) < whole / 2


def test_in_bf16_the_corrected_loss_stays_in_fp32_and_its_gradient_close():
    from dspine_jax.head_losses import slot_scores

    rng = np.random.default_rng(0)
    hidden, codes, states, rows, table = (rng.normal(size=s).astype(np.float32) for s in ((2, 9, 16), (2, 9, 4), (2, 9, 16), (50, 16), (50, 4)))
    labels = jnp.asarray(rng.integers(0, 45, (2, 9)))

    @functools.partial(jax.jit, static_argnums=0)
    def run(dtype, hidden, codes, table):
        def loss(hidden, codes, table):
            options = dict(corrected_by=(codes, table), target_hidden_BTD=jnp.asarray(states, dtype))
            ce, _, distance = slot_scores(hidden, jnp.asarray(rows, dtype), labels, 45, 4, **options)
            return (ce + distance).sum(), (ce, distance)

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(hidden.astype(dtype), codes.astype(dtype), table)

    short = [x.astype(jnp.bfloat16).astype(np.float32) for x in (hidden, codes, table)]
    rows, states = (np.asarray(x.astype(jnp.bfloat16), np.float32) for x in (rows, states))
    (_, exact), exact_gradients = run(jnp.dtype("float32"), *short)
    (_, ours), gradients = run(jnp.dtype("bfloat16"), *short)
    for a, b in zip(ours, exact):
        assert a.dtype == jnp.float32 and relative_l2(a, b) <= BAR
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    for a, b in zip(gradients, exact_gradients):
        assert relative_l2(a.astype(jnp.float32), b) <= 1e-2


def test_dominos_base_share_falls_with_the_steps_that_the_state_counts():
    """From 1 to 0 over base_decay_fraction of the run, by the counter that a checkpoint keeps: a resumed run goes on where it was."""
    s = tiny.setup(tiny.train_config("domino", drafter={"num_layers": 1}, steps=10, loss=LossConfig(base_decay_fraction=0.5)))
    tokens, mask, _ = tiny.rows(8)
    shares, state = [], s.state
    with jax.set_mesh(s.mesh):
        for done in (0, 2, 5, 9):
            state, metrics = s.step(dataclasses.replace(state, step=jnp.int32(done)), s.target_state, s.batch(tokens, mask))
            base, main = (float(metrics[f"loss/ce_{path}"][0]) for path in ("base", "conditioned"))
            shares.append(float(metrics["loss/base_share"][0]))
            assert float(metrics["loss/total"][0]) == pytest.approx(shares[-1] * base + (1 - shares[-1]) * main, rel=1e-5)
    assert shares == pytest.approx([1.0, 0.6, 0.0, 0.0], abs=1e-6)


# ---- R07: the target's law -----------------------------------------------------------------------


def test_R07_the_law_that_is_taught_is_that_of_the_targets_logits():
    """Norm weights lie in [0.5, 1.5]: a head on states without the final norm, or normed twice, is another law."""
    tokens, blocks = batch("dspark")

    @jax.jit
    def laws(tokens):
        out = target()(tokens, target_layer_ids=(0, 2))
        used = jax.nn.softmax(target().logits(predicting_states(out.hidden_BTD, blocks)))
        twice = jax.nn.softmax(target().logits(target().norm(out.hidden_BTD)))
        raw = jax.nn.softmax(target().logits(out.hidden_BTD / target().norm.weight[...]))
        return used, twice, raw

    used, *wrong = (np.asarray(x)[..., : target().config.num_tokens] for x in laws(tokens))
    for b, n, j in np.ndindex(*blocks.labels_BNJ.shape):
        at = min(int(blocks.positions_BNK[b, n, 0]) + j, 9)
        np.testing.assert_allclose(used[b, n, j], target_read()[1][b, at], atol=1e-6)
        assert all(np.abs(law[b, at] - used[b, n, j]).max() > 1e-3 for law in wrong)


# ---- L24: which token a bias is looked up with ---------------------------------------------------

STEP = 7  # the toy language: token t is followed by t + 7


def toy_markov(kind: str = "vanilla") -> tuple[Drafter, object]:
    """(a drafter whose Markov head knows the toy language, a target that writes it). All block states are 0."""
    V = 32
    changes = dict(vocab_size=V, num_tokens=V, eos_token_ids=())
    toy = tiny.tiny_target(**changes)
    config = tiny.train_config("dflash", drafter={"markov": MarkovConfig(kind, V), "label_shift": "shifted", "block_size": 6, "num_layers": 1})
    drafter = Drafter(config.drafter.resolve(toy.config), rngs=nnx.Rngs(0))
    drafter.norm.weight.set_value(jnp.zeros_like(drafter.norm.weight[...]))
    drafter.markov_head.markov_w1.embedding.set_value(jnp.eye(V))
    drafter.markov_head.markov_w2.embedding.set_value(8.0 * jnp.roll(jnp.eye(V), STEP, axis=0))
    return drafter, toy


def test_L24_every_draft_follows_the_token_drafted_before_it():
    """Along a toy language the head alone is right in every slot; without it the drafts are one constant token."""
    drafter, toy = toy_markov()
    block = BlockOutput(jnp.zeros((1, 32, 6, 64)), None, None, ())
    anchors = jnp.arange(32)[None]
    drafts = np.asarray(select_greedy(drafter, toy, block, anchors, None))
    assert (drafts == (np.arange(32)[None, :, None] + STEP * np.arange(1, 7)) % 32).all()
    plain = Drafter(dataclasses.replace(drafter.config, markov=None), rngs=nnx.Rngs(0))
    assert (np.asarray(select_greedy(plain, toy, block, anchors, None)) == 0).all(), "rank 0: the plain block's own logits"
    with pytest.raises(ValueError, match="markov.rank 0 must be positive; without a Markov head set drafter.markov to None"):
        MarkovConfig(rank=0)
    with pytest.raises(ValueError, match="markov.rank -1 must be positive"):
        MarkovConfig(rank=-1)


def test_L24_a_draft_follows_the_drawn_token_and_not_the_best_one():
    """Sampled hot, most draws are not the best token: each slot's law still peaks after the token really drawn."""
    drafter, toy = toy_markov()
    head, keys = sequential_head(drafter, toy), jax.random.split(jax.random.key(0), 64)
    anchor = jnp.arange(64) % 32
    draft = select_sequentially(head, jnp.zeros((64, 6, 64)), jnp.zeros((64, 6, 32)), anchor, keys, SamplingConfig(temperature=4.0))
    drawn, laws = np.asarray(draft.tokens_BJ), np.asarray(draft.probs_BJP)
    before = np.concatenate([np.asarray(anchor)[:, None], drawn[:, :-1]], axis=1)
    assert (laws.argmax(-1) == (before + STEP) % 32).all()
    assert (drawn[:, 0] != (np.asarray(anchor) + STEP) % 32).mean() > 0.5, "forced off the best token"


# ---- G03: switches that belong together ----------------------------------------------------------


@pytest.mark.parametrize("markov", [None, MarkovConfig(rank=8)], ids=["plain", "markov"])
@pytest.mark.parametrize("confidence", [False, True], ids=["", "confidence"])
@pytest.mark.parametrize("with_markov", [False, True], ids=["", "reads markov"])
def test_G03_every_setting_of_the_switches_trains_decodes_and_exports_or_is_refused(markov, confidence, with_markov, tmp_path):
    parts = {"markov": markov, "confidence": confidence, "confidence_with_markov": with_markov, "label_shift": "shifted", "num_layers": 1}
    if with_markov and not (confidence and markov):
        with pytest.raises(ValueError) as error:
            DrafterConfig(mask_token_id=3, **parts)
        assert "drafter.confidence_with_markov" in str(error.value) and ("drafter.markov" if confidence else "drafter.confidence is not") in str(error.value)
        return
    s = tiny.setup(tiny.train_config("dflash", drafter=parts, loss=LossConfig(l1_weight=0.9, ce_weight=0.1, prefix_mask=True)))
    tokens, mask, _ = tiny.rows(8)
    state = s.state
    with jax.set_mesh(s.mesh):
        for _ in range(2):
            state, metrics = s.step(state, s.target_state, s.batch(tokens, mask))
    assert int(state.updates) == 2 and np.isfinite(float(metrics["loss/total"][0]))
    trained = nnx.merge(s.graphdef, jax.device_get(state.params), jax.device_get(state.frozen))
    save_drafter(tmp_path, trained)
    loaded = load_drafter(tmp_path, s.target.config)
    assert loaded.config.method == ("dspark" if markov or confidence else "dflash")
    tiny.assert_bit_equal(nnx.state(loaded), nnx.state(trained))
    plain, ours = (generate(Decoder(s.target, d, DecodeSettings(4 if d else 0)), [[5, 6, 7]], max_new_tokens=9) for d in (None, loaded))
    assert ours[0].tokens == plain[0].tokens


@pytest.mark.parametrize("first, second", [("dspark", "domino"), ("dflash2", "dspark gated"), ("dflash2", "domino")])
def test_parts_of_two_methods_are_refused_naming_both(first, second):
    parts = tiny.RIVALS[first] | tiny.RIVALS[second]
    with pytest.raises(ValueError, match=r"drafter\.\w+ and drafter\.\w+.* belong to different methods"):
        DrafterConfig(mask_token_id=3, **parts)


# ---- folders -------------------------------------------------------------------------------------

TENSORS = {
    "dflash2": {
        "candidate_selector.predecessor_codebook": (128, 8), "candidate_selector.successor_codebook": (128, 8),
        "candidate_selector.hidden_projection.weight": (8, 64),
    } | {
        f"layers.{layer}.{part}_conv.{name}": shape
        for layer in (0, 1) for part in ("attention", "mlp") for name, shape in (("base_kernel", (2, 2, 64)), ("kernel_projection.weight", (32, 64)))
    },
    "dspark": {
        "markov_head.markov_w1.weight": (128, 8), "markov_head.markov_w2.weight": (128, 8),
        "confidence_head.proj.weight": (1, 72), "confidence_head.proj.bias": (1,),
    },
    "dspark gated": {
        "markov_head.markov_w1.weight": (128, 8), "markov_head.markov_w2.weight": (128, 8), "markov_head.gate_proj.weight": (8, 72),
        "markov_head.gate_proj.bias": (8,), "confidence_head.proj.weight": (1, 64), "confidence_head.proj.bias": (1,),
    },
    "dspark rnn": {
        "markov_head.markov_w1.weight": (128, 8), "markov_head.markov_w2.weight": (128, 8), "markov_head.joint_proj.weight": (24, 80),
        "markov_head.joint_proj.bias": (24,),
    },
    "domino": {
        "prefix_gru.weight_ih_l0": (36, 64), "prefix_gru.weight_hh_l0": (36, 12), "embed_proj.0.weight": (8, 76), "embed_proj.2.weight": (128, 8),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_a_folder_holds_the_published_tensor_names_and_shapes_and_reads_back(name, tmp_path):
    drafter, plain = drafter_of(name), tiny_drafter(target(), "dflash", block_size=4)
    backbone = {n: x.shape for n, x in module_to_tensors(plain).items()}
    assert {n: x.shape for n, x in module_to_tensors(drafter).items()} == backbone | TENSORS[name]
    save_drafter(tmp_path, drafter)
    loaded = load_drafter(tmp_path, target().config)
    assert loaded.config == drafter.config and loaded.config.method == name.split()[0]
    tiny.assert_bit_equal(nnx.state(loaded), nnx.state(drafter))


def test_all_methods_start_from_one_backbone():
    start = {name: Drafter(drafter_of(name).config, rngs=nnx.Rngs(params=7)) for name in tiny.RIVALS}
    plain = module_to_tensors(Drafter(tiny_drafter(target(), "dflash").config, rngs=nnx.Rngs(params=7)))
    for name, drafter in start.items():
        tensors = module_to_tensors(drafter)
        assert all(np.array_equal(tensors[n], x) for n, x in plain.items()), name
