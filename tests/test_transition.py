"""Transition cache: the table's kernels (interpreted, lowered, on a GPU) against the fp32 reference; walks against one step after the other."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import AbstractDevice, AbstractMesh

from dspine_jax.sampling import SamplingConfig, draw, probabilities
from dspine_jax.selection import select_on_candidates, slot_keys
from pallas_kernels.shapes import MODELS, ModelShape
from pallas_kernels.transition import arg_specs, by_kernel, greedy_walk, pallas_gpu, pallas_tpu, ref, transition_table

# (K, P, D, R, batch): odd sizes, then three tiles of predecessors, of D and of R for every kernel.
CASES = [(2, 16, 48, 16, 3), (7, 4, 64, 32, 5), (16, 8, 384, 192, 3)]
KWARGS = {"eps": 1e-6}
TPU_TILES = {7: (16, 64), 16: (16, 128)}


def abstract(shape: ModelShape, batch: int, dtype=jnp.bfloat16):
    return jax.eval_shape(lambda key: arg_specs.arguments(shape, batch, key, dtype)[0], jax.random.key(0))


def make(K, P, D, R, batch, dtype=jnp.bfloat16):
    """Arguments in ``dtype``, drawn by NumPy (nothing to compile), and what the reference makes of them in fp32."""
    rng = np.random.default_rng(K)
    scale = lambda x: 1 if x.ndim > 2 else x.shape[0] ** -0.5  # noqa: E731

    def fill(x):
        if x.dtype == jnp.int32:
            return jnp.asarray(rng.integers(0, 97, x.shape), x.dtype)
        values = rng.normal(size=x.shape).astype(np.float32)
        return jnp.asarray(1 + 0.1 * values if x.ndim == 1 else scale(x) * values, x.dtype)

    args = jax.tree.map(fill, abstract(ModelShape(D, R, 97, 4, 2, 16, block_size=K, num_candidates=P), batch, dtype))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, args)
    return args, KWARGS, jax.jit(functools.partial(ref.transition_table, **KWARGS))(*wide)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_table_kernels_interpreted(case):
    """About as near to fp32 as the reference is in bf16: a kernel rounds elsewhere."""
    args, kwargs, exact = make(*case)
    rounded = tiny.relative_l2(jax.jit(functools.partial(ref.transition_table, **kwargs))(*args), exact)
    assert 1e-4 < rounded < 5e-3
    for kernel in (pallas_gpu.table, functools.partial(pallas_tpu.table, tile=TPU_TILES.get(case[0]))):
        ours = jax.jit(functools.partial(by_kernel, kernel, interpret=True, **kwargs))(*args)
        assert ours.dtype == jnp.float32 and tiny.relative_l2(ours, exact) < 1.5 * rounded
    args, kwargs, exact = make(*case, dtype=jnp.float32)
    kernel = functools.partial(pallas_tpu.table, tile=TPU_TILES.get(case[0]))
    ours = jax.jit(functools.partial(by_kernel, kernel, interpret=True, **kwargs))(*args)
    assert tiny.relative_l2(ours, exact) < 1e-6


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("P", [4, 8, 16])
def test_table_lowers_with_a_kernel_where_one_is_asked_for(platform, P):
    """Without the device. The default holds it on a GPU, for several blocks, and nowhere else."""
    device = AbstractDevice(device_kind={"cuda": "NVIDIA H200", "tpu": "TPU v5 lite"}[platform], num_cores=1, platform=platform)
    marker = {"cuda": "xla.gpu.triton", "tpu": "tpu_custom_call"}[platform]
    for batch, implementation, found in ((1, "pallas", True), (32, "pallas", True), (32, None, platform == "cuda"), (1, None, False), (32, "xla", False)):
        args = abstract(dataclasses.replace(MODELS["smollm2-135m"], num_candidates=P), batch)
        with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=device)):
            traced = jax.jit(functools.partial(transition_table, implementation=implementation, **KWARGS)).trace(*args)
            assert (marker in traced.lower(lowering_platforms=(platform,)).as_text()) == found


def test_what_the_table_kernels_do_not_serve_is_refused_by_name(monkeypatch):
    args, kwargs, exact = make(7, 4, 64, 32, 5, dtype=jnp.float32)
    with pytest.raises(ValueError, match="'triton' is none of 'xla', 'pallas'"):
        transition_table(*args, implementation="triton", **kwargs)
    odd, kwargs, _ = make(7, 40, 64, 24, 1)
    with pytest.raises(NotImplementedError, match="40 candidates .only powers of two from 2 to 32. on cuda; 40 candidates .only 1 to 32. on tpu"):
        transition_table(*odd, implementation="pallas", **kwargs)
    assert transition_table(*odd, **kwargs).shape == (1, 1, 6, 40, 40)
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match="interpret mode"):
            transition_table(*args, implementation="pallas", **kwargs)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(NotImplementedError, match="float32 .only bfloat16 and float16. on cuda"):
        transition_table(*args, implementation="pallas", **kwargs)
    np.testing.assert_allclose(transition_table(*args, **kwargs), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_table_on_a_gpu():
    for K, P, D, R, batch in (*CASES, (16, 8, 4096, 1024, 1), (16, 16, 4096, 1024, 8)):
        args, kwargs, exact = make(K, P, D, R, batch)
        rounded = tiny.relative_l2(jax.jit(functools.partial(ref.transition_table, **kwargs))(*args), exact)
        for implementation in ("pallas", None):
            ours = jax.jit(functools.partial(transition_table, implementation=implementation, **kwargs))(*args)
            assert tiny.relative_l2(ours, exact) < 1.5 * rounded


# ---- walks --------------------------------------------------------------------------------------


def tables(J, P, seed=0):
    """Scores of few levels, so that most rows are tied, and candidates in no order of ids."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(60)[:P] for _ in range(6 * J)]).reshape(3, 2, J, P)
    return jnp.asarray(rng.integers(0, 3, (3, 2, J, P, P)), jnp.float32), jnp.asarray(ids, jnp.int32)


@pytest.mark.parametrize("P", [1, 4, 16])
@pytest.mark.parametrize("J", [1, 6, 15])
def test_composed_walk_equals_steps(J, P):
    table, ids = tables(J, P)
    walked = jax.jit(greedy_walk)(table, ids)
    assert walked.dtype == jnp.int32
    np.testing.assert_array_equal(walked, jax.jit(ref.greedy_walk)(table, ids))
    lost = np.asarray(greedy_walk(table.at[0].set(jnp.nan), ids))
    np.testing.assert_array_equal(lost[1:], walked[1:])
    assert (lost[..., None] == ids).any(axis=-1).all()


def walk_in_steps(table_BJPP, ids_BJP, keys_B, law):
    """Draw a slot, look up the next row, and so on: what ``select_on_candidates`` has to equal."""
    row_B, choices, probs = jnp.zeros(len(ids_BJP), jnp.int32), [], []
    for j in range(ids_BJP.shape[1]):
        scores_BP = jnp.take_along_axis(table_BJPP[:, j], row_B[:, None, None], axis=1)[:, 0]
        probs.append(probabilities(scores_BP, law))
        row_B = draw(slot_keys(keys_B, j), probs[-1])
        choices.append(row_B)
    return jnp.stack(choices, axis=1), jnp.stack(probs, axis=1)


@pytest.mark.parametrize("law", [SamplingConfig(0.7), SamplingConfig(1.0, 5, 0.9), SamplingConfig(0.0)])
def test_sampled_walk_draws_what_steps_draw(law):
    """Same keys, same noise: every token and every law of the path."""
    table, ids = tables(5, 8)
    table, ids = (jnp.tile(x[:, 0], (40,) + (1,) * (x.ndim - 2)) for x in (table, ids))
    keys_B = jax.random.split(jax.random.key(3), len(ids))
    drawn = jax.jit(select_on_candidates, static_argnums=3)(table, ids, keys_B, law)
    choice_BJ, probs_BJP = jax.jit(walk_in_steps, static_argnums=3)(table, ids, keys_B, law)
    np.testing.assert_array_equal(drawn.tokens_BJ, jnp.take_along_axis(ids, choice_BJ[..., None], axis=2)[..., 0])
    np.testing.assert_allclose(drawn.probs_BJP, probs_BJP, rtol=1e-6)
    np.testing.assert_allclose(drawn.token_prob_BJ, jnp.take_along_axis(probs_BJP, choice_BJ[..., None], axis=2)[..., 0], rtol=1e-6)
    assert law.greedy or len(np.unique(np.asarray(choice_BJ), axis=0)) > 100
