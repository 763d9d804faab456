"""The target port against transformers' torch models (fixtures), and its own promises (area B).

The fixtures come from make_fixtures.py; test_target_oracle.py asks the live torch models.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspine_jax.config import TargetConfig
from dspine_jax.kv_cache import KVCache
from dspine_jax.target import Target
from dspine_jax.target_io import load_target
from dspine_jax.vocabulary import vocabulary_logits

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = ("target_qwen3", "target_llama")
BAR = 1e-5  # relative L2, fp32


def relative_l2(ours, theirs) -> float:
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.fixture(scope="module")
def loaded() -> dict:
    """name -> (fp32 target, reference arrays)."""
    return {name: (load_target(FIXTURES / name, dtype=jnp.float32), dict(np.load(FIXTURES / name / "reference.npz"))) for name in NAMES}


@nnx.jit(static_argnames="ids")
def forward(model, tokens_BT, ids=()):
    out = model(tokens_BT, target_layer_ids=ids)
    return out, model.logits(out.hidden_BTD)


@nnx.jit(static_argnames=("ids", "capacity"))
def prefill(model, tokens_BS, lengths_B, capacity, ids=()):
    out = model.prefill(tokens_BS, lengths_B, capacity=capacity, target_layer_ids=ids)
    return out, model.logits(out.hidden_BTD)


@nnx.jit(static_argnames="ids")
def verify(model, block_BK, cache, ids=()):
    out = model.verify(block_BK, cache, target_layer_ids=ids)
    return out, model.logits(out.hidden_BTD)


@nnx.jit(static_argnames="ids")
def step(model, token_B, cache, ids=()):
    out = model.step(token_B, cache, target_layer_ids=ids)
    return out, model.logits(out.hidden_BTD)


def tiny(family: str = "qwen3", scale: float = 8.0, **changes) -> Target:
    """Random target; ``scale`` 8 makes logits depend on the text (the default start hardly does)."""
    sizes = {
        "family": family,
        "vocab_size": 64,
        "num_tokens": 64,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "tie_embeddings": False,
    }
    model = Target(TargetConfig(**sizes | changes), rngs=nnx.Rngs(3))
    state = jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, nnx.state(model, nnx.Param))
    nnx.update(model, state)
    return model


# ---- parity ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_and_the_logits_equal_transformers(loaded, name):
    model, ref = loaded[name]
    n = model.config.num_layers
    out, logits = forward(model, jnp.asarray(ref["short_tokens"]), tuple(range(n - 1)))
    ours = np.split(np.asarray(out.tapped_BTE), n - 1, axis=-1)
    for index in range(n - 1):
        assert relative_l2(ours[index], ref["short_layers"][index]) <= BAR, f"layer {index}"
    assert relative_l2(out.hidden_BTD, ref["short_hf_states"][-1]) <= BAR, "final norm"
    assert relative_l2(logits, ref["short_logits"]) <= BAR


@pytest.mark.parametrize("name", NAMES)
def test_positions_up_to_3099_equal_transformers(loaded, name):
    model, ref = loaded[name]
    n, at = model.config.num_layers, ref["long_positions"]
    assert at.max() >= 3000
    out, logits = forward(model, jnp.asarray(ref["long_tokens"]), tuple(range(n - 1)))
    ours = np.split(np.asarray(out.tapped_BTE)[:, at], n - 1, axis=-1)
    for index in range(n - 1):
        assert relative_l2(ours[index], ref["long_layers"][index]) <= BAR, f"layer {index}"
    assert relative_l2(np.asarray(logits)[:, at], ref["long_logits"]) <= BAR


@pytest.mark.parametrize("name", NAMES)
def test_prefill_verify_and_step_equal_transformers_far_from_the_start(loaded, name):
    model, ref = loaded[name]
    tokens, expected = jnp.asarray(ref["long_tokens"]), dict(zip(ref["long_positions"].tolist(), np.moveaxis(ref["long_logits"], 1, 0), strict=True))
    end = tokens.shape[1]
    start = end - 52
    padded = jnp.pad(tokens[:, :start], ((0, 0), (0, 8)), constant_values=9)  # right padding must not matter
    out, logits = prefill(model, padded, jnp.array([start]), end)
    assert relative_l2(logits[:, 3000], expected[3000]) <= BAR
    out, _ = verify(model, jnp.full((1, 50), 9), out.cache.with_lengths([start]))  # a wrong block, rolled back by not committing it
    out, logits = verify(model, tokens[:, start : start + 50], out.cache)
    assert relative_l2(logits[:, 3050 - start], expected[3050]) <= BAR
    cache = out.cache.with_lengths([start + 50])
    for position in (3098, 3099):
        out, logits = step(model, tokens[:, position], cache)
        cache = out.cache
        assert relative_l2(logits[:, 0], expected[position]) <= BAR
    assert int(cache.lengths_B[0]) == end


# ---- T01 ---------------------------------------------------------------------------------------


def test_head_dim_is_read_not_derived(loaded):
    model, _ = loaded["target_qwen3"]  # hidden 64, 4 heads, head_dim 32: its logits are compared above
    attention = model.layers[0].self_attn
    assert [layer.fan for layer in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)] == [(64, 128), (64, 64), (64, 64), (128, 64)]
    out, _ = prefill(model, jnp.zeros((1, 4), jnp.int32), jnp.array([4]), 8)
    assert out.cache.keys[0].shape[-2:] == out.cache.values[0].shape[-2:] == (2, 32)


@pytest.mark.parametrize("changes", [{"rope_theta": 1e6}, {"rms_norm_eps": 1e-2}])
def test_config_numbers_are_live(loaded, changes):
    model, ref = loaded["target_llama"]
    tokens = jnp.asarray(ref["short_tokens"])
    changed = Target(dataclasses.replace(model.config, **changes), rngs=nnx.Rngs(0))
    nnx.update(changed, nnx.state(model))
    assert relative_l2(forward(changed, tokens)[1], ref["short_logits"]) > 1e-3


# ---- T03 ---------------------------------------------------------------------------------------


def test_padded_columns_never_win():
    model = tiny(vocab_size=256, num_tokens=130)
    rows = jnp.zeros((256, 64)).at[:130, 0].set(-1.0).at[7, 0].set(-0.5)
    model.lm_head.embedding[...] = rows
    hidden = jnp.zeros((1, 1, 64)).at[..., 0].set(1.0)
    assert float(jnp.max(vocabulary_logits(hidden, rows, 256))) == 0.0, "without the mask a padded column wins"
    logits = model.logits(hidden)
    assert logits.shape == (1, 1, 256)
    assert int(jnp.argmax(logits)) == 7
    assert float(jnp.sum(jax.nn.softmax(logits)[..., :130])) == pytest.approx(1.0, abs=1e-6)
    samples = jax.random.categorical(jax.random.key(0), logits[0, 0], shape=(10_000,))
    assert int(samples.max()) < 130
    unpadded = jax.nn.log_softmax(logits[..., :130])
    np.testing.assert_allclose(jax.nn.log_softmax(logits)[..., :130], unpadded, rtol=0, atol=1e-6)


# ---- T12 ---------------------------------------------------------------------------------------


def test_ties_go_to_the_lowest_id_in_every_path():
    model = tiny()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (1, 9)), jnp.int32)
    out, _ = forward(model, tokens)
    best = 10.0 * out.hidden_BTD[0, -1]
    for row in (40, 11):
        model.lm_head.embedding[row] = best
    out, whole = prefill(model, tokens, jnp.array([9]), 16)
    _, block = verify(model, tokens[:, 4:], out.cache.with_lengths([4]))
    _, one = step(model, tokens[:, 8], out.cache.with_lengths([8]))
    for path, logits in (("prefill", whole[0, -1]), ("verify", block[0, -1]), ("step", one[0, 0])):
        assert float(logits[11]) == float(logits[40]) == float(logits.max()), path
        assert int(jnp.argmax(logits)) == 11, path


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_verify_and_step_choose_the_same_tokens(family):
    model = tiny(family)
    B, S, K, blocks = 16, 10, 8, 4
    rng = np.random.default_rng(1)
    prompts, lengths = jnp.asarray(rng.integers(0, 64, (B, S)), jnp.int32), jnp.asarray(rng.integers(1, S + 1, B), jnp.int32)
    capacity = S + K * blocks
    out, logits = prefill(model, prompts, lengths, capacity)
    start = out.cache
    token = jnp.argmax(jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0], axis=-1)
    chosen, cache = [token], start
    for _ in range(K * blocks):
        out, logits = step(model, chosen[-1], cache)
        cache = out.cache
        chosen.append(jnp.argmax(logits[:, 0], axis=-1))
    plain = jnp.stack(chosen, axis=1)
    assert len(np.unique(np.asarray(plain))) > 8, "the text must vary for the comparison to mean anything"
    cache = start
    for index in range(blocks):
        block = plain[:, index * K : (index + 1) * K]
        out, logits = verify(model, block, cache)
        cache = out.cache.with_lengths(cache.lengths_B + K)
        np.testing.assert_array_equal(jnp.argmax(logits, axis=-1), plain[:, index * K + 1 : (index + 1) * K + 1])


# ---- D11 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_features_do_not_depend_on_neighbours_padding_or_earlier_calls(family):
    model = tiny(family, scale=4.0, num_layers=4)  # values near 1, so that the bar of 1e-5 is about rounding
    rng = np.random.default_rng(2)
    lengths = (5, 9, 17)
    rows = [rng.integers(0, 64, n).astype(np.int32) for n in lengths]
    batch = rng.integers(0, 64, (3, 20)).astype(np.int32)  # padding holds real ids, not a harmless constant
    for i, row in enumerate(rows):
        batch[i, : len(row)] = row
    for _ in range(2):
        out, _ = prefill(model, jnp.asarray(batch), jnp.asarray(lengths), 24, (0, 2))
        again, _ = forward(model, jnp.asarray(batch), (0, 2))
        for i, row in enumerate(rows):
            alone, _ = forward(model, jnp.asarray(row)[None], (0, 2))
            for features in (out, again):
                np.testing.assert_allclose(features.tapped_BTE[i, : len(row)], alone.tapped_BTE[0], rtol=0, atol=1e-5)
                np.testing.assert_allclose(features.hidden_BTD[i, : len(row)], alone.hidden_BTD[0], rtol=0, atol=1e-5)


# ---- E02, E05 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 2, 4])  # first, middle and last but one of 6
def test_tap_is_entry_plus_one_of_the_reference_list(loaded, layer):
    model, ref = loaded["target_qwen3"]
    out, _ = forward(model, jnp.asarray(ref["short_tokens"]), (layer,))
    states = ref["short_hf_states"]
    assert relative_l2(out.tapped_BTE, states[layer + 1]) <= BAR
    assert relative_l2(out.tapped_BTE, states[layer]) > 0.05
    assert relative_l2(out.tapped_BTE, states[layer + 2]) > 0.05


def test_taps_are_concatenated_in_order_in_every_path():
    model = tiny(num_layers=4)
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 64, (2, 6)), jnp.int32)
    first, second = forward(model, tokens, (0,))[0].tapped_BTE, forward(model, tokens, (2,))[0].tapped_BTE
    both = np.concatenate([first, second], axis=-1)
    np.testing.assert_allclose(forward(model, tokens, (0, 2))[0].tapped_BTE, both, atol=1e-6)
    out, _ = prefill(model, tokens, jnp.array([6, 6]), 8, (0, 2))
    np.testing.assert_allclose(out.tapped_BTE, both, atol=1e-5)
    block, _ = verify(model, tokens[:, 3:], out.cache.with_lengths([3, 3]), (0, 2))
    np.testing.assert_allclose(block.tapped_BTE, both[:, 3:], atol=1e-5)
    one, _ = step(model, tokens[:, 5], out.cache.with_lengths([5, 5]), (0, 2))
    np.testing.assert_allclose(one.tapped_BTE, both[:, 5:], atol=1e-5)


@pytest.mark.parametrize(("ids", "named"), [((1, 5), "5"), ((1, 6), "6"), ((-1, 3), "-1"), ((3, 1), "1"), ((2, 2), "2")])
def test_bad_taps_are_refused_by_name(loaded, ids, named):
    model, _ = loaded["target_qwen3"]
    tokens = jnp.zeros((1, 3), jnp.int32)
    cache = KVCache.empty(1, 4, 6, 2, 32, jnp.float32)
    for call in (
        lambda: model(tokens, target_layer_ids=ids),
        lambda: model.prefill(tokens, jnp.array([3]), capacity=4, target_layer_ids=ids),
        lambda: model.verify(tokens, cache, target_layer_ids=ids),
        lambda: model.step(tokens[:, 0], cache, target_layer_ids=ids),
    ):
        with pytest.raises(ValueError, match=rf"target_layer_ids: id {named} "):
            call()
