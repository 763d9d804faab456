"""The mapping between module state and named tensors in torch layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from dspine_jax.checkpoint_io import SafetensorsFiles, expected_tensors, load_tensors, module_to_tensors
from dspine_jax.layers import Embedding, Linear, RMSNorm


class Table(nnx.Variable):
    """A stored array that is not trained."""


class Part(nnx.Module):
    def __init__(self, rngs, param_dtype=jnp.float32):
        self.norm = RMSNorm(6, 1e-6, param_dtype=param_dtype)
        self.heads = Linear(6, (2, 4), rngs=rngs, bias=True, param_dtype=param_dtype)
        self.out = Linear((2, 4), 6, rngs=rngs, param_dtype=param_dtype)


class Whole(nnx.Module):
    def __init__(self, rngs, param_dtype=jnp.float32):
        self.embed = Embedding(5, 6, rngs=rngs, param_dtype=param_dtype)
        self.layers = nnx.List([Part(rngs, param_dtype) for _ in range(2)])
        self.extra = nnx.Dict({"3": Linear(6, 2, rngs=rngs, param_dtype=param_dtype)})
        self.mean = Table(jnp.arange(6, dtype=jnp.float32))
        self.drop = nnx.Dropout(0.1, rngs=rngs)


SHAPES = {
    "embed.weight": (5, 6),
    "extra.3.weight": (2, 6),
    "mean": (6,),
    **{
        f"layers.{i}.{name}": shape
        for i in range(2)
        for name, shape in (("norm.weight", (6,)), ("heads.weight", (8, 6)), ("heads.bias", (8,)), ("out.weight", (6, 8)))
    },
}


def whole() -> Whole:
    return Whole(nnx.Rngs(0))


def abstract(param_dtype=jnp.float32) -> Whole:
    return nnx.eval_shape(lambda: Whole(nnx.Rngs(0), param_dtype))


def random_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def test_names_and_torch_shapes():
    for module in (whole(), abstract()):
        assert {name: shape for name, (_, shape) in expected_tensors(module).items()} == SHAPES
    assert expected_tensors(whole())["extra.3.weight"][0] == ("extra", "3", "kernel")


def test_layout_is_torchs():
    tensors = random_tensors()
    module = load_tensors(whole(), tensors, source="x")
    x = np.random.default_rng(1).standard_normal(6).astype(np.float32)
    layer = module.layers[1]
    heads = layer.heads(jnp.asarray(x))
    np.testing.assert_allclose(heads.reshape(-1), tensors["layers.1.heads.weight"] @ x + tensors["layers.1.heads.bias"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(layer.out(heads), tensors["layers.1.out.weight"] @ np.asarray(heads).reshape(-1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(module.embed.embedding[...], tensors["embed.weight"])


def test_round_trip_is_exact():
    tensors = random_tensors()
    back = module_to_tensors(load_tensors(whole(), tensors, source="x"))
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(back[name], value)
        assert back[name].flags.c_contiguous


def test_dtype_applies_to_parameters_only_and_the_given_module_is_left_alone():
    before = whole()
    kept = np.asarray(before.layers[0].out.kernel[...])
    module = load_tensors(before, random_tensors(), source="x", dtype=jnp.bfloat16)
    assert module.layers[0].out.kernel[...].dtype == jnp.bfloat16
    assert module.mean[...].dtype == jnp.float32
    np.testing.assert_array_equal(before.layers[0].out.kernel[...], kept)
    assert load_tensors(whole(), random_tensors(), source="x").layers[0].out.kernel[...].dtype == jnp.float32
    half = load_tensors(abstract_without_rng(jnp.bfloat16), {"weight": np.ones((3, 2), np.float16)}, source="x")
    assert half.kernel[...].dtype == jnp.bfloat16


def abstract_without_rng(param_dtype) -> Linear:
    return nnx.eval_shape(lambda: Linear(2, 3, rngs=nnx.Rngs(0), param_dtype=param_dtype))


def test_abstract_module_is_filled_and_placed():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    asked = []
    tensor = np.arange(6, dtype=np.float32).reshape(3, 2)
    place = lambda path: asked.append(path) or sharding  # noqa: E731
    module = load_tensors(abstract_without_rng(jnp.float32), {"m.weight": tensor}, source="x", rename=lambda name: f"m.{name}", sharding=place)
    np.testing.assert_array_equal(module.kernel[...], tensor.T)
    assert asked == [("kernel",)]
    assert module.kernel[...].sharding == sharding


def test_bf16_files_are_read(tmp_path):
    values = random_tensors()
    save_file({name: value.astype(ml_dtypes.bfloat16) for name, value in values.items()}, tmp_path / "w.safetensors")
    module = load_tensors(whole(), SafetensorsFiles([tmp_path / "w.safetensors"]), source="w", dtype=jnp.float32)
    np.testing.assert_array_equal(module.embed.embedding[...], values["embed.weight"].astype(ml_dtypes.bfloat16).astype(np.float32))


def changed(**changes):
    tensors = random_tensors()
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    return tensors


BAD = [
    ({"layers.1.out.weight": None}, r"layers\.1\.out\.weight \[6, 8\]"),
    ({"mean": None}, r"missing tensor mean"),
    ({"layers.2.out.weight": np.zeros((6, 8), np.float32)}, r"no tensor layers\.2\.out\.weight \[6, 8\]"),
    ({"layers.0.out.weight": np.zeros((8, 6), np.float32)}, r"'layers\.0\.out\.weight' has shape \[8, 6\], the config asks for \[6, 8\]"),
    ({"embed.weight": np.zeros((5, 6), np.int8)}, r"'embed\.weight' holds int8"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_what_does_not_fit_is_refused_by_name(tmp_path, changes, message):
    tensors = changed(**changes)
    with pytest.raises(ValueError, match=message) as caught:
        load_tensors(whole(), tensors, source="the-file")
    assert "the-file" in str(caught.value)
    file = tmp_path / "w.safetensors"
    save_file(tensors, file)
    with pytest.raises(ValueError, match=message) as caught:
        load_tensors(whole(), SafetensorsFiles([file]), source=str(file))
    assert str(file) in str(caught.value)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in "ab":
        save_file({"t": np.zeros(2, np.float32)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"b\.safetensors: tensor 't' is also in .*a\.safetensors"):
        SafetensorsFiles([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])


def test_clashing_names_are_refused():
    class Clash(nnx.Module):
        def __init__(self):
            self.kernel, self.weight = nnx.Param(jnp.ones((2, 2))), nnx.Param(jnp.ones(2))

    with pytest.raises(ValueError, match="both map to tensor 'weight'"):
        expected_tensors(Clash())
