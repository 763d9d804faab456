"""The kernels' benchmark: what it counts, what it writes, what it refuses."""

import json
import types

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import bench, block_attention, cached_attention, injection
from pallas_kernels.injection import bench_round
from pallas_kernels.shapes import MODELS


@pytest.mark.parametrize(("op", "extra"), [(injection, {}), *((op, extra) for op in (block_attention, cached_attention) for extra in ({}, {"context": 96}))])
@pytest.mark.parametrize("model", ["tiny", "qwen3-8b"])
def test_bytes_are_those_of_the_arrays(op, extra, model):
    """Every input read once, every output of a round written once; positions and lengths are too few to count."""
    specs, static = bench.part(op, "arg_specs"), {}

    def run(key):
        args, keywords = specs.arguments(MODELS[model], 2, key, jnp.bfloat16, **extra)
        static.update(keywords)
        outputs = bench.function_of(op)(*args, **keywords)
        return args, outputs[0] if isinstance(outputs, tuple) else outputs

    arrays = jax.tree.leaves(jax.eval_shape(run, jax.random.key(0)))
    expected = sum(x.size * x.dtype.itemsize for x in arrays if jnp.issubdtype(x.dtype, jnp.floating))
    assert specs.bytes_moved(MODELS[model], 2, jnp.bfloat16, **extra) == expected


def test_a_table_and_its_records(tmp_path, capsys):
    path = tmp_path / "deep" / "bench.json"
    arguments = ["--ops", "injection", "--shapes", "tiny", "--batches", "2", "--implementations", "xla", "default", "pallas", "--repeats", "3"]
    bench.main([*arguments, "--json", str(path)])
    report = json.loads(path.read_text())
    plain, default, kernel = report["records"]
    assert [x["id"] for x in (plain, default, kernel)] == [f"kernel/injection/tiny/b2/{name}" for name in ("xla", "default", "pallas")]
    for x in (plain, default):
        assert x["over_floor"] == pytest.approx(x["value"] / (1e3 * x["bytes"] / report["bytes_per_second"]))
        assert x["over_xla"] == pytest.approx(x["value"] / plain["value"]) and 0 < x["relative_l2"] < 1e-2
    assert "interpret mode" in kernel["failed"]  # said in its line, and the others are still timed
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("injection")]) == 3


def test_a_program_runs_every_set_of_arguments():
    """A set whose result nobody used would be dropped, and the time divided by what was never run."""
    case = bench.Case(injection, MODELS["tiny"], 1, jnp.bfloat16, blocks=1, gradients=True, at_least_bytes=2**17)
    assert len(case.sets) > MODELS["tiny"].num_layers
    one, all_ = (jax.jit(lambda sets: case.program(sets, "xla")).lower(sets).compile() for sets in (case.sets[:1], case.sets))
    assert all_.as_text().count(" dot(") == len(case.sets) * one.as_text().count(" dot(") > 0
    sums = {float(jnp.sum(outputs[0].astype(jnp.float32))) for outputs, _ in all_(case.sets)}
    assert len(sums) == len(case.sets)


def test_a_batch_that_does_not_fit_is_said_and_ends_that_implementation(tmp_path, monkeypatch, capsys):
    path = tmp_path / "bench.json"

    def case(op, name, batch, args):
        def time(implementation, repeats):
            if implementation == "xla" and batch > 1:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes.")
            return 2.0, 0.1

        size = bench.part(op, "arg_specs").bytes_moved(MODELS[name], batch, jnp.bfloat16, args.blocks, args.context)
        return types.SimpleNamespace(bytes=size, operations=1, time=time, error=lambda _: None)

    monkeypatch.setattr(bench, "make_case", case)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 1e9)
    sizes = ["--shapes", "tiny", "--batches", "1", "2", "4", "--blocks", "3", "--context", "24", "--gradients"]
    bench.main(["--ops", "block_attention", *sizes, "--implementations", "xla", "default", "--repeats", "2", "--json", str(path)])
    *records, largest = json.loads(path.read_text())["records"]
    assert [x.get("failed", "")[:13] for x in records] == ["", "", "out of memory", "", "not tried: a ", ""]
    moved = bench.part(block_attention, "arg_specs").bytes_moved
    assert [x["bytes"] for x in records if "value" in x] == [moved(MODELS["tiny"], b, jnp.bfloat16, 3, 24) for b in (1, 1, 2, 4)]
    assert largest["value"] == {"xla": 1, "default": 4}
    assert "largest batch that fits: xla 1, default 4 (the largest tried)" in capsys.readouterr().out


def test_what_a_round_pays_for_injections(tmp_path):
    path = tmp_path / "round.json"
    bench_round.main(["--shapes", "tiny", "--batches", "1", "--implementations", "xla", "--turns", "1", "--json", str(path)])
    none, plain = json.loads(path.read_text())["records"]
    assert none["value"] == 0 and plain["value"] == pytest.approx(plain["round_ms"] - none["round_ms"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ops", "cached_attention", "--blocks", "4"], "cached_attention runs in decoding alone"),
        (["--ops", "injection", "--context", "4096"], "--context 4096: injection reads no context"),
        (["--ops", "cached_attention", "--scan"], "cached_attention has no launches"),
        (["--set", "injection.rite=1,2"], "no kernel 'injection.rite', only injection.products, injection.write"),
        (["--set", "injection.write=1,2"], "wants rows,columns,depth,warps,stages"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, words, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert words in capsys.readouterr().err


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU would run them")
def test_a_scan_says_what_failed_and_leaves_the_launches(tmp_path, monkeypatch, capsys):
    kernels, path = bench.part(injection, "mosaic_gpu"), tmp_path / "scan.json"
    before = {kernel: dict(launches) for kernel, launches in kernels.LAUNCHES.items()}
    monkeypatch.setattr(kernels, "candidates", lambda kernel, shape, blocks: list(before[kernel].values()) * 2)
    bench.main(["--ops", "injection", "--shapes", "tiny", "--batches", "1", "--scan", "mosaic_gpu", "--json", str(path)])
    records = json.loads(path.read_text())["records"]  # nothing can run without a GPU
    assert [x["kernel"] for x in records] == ["round"] * 2 and all("no kernel serves" in x["failed"] for x in records)
    assert "injection.round: 2 launches failed, the first with NotImplementedError" in capsys.readouterr().out
    assert kernels.LAUNCHES == before
