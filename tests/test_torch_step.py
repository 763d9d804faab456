"""The PyTorch step that ours is timed against computes the same: loss, every gradient, learning rate and update; its flex attention is its dense one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from fixtures.drafter_models import relative_l2, tiny_drafter, tiny_target
from flax import nnx

from dspine_jax.anchors import draw_anchors as our_anchors
from dspine_jax.anchors import make_blocks
from dspine_jax.checkpoint_io import module_to_tensors
from dspine_jax.config import AnchorConfig, DrafterConfig, OptimizerConfig
from dspine_jax.config_io import read_config
from dspine_jax.objective import block_objective
from train.step import learning_rate_schedule, make_optimizer

torch = pytest.importorskip("torch", reason="the comparison is with torch; nothing else needs it")
from safetensors.torch import load_file  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402

from train.torch_reference.model import Drafter, Target, attend_blocks, attention_mask  # noqa: E402
from train.torch_reference.step import TorchStep, draw_anchors, learning_rate  # noqa: E402

FOLDER = Path(__file__).parent / "fixtures" / "drafter_dflash"
WIDTH, ANCHORS = 24, 6
OPTIMIZER = {"learning_rate": 1e-2, "weight_decay": 0.1, "clip_norm": 0.7, "warmup_fraction": 0.3, "final_fraction": 0.1}


def tensors_of(module: nnx.Module) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(value)) for name, value in module_to_tensors(module).items()}


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Four rows: one as usual, one without any anchor, one with fewer candidates than anchors and labels past its end, one supervised throughout."""
    tokens, mask, _ = tiny.rows(4, WIDTH)
    mask[1], mask[3] = False, True
    mask[2] = np.arange(WIDTH) >= WIDTH - 3
    return tokens, mask


def torch_step(config, target, drafter, *, attention="dense") -> TorchStep:
    """The PyTorch step with the weights of our target and drafter, eager, fp32."""
    theirs = Target(target.config, config.drafter.target_layer_ids, WIDTH, device="cpu", dtype=torch.float32)
    theirs.load(tensors_of(target))
    torch_drafter = Drafter(config.drafter, WIDTH, device="cpu", attention=attention)
    torch_drafter.load_state_dict(tensors_of(drafter))
    return TorchStep(config, theirs, torch_drafter, num_tokens=target.config.num_tokens, chunk=50, mode=None)


@pytest.mark.parametrize("method, family, sizes", [("dflash", "llama", {}), ("dspine", "qwen3", {"num_layers": 3, "injection": {"layers": (0, 2)}})])
def test_loss_gradients_and_updates_are_ours(method, family, sizes):
    target = tiny_target(family=family, tie_embeddings=family == "llama")
    drafter = tiny_drafter(target, method, num_heads=6, **sizes)  # three query heads a key/value head, as SmolLM2 has
    config = dataclasses.replace(tiny.train_config(method, optimizer=OPTIMIZER), drafter=drafter.config, anchors=AnchorConfig(num_anchors=ANCHORS))
    tokens, mask = rows()
    anchors, keep = our_anchors(jax.random.key(3), jnp.asarray(mask), ANCHORS, replacement=False)
    assert np.array(keep).sum(axis=1).tolist()[1:] == [0, 2, ANCHORS]

    graph, params, rest = nnx.split(drafter, nnx.Param, ...)
    K = drafter.config.block_size
    blocks = make_blocks(jnp.asarray(tokens), jnp.asarray(mask), anchors, keep, block_size=K, mask_token_id=drafter.config.mask_token_id)
    optimizer = make_optimizer(config.optimizer, config.steps)

    @jax.jit
    def our_step(params, opt_state):
        objective = lambda p: block_objective(nnx.merge(graph, p, rest), target, tokens, blocks, config.loss, jnp.float32)[0]  # noqa: E731
        loss, gradients = jax.value_and_grad(objective)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return loss, gradients, optax.apply_updates(params, updates), opt_state

    named = lambda state: module_to_tensors(nnx.merge(graph, state, rest))  # noqa: E731
    theirs = torch_step(config, target, drafter)
    arrays = [torch.from_numpy(np.array(x)) for x in (tokens.astype(np.int64), mask, np.array(anchors, np.int64), keep)]
    opt_state = optimizer.init(params)
    for step in range(3):
        loss, gradients, params, opt_state = our_step(params, opt_state)
        theirs.set_learning_rate()
        torch_loss = theirs.loss(*arrays)
        torch_loss.backward()
        assert abs(torch_loss.item() - float(loss)) <= 1e-5 * float(loss)
        if step == 0:
            ours = named(gradients)
            for name, parameter in theirs.drafter.named_parameters():
                assert relative_l2(parameter.grad, ours[name]) <= 1e-4, name
        norm = theirs.update(torch_loss.detach())
        assert float(norm) > config.optimizer.clip_norm  # the gradients really are clipped
    ours, start = named(params), tensors_of(drafter)
    for name, parameter in theirs.drafter.named_parameters():
        moved = ours[name] - start[name].numpy()
        assert relative_l2(parameter.detach().numpy() - start[name].numpy(), moved) <= 1e-3, name


@pytest.mark.parametrize("kind", ["two_way", "causal"])
def test_blocks_are_those_of_dflash(kind):
    """Weights under their own names and results of dflash 0.1.0 (tests/make_drafter_fixtures.py): many anchors over one row."""
    ref = np.load(FOLDER / "reference.npz")
    config = read_config(FOLDER / "config.json", DrafterConfig)
    config = dataclasses.replace(config, block_attention={"two_way": "bidirectional", "causal": "causal"}[kind])
    anchors, taps = torch.from_numpy(ref["anchors"])[None], torch.from_numpy(ref["anchors_taps"])
    drafter = Drafter(config, taps.shape[1], device="cpu", attention="dense")
    drafter.load_state_dict(load_file(FOLDER / "model.safetensors"))
    N, K = anchors.shape[1], config.block_size
    noise = torch.from_numpy(ref["anchors_noise"]).view(1, N, K, -1)
    with torch.no_grad():
        (hidden,), _ = drafter(taps, noise, anchors, anchors[..., None] + torch.arange(K), None)
    assert relative_l2(hidden, ref[f"anchors_{kind}"].reshape(noise.shape)[:, :, 1:]) <= 1e-5


def test_a_step_that_is_not_finite_changes_nothing():
    target = tiny_target()
    drafter = tiny_drafter(target, "dflash")
    step = torch_step(dataclasses.replace(tiny.train_config("dflash"), drafter=drafter.config), target, drafter)
    tokens, mask = map(torch.from_numpy, rows())
    step(tokens.long(), mask)
    state = lambda: [x.clone() for p in step.parameters for x in (p.detach(), *step._optimizer.state[p].values())]  # noqa: E731
    before = state()
    step.set_learning_rate()
    loss = step.loss(tokens.long(), mask, *draw_anchors(mask, 4, replacement=False))
    loss.backward()
    step.parameters[0].grad[0] = torch.inf
    step.update(loss.detach())
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    step(tokens.long(), mask)
    assert not torch.equal(before[0], state()[0])


@pytest.mark.parametrize("changes", [{}, {"warmup_fraction": 0.0}, {"final_fraction": 0.0, "warmup_fraction": 0.5}])
def test_the_learning_rate_is_ours(changes):
    config = OptimizerConfig(**OPTIMIZER | changes)
    schedule = learning_rate_schedule(config, 20)
    np.testing.assert_allclose([learning_rate(config, 20, i) for i in range(25)], [float(schedule(i)) for i in range(25)], rtol=1e-5, atol=1e-9)


def test_anchors_are_candidates_in_rising_order():
    _, mask = rows()
    for replacement in (False, True):
        anchors, keep = draw_anchors(torch.from_numpy(mask), ANCHORS, replacement=replacement)
        ours, our_keep = our_anchors(jax.random.key(0), jnp.asarray(mask), ANCHORS, replacement=replacement)
        np.testing.assert_array_equal(keep, our_keep)
        candidates = mask[:, :-1] & mask[:, 1:]
        for row in range(len(mask)):
            kept = anchors[row][keep[row]].tolist()
            assert kept == sorted(kept) and all(candidates[row, a] for a in kept)
            assert replacement or len(set(kept)) == len(kept)
    assert (anchors[~keep] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_flex_attention_is_the_dense_one(causal):
    """The path of the GPU, forward: three query heads a key/value head, a context of zero, lengths off the tile of 128; and the tiles it would visit."""
    S, N, K, H, G, C = 410, 20, 16, 6, 2, 16
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(2, *shape, generator=generator)  # noqa: E731
    context_len = torch.randint(0, S, (2, N), generator=generator).sort(dim=1).values
    context_len[0, 0] = 0
    arrays = (draw(N * K, H, C), draw(S + N * K, G, C), draw(S + N * K, G, C))
    masks = {kind: attention_mask(context_len, S, K, causal=causal, attention=kind) for kind in ("flex", "dense")}
    assert relative_l2(*(attend_blocks(*arrays, mask) for mask in masks.values())) <= 1e-5

    expected = create_block_mask(masks["flex"].mask_mod, 2, 1, N * K, S + N * K, device="cpu")
    assert masks["flex"].full_kv_num_blocks.sum() > 0 and masks["flex"].shape == expected.shape
    for kind in ("kv", "full_kv", "q", "full_q"):
        for name in (f"{kind}_num_blocks", f"{kind}_indices"):
            assert torch.equal(getattr(masks["flex"], name), getattr(expected, name)), name
