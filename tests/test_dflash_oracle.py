"""DFlash and DFlash2 equal PyPI dflash 0.1.0 on the same weights: stored results on every Python, the live torch model on 3.11."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.drafter_models import BAR, relative_l2
from flax import nnx
from safetensors import safe_open

from dspine_jax.candidate_selector import selector_table
from dspine_jax.config import DrafterConfig, TargetConfig
from dspine_jax.config_io import read_config, save_config
from dspine_jax.drafter import Drafter
from dspine_jax.drafter_io import load_drafter, save_drafter
from pallas_kernels.transition import greedy_walk

FOLDER = Path(__file__).parent / "fixtures" / "drafter_dflash"
SECOND = FOLDER.parent / "drafter_dflash2"
PIECES = (5, 1, 7, 3)
KINDS = {"two_way": "bidirectional", "causal": "causal"}
TARGET = TargetConfig(
    family="qwen3",
    vocab_size=128,
    num_tokens=128,
    hidden_size=64,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    intermediate_size=48,
    rope_theta=5e5,
    rms_norm_eps=1e-3,
    tie_embeddings=True,
)

TARGET_OF_SECOND = dataclasses.replace(TARGET, rope_theta=1e6, rms_norm_eps=1e-6)


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / "reference.npz"))


def load_kind(folder: Path, kind: str, scratch: Path) -> Drafter:
    """The drafter of ``folder`` with the attention of ``kind``."""
    config = dataclasses.replace(read_config(folder / "config.json", DrafterConfig), block_attention=KINDS[kind])
    copy = scratch / kind
    copy.mkdir(exist_ok=True)
    (copy / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    save_config(config, copy / "config.json")
    return load_drafter(copy, TARGET)


@nnx.jit
def run_rows(drafter, taps_BSE, noise_BNKD, context_len_BN, start):
    """Blocks at their context length, with every position counted from ``start``."""
    context_positions = start + jnp.broadcast_to(jnp.arange(taps_BSE.shape[1]), taps_BSE.shape[:2])
    context = drafter.context_kv(taps_BSE, context_positions)
    positions_BNK = start + context_len_BN[..., None] + jnp.arange(noise_BNKD.shape[2])
    return drafter(noise_BNKD, *context, context_len_BN, positions_BNK).hidden_BNKD


@nnx.jit
def run_cached(drafter, cache, taps_BTE, count_B, noise_BKD):
    cache = drafter.extend_cache(cache, taps_BTE, count_B)
    positions_BNK = (cache.lengths_B[:, None] + jnp.arange(noise_BKD.shape[1]))[:, None]
    return drafter(noise_BKD[:, None], cache.keys, cache.values, cache.lengths_B[:, None], positions_BNK).hidden_BNKD[:, 0], cache


def assert_equal_to_dflash(drafter: Drafter, ref: dict[str, np.ndarray], kind: str) -> None:
    """Plain, far from the start, cached with unequal pieces, and many anchors in one call."""
    B, S = ref["plain_taps"].shape[:2]
    K, D = ref["plain_noise"].shape[1:]
    for name, start in (("plain", 0), ("far", 3000)):
        out = run_rows(drafter, ref["plain_taps"], ref["plain_noise"][:, None], jnp.full((B, 1), S), start)
        assert relative_l2(out[:, 0], ref[f"{name}_{kind}"]) <= BAR, name

    cache = drafter.empty_cache(1, ref["cached_taps"].shape[1] + max(PIECES), jnp.float32)
    for index, piece in enumerate(PIECES):
        length = int(cache.lengths_B[0])
        taps = np.full((1, max(PIECES), ref["cached_taps"].shape[2]), 7.0, np.float32)  # rows past the count are not committed
        taps[:, :piece] = ref["cached_taps"][:, length : length + piece]
        out, cache = run_cached(drafter, cache, taps, jnp.array([piece]), ref["cached_noise"][index : index + 1])
        assert relative_l2(out[0], ref[f"cached_{kind}"][index]) <= BAR, f"cached block {index}"

    anchors = ref["anchors"]
    out = run_rows(drafter, ref["anchors_taps"], ref["anchors_noise"].reshape(1, len(anchors), K, D), jnp.asarray(anchors)[None], 0)
    assert relative_l2(out.reshape(1, -1, D), ref[f"anchors_{kind}"]) <= BAR, "many anchors"


@pytest.mark.parametrize("kind", KINDS)
def test_dflash_equals_the_stored_results_of_dflash(stored, kind, tmp_path):
    assert_equal_to_dflash(load_kind(FOLDER, kind, tmp_path), stored, kind)


def test_the_comparison_sees_the_wrong_attention_and_a_shifted_position(stored, tmp_path):
    drafter = load_kind(FOLDER, "causal", tmp_path)
    with pytest.raises(AssertionError):
        assert_equal_to_dflash(drafter, stored, "two_way")
    B, S = stored["plain_taps"].shape[:2]
    noise = stored["plain_noise"][:, None]
    short = run_rows(drafter, stored["plain_taps"], noise, jnp.full((B, 1), S - 1), 0)
    assert relative_l2(short[:, 0], stored["plain_causal"]) > 1e-3


def test_saving_writes_exactly_the_tensor_names_and_shapes_of_dflash(stored, tmp_path):
    drafter = load_kind(FOLDER, "two_way", tmp_path)
    save_drafter(tmp_path / "saved", drafter, dtype=jnp.bfloat16)
    with safe_open(FOLDER / "model.safetensors", "numpy") as theirs, safe_open(tmp_path / "saved" / "model.safetensors", "numpy") as ours:
        assert sorted(ours.keys()) == sorted(theirs.keys())
        for name in theirs.keys():
            np.testing.assert_array_equal(ours.get_tensor(name), theirs.get_tensor(name), err_msg=name)
    again = load_drafter(tmp_path / "saved", TARGET)
    assert_equal_to_dflash(again, stored, "two_way")


def test_projections_follow_the_drafters_own_head_dim(tmp_path):
    """T01 in the drafter's config: hidden 64, 4 heads, 2 KV heads, head_dim 32, though the target says otherwise."""
    drafter = load_kind(FOLDER, "two_way", tmp_path)
    attention = drafter.layers[0].self_attn
    assert [p.fan for p in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)] == [(64, 128), (64, 64), (64, 64), (128, 64)]
    assert drafter.empty_cache(1, 4, jnp.float32).keys[0].shape == (1, 4, 2, 32)


# ---- DFlash2 -------------------------------------------------------------------------------------


@nnx.jit
def propose_second(drafter, hidden_BKD, anchors_B, head_VD):
    table, ids = selector_table(
        drafter.candidate_selector, hidden_BKD[:, None, 1:], anchors_B[:, None], head_VD, drafter.config.selector.num_candidates, num_tokens=len(head_VD)
    )
    return table[:, 0], ids[:, 0], greedy_walk(table, ids)[:, 0]


def assert_equal_to_dflash2(drafter: Drafter, ref: dict[str, np.ndarray], temperature: float) -> None:
    """Hidden states fresh and cached, the greedy walk, and candidates and law of every slot along the path that dflash drew."""
    B, S = ref["taps"].shape[:2]
    fresh = run_rows(drafter, ref["taps"], ref["noise"][:, None], jnp.full((B, 1), S), 0)[:, 0]
    assert relative_l2(fresh, ref["hidden"]) <= BAR
    _, cache = run_cached(drafter, drafter.empty_cache(B, S, jnp.float32), ref["taps"][:, : S - 3], jnp.full(B, S - 3), ref["noise"])
    assert relative_l2(run_cached(drafter, cache, ref["taps"][:, S - 3 :], jnp.full(B, 3), ref["noise"])[0], ref["cached"]) <= BAR
    table, ids, greedy = (np.asarray(x) for x in propose_second(drafter, ref["hidden"], ref["anchors"], ref["head"]))
    np.testing.assert_array_equal(greedy, ref["greedy"])
    for b, path in enumerate(ref["sampled"]):
        came_from = 0
        for j, token in enumerate(path):
            theirs = dict(zip(ref["candidates"][b, j].tolist(), ref["law"][b, j]))
            scores = table[b, j, came_from] / temperature
            law = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
            assert set(ids[b, j].tolist()) == set(theirs)
            np.testing.assert_allclose(law, [theirs[i] for i in ids[b, j].tolist()], atol=1e-5)
            came_from = ids[b, j].tolist().index(int(token))
    without = np.argsort(-(ref["hidden"][:, 1:] @ ref["head"].T), axis=-1)[..., 0]
    assert (without != ref["greedy"]).any(axis=1).mean() > 0.5 and (ref["sampled"] != ref["greedy"]).any(), "otherwise the selector was not seen"


def test_dflash2_equals_the_stored_results_of_dflash(tmp_path):
    ref = dict(np.load(SECOND / "reference.npz"))
    assert_equal_to_dflash2(load_drafter(SECOND, TARGET_OF_SECOND), ref, 8.0)
    with safe_open(SECOND / "model.safetensors", "numpy") as theirs:
        save_drafter(tmp_path, load_drafter(SECOND, TARGET_OF_SECOND), dtype=jnp.bfloat16)
        with safe_open(tmp_path / "model.safetensors", "numpy") as ours:
            assert sorted(ours.keys()) == sorted(theirs.keys())
            for name in theirs.keys():
                np.testing.assert_array_equal(ours.get_tensor(name), theirs.get_tensor(name), err_msg=name)


def test_the_comparison_sees_a_broken_convolution():
    """The filters of the two sides exchanged, in either sublayer, are noticed."""
    ref = dict(np.load(SECOND / "reference.npz"))
    drafter = load_drafter(SECOND, TARGET_OF_SECOND)
    B, S = ref["taps"].shape[:2]
    for part in ("attention_conv", "mlp_conv"):
        kernel = getattr(drafter.layers[0], part).base_kernel
        kept = kernel[...]
        kernel.set_value(kept[::-1])
        states = run_rows(drafter, ref["taps"], ref["noise"][:, None], jnp.full((B, 1), S), 0)[:, 0]
        assert relative_l2(states, ref["hidden"]) > 1e-2
        kernel.set_value(kept)


SIZES_OF_SECOND = {"one tap, wide groups": (1, 32, 4, 2), "five taps, one channel a group": (5, 1, 3, 8)}


@pytest.mark.parametrize("case", SIZES_OF_SECOND)
def test_dflash2_equals_the_live_model(case, tmp_path):
    pytest.importorskip("torch", reason="torch is the live oracle; the stored results are compared above")
    pytest.importorskip("dflash", reason="dflash 0.1.0 is the live oracle; install it with --no-deps")
    import make_drafter_fixtures as oracle

    second = dict(zip(oracle.SECOND, SIZES_OF_SECOND[case]))
    model = oracle.random_dflash(seed=13, second=second)
    oracle.write_folder(tmp_path, model)
    assert_equal_to_dflash2(load_drafter(tmp_path, TARGET_OF_SECOND), oracle.reference_of_second(model, seed=14), oracle.TEMPERATURE)


LIVE = {
    "one key/value head, three layers": {"num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 3, "theta": 1e4, "rms_norm_eps": 1e-5},
    "no grouping, one layer": {"num_key_value_heads": 4, "head_dim": 8, "num_hidden_layers": 1, "intermediate_size": 40},
}


@pytest.mark.parametrize("case", LIVE)
def test_dflash_equals_the_live_model(case, tmp_path):
    pytest.importorskip("torch", reason="torch is the live oracle; the stored results are compared above")
    pytest.importorskip("dflash", reason="dflash 0.1.0 is the live oracle; install it with --no-deps")
    import make_drafter_fixtures as oracle

    model = oracle.random_dflash(seed=11, **LIVE[case])
    oracle.write_folder(tmp_path, model)
    ref = oracle.reference(model, seed=12)
    for kind in KINDS:
        assert_equal_to_dflash(load_kind(tmp_path, kind, tmp_path), ref, kind)


def test_fixtures_are_what_the_script_writes(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="torch is the live oracle")
    pytest.importorskip("dflash", reason="dflash 0.1.0 is the live oracle; install it with --no-deps")
    import make_drafter_fixtures as oracle

    monkeypatch.setattr(oracle, "HERE", tmp_path)
    oracle.main()
    for folder in (FOLDER, SECOND):
        for name in ("config.json", "model.safetensors"):
            assert (tmp_path / folder.name / name).read_bytes() == (folder / name).read_bytes(), name
        fresh, kept = np.load(tmp_path / folder.name / "reference.npz"), np.load(folder / "reference.npz")
        assert set(fresh) == set(kept)
        for key in kept:
            assert relative_l2(fresh[key], kept[key]) <= BAR, key
