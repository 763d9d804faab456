"""Memory and time of training configs, reckoned; the configs of Qwen3-4B and 8B, abstractly: no weight is ever made."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from dspine_jax.config import METHODS, TargetConfig, TrainConfig
from dspine_jax.config_io import load_config
from dspine_jax.drafter import Drafter
from dspine_jax.drafter_io import drafter_parameter_counts
from dspine_jax.sharding import make_mesh
from dspine_jax.target import Target
from train import compare_torch, estimate
from train.step import abstract_state, make_train_step

ROOT = Path(__file__).resolve().parents[1]
QWEN3_4B = compare_torch.SHAPES["qwen3-4b"].target
QWEN3 = {"4b": QWEN3_4B, "8b": dataclasses.replace(QWEN3_4B, hidden_size=4096, intermediate_size=12288, tie_embeddings=False)}
NAMES = [(size, method) for size in QWEN3 for method in METHODS]
WIDTH, GPUS = 3072, 8


@functools.cache
def config_of(size: str, method: str) -> TrainConfig:
    return load_config(ROOT / "configs" / f"qwen3_{size}_{method}.py")


def drafter_of(config: TrainConfig, target: TargetConfig) -> Drafter:
    """Shapes only."""
    return nnx.eval_shape(lambda: Drafter(config.drafter.resolve(target), rngs=nnx.Rngs(0)))


# ---- Qwen3 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, method", NAMES)
def test_the_configs_of_qwen3_are_one_setting_and_say_what_they_need(size, method):
    """15 drafts a round, the same rows, anchors, epochs and learning rate for all; sizes and needs in the docstring are what is counted."""
    config, plain, target = config_of(size, method), config_of(size, "dflash"), QWEN3[size]
    c = config.drafter.resolve(target)
    assert (c.method, c.num_draft_tokens, c.num_layers, c.block_size, config.epochs) == (method, 15, 5, 15 if method == "dspark" else 16, 6)
    assert c.target_layer_ids == (1, 9, 17, 25, 33) and c.mask_token_id == target.num_tokens
    assert (config.data, config.anchors, config.mesh) == (plain.data, plain.anchors, plain.mesh)
    for name in ("learning_rate", "warmup_fraction", "clip_norm", "weight_decay"):
        assert getattr(config.optimizer, name) == getattr(plain.optimizer, name)
    assert config.target == f"Qwen3-{size.upper()}" and config.workdir == f"runs/qwen3_{size}_{method}"
    words = ast.get_docstring(ast.parse((ROOT / "configs" / f"qwen3_{size}_{method}.py").read_text()))
    counts = drafter_parameter_counts(drafter_of(config, target))
    assert f"{counts['total'] / 1e6:,.1f}M trained parameters, {counts['head'] / 1e6:,.1f}M of them beyond DFlash's." in words
    assert estimate.summary(config, target, gpus=GPUS, width=WIDTH) in words


@pytest.mark.parametrize("size, method", [("8b", method) for method in METHODS] + [("4b", "dspine")])
def test_a_step_of_qwen3_keeps_every_shape(size, method):
    """The whole step, traced at full size on eight devices: the state comes out as it went in, and the loss is one number."""
    target_config, mesh = QWEN3[size], make_mesh(config_of(size, method).mesh, jax.devices()[:GPUS])
    config = dataclasses.replace(config_of(size, method), drafter=config_of(size, method).drafter.resolve(target_config))
    with jax.set_mesh(mesh):
        target = nnx.eval_shape(lambda: Target(target_config, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16))
        graph, state = abstract_state(config)
        rows = {"tokens": jax.ShapeDtypeStruct((32, WIDTH), jnp.int32), "loss_mask": jax.ShapeDtypeStruct((32, WIDTH), jnp.bool_)}
        after, metrics = jax.eval_shape(make_train_step(config, mesh, graph, target), state, nnx.split(target)[1], rows)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert metrics["loss/total"][0].shape == ()


# ---- the reckoning ------------------------------------------------------------------------------


def measured(name: str) -> float:
    """The newest figure of this name."""
    return [entry["value"] for entry in json.loads((ROOT / "docs" / "results.json").read_text()) if entry["id"] == name][-1]


def reckoned(shape: str, method: str, **changes) -> estimate.Estimate:
    s = compare_torch.SHAPES[shape]
    return estimate.estimate(dataclasses.replace(compare_torch.train_config(s, method, []), **changes), s.target, gpus=1, width=s.width)


@pytest.mark.parametrize("shape, method, short", [("qwen3-4b", "dspine", 0.03), ("smollm2-135m", "dspine", 0.12), ("smollm2-135m", "dflash", 0.12)])
def test_memory_falls_little_short_of_what_was_measured(shape, method, short):
    """What is not counted (the compiler's scratch, libraries) shows where the rest is small."""
    peak = measured(f"compare_torch/{shape}/{method}/jax/peak_gib")
    assert (1 - short) * peak < reckoned(shape, method).gib <= peak


def test_the_speed_is_that_of_the_measured_step():
    found = reckoned("qwen3-4b", "dspine")
    assert found.seconds == pytest.approx(1e-3 * measured("compare_torch/qwen3-4b/dspine/jax/step_ms"), rel=1e-3)
    assert found.flops / estimate.MEASURED == pytest.approx(found.seconds)


def test_what_is_spread_over_devices_is_counted_once():
    """fsdp and tensor divide weights, data and fsdp rows; averaged weights are one more copy; remat keeps less."""
    config, target = config_of("4b", "dspine"), QWEN3["4b"]
    of = lambda **mesh: estimate.estimate(dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **mesh)), target, gpus=8, width=WIDTH)  # noqa: E731
    plain, spread = of(), of(data=1, fsdp=8)
    assert spread.bytes["target"] == pytest.approx(plain.bytes["target"] / 8, rel=0.01)
    assert spread.bytes["kept for the backward pass"] == plain.bytes["kept for the backward pass"] and spread.seconds == plain.seconds
    assert of(data=4, tensor=2).bytes["a chunk of the vocabulary"] == plain.bytes["a chunk of the vocabulary"]  # twice the rows, half the columns
    averaged = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, ema_decay=0.999), remat=True)
    more = estimate.estimate(averaged, target, gpus=8, width=WIDTH)
    name = "masters, moments and counters"
    assert more.bytes[name] - plain.bytes[name] == pytest.approx(plain.bytes["gradients"], rel=1e-3)
    assert more.bytes["kept for the backward pass"] < 0.5 * plain.bytes["kept for the backward pass"]
    with pytest.raises(ValueError, match="does not use exactly 8 devices"):
        of(data=3)
    with pytest.raises(ValueError, match="data.batch_size 32 does not divide by mesh.data x mesh.fsdp = 64 x 1"):
        estimate.estimate(config, target, gpus=64, width=WIDTH)


def products(jaxpr) -> float:
    """Floating-point operations of all matrix products of a program, loops counted as often as they run."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        inner = [products(jaxpr) for jaxpr in jaxprs_in_params(equation.params)]
        # Branches are one operation's implementations, of which a device runs one.
        total += times * (max(inner) if equation.primitive.name == "cond" else sum(inner))
    return total


@pytest.mark.parametrize("method", METHODS)
def test_arithmetic_is_that_of_the_traced_step(method):
    """Qwen3-4B's widths, rows so short that attention, which the reference counts in full, is next to nothing."""
    target_config = dataclasses.replace(QWEN3["4b"], num_layers=7)
    config = config_of("4b", method)
    config = dataclasses.replace(
        config,
        drafter=dataclasses.replace(config.drafter, target_layer_ids=(1, 2, 3, 4, 5), num_layers=2).resolve(target_config),
        data=dataclasses.replace(config.data, batch_size=2),
        anchors=dataclasses.replace(config.anchors, num_anchors=8),
        mesh=dataclasses.replace(config.mesh, data=1),
    )
    mesh, width = make_mesh(config.mesh, jax.devices()[:1]), 64
    with jax.set_mesh(mesh):
        target = nnx.eval_shape(lambda: Target(target_config, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16))
        graph, state = abstract_state(config)
        rows = {"tokens": jax.ShapeDtypeStruct((2, width), jnp.int32), "loss_mask": jax.ShapeDtypeStruct((2, width), jnp.bool_)}
        traced = products(jax.make_jaxpr(make_train_step(config, mesh, graph, target))(state, nnx.split(target)[1], rows).jaxpr)
    assert estimate.step_flops(config, target_config, width) == pytest.approx(traced, rel=0.05)


def test_the_command_prints_the_estimate_or_what_is_wrong(tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "head_dim": 128}
            | {"num_key_value_heads": 8, "intermediate_size": 9728, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
            | {"max_position_embeddings": 40960}
        )
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {str(i): i for i in range(151669)}}}))
    command = [str(ROOT / "configs" / "qwen3_4b_dspine.py"), "--set", f"target={tmp_path}", "--gpus", "8", "--rows", "100000"]
    assert estimate.main(command) == 0
    out = capsys.readouterr().out
    assert out.startswith(estimate.summary(config_of("4b", "dspine"), QWEN3["4b"], gpus=GPUS, width=WIDTH) + "\n")
    assert "6 epochs of 100,000 rows: 18,750 steps, " in out
    assert estimate.main([*command, "--set", "data.batch_size=9"]) == 2
    assert "error: data.batch_size 9 does not divide" in capsys.readouterr().err
