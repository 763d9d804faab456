"""One rules table on every mesh: equal numbers, real layouts, refusals by name, single prompts on training meshes."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dspine_jax.config import DataConfig, MeshConfig
from dspine_jax.drafter import Drafter
from dspine_jax.losses import weighted_mean
from dspine_jax.sharding import (
    assert_shardings,
    batch_sharding,
    check_batch,
    constrain_batch,
    make_mesh,
    parameter_spec,
    tree_shardings,
)
from dspine_jax.speculative import Decoder, DecodeSettings
from dspine_jax.target import Target
from train.step import initial_state, step_anchors

MESHES = {"8x1x1": (8, 1, 1), "2x2x2": (2, 2, 2), "1x4x2": (1, 4, 2)}


def uneven_rows() -> tuple[np.ndarray, np.ndarray]:
    """Eight rows: one with a single label, one with none, so a mean of per-device means would be far off."""
    tokens, mask, _ = tiny.rows(8)
    mask[1] = False
    mask[1, 4:6] = True
    mask[3] = False
    return tokens, mask


@functools.cache
def first_step(method: str, sizes: tuple[int, int, int]) -> dict:
    """Loss, gradients, anchors and layouts of one step; the first moment after it is (1 - beta1) x gradient."""
    layers = 2 if method == "dspine" else 1  # compiling is what takes time here
    config = tiny.train_config(method, drafter={"num_layers": layers}, optimizer={"clip_norm": 1e9}, mesh=MeshConfig(*sizes))
    s = tiny.setup(config, int(np.prod(sizes)))
    tokens, mask = uneven_rows()
    start = dataclasses.replace(s.state, step=jnp.int32(5))  # at step 0 Domino's head has no share in the loss
    with jax.set_mesh(s.mesh):
        batch = s.batch(tokens, mask)
        anchors = jax.jit(lambda rng, step, m: step_anchors(rng, step, m, s.config))(start.rng, start.step, batch["loss_mask"])
        state, metrics = s.step(start, s.target_state, batch)
    assert_shardings(state, tree_shardings(state, s.mesh))
    moments = state.opt_state[1][0]
    return {
        "loss": float(metrics["loss/total"][0]),
        "tau": [float(x) for name in sorted(metrics) if name.startswith("simulated_tau/") for x in metrics[name]],
        "gradients": jax.device_get(moments.mu),
        "anchors": jax.device_get(anchors),
        "state": state,
        "mesh": s.mesh,
    }


ALONE = [(method, mesh) for mesh in MESHES for method in tiny.METHODS] + [(name, "2x2x2") for name in ("dflash2", "dspark", "domino")]


@pytest.mark.parametrize("method, mesh", ALONE)
def test_loss_gradients_and_anchors_are_those_of_one_device(method, mesh):
    one, many = first_step(method, (1, 1, 1)), first_step(method, MESHES[mesh])
    tiny.assert_bit_equal(one["anchors"], many["anchors"])
    assert one["loss"] == pytest.approx(many["loss"], rel=1e-5)
    assert one["tau"] == many["tau"]
    pairs = zip(jax.tree_util.tree_leaves_with_path(one["gradients"]), jax.tree_util.tree_leaves_with_path(many["gradients"]))
    for (path, a), (_, b) in pairs:
        # The selector's successors start at zero, and with them the gradient of what they are multiplied with.
        assert np.any(a) or "candidate_selector" in jax.tree_util.keystr(path), f"no gradient for {jax.tree_util.keystr(path)}"
        assert tiny.relative_l2(b, a) <= 1e-5, jax.tree_util.keystr(path)


@pytest.mark.parametrize("method", tiny.METHODS)
def test_large_arrays_are_really_split(method):
    """The plan is not only equal to the layout, it splits: bytes on one device are a fraction of the whole (M01)."""
    state = first_step(method, (2, 2, 2))["state"]
    for leaf in [x for x in jax.tree.leaves((state.params, state.opt_state)) if x.size >= 1024]:
        assert leaf.addressable_shards[0].data.size <= leaf.size // 2, leaf.shape


def test_an_array_in_another_layout_is_reported_by_name():
    step = first_step("dflash", (2, 2, 2))
    state, mesh = step["state"], step["mesh"]
    planned = tree_shardings(state, mesh)

    def misplace(tree):
        flat = nnx.to_flat_state(tree)
        everywhere = NamedSharding(mesh, P())
        return nnx.from_flat_state([(p, x.replace(jax.device_put(x.get_value(), everywhere)) if p[0] == "fc" else x) for p, x in flat])

    with pytest.raises(RuntimeError, match=r"fc/kernel \(128, 64\) is laid out as .*planned"):
        assert_shardings(dataclasses.replace(state, params=misplace(state.params)), planned)
    moments = state.opt_state[1][0]
    wrong = (state.opt_state[0], (moments._replace(nu=misplace(moments.nu)), *state.opt_state[1][1:]))
    with pytest.raises(RuntimeError, match="nu/fc/kernel"):
        assert_shardings(dataclasses.replace(state, opt_state=wrong), planned)


def test_the_trainer_checks_layouts_after_its_first_step(tmp_path, monkeypatch):
    """M01: the trainer itself looks, not only the tests."""
    from train.loop import run  # here: the tests marked gpu need no logging packages

    def careless(config, mesh, graphdef, target, objective):
        return lambda state, target_state, batch: (jax.device_put(state, NamedSharding(mesh, P())), {})

    monkeypatch.setattr("train.loop.make_train_step", careless)
    data = DataConfig(path=str(tiny.write_data(tmp_path / "data")), batch_size=8)
    target = str(tiny.write_target(tmp_path / "target"))
    config = tiny.train_config("dflash", workdir=str(tmp_path / "run"), target=target, data=data, mesh=MeshConfig(2, 2, 2))
    with pytest.raises(RuntimeError, match="is laid out as"):
        run(config)


def test_the_initial_state_does_not_depend_on_the_mesh():
    config = tiny.resolved(tiny.train_config("dspine", drafter={"num_layers": 1}))
    states = []
    for sizes in ((1, 1, 1), (2, 2, 2)):
        mesh = make_mesh(MeshConfig(*sizes), jax.devices()[: int(np.prod(sizes))])
        with jax.set_mesh(mesh):
            states.append(initial_state(config, mesh))
    tiny.assert_bit_equal(*states)
    assert_shardings(states[1], tree_shardings(states[1], mesh))


def test_losses_weigh_tokens_not_devices():
    """M08: 3 tokens of CE 1, 1 of CE 5, 4 of CE 3 and an empty device -> 2.5, and finite gradients."""
    mesh = make_mesh(MeshConfig(data=4), jax.devices()[:4])
    weights = jnp.arange(4)[None] < jnp.array([3, 1, 4, 0])[:, None]
    values = jnp.broadcast_to(jnp.array([1.0, 5.0, 3.0, 7.0])[:, None], (4, 4))
    values, weights = jax.device_put((values, weights.astype(jnp.float32)), batch_sharding(mesh))
    loss, gradient = jax.jit(jax.value_and_grad(weighted_mean))(values, weights)
    assert float(loss) == 2.5
    np.testing.assert_allclose(gradient, np.asarray(weights) / 8, rtol=1e-6)


# ---- refusals -----------------------------------------------------------------------------------


def abstract_target(**changes) -> nnx.State:
    config = dataclasses.replace(tiny.TARGET, **changes)
    return nnx.split(nnx.eval_shape(lambda: Target(config, rngs=nnx.Rngs(0))))[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 131}, r"embed_tokens/embedding.*axis 'vocab' of size 131 does not divide by mesh.tensor = 2"),
        ({"num_heads": 6, "num_kv_heads": 3}, r"k_proj/kernel.*axis 'kv_heads' of size 3 does not divide by mesh.tensor = 2"),
        ({"intermediate_size": 97}, r"axis 'mlp' of size 97 does not divide by mesh.tensor = 2"),
        ({"hidden_size": 66}, r"axis 'embed' of size 66 does not divide by mesh.fsdp = 4"),
    ],
)
def test_a_dimension_that_does_not_divide_is_refused_by_axis_and_sizes(changes, words):
    """M01: XLA would replicate it without a word."""
    mesh = make_mesh(MeshConfig(1, 4, 2))
    tree_shardings(abstract_target(), mesh)
    with pytest.raises(ValueError, match=words):
        tree_shardings(abstract_target(**changes), mesh)


def test_a_parameter_without_a_rule_is_refused():
    mesh = make_mesh(MeshConfig())
    with pytest.raises(ValueError, match=r"no sharding rule matches parameter layers/0/router/table \(8, 8\).*RULES"):
        parameter_spec("layers/0/router/table", (8, 8), mesh)
    with pytest.raises(ValueError):  # a rule for two axes never fits three
        parameter_spec("fc/kernel", (8, 8, 8), mesh)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((3, 1, 1), "does not use exactly 8 devices; change mesh.data"),
        ((-1, 3, 1), "does not use exactly 8 devices"),
        ((-1, -1, 1), "at most one -1"),
        ((0, 1, 1), "must be positive"),
        ((4, 1, 1), "does not use exactly 8 devices"),
    ],
)
def test_a_mesh_that_does_not_use_all_devices_is_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        make_mesh(MeshConfig(*sizes))


def test_minus_one_takes_the_devices_that_are_left():
    assert dict(make_mesh(MeshConfig()).shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(MeshConfig(2, -1, 2)).shape) == {"data": 2, "fsdp": 2, "tensor": 2}


def test_a_training_batch_that_does_not_divide_is_refused_by_name():
    mesh = make_mesh(MeshConfig(2, 2, 2))
    check_batch(8, mesh)
    with pytest.raises(ValueError, match=r"data.batch_size 3 does not divide by mesh.data x mesh.fsdp = 2 x 2; use a multiple of 4"):
        check_batch(3, mesh)


# ---- M02: one prompt on a mesh made for training ------------------------------------------------


def test_activations_are_pinned_to_the_batch_axes_where_the_batch_divides():
    mesh = make_mesh(MeshConfig(4, 2, 1))
    pin = jax.jit(lambda x: constrain_batch(x) * 2)
    with jax.set_mesh(mesh):
        assert pin(jnp.ones((16, 3))).sharding.is_equivalent_to(batch_sharding(mesh), 2)
        assert pin(jnp.ones((1, 3))).shape == (1, 3)
    assert constrain_batch(jnp.ones((3, 3))).shape == (3, 3)


def decode(sizes: tuple[int, int, int], target: Target, drafter: Drafter) -> tuple[np.ndarray, np.ndarray]:
    """Speculative greedy tokens of one prompt, and the accepted counts, with every parameter sharded by the rules."""
    mesh = make_mesh(MeshConfig(*sizes), jax.devices()[: int(np.prod(sizes))])

    def place(module):
        graph, state = nnx.split(module)
        return nnx.merge(graph, jax.device_put(state, tree_shardings(state, mesh)))

    with jax.set_mesh(mesh):
        decoder = Decoder(place(target), place(drafter), DecodeSettings(num_draft_tokens=3))
        prompt = jnp.asarray(tiny.rows(1)[0][:, :9])
        state = decoder.start(prompt, jnp.array([9]), jnp.array([12]), jax.random.split(jax.random.key(0), 1), room=12)
        state = decoder.run(state, 12)
    return np.asarray(state.tokens_BT), np.asarray(state.accepted_BT)


def test_one_prompt_decodes_on_a_training_mesh_as_on_one_device():
    """M02: batch 1 on 8x1x1 and 2x2x2 gives the tokens and accepted counts of one device."""
    config = tiny.resolved(tiny.train_config("dspine"))
    target = tiny.tiny_target()
    drafter = Drafter(config.drafter, rngs=nnx.Rngs(0))
    tiny.randomise(drafter, 2)
    nnx.update(drafter.transfer, tiny.transfer_of(config, target, nnx.state(drafter.transfer)))
    assert np.any(drafter.transfer.basis[...])
    one = decode((1, 1, 1), target, drafter)
    for sizes in ((8, 1, 1), (2, 2, 2)):
        many = decode(sizes, target, drafter)
        np.testing.assert_array_equal(many[0], one[0])
        np.testing.assert_array_equal(many[1], one[1])


# ---- real devices -------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("method", tiny.METHODS)
@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_two_gpus_equal_one(method, sizes):
    if len(jax.devices()) < 2:
        pytest.skip(f"needs two GPUs, this machine has {len(jax.devices())}")
    one, two = first_step(method, (1, 1, 1)), first_step(method, sizes)
    tiny.assert_bit_equal(one["anchors"], two["anchors"])
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
    for a, b in zip(jax.tree.leaves(one["gradients"]), jax.tree.leaves(two["gradients"])):
        assert tiny.relative_l2(b, a) <= 1e-5
