"""The injection's fast paths against its reference: the gradient by hand, the kernels (interpreted, and on a GPU), and the choice between them."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dspine_jax.config import MeshConfig
from dspine_jax.sharding import BATCH_AXES, make_mesh
from pallas_kernels.dispatch import without_jax_triton
from pallas_kernels.injection import InjectionWeights, _with_gradient, injection, mosaic_gpu, pallas_tpu, ref, triton_gpu, vjp
from pallas_kernels.injection.arg_specs import arguments
from pallas_kernels.shapes import MODELS

EPS = 1e-6
injection_module = sys.modules["pallas_kernels.injection"]
# (B, N, K, D, R): with the tiles of ``small_tiles`` at least three along rows, columns of both widths and both depths, and the smallest of all.
CASES = [(3, 1, 16, 104, 40), (2, 3, 7, 56, 40), (13, 2, 2, 72, 48), (1, 1, 2, 64, 16), (1, 1, 7, 160, 96)]
# The same for the TPU, whose columns come in 128s, and a width and a few blocks that do not divide.
TPU_CASES = [(17, 1, 16, 384, 384), (3, 7, 7, 384, 24), (19, 1, 2, 56, 384), (3, 1, 7, 64, 24)]
TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-5}
NAMES = ("new stream", "features", "hidden gate", "dx", "danchor", *(f"d{name}" for name in InjectionWeights._fields))


def make(B, N, K, D, R, dtype=jnp.bfloat16, weight_dtype=None, seed=0):
    """(arguments, cotangents of the outputs); gates far from constant, one silent slot."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape)  # noqa: E731
    weights = rng.uniform(0.5, 1.5, D), draw(D, R) / D**0.5, draw(R, D) / R**0.5, draw(D, D) / D**0.5, draw(D), draw(R, D) / R**0.5
    x = 3 * draw(B, N, K, D)
    x[0, 0, 1] = 0
    as_dtype = lambda x: jnp.asarray(x, dtype)  # noqa: E731
    args = as_dtype(x), jnp.asarray(draw(B, N, R), jnp.float32), InjectionWeights(*(jnp.asarray(w, weight_dtype or dtype) for w in weights))
    return args, (as_dtype(draw(B, N, K, D)), *(jnp.asarray(draw(B, N, K, width), jnp.float32) for width in (R, D)))


def everything(function):
    """(arguments, cotangents) -> outputs and all gradients, by name."""

    def run(args, cotangents):
        outputs, pull = jax.vjp(function, *args)
        dx, danchor, dweights = pull(cotangents)
        return dict(zip(NAMES, (*outputs, dx, danchor, *dweights)))

    return run


REFERENCE = functools.partial(ref.injection, eps=EPS)
REFERENCE_AND_GRADIENTS = jax.jit(everything(REFERENCE))


def exact(function, *inputs):
    with jax.default_matmul_precision("highest"):
        return function(*jax.tree.map(lambda x: x.astype(jnp.float32), inputs))


def compare(ours, theirs, tolerance):
    for name, x in ours.items():
        assert jnp.isfinite(x.astype(jnp.float32)).all(), name
        assert tiny.relative_l2(x.astype(jnp.float32), theirs[name]) < tolerance, name


def compare_outputs(ours, args, dtype):
    compare(dict(zip(NAMES, ours)), dict(zip(NAMES, exact(jax.jit(REFERENCE), *args))), TOLERANCE[jnp.dtype(dtype).name])
    assert [x.dtype for x in ours] == [dtype, jnp.float32, jnp.float32]
    np.testing.assert_array_equal(ours[0][:, :, 0], args[0][:, :, 0])


@pytest.fixture
def small_tiles(monkeypatch):
    launches = {"products": {1: triton_gpu.Launch(16, 16, 16, 4, 2)}, "write": {1: triton_gpu.Launch(16, 16, 16, 4, 2)}}
    monkeypatch.setattr(triton_gpu, "LAUNCHES", launches)
    monkeypatch.setattr(mosaic_gpu, "LAUNCHES", {"round": {1: mosaic_gpu.Launch(128, 3, 1)}})
    monkeypatch.setattr(pallas_tpu, "MOST_COLUMNS", pallas_tpu.LANES)
    monkeypatch.setattr(pallas_tpu, "MOST_ROWS", 1)


# ---- the gradient by hand -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "dtype", "weight_dtype"),
    [(CASES[1], jnp.float32, jnp.float32), (CASES[3], jnp.float32, jnp.float32), (CASES[1], jnp.bfloat16, jnp.float32), (CASES[0], jnp.bfloat16, jnp.bfloat16)],
)
def test_outputs_and_gradients_of_the_default(case, dtype, weight_dtype):
    """Each gradient comes in its argument's type, and the default is what training runs."""
    args, cotangents = make(*case, dtype=dtype, weight_dtype=weight_dtype)
    ours = jax.jit(everything(functools.partial(injection, eps=EPS)))(args, cotangents)
    assert [ours[name].dtype for name in NAMES[3:]] == [x.dtype for x in jax.tree.leaves(args)]
    theirs = exact(REFERENCE_AND_GRADIENTS, args, cotangents)
    compare(ours, theirs, 1e-5 if dtype == jnp.float32 else 2e-2)
    plain = REFERENCE_AND_GRADIENTS(args, cotangents)
    if dtype == jnp.bfloat16:  # no worse than autodiff at the same precision
        for name in NAMES:
            errors = [tiny.relative_l2(x[name].astype(jnp.float32), theirs[name]) for x in (ours, plain)]
            assert errors[0] <= max(1.5 * errors[1], 1e-5), (name, errors)


def test_default_on_a_mesh():
    """The same values on rows spread over devices, with no row gathered."""
    args, cotangents = make(8, 2, 7, 64, 24, dtype=jnp.float32)
    run = everything(functools.partial(injection, eps=EPS))
    alone = jax.jit(run)(args, cotangents)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()[:8])
    rows, whole = NamedSharding(mesh, P(BATCH_AXES)), NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        spread = jax.device_put((args, cotangents), ((rows, rows, jax.tree.map(lambda _: whole, args[2])), (rows,) * 3))
        compiled = jax.jit(run).lower(*spread).compile()
        theirs = compiled(*spread)
    assert "all-gather" not in compiled.as_text()
    for name in NAMES:
        assert tiny.relative_l2(theirs[name], alone[name]) < 1e-5, name


def test_what_is_kept_for_the_backward_pass():
    """Nothing of a slot's width in fp32; the reference keeps several such arrays."""
    args, _ = make(2, 3, 7, 64, 24, weight_dtype=jnp.float32)

    def kept(function):
        _, pull = jax.eval_shape(lambda *args: jax.vjp(functools.partial(function, eps=EPS), *args), *args)
        return [x for x in jax.tree.leaves(pull) if x.dtype == jnp.float32 and x.shape[:2] == (2, 3) and x.shape[-1] in (64, 24) and x.ndim == 4]

    assert not kept(injection) and len(kept(ref.injection)) >= 3


# ---- kernels ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "dtype"), [(case, jnp.float32) for case in TPU_CASES] + [(case, jnp.bfloat16) for case in TPU_CASES[:2]])
def test_tpu_kernel_equals_the_reference(case, dtype, small_tiles):
    """In the interpreter; tests/test_tpu_compile.py compiles it."""
    args, _ = make(*case, dtype=dtype)
    compare_outputs(jax.jit(functools.partial(pallas_tpu.injection, eps=EPS, interpret=True))(*args), args, dtype)


def traced_for(kind: str, cores: int = 132):
    """A scope in which programs are traced for one GPU of this kind."""
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform="cuda")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=device))


def lowered_for_cuda(function, *args, kind: str = "NVIDIA H200") -> str:
    with traced_for(kind):
        # A new function each time: what jit has traced before, it would not trace again.
        return jax.jit(lambda *args: function(*args)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_gradients_through_the_kernels(small_tiles):
    """A kernel's backward pass is the default's."""
    args, cotangents = make(*TPU_CASES[3])
    ours = jax.jit(everything(_with_gradient(functools.partial(pallas_tpu.injection, interpret=True), EPS)))(args, cotangents)
    theirs = jax.jit(everything(lambda *args: vjp.injection(*args, EPS)))(args, cotangents)
    for name in NAMES[3:]:
        tiny.assert_bit_equal(ours[name], theirs[name])


# (B, N, K, D, R) of the kernel in one launch, with pieces of 128: two and one parts of A's depth for each half of the stream; several blocks, missing rows.
ROUND_CASES = [(1, 1, 16, 512, 256), (1, 2, 7, 512, 512), (2, 1, 7, 1024, 256)]


@pytest.fixture
def without_counters(monkeypatch):
    """Pallas' interpreter knows neither counters nor inlined code; the kernel runs three times in it, so that nothing is waited for."""
    if jax.version.__version_info__ < (0, 11):
        pytest.skip(f"jax {jax.__version__} cannot interpret this kernel, 0.11 can")

    def stacked_product(sum_CT, weights_smem, features_smem):
        weights_QC = jnp.concatenate([weights_smem.at[part][...] for part in range(2)], axis=1)
        return sum_CT + jnp.einsum("qc,tq->ct", weights_QC, features_smem[...], preferred_element_type=jnp.float32)

    for name in ("_counters", "_arrive", "_wait"):
        monkeypatch.setattr(mosaic_gpu, name, lambda *_: None)
    monkeypatch.setattr(mosaic_gpu, "_stacked_product", stacked_product)


@pytest.mark.parametrize("case", ROUND_CASES[:2])
def test_round_in_one_launch_equals_the_reference(case, without_counters, small_tiles):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    args, _ = make(*case)
    compare_outputs(mosaic_gpu.injection(*args, eps=EPS, interpret=plgpu.InterpretGPUParams()), args, jnp.bfloat16)


def compiled_kernels(implementation: str):
    reason = without_jax_triton() if implementation == "triton" else None
    if reason:
        pytest.skip(f"{reason}; pip install '.[triton]' on a GPU machine")
    return jax.jit(functools.partial(injection, eps=EPS, implementation=implementation))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_kernels_on_a_gpu(case, small_tiles):
    args, _ = make(*case)
    compare_outputs(compiled_kernels("triton")(*args), args, jnp.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("model", MODELS)
def test_kernels_on_a_gpu_with_their_own_tiles(model, batch):
    """Right, and the same every time: no sum depends on which program comes first."""
    args, _ = arguments(MODELS[model], batch, jax.random.key(1), jnp.bfloat16)
    run = compiled_kernels("triton")
    ours = run(*args)
    compare_outputs(ours, args, jnp.bfloat16)
    for _ in range(3):
        tiny.assert_bit_equal(run(*args), ours)


@pytest.mark.skipif(jax.version.__version_info__ < (0, 11), reason="the kernel serves jax 0.11 and newer")
def test_round_in_one_launch_lowers_for_cuda():
    args, kwargs = jax.eval_shape(lambda key: arguments(MODELS["qwen3-8b"], 1, key, jnp.bfloat16), jax.random.key(0))
    assert lowered_for_cuda(functools.partial(injection, eps=EPS, implementation="mosaic_gpu"), *args).count("custom_call @mosaic_gpu") == 1


ONE_LAUNCH = functools.partial(injection, eps=EPS, implementation="mosaic_gpu")
SMALLEST = (1, 1, 16, 1024, 1024)  # that the kernel's own launch serves


@pytest.fixture
def on_a_hopper(monkeypatch):
    """What would be traced there."""
    monkeypatch.setattr(mosaic_gpu, "not_hopper", lambda: None)
    monkeypatch.setattr(mosaic_gpu, "multiprocessors", lambda: 132)


@pytest.mark.skipif(jax.version.__version_info__ < (0, 11), reason="the kernel serves jax 0.11 and newer")
def test_a_vmapped_round_launches_one_after_the_other(on_a_hopper):
    """Programs of several rounds at once would wait for each other for ever."""
    args = jax.eval_shape(lambda: make(*SMALLEST)[0])
    rounds = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), args)
    one, several = (str(jax.make_jaxpr(function)(*inputs)).partition("grid=") for function, inputs in ((ONE_LAUNCH, args), (jax.vmap(ONE_LAUNCH), rounds)))
    assert one[2].startswith("(32,)") and several[2].startswith("(32,)")
    assert "scan[" in several[0] and "scan[" not in one[0]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ROUND_CASES)
def test_round_in_one_launch_on_a_gpu(case, small_tiles):
    args, _ = make(*case)
    compare_outputs(compiled_kernels("mosaic_gpu")(*args), args, jnp.bfloat16)


@pytest.mark.gpu
def test_round_in_one_launch_on_a_gpu_with_its_own_tiles():
    """Right, and the same in every launch: counters begin at 0 again, and no sum depends on who comes first."""
    args, _ = arguments(MODELS["qwen3-8b"], 1, jax.random.key(1), jnp.bfloat16)
    run = compiled_kernels("mosaic_gpu")
    ours = run(*args)
    compare_outputs(ours, args, jnp.bfloat16)
    for _ in range(50):
        tiny.assert_bit_equal(run(*args), ours)


@pytest.mark.skipif(jax.version.__version_info__ < (0, 11), reason="the kernel serves jax 0.11 and newer")
@pytest.mark.parametrize(
    ("case", "device", "words"),
    [
        ((2, 1, 16, 1024, 1024), ("NVIDIA H200",), "32 rows"),
        ((1, 1, 16, 576, 192), ("NVIDIA H200",), "a stream 576 wide with features of 192"),
        ((1, 1, 16, 4096, 4096), ("NVIDIA H200",), "a stream 4096 wide with features of 4096"),  # more shared memory than there is
        ((1, 1, 16, 1024, 1024), ("NVIDIA H200", 24), "a device of 24 multiprocessors .a stream 1024 wide wants 32"),
        ((1, 1, 16, 1024, 1024), ("NVIDIA A100-SXM4-80GB", 108), "devices other than NVIDIA's Hopper"),
    ],
)
def test_what_the_round_in_one_launch_does_not_serve_is_refused_by_name(case, device, words):
    """And nothing of it stops the default."""
    args = jax.eval_shape(lambda: make(*case)[0])
    with traced_for(*device):
        with pytest.raises(NotImplementedError, match=words):
            injection(*args, eps=EPS, implementation="mosaic_gpu")
        assert "platform_index" not in str(jax.make_jaxpr(functools.partial(injection, eps=EPS))(*args))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, f, w: (x.astype(jnp.float32), f, w), "a stream of float32"),
        (lambda x, f, w: (x, f, w._replace(message_RD=w.message_RD.astype(jnp.float32))), "message_RD of float32 with a stream of bfloat16"),
        (lambda x, f, w: (x[:0], f[:0], w), "an empty stream"),
    ],
)
def test_what_the_kernels_do_not_serve_is_refused_by_name(change, words):
    args = change(*make(1, 1, 7, 64, 24)[0])
    with pytest.raises(NotImplementedError, match=words):
        injection(*args, eps=EPS, implementation="pallas")
    assert injection(*args, eps=EPS)[0].shape == args[0].shape
    with pytest.raises(ValueError, match="'cuda' is none of 'xla', 'pallas', 'triton', 'mosaic_gpu'"):
        injection(*args, eps=EPS, implementation="cuda")


@pytest.mark.skipif(without_jax_triton() is None, reason="jax-triton is installed")
def test_triton_without_jax_triton_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="without jax-triton"):
        injection(*make(1, 1, 7, 64, 24)[0], eps=EPS, implementation="triton")


def test_a_mesh_keeps_the_reference_path():
    args, _ = make(1, 1, 7, 64, 24)
    with jax.set_mesh(make_mesh(MeshConfig(data=1, tensor=2), jax.devices()[:2])):
        with pytest.raises(NotImplementedError, match="a mesh of several devices.*'tensor': 2"):
            injection(*args, eps=EPS, implementation="pallas")
        assert "platform_index" not in str(jax.make_jaxpr(functools.partial(injection, eps=EPS))(*args))
