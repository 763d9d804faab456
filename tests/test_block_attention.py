"""Block attention: the kernels (interpreted, and on a GPU) against the reference, forward and backward, and the choice between them."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dspine_jax.config import MeshConfig
from dspine_jax.sharding import BATCH_AXES, make_mesh
from pallas_kernels.block_attention import block_attention, pallas_gpu, pallas_tpu, ref

# (N, K, H, G, C, S, causal): with the tiles of ``small_tiles`` at least three along queries, context and own keys, and the smallest of all.
CASES = [
    (5, 7, 9, 3, 16, 53, True),
    (5, 7, 3, 3, 32, 48, False),
    (25, 2, 8, 2, 16, 33, True),
    (25, 2, 2, 2, 16, 47, False),
    (3, 16, 3, 1, 64, 40, True),
    (4, 16, 4, 1, 16, 70, False),
    (2, 1, 4, 2, 16, 1, True),
]
pytestmark = pytest.mark.usefixtures("quick_compiler")

NAMES = ("out", "q", "ctx_k", "ctx_v", "block_k", "block_v")
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-6}


def make(N, K, H, G, C, S, dtype=jnp.bfloat16, B=2, seed=0):
    """(arrays, context lengths none, one, partial and whole in no order, weights of the outputs). Rows that nobody sees hold nonsense."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape)  # noqa: E731
    lengths = np.where(rng.random((B, N)) < 0.3, rng.choice([0, 1, 16, S - 1, S], (B, N)), rng.integers(0, S + 1, (B, N)))
    lengths[0] = np.minimum(lengths[0], S - 5)
    lengths[0, -1], lengths[-1, 0], lengths[-1, -1] = 0, 0, S
    hidden = (np.arange(S) >= lengths.max(axis=1)[:, None])[..., None, None]
    ctx_k, ctx_v = (np.where(hidden, 7.0, draw(B, S, G, C)) for _ in "kv")
    arrays = draw(B, N, K, H, C), ctx_k, ctx_v, draw(B, N, K, G, C), draw(B, N, K, G, C)
    return tuple(jnp.asarray(x, dtype) for x in arrays), jnp.asarray(lengths, jnp.int32), jnp.asarray(draw(B, N, K, H, C), dtype)


def everything(function):
    """(arrays, context lengths, weights) -> output and all gradients, by name."""

    def run(arrays, context_len, weights):
        out, pull = jax.vjp(lambda *arrays: function(*arrays, context_len), *arrays)
        return dict(zip(NAMES, (out, *pull(weights))))

    return run


def exact(arrays, context_len, weights, causal):
    wide = lambda x: x.astype(jnp.float32)  # noqa: E731
    with jax.default_matmul_precision("highest"):
        return jax.jit(everything(functools.partial(ref.block_attention, causal=causal)))(tuple(map(wide, arrays)), context_len, wide(weights))


def compare(ours, theirs, dtype):
    for name in NAMES:
        assert ours[name].dtype == dtype and jnp.isfinite(ours[name].astype(jnp.float32)).all(), name
        assert tiny.relative_l2(ours[name].astype(jnp.float32), theirs[name]) < TOLERANCE[jnp.dtype(dtype).name], name


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(pallas_gpu, "LAUNCHES", {kernel: {256: pallas_gpu.Launch(16, 16, 4, 2)} for kernel in pallas_gpu.LAUNCHES})
    monkeypatch.setattr(pallas_tpu, "MOST_QUERIES", 32)
    monkeypatch.setattr(pallas_tpu, "MOST_KEYS", 16)


@pytest.mark.parametrize(("case", "dtype"), [(case, jnp.float32) for case in CASES] + [(case, jnp.bfloat16) for case in CASES[::2]] + [(CASES[1], jnp.float16)])
def test_kernels_equal_the_reference(case, dtype, small_tiles):
    """In the interpreter, which is no evidence for the GPU compiler."""
    *sizes, causal = case
    inputs = make(*sizes, dtype=dtype)
    ours = jax.jit(everything(functools.partial(pallas_gpu.block_attention, causal=causal, interpret=True)))(*inputs)
    compare(ours, exact(*inputs, causal), dtype)


@pytest.mark.parametrize(("case", "dtype"), [(case, jnp.float32) for case in CASES[::2]] + [(CASES[1], jnp.bfloat16), (CASES[5], jnp.bfloat16)])
def test_tpu_kernels_equal_the_reference(case, dtype, small_tiles):
    """In the interpreter; tests/test_tpu_compile.py compiles them."""
    *sizes, causal = case
    inputs = make(*sizes, dtype=dtype)
    ours = jax.jit(everything(functools.partial(pallas_tpu.block_attention, causal=causal, interpret=True)))(*inputs)
    compare(ours, exact(*inputs, causal), dtype)


def test_kernels_with_the_tiles_of_a_gpu():
    inputs = make(9, 16, 6, 2, 64, 300, B=1)
    ours = jax.jit(everything(functools.partial(pallas_gpu.block_attention, causal=True, interpret=True)))(*inputs)
    compare(ours, exact(*inputs, True), jnp.bfloat16)


@pytest.mark.parametrize("length", [0, 48, 99])
def test_equal_contexts(length, small_tiles):
    """No context at all (every block sees itself alone), and all of it, also where more is promised than there is."""
    arrays, context_len, weights = make(5, 7, 6, 2, 16, 48, dtype=jnp.float32)
    inputs = arrays, jnp.full_like(context_len, length), weights
    ours = jax.jit(everything(functools.partial(pallas_gpu.block_attention, causal=True, interpret=True)))(*inputs)
    compare(ours, exact(*inputs, True), jnp.float32)
    assert length or not any(jnp.any(ours[name]) for name in ("ctx_k", "ctx_v"))


@pytest.mark.parametrize(("slots", "contexts"), [(1, (15, 4092)), (7, (129, 1)), (16, (4092, 129)), (17, (1, 15)), (192, (129, 4092))])
def test_any_length_is_right_each_time(slots, contexts):
    """K01: blocks and contexts that end anywhere in a tile. What no block sees is not a number and must not spread; ten calls are alike."""
    for S in contexts:
        (q, ctx_k, ctx_v, *own), _, _ = make(1, slots, 2, 1, 16, S, dtype=jnp.float32, B=1)
        hidden = (jnp.arange(S) >= max(S - 3, 1))[:, None, None]
        seen, lost = ([jnp.where(hidden, fill, x) for x in (ctx_k, ctx_v)] for fill in (0.0, jnp.nan))
        lengths = jnp.full((1, 1), max(S - 3, 1), jnp.int32)
        run = jax.jit(functools.partial(pallas_gpu.block_attention, causal=True, interpret=True))
        ours = run(q, *lost, *own, lengths)
        with jax.default_matmul_precision("highest"):
            theirs = ref.block_attention(q, *seen, *own, lengths, causal=True)
        assert tiny.relative_l2(ours, theirs) < 1e-5, S
        for _ in range(9):
            tiny.assert_bit_equal(run(q, *lost, *own, lengths), ours)


@pytest.mark.parametrize("more", [0, 1])
def test_gradients_of_any_length(more):
    """K02: as many queries as context rows, or one more, at lengths that fill tiles and that do not."""
    for S in (8, 20, 33, 64, 100, 128)[more::2]:
        inputs = make(S + more, 1, 2, 1, 16, S, dtype=jnp.float32, B=1) if more else make(1, S, 2, 1, 16, S, dtype=jnp.float32, B=2)
        ours = jax.jit(everything(functools.partial(pallas_gpu.block_attention, causal=True, interpret=True)))(*inputs)
        compare(ours, exact(*inputs, True), jnp.float32)


def scores_in_memory(run, *args) -> int:
    """Numbers of the largest array in the program that is lowered for a GPU."""
    return max(math.prod(map(int, dims.split("x")[:-1])) for dims in re.findall(r"tensor<((?:\d+x)+)\w+>", lowered_for_cuda(run, *args)))


def test_no_scores_of_all_slots_in_memory():
    """At 4,096 rows of context, forward and backward; the reference has such an array of every head."""
    N, K, H, S = 32, 16, 2, 4096
    args = jax.eval_shape(lambda: make(N, K, H, 1, 16, S, B=1))
    kernel, reference = (everything(functools.partial(block_attention, causal=True, implementation=name)) for name in ("pallas", "xla"))
    assert scores_in_memory(kernel, *args) < N * K * S / 10 and scores_in_memory(reference, *args) >= H * N * K * S


def test_kernels_under_checkpoint_and_donation(small_tiles):
    """A rematerialised layer of a donating step gives the same gradients."""
    arrays, context_len, weights = make(5, 7, 6, 2, 16, 53)
    layer = functools.partial(pallas_gpu.block_attention, causal=True, interpret=True)

    def gradients(run, arrays):
        return jax.grad(lambda arrays: jnp.vdot(run(*arrays, context_len), weights, preferred_element_type=jnp.float32))(arrays)

    plain = jax.jit(functools.partial(gradients, layer))(arrays)
    theirs = jax.jit(functools.partial(gradients, jax.checkpoint(layer)), donate_argnums=0)(jax.tree.map(jnp.copy, arrays))
    tiny.assert_bit_equal(theirs, plain)


def test_kernels_on_a_mesh(small_tiles):
    """Each device works on its own rows and heads: nothing is gathered, and the values are those of one device."""
    arrays, context_len, weights = make(5, 7, 6, 2, 16, 53, B=4)
    run = everything(functools.partial(pallas_gpu.block_attention, causal=True, interpret=True))
    alone = jax.jit(run)(arrays, context_len, weights)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()[:8])
    heads = lambda x: jax.device_put(x, NamedSharding(mesh, P(BATCH_AXES, *[None] * (x.ndim - 3), "tensor", None)))  # noqa: E731
    with jax.set_mesh(mesh):
        inputs = jax.tree.map(heads, arrays), jax.device_put(context_len, NamedSharding(mesh, P(BATCH_AXES))), heads(weights)
        compiled = jax.jit(run).lower(*inputs).compile()
        spread = compiled(*inputs)
    assert "all-gather" not in compiled.as_text()
    tiny.assert_bit_equal(jax.device_get(spread), jax.device_get(alone))


def test_a_mesh_that_does_not_divide_keeps_the_reference():
    (q, *others), context_len, _ = make(3, 2, 6, 3, 16, 20)
    with jax.set_mesh(make_mesh(MeshConfig(data=1, tensor=2), jax.devices()[:2])):
        with pytest.raises(NotImplementedError, match="2 rows and 3 kv heads on a mesh of .*'tensor': 2"):
            block_attention(q, *others, context_len, causal=True, implementation="pallas")
        assert "platform_index" not in str(jax.make_jaxpr(functools.partial(block_attention, causal=True))(q, *others, context_len))
    with jax.set_mesh(jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))):
        with pytest.raises(NotImplementedError, match="a mesh with axes {'rows'"):
            block_attention(q, *others, context_len, causal=True, implementation="pallas")


def lowered_for_cuda(function, *args) -> str:
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=device)):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("N", "dtype", "found"), [(3, jnp.bfloat16, True), (3, jnp.float16, True), (3, jnp.float32, False), (1, jnp.bfloat16, False)])
def test_what_takes_the_kernels(N, dtype, found):
    """Training in a half precision holds them on a GPU, forward and backward; fp32 and a decoding round do not. On a CPU nothing does."""
    arrays, context_len, weights = make(max(N, 2), 7, 6, 2, 16, 53, dtype=dtype)
    inputs = (arrays[0][:, :N], *arrays[1:3], *(x[:, :N] for x in arrays[3:])), context_len[:, :N], weights[:, :N]
    run = everything(functools.partial(block_attention, causal=True))
    kernels = ("forward_kernel", "backward_queries_kernel", "backward_keys_kernel")
    text = lowered_for_cuda(run, *inputs)
    assert [name in text for name in kernels] == [found] * 3
    assert "triton" not in jax.jit(run).lower(*inputs).as_text()
    tiny.assert_bit_equal(jax.jit(run)(*inputs), jax.jit(everything(functools.partial(ref.block_attention, causal=True)))(*inputs))


@pytest.mark.parametrize("case", CASES + [(9, 16, 6, 2, 64, 300, True), (5, 16, 8, 2, 128, 700, True), (6, 8, 4, 2, 256, 130, False)])
def test_all_kernels_lower_for_cuda(case):
    *sizes, causal = case
    assert lowered_for_cuda(everything(functools.partial(pallas_gpu.block_attention, causal=causal)), *make(*sizes)).count("triton") == 4


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_kernels_on_a_gpu(case, dtype, small_tiles):
    *sizes, causal = case
    inputs = make(*sizes, dtype=dtype)
    ours = jax.jit(everything(functools.partial(block_attention, causal=causal, implementation="pallas")))(*inputs)
    compare(ours, exact(*inputs, causal), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [(9, 16, 6, 2, 64, 300, True), (48, 16, 9, 3, 64, 512, True), (40, 16, 8, 2, 128, 1000, False), (6, 8, 4, 2, 256, 130, True)])
def test_kernels_on_a_gpu_with_their_own_tiles(case):
    *sizes, causal = case
    inputs = make(*sizes)
    run = jax.jit(everything(functools.partial(block_attention, causal=causal)))
    assert "triton" in run.lower(*inputs).as_text()
    ours = run(*inputs)
    compare(ours, exact(*inputs, causal), jnp.bfloat16)
    for _ in range(5):
        tiny.assert_bit_equal(run(*inputs), ours)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, *others: (q.astype(jnp.float32), *others), "arrays of several types, bfloat16, float32"),
        (lambda *arrays: [x.astype(jnp.float32) for x in arrays], "float32"),
        (lambda *arrays: [x[..., :12] for x in arrays], "head width of 12"),
        (lambda q, k, v, *own: (q, k[:, :0], v[:, :0], *own), "0 context rows"),
    ],
)
def test_what_the_kernels_do_not_serve_is_refused_by_name(change, words, monkeypatch):
    arrays, context_len, _ = make(3, 2, 4, 2, 16, 20)
    arrays = change(*arrays)
    with monkeypatch.context() as on_a_gpu, pytest.raises(NotImplementedError, match=f"{words}.* on cuda"):
        on_a_gpu.setattr(jax, "default_backend", lambda: "gpu")
        block_attention(*arrays, context_len, causal=True, implementation="pallas")
    assert block_attention(*arrays, context_len, causal=True).shape == arrays[0].shape
    with pytest.raises(ValueError, match="'cuda' is none of"):
        block_attention(*arrays, context_len, causal=True, implementation="cuda")
