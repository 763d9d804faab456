"""The choice of kernels: each reaches its operation in training and in decoding and no other, and what cannot run is said."""

from __future__ import annotations

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import pytest
import tiny
from flax import nnx

from dspine_jax.anchors import make_blocks
from dspine_jax.config import KernelConfig, LossConfig, TrainConfig
from dspine_jax.drafter import Drafter
from dspine_jax.objective import block_objective
from dspine_jax.speculative import DecodeSettings, decoding_round, idle
from dspine_jax.target import Target

# Sizes that every kernel serves: traced, never computed.
TARGET = dataclasses.replace(tiny.TARGET, hidden_size=128, head_dim=32, vocab_size=512, num_tokens=500)
PLAIN = {field.name: "xla" for field in dataclasses.fields(KernelConfig)}
KERNEL = {name: "mosaic_gpu" if name == "head_softmax" else "pallas" for name in PLAIN}
# Operations that each method calls.
CALLS = {
    ("training", "dspine"): {"injection", "block_attention", "head_softmax"},
    ("training", "dflash"): {"block_attention", "head_softmax"},
    ("training", "dflash2"): {"block_attention", "head_softmax", "topk_logits"},
    ("decoding", "dspine"): {"injection", "block_attention", "topk_logits", "transition", "cached_attention"},
    ("decoding", "dflash"): {"block_attention", "topk_logits", "cached_attention"},
    ("decoding", "dflash2"): {"block_attention", "topk_logits", "cached_attention"},
}


def modules(method: str, kernels: KernelConfig) -> tuple[Drafter, Target]:
    """Shapes in bfloat16."""
    config = tiny.train_config(method, drafter={"num_layers": 1}).drafter.resolve(TARGET)
    make = dict(param_dtype=jnp.bfloat16, kernels=kernels)
    return nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0), **make)), nnx.eval_shape(lambda: Target(TARGET, rngs=nnx.Rngs(0), **make))


def traced(phase: str, method: str, kernels: KernelConfig) -> str:
    """Every operation of a loss with its gradient, or of a greedy round of decoding."""
    drafter, target = modules(method, kernels)
    (drafter_graph, params), (target_graph, weights) = nnx.split(drafter), nnx.split(target)

    def loss(params, weights):
        drafter, target, B, S = nnx.merge(drafter_graph, params), nnx.merge(target_graph, weights), 2, 24
        sizes = dict(block_size=drafter.config.block_size, mask_token_id=3, num_predicting_slots=drafter.config.num_predicting_slots)
        tokens, anchors = jnp.zeros((B, S), jnp.int32), jnp.zeros((B, 4), jnp.int32)
        blocks = make_blocks(tokens, tokens == 0, anchors, anchors == 0, **sizes)
        return block_objective(drafter, target, tokens, blocks, LossConfig(), jnp.bfloat16)[0]

    def decode(params, weights):
        drafter, target = nnx.merge(drafter_graph, params), nnx.merge(target_graph, weights)
        settings = DecodeSettings(drafter.config.num_draft_tokens, dtype="bfloat16")
        return decoding_round(drafter, target, idle(drafter, target, 2, 64, 8, settings), settings)

    return str(jax.make_jaxpr(jax.grad(loss) if phase == "training" else decode)(params, weights))


def runs_kernel(phase: str, method: str, **choices: str) -> bool:
    """Whether anything in the program is a kernel, or would be one where the device had it."""
    try:
        text = traced(phase, method, KernelConfig(**PLAIN | choices))
    except NotImplementedError as error:  # 'head_softmax' asks which GPU there is
        return any(str(error).startswith(f"{name}: no kernel serves") for name in choices)
    return "pallas_call" in text


@pytest.mark.parametrize(("phase", "method"), CALLS)
def test_a_choice_reaches_its_operation_and_no_other(phase, method):
    """With 'xla' everywhere no kernel is left, so no call is without its choice; with one kernel chosen there is one where the method calls it."""
    assert not runs_kernel(phase, method)
    assert {name for name, kernel in KERNEL.items() if runs_kernel(phase, method, **{name: kernel})} == CALLS[phase, method]


def test_a_choice_is_compiled_anew():
    """Compiled loops are kept by the graphs of drafter and target."""
    graphs = [[nnx.split(module)[0] for module in modules("dspine", kernels)] for kernels in (KernelConfig(), KernelConfig(injection="xla"), KernelConfig())]
    assert graphs[0] == graphs[2] and all(a != b and hash(a) != hash(b) for a, b in zip(graphs[0], graphs[1]))


@pytest.mark.parametrize("name", PLAIN)
def test_an_unknown_implementation_is_refused_by_name(name):
    known = importlib.import_module(f"pallas_kernels.{name}").IMPLEMENTATIONS
    for implementation in known:
        assert KernelConfig(**{name: implementation}).chosen == {name: implementation}
    with pytest.raises(ValueError, match=f"kernels.{name} 'cuda' is none of 'xla', .*{known[-1]}"):
        KernelConfig(**{name: "cuda"})


def test_a_kernel_that_does_not_serve_raises_with_its_reason():
    """Masters are fp32 in training, and the injection's kernels would cast them in every call."""
    drafter, target = (nnx.eval_shape(make) for make in (
        lambda: Drafter(tiny.train_config("dspine").drafter.resolve(TARGET), rngs=nnx.Rngs(0), kernels=KernelConfig(injection="pallas")),
        lambda: Target(TARGET, rngs=nnx.Rngs(0)),
    ))  # fmt: skip
    settings = DecodeSettings(3, dtype="bfloat16")
    with pytest.raises(NotImplementedError, match="injection: no kernel serves feature_DR of float32 with a stream of bfloat16"):
        nnx.eval_shape(lambda drafter, target: decoding_round(drafter, target, idle(drafter, target, 1, 64, 8, settings), settings), drafter, target)


def test_training_refuses_what_only_decoding_calls():
    with pytest.raises(ValueError, match="kernels.transition is 'xla', but training never calls it"):
        TrainConfig(kernels=KernelConfig(transition="xla"))
