"""The drafter that trains and the drafter that decodes are one function; what a block may see; drafter folders."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.drafter_models import BAR, drafter_config, random_tokens, relative_l2, tapped_states, tiny_drafter, tiny_target
from flax import nnx
from safetensors.numpy import load_file, save_file

from dspine_jax.anchors import make_blocks
from dspine_jax.attention import attend
from dspine_jax.config import DrafterConfig
from dspine_jax.config_io import read_config
from dspine_jax.drafter import Drafter
from dspine_jax.drafter_io import drafter_parameter_counts, load_drafter, save_drafter
from dspine_jax.objective import row_context, run_blocks
from dspine_jax.selection import anchor_features, select_greedy
from pallas_kernels.block_attention import block_attention
from pallas_kernels.topk_logits import topk_logits
from pallas_kernels.transition import transition_table

METHODS = ("dflash", "dspine")


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def drafters(target) -> dict[str, Drafter]:
    """One drafter a method: the block size is an argument of the calls below, so that prefill and verify compile once."""
    return {method: tiny_drafter(target, method, block_size=16) for method in METHODS}


# ---- R03: training path == decoding path --------------------------------------------------------


def everything(drafter, target, block, feature_BNR, predecessors_BNJ) -> dict:
    """All that selection and losses read from a block pass."""
    rows_VD, num_tokens = target.output_embedding_VD, target.config.num_tokens
    out = {
        "hidden": block.hidden_BNKD,
        "logits": target.logits(block.hidden_BNKD)[..., :num_tokens],
        "tokens": select_greedy(drafter, target, block, predecessors_BNJ[..., 0], feature_BNR),
    }
    if drafter.config.redoes_last_write:
        P = drafter.config.injection.num_candidates
        _, ids = topk_logits(block.hidden_BNKD[:, :, 1:], rows_VD, P, num_tokens=num_tokens)
        weights = drafter.injections[str(drafter.config.num_layers - 1)].weights
        features = anchor_features(drafter, rows_VD, ids)
        args = (block.pre_write_BNKD, block.hidden_gate_BNKD, ids, feature_BNR, features, rows_VD, weights, drafter.norm.weight[...])
        out |= {
            "features": jnp.stack(block.features),
            "pre_write": block.pre_write_BNKD,
            "conditioned": drafter.conditioned(block, anchor_features(drafter, rows_VD, predecessors_BNJ)),
            "candidates": ids,
            "table": transition_table(*args, eps=drafter.config.rms_norm_eps),
        }
    return out


@nnx.jit(static_argnames="block_size")
def train_path(drafter, target, tokens_BS, anchors_BN, block_size=6):
    """Whole rows, all anchors at once, as a training step does it."""
    c = drafter.config
    tapped = target(tokens_BS, target_layer_ids=c.target_layer_ids).tapped_BTE
    mask, keep = jnp.ones_like(tokens_BS, bool), jnp.ones_like(anchors_BN, bool)
    blocks = make_blocks(tokens_BS, mask, anchors_BN, keep, block_size=block_size, mask_token_id=c.mask_token_id)
    block, feature = run_blocks(drafter, target, row_context(drafter, tapped), blocks, jnp.float32)
    return everything(drafter, target, block, feature, blocks.predecessors_BNJ)


@nnx.jit(static_argnames="capacity")
def prefill(drafter, target, tokens_BS, lengths_B, capacity):
    out = target.prefill(tokens_BS, lengths_B, capacity=capacity, target_layer_ids=drafter.config.target_layer_ids)
    cache = drafter.empty_cache(tokens_BS.shape[0], capacity, jnp.float32)
    return out.cache, drafter.extend_cache(cache, out.tapped_BTE, lengths_B)


@nnx.jit
def verify(drafter, target, tokens_BT, count_B, target_cache, cache):
    """Feed T tokens, commit ``count``: the rest is rolled back by not counting it."""
    out = target.verify(tokens_BT, target_cache, target_layer_ids=drafter.config.target_layer_ids)
    return out.cache.with_lengths(target_cache.lengths_B + count_B), drafter.extend_cache(cache, out.tapped_BTE, count_B)


@nnx.jit
def draft(drafter, target, anchor_token_B, predecessors_BJ, cache):
    """One block of every row, standing at the end of its cache; the predecessors (one fewer than slots) are for the conditioned path."""
    J = predecessors_BJ.shape[1]
    ids_BNK = jnp.pad(anchor_token_B[:, None], ((0, 0), (0, J)), constant_values=drafter.config.mask_token_id)[:, None]
    feature = anchor_features(drafter, target.output_embedding_VD, ids_BNK[..., 0])
    positions = (cache.lengths_B[:, None] + jnp.arange(J + 1))[:, None]
    noise = jnp.take(target.input_embedding_VD, ids_BNK, axis=0)
    block = drafter(noise, cache.keys, cache.values, cache.lengths_B[:, None], positions, feature)
    return everything(drafter, target, block, feature, predecessors_BJ[:, None])


def decode_to(drafter, target, tokens_BS: np.ndarray, anchors_B: np.ndarray, capacity: int, rng):
    """A cache whose rows end before their anchors, built in unequal pieces with rejected rows in between."""
    B = len(tokens_BS)
    start = np.minimum(anchors_B, 4)
    prompt = np.where(np.arange(4) < start[:, None], tokens_BS[:, :4], rng.integers(4, 120, (B, 4)))
    target_cache, cache = prefill(drafter, target, prompt, start, capacity)
    done, calls = start.copy(), 0
    while (done < anchors_B).any():
        count = np.minimum(rng.integers(0, 4, B), anchors_B - done)
        block = rng.integers(4, 120, (B, 5)).astype(np.int32)
        for b in range(B):
            block[b, : count[b]] = tokens_BS[b, done[b] : done[b] + count[b]]
        target_cache, cache = verify(drafter, target, block, count, target_cache, cache)
        done += count
        calls += 1
    np.testing.assert_array_equal(cache.lengths_B, anchors_B)
    assert anchors_B.max() < 10 or calls > 2
    return cache


@pytest.mark.parametrize("block_size", [2, 7, 16])
@pytest.mark.parametrize("method", METHODS)
def test_training_and_decoding_give_the_same_block(target, drafters, method, block_size):
    """R03: context from a cache filled piece by piece, rows at different anchors, against whole padded rows."""
    drafter = drafters[method]
    S, short = 32, 27
    tokens = random_tokens(3, 2, S)  # row 1 counts as 27 tokens long: what follows is padding that holds real ids
    last = [S - block_size, short - block_size]
    anchors = np.array([[1, 7, last[0]], [1, 7, last[1]]], np.int32)
    trained = train_path(drafter, target, tokens, anchors, block_size)
    rng = np.random.default_rng(4)
    for turn in range(3):
        columns = np.array([turn, (turn + 1) % 3])
        at = anchors[np.arange(2), columns]
        truth = tokens.copy()
        truth[1, short:] = 99
        cache = decode_to(drafter, target, truth, at, S + 9, rng)
        predecessors = np.stack([tokens[b, at[b] : at[b] + block_size - 1] for b in range(2)])
        decoded = draft(drafter, target, tokens[np.arange(2), at], predecessors, cache)
        for name, ours in decoded.items():
            for b in range(2):
                pick = lambda x, n: np.asarray(x)[:, b, n] if name == "features" else np.asarray(x)[b, n]  # noqa: B023, E731
                a, e = pick(ours, 0), pick(trained[name], columns[b])
                if name in ("tokens", "candidates"):
                    np.testing.assert_array_equal(a, e, err_msg=name)
                else:
                    assert relative_l2(a, e) <= BAR, (name, int(at[b]))


@pytest.mark.parametrize("method", METHODS)
def test_the_parity_test_sees_a_context_that_is_one_row_off(target, drafters, method):
    drafter = drafters[method]
    tokens, at = random_tokens(3, 2, 32), np.array([7, 12])
    trained = train_path(drafter, target, tokens, np.stack([at, at, at], axis=1), 7)
    cache = decode_to(drafter, target, tokens, at, 41, np.random.default_rng(4))
    predecessors = np.stack([tokens[b, at[b] : at[b] + 6] for b in range(2)])
    right = draft(drafter, target, tokens[np.arange(2), at], predecessors, cache)
    assert relative_l2(right["hidden"], trained["hidden"][:, :1]) <= BAR
    for offset in (-1, 1):
        wrong = draft(drafter, target, tokens[np.arange(2), at], predecessors, cache.with_lengths(cache.lengths_B + offset))
        assert relative_l2(wrong["hidden"], trained["hidden"][:, :1]) > 1e-3


def test_rows_past_the_capacity_never_overwrite_good_ones(target):
    """L19 for the drafter's cache: 8 rows, 7 valid, a write of 4."""
    drafter = tiny_drafter(target, "dflash")
    taps = np.random.default_rng(0).normal(size=(1, 11, 128)).astype(np.float32)
    cache = drafter.extend_cache(drafter.empty_cache(1, 8, jnp.float32), taps[:, :7], jnp.array([7]))
    more = drafter.extend_cache(cache, taps[:, 7:], jnp.array([1]))
    one = drafter.extend_cache(cache, taps[:, 7:8], jnp.array([1]))
    for old, new, expected in zip(cache.keys + cache.values, more.keys + more.values, one.keys + one.values):
        np.testing.assert_array_equal(old[:, :7], new[:, :7])
        assert relative_l2(new[:, 7], expected[:, 7]) <= 1e-6  # the last row is the one that fits, not a later one


# ---- R01: overlapping blocks --------------------------------------------------------------------


def hidden_of_anchors_unjitted(drafter, target, tokens_BS, tapped_BSE, anchors_BN):
    c = drafter.config
    mask, keep = jnp.ones_like(tokens_BS, bool), jnp.ones_like(anchors_BN, bool)
    blocks = make_blocks(tokens_BS, mask, anchors_BN, keep, block_size=c.block_size, mask_token_id=c.mask_token_id)
    return run_blocks(drafter, target, row_context(drafter, tapped_BSE), blocks, jnp.float32)[0].hidden_BNKD


hidden_of_anchors = nnx.jit(hidden_of_anchors_unjitted)


@pytest.mark.parametrize("method", METHODS)
def test_a_block_sees_target_features_strictly_before_its_anchor(target, method):
    """R01: anchors 8, 9, 10 nearer than a block of 4; noise at or past the anchor changes exactly nothing, noise before it does."""
    drafter = tiny_drafter(target, method, block_size=4)
    tokens, anchors = random_tokens(5, 1, 16), np.array([[8, 9, 10]])
    tapped = np.asarray(tapped_states(target, drafter, tokens))
    plain = np.asarray(hidden_of_anchors(drafter, target, tokens, tapped, anchors))
    noise = np.random.default_rng(6).normal(size=tapped.shape).astype(np.float32)
    gradient = jax.jit(jax.grad(lambda taps, n: jnp.sum(jnp.sin(hidden_of_anchors_unjitted(drafter, target, tokens, taps, anchors)[:, n])), argnums=0))
    for n, anchor in enumerate(anchors[0]):
        behind, before = tapped.copy(), tapped.copy()
        behind[:, anchor:] += noise[:, anchor:]
        before[:, anchor - 1] += noise[:, anchor - 1]
        np.testing.assert_array_equal(np.asarray(hidden_of_anchors(drafter, target, tokens, behind, anchors))[:, n], plain[:, n])
        assert np.abs(np.asarray(hidden_of_anchors(drafter, target, tokens, before, anchors))[:, n] - plain[:, n]).max() > 1e-3
        pull = np.abs(np.asarray(gradient(tapped, n))).max(axis=(0, 2))
        assert (pull[anchor:] == 0).all() and (pull[:anchor] > 0).all()


# ---- R04: attention inside the block ------------------------------------------------------------


def attention_pairs(causal: bool) -> np.ndarray:
    """[N,K,S+N*K] bool: which keys reach which query, read off one-hot values."""
    S, anchors, K = 12, (2, 5, 6), 4
    N, keys = len(anchors), 12 + 3 * 4
    one_hot = np.eye(keys, dtype=np.float32)
    zeros = lambda *shape: jnp.zeros((1, *shape, 1, keys))  # noqa: E731
    own = one_hot[S:].reshape(1, N, K, 1, keys)
    out = block_attention(zeros(N, K), zeros(S), one_hot[None, :S, None], zeros(N, K), own, jnp.array([anchors]), causal=causal)
    return np.asarray(out)[0, :, :, 0] > 0


@pytest.mark.parametrize(("causal", "count"), [(False, 100), (True, 82)])
def test_visible_pairs_equal_a_mask_written_out_by_loops(causal, count):
    """R04: length 12, anchors 2, 5, 6, blocks of 4: 100 pairs two-way, 82 causal."""
    expected = np.zeros((3, 4, 24), bool)
    for n, anchor in enumerate((2, 5, 6)):
        for slot in range(4):
            for j in range(12):
                expected[n, slot, j] = j < anchor
            for other in range(4):
                expected[n, slot, 12 + 4 * n + other] = other <= slot if causal else True
    pairs = attention_pairs(causal)
    assert pairs.sum() == expected.sum() == count
    np.testing.assert_array_equal(pairs, expected)


@pytest.mark.parametrize(("causal", "moves"), [(False, True), (True, False)])
def test_slot_5_reaches_slot_2_only_in_a_two_way_block(target, causal, moves):
    drafter = tiny_drafter(target, "dflash", block_size=8, block_attention="causal" if causal else "bidirectional")
    rng = np.random.default_rng(7)
    noise = rng.normal(size=(1, 1, 8, 64)).astype(np.float32)
    context = drafter.context_kv(rng.normal(size=(1, 6, 128)).astype(np.float32), jnp.arange(6)[None])
    run = nnx.jit(lambda drafter, x: drafter(x, *context, jnp.array([[6]]), 6 + jnp.arange(8)[None, None]).hidden_BNKD)
    changed = noise.copy()
    changed[:, :, 5] += 1.0
    before, after = np.asarray(run(drafter, noise))[0, 0], np.asarray(run(drafter, changed))[0, 0]
    assert np.abs(before[5] - after[5]).max() > 1e-3
    if moves:
        assert np.abs(before[2] - after[2]).max() > 1e-4
    else:
        np.testing.assert_array_equal(before[:5], after[:5])


def test_the_mask_of_the_method_is_resolved_and_stored(target, tmp_path):
    for method, attention in (("dflash", "bidirectional"), ("dspine", "causal")):
        drafter = tiny_drafter(target, method)
        save_drafter(tmp_path / method, drafter)
        assert read_config(tmp_path / method / "config.json", DrafterConfig).block_attention == attention
    with pytest.raises(ValueError, match="block_attention"):
        drafter_config(target.config, "dspine", block_attention="bidirectional")


# ---- K07: nothing to see ------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_unkept_and_first_position_blocks_stay_finite_and_leave_others_alone(target, method):
    """K07: an unkept block and an anchor at 0 beside a normal block, in value and gradient."""
    drafter = tiny_drafter(target, method)
    tokens = jnp.asarray(random_tokens(8, 1, 16))
    tapped = tapped_states(target, drafter, tokens)
    graph, params, rest = nnx.split(drafter, nnx.Param, ...)

    @jax.jit
    def value_and_gradient(params, anchors, keep, chosen):
        def loss(params):
            drafter = nnx.merge(graph, params, rest)
            c = drafter.config
            blocks = make_blocks(tokens, jnp.ones_like(tokens, bool), anchors, keep, block_size=c.block_size, mask_token_id=c.mask_token_id)
            block, _ = run_blocks(drafter, target, row_context(drafter, tapped), blocks, jnp.float32)
            weights = chosen[..., None, None]
            total = jnp.sum(jnp.sin(block.hidden_BNKD) * weights)
            for p in block.features:
                total += jnp.sum(jnp.sin(p) * weights)
            return total, block.hidden_BNKD

        return jax.value_and_grad(loss, has_aux=True)(params)

    alone = hidden_of_anchors(drafter, target, tokens, tapped, jnp.array([[9]]))
    anchors, keep, first = jnp.array([[9, 0, 5]]), jnp.array([[True, True, False]]), jnp.array([[1.0, 0.0, 0.0]])
    (_, hidden), gradient = value_and_gradient(params, anchors, keep, first)
    _, gradient_alone = value_and_gradient(params, jnp.array([[9, 9, 9]]), jnp.ones((1, 3), bool), first)
    assert np.isfinite(hidden).all()
    assert relative_l2(hidden[:, 0], alone[:, 0]) <= 1e-6
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(gradient_alone)):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max() + 1e-9))
    _, gradient = value_and_gradient(params, anchors, keep, jnp.ones((1, 3)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_a_query_without_any_key_gives_zero_and_finite_gradients():
    rng = np.random.default_rng(9)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 3, 2, 8)), jnp.float32) for _ in range(3))
    visible = jnp.array([[[True, False, False], [False, False, False], [True, True, True]]])
    run = lambda q, k, v: attend(q, k, v, visible)  # noqa: E731
    out = run(q, k, v)
    assert (out[:, 1] == 0).all() and np.isfinite(out).all()
    for gradient in jax.grad(lambda *args: jnp.sum(jnp.sin(run(*args))), argnums=(0, 1, 2))(q, k, v):
        assert np.isfinite(gradient).all()
    np.testing.assert_allclose(out[:, 2], attend(q[:, 2:], k, v, visible[:, 2:])[:, 0], rtol=1e-6, atol=1e-7)


# ---- R12: the mask id ---------------------------------------------------------------------------


@pytest.mark.parametrize(("mask_id", "words"), [(None, "not set"), (128, "outside the target's table of 128 rows"), (-1, "outside"), (5, "end token")])
def test_a_bad_mask_id_is_refused_before_any_weight_exists(target, mask_id, words):
    """R12: unset, past the table, negative, or an end id."""
    config = dataclasses.replace(target.config, eos_token_ids=(2, 5))
    with pytest.raises(ValueError, match=f"mask_token_id.*{words}"):
        drafter_config(config, "dflash", mask_token_id=mask_id)


def test_the_mask_id_is_the_same_in_training_decoding_and_after_loading(target, tmp_path):
    drafter = tiny_drafter(target, "dspine", mask_token_id=17)
    save_drafter(tmp_path, drafter)
    loaded = load_drafter(tmp_path, target.config)
    assert loaded.config.mask_token_id == 17 and loaded.config == drafter.config
    tokens, anchors = random_tokens(10, 1, 12), jnp.array([[4]])
    blocks = make_blocks(tokens, jnp.ones((1, 12), bool), anchors, jnp.ones((1, 1), bool), block_size=6, mask_token_id=loaded.config.mask_token_id)
    assert blocks.noise_ids_BNK[0, 0].tolist() == [int(tokens[0, 4])] + [17] * 5


# ---- drafter folders: E01, E05, E07 -------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory) -> Path:
    """A saved DSpine drafter."""
    path = tmp_path_factory.mktemp("drafter")
    save_drafter(path, tiny_drafter(target, "dspine", injection={"layers": (1,)}))
    return path


def copy_folder(folder: Path, to: Path, *, config: dict | None = None, tensors: dict | None = None) -> Path:
    """The folder with other contents."""
    to.mkdir(exist_ok=True)
    content = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(content if config is None else config(content)))
    if tensors is None:
        (to / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    else:
        save_file(tensors, to / "model.safetensors")
    return to


LAYER_NAMES = [
    "input_layernorm.weight",
    "mlp.down_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "post_attention_layernorm.weight",
    "self_attn.k_norm.weight",
    "self_attn.k_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.q_proj.weight",
    "self_attn.v_proj.weight",
]
INJECTION_NAMES = ["feature.weight", "gate_hidden.bias", "gate_hidden.weight", "gate_predecessor.weight", "message.weight", "norm.weight"]


def test_a_folder_holds_exactly_the_promised_tensors_and_reads_back(target, folder):
    """E07: the key set is pinned; neither embedding nor LM head is stored."""
    expected = ["fc.weight", "hidden_norm.weight", "norm.weight", "transfer.basis", "transfer.mean"]
    expected += [f"layers.{layer}.{name}" for layer in (0, 1) for name in LAYER_NAMES] + [f"injections.1.{name}" for name in INJECTION_NAMES]
    stored = load_file(folder / "model.safetensors")
    assert sorted(stored) == sorted(expected)
    assert stored["fc.weight"].shape == (64, 128) and stored["injections.1.feature.weight"].shape == (24, 64)
    drafter, original = load_drafter(folder, target.config), tiny_drafter(target, "dspine", injection={"layers": (1,)})
    for a, b in zip(jax.tree.leaves(nnx.state(drafter)), jax.tree.leaves(nnx.state(original)), strict=True):
        np.testing.assert_array_equal(a, b)
    counts = drafter_parameter_counts(drafter)
    assert counts["head"] == counts["injection"] == 64 + 2 * 64 * 24 + 64 * 64 + 64 + 64 * 24
    assert counts["total"] == sum(x.size for name, x in stored.items() if not name.startswith("transfer."))


def test_bf16_folders_keep_the_transfer_space_in_fp32(target, tmp_path):
    save_drafter(tmp_path, tiny_drafter(target, "dspine"), dtype=jnp.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    assert {str(x.dtype) for name, x in stored.items() if name.startswith("transfer.")} == {"float32"}
    assert {str(x.dtype) for name, x in stored.items() if not name.startswith("transfer.")} == {"bfloat16"}
    drafter = load_drafter(tmp_path, target.config, dtype=jnp.bfloat16)
    assert drafter.fc.kernel[...].dtype == jnp.bfloat16 and drafter.transfer.basis[...].dtype == jnp.float32


def test_missing_taps_are_refused_never_guessed(target, folder, tmp_path):
    """E01: odd tap ids are stored as trained; without the key the loader stops and names it."""
    odd = tiny_drafter(tiny_target(num_layers=6), "dflash", target_layer_ids=(0, 3, 4))
    save_drafter(tmp_path / "odd", odd)
    assert json.loads((tmp_path / "odd" / "config.json").read_text())["target_layer_ids"] == [0, 3, 4]
    for change in (lambda c: {k: v for k, v in c.items() if k != "target_layer_ids"}, lambda c: c | {"target_layer_ids": None}):
        with pytest.raises(ValueError, match="config.json: target_layer_ids is missing"):
            load_drafter(copy_folder(folder, tmp_path / "no_taps", config=change), target.config)


@pytest.mark.parametrize(("ids", "named"), [((1, 3), "3"), ((1, 4), "4"), ((-1, 2), "-1"), ((2, 1), "1"), ((1, 1), "1"), ((), "empty")])
def test_bad_taps_are_refused_by_name(target, folder, tmp_path, ids, named):
    """E05 for a target of 4 layers: last layer, out of range, negative, falling, repeated, none."""
    with pytest.raises(ValueError, match=rf"config.json: .*target_layer_ids.* {named}\b"):
        load_drafter(copy_folder(folder, tmp_path / "bad", config=lambda c: c | {"target_layer_ids": list(ids)}), target.config)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("removed", lambda t: {k: v for k, v in t.items() if k != "injections.1.message.weight"}, r"missing tensor injections\.1\.message\.weight"),
        ("unknown", lambda t: t | {"markov_head.markov_w1.weight": np.zeros((4, 2), np.float32)}, r"markov_head\.markov_w1\.weight \[4, 2\]"),
        ("prefixed", lambda t: {f"model.{k}": v for k, v in t.items()}, r"missing tensors fc\.weight"),
        (
            "transposed",
            lambda t: t | {"fc.weight": np.ascontiguousarray(t["fc.weight"].T)},
            r"'fc\.weight' has shape \[128, 64\], the config asks for \[64, 128\]",
        ),
        ("integers", lambda t: t | {"norm.weight": np.ones(64, np.int32)}, r"'norm\.weight' holds int32"),
    ],
)
def test_a_folder_whose_tensors_are_not_those_of_its_config_is_refused(target, folder, tmp_path, name, change, words):
    """E07: one removed, one unknown, a prefix on all, a kernel in the other orientation, another type."""
    changed = copy_folder(folder, tmp_path / name, tensors=change(load_file(folder / "model.safetensors")))
    with pytest.raises(ValueError, match=words) as error:
        load_drafter(changed, target.config)
    assert str(changed / "model.safetensors") in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 128}, "hidden_size is 64 but the target has 128"),
        ({"vocab_size": 256}, "vocab_size is 128 but the target has 256"),
        ({"num_layers": 6}, "num_target_layers is 4 but the target has 6"),
    ],
)
def test_another_targets_drafter_is_refused_before_its_weights_are_read(target, folder, tmp_path, changes, words):
    other = copy_folder(folder, tmp_path / "other")
    (other / "model.safetensors").write_bytes(b"not weights at all")
    with pytest.raises(ValueError, match=words):
        load_drafter(other, dataclasses.replace(target.config, **changes))


def test_truncated_and_missing_files_are_named(target, folder, tmp_path):
    cut = copy_folder(folder, tmp_path / "cut")
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a whole safetensors file"):
        load_drafter(cut, target.config)
    (cut / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load_drafter(cut, target.config)
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        load_drafter(tmp_path / "nothing", target.config)


@pytest.mark.parametrize(("key", "value", "words"), [("block_sizes", 7, "block_size"), ("num_heads", "4", "num_heads"), ("num_kv_heads", 3, "num_kv_heads 3")])
def test_a_bad_drafter_config_is_refused_with_file_and_key(target, folder, tmp_path, key, value, words):
    with pytest.raises(ValueError, match=rf"config.json: .*{words}"):
        load_drafter(copy_folder(folder, tmp_path / "bad", config=lambda c: c | {key: value}), target.config)


# ---- start of training --------------------------------------------------------------------------


def test_both_methods_start_from_the_same_backbone(target):
    start = {method: Drafter(drafter_config(target.config, method), rngs=nnx.Rngs(params=7)) for method in METHODS}
    states = {method: dict(nnx.to_flat_state(nnx.state(drafter))) for method, drafter in start.items()}
    shared = [path for path in states["dspine"] if path[0] not in ("injections", "transfer")]
    assert sorted(map(str, shared)) == sorted(map(str, states["dflash"]))
    for path in shared:
        np.testing.assert_array_equal(states["dspine"][path].get_value(), states["dflash"][path].get_value(), err_msg=str(path))


def test_with_a_zero_message_training_starts_exactly_at_block_causal_dflash(target):
    spine = Drafter(drafter_config(target.config, "dspine", injection={"message_init_std": 0.0}), rngs=nnx.Rngs(params=7))
    flash = Drafter(drafter_config(target.config, "dflash", block_attention="causal"), rngs=nnx.Rngs(params=7))
    tokens, anchors = random_tokens(12, 2, 16), np.array([[3, 8], [0, 9]], np.int32)
    both = [train_path(drafter, target, tokens, anchors) for drafter in (spine, flash)]
    np.testing.assert_array_equal(both[0]["hidden"], both[1]["hidden"])
    np.testing.assert_array_equal(both[0]["conditioned"], both[0]["hidden"][:, :, 1:])
    np.testing.assert_array_equal(both[0]["tokens"], both[1]["tokens"])
    two_way = Drafter(drafter_config(target.config, "dflash"), rngs=nnx.Rngs(params=7))
    assert relative_l2(train_path(two_way, target, tokens, anchors)["hidden"], both[0]["hidden"]) > 1e-4


def test_rematerialised_layers_change_nothing(target):
    """TrainConfig.remat only trades memory for time."""
    config = drafter_config(target.config, "dflash")
    tokens = random_tokens(13, 1, 16)

    def value_and_gradients(remat):
        drafter = Drafter(config, rngs=nnx.Rngs(params=7), remat=remat)
        tapped = tapped_states(target, drafter, tokens)
        loss = lambda drafter: jnp.sum(jnp.sin(hidden_of_anchors_unjitted(drafter, target, tokens, tapped, jnp.array([[5, 9]]))))  # noqa: E731
        return nnx.jit(nnx.value_and_grad(loss))(drafter)

    (a, ga), (b, gb) = value_and_gradients(False), value_and_gradients(True)
    assert float(a) == pytest.approx(float(b), rel=1e-6)
    for x, y in zip(jax.tree.leaves(ga), jax.tree.leaves(gb), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6 * float(jnp.abs(x).max() + 1e-9))


