"""What the injections add to a decoding round's pass over the drafter's layers: python -m pallas_kernels.injection.bench_round

    python -m pallas_kernels.injection.bench_round --shapes qwen3-8b --batches 1 8 32 --json out/round.json

The layers run as the drafter runs them, one block a row against 1,024 rows of context, without injections and with one after each, by implementation. The
programs take turns, so that a drift of the clock meets all of them; 'added' is the difference of the medians. The floor is that of the injections' bytes at
the bandwidth of a large copy.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from dspine_jax.config import DrafterConfig
from dspine_jax.drafter import DrafterLayer
from pallas_kernels import bench
from pallas_kernels.block_attention.arg_specs import CONTEXT
from pallas_kernels.injection import arg_specs, injection
from pallas_kernels.shapes import BATCHES, MODELS, ModelShape

MLP_WIDTH = {"tiny": 128, "smollm2-135m": 1536, "qwen3-4b": 9728, "qwen3-8b": 12288}


def make_layers(shape: ModelShape, intermediate_size: int) -> tuple[nnx.GraphDef, nnx.State]:
    """The drafter's layers in bf16, random."""
    config = DrafterConfig(
        block_size=shape.block_size,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=intermediate_size,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        block_attention="causal",
    )

    @nnx.jit
    def make():
        return nnx.List([DrafterLayer(config, rngs=nnx.Rngs(i), param_dtype=jnp.bfloat16) for i in range(shape.num_layers)])

    return nnx.split(make())


def round_pass(graph, state, weights, x_BNKD, anchor_feature_BNR, keys, values, context_len_BN, *, implementation: str):
    """The stream after all layers, and the last hidden gate if there are injections."""
    layers, hidden_gate = nnx.merge(graph, state), None
    positions_BNK = context_len_BN[..., None] + jnp.arange(x_BNKD.shape[2])
    for layer, w, k, v in zip(layers, weights, keys, values, strict=True):
        x_BNKD = layer(x_BNKD, k, v, context_len_BN, positions_BNK)
        if implementation != "none":
            chosen = None if implementation == "default" else implementation
            x_BNKD, _, hidden_gate = injection(x_BNKD, anchor_feature_BNR, w, eps=1e-6, implementation=chosen)
    return x_BNKD, hidden_gate


def measure(name: str, batch: int, layers, implementations: list[str], turns: int, bandwidth: float) -> list[dict]:
    shape = MODELS[name]
    graph, state = layers
    made = [arg_specs.arguments(shape, batch, jax.random.key(i), jnp.bfloat16)[0] for i in range(shape.num_layers)]
    x, anchor_feature, _ = made[0]
    caches = [[jnp.full((batch, CONTEXT, shape.num_kv_heads, shape.head_dim), 0.1 + i, jnp.bfloat16) for i in range(shape.num_layers)] for _ in "kv"]
    inputs = state, [weights for *_, weights in made], x, anchor_feature, *caches, jnp.full((batch, 1), CONTEXT)
    programs, failed, rounds = {}, {}, 1 if jax.default_backend() == "cpu" else 50
    for implementation in ("none", *implementations):
        try:
            run = functools.partial(round_pass, graph, implementation=implementation)
            programs[implementation] = jax.jit(bench.repeated(run, rounds)).lower(*inputs).compile()
        except bench.FAILURES as failure:
            failed[implementation] = bench.short(failure)
            print(f"{name:13s} {batch:3d} {implementation:8s} {failed[implementation]}", flush=True)
    times = {implementation: [] for implementation in programs}
    for _ in range(turns):
        for implementation, program in programs.items():
            times[implementation].append(bench.time_program(program, inputs, rounds, 2)[0])
    floor = 1e3 * shape.num_layers * arg_specs.bytes_moved(shape, batch, jnp.bfloat16) / bandwidth
    backbone, records = statistics.median(times["none"]), []
    for implementation, values in times.items():
        median, spread = statistics.median(values), max(values) - min(values)
        record = {"id": f"kernel/injection/{name}/b{batch}/{implementation}", "round_ms": median, "spread": spread, "value": median - backbone, "unit": "ms"}
        records.append(record | {"floor_ms": floor})
        print(f"{name:13s} {batch:3d} {implementation:8s} {median:9.4f} {spread:8.4f} {median - backbone:9.4f} {(median - backbone) / floor:7.2f}", flush=True)
    return records + [{"id": f"kernel/injection/{name}/b{batch}/{implementation}", "failed": reason} for implementation, reason in failed.items()]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=MODELS, default=["qwen3-8b"])
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--implementations", nargs="+", choices=bench.IMPLEMENTATIONS, default=list(bench.IMPLEMENTATIONS))
    parser.add_argument("--set", nargs="+", default=[], metavar="OP.KERNEL=NUMBERS", help="a launch, as pallas_kernels.bench takes it")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    for item in args.set:
        bench.set_launch(parser, item)
    bandwidth = bench.copy_bandwidth()
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, bfloat16, {bandwidth / 1e9:.0f} GB/s")
    print(f"{'shape':13s} {'b':>3s} {'impl':8s} {'round ms':>9s} {'spread':>8s} {'added ms':>9s} {'/floor':>7s}")
    records = []
    for name in args.shapes:
        layers = make_layers(MODELS[name], MLP_WIDTH[name])
        for batch in args.batches:
            records += measure(name, batch, layers, args.implementations, args.turns, bandwidth)
    if args.json:
        bench.write_json(args.json, {"device": device.device_kind, "bytes_per_second": bandwidth}, records)


if __name__ == "__main__":
    main()
