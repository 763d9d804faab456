"""Time and memory of block attention, reference and kernels, on a GPU: python -m pallas_kernels.bench_block_attention

``--set`` tries another launch (queries, keys, warps, stages) of a kernel; ``--scan`` times many launches of one, for the table in ``pallas_gpu``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_attention import block_attention, pallas_gpu

# name -> (B, N, K, H, G, C, S)
SHAPES = {
    "smollm2": (32, 48, 16, 9, 3, 64, 512),
    "qwen3-8b": (2, 512, 16, 32, 8, 128, 4096),
}


def make(B, N, K, H, G, C, S):
    """Random arrays, context lengths uniform in 0..S-1 and in no order, as anchors with replacement are."""
    shapes = [(B, N, K, H, C), (B, S, G, C), (B, S, G, C), (B, N, K, G, C), (B, N, K, G, C), (B, N, K, H, C)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    *arrays, dout = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes))
    return tuple(arrays), jnp.asarray(np.random.default_rng(0).integers(0, S, (B, N)), jnp.int32), dout


def measure(compiled, args, repeats: int) -> float:
    """Median milliseconds a call, over groups of calls that are queued together."""
    jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        results = [compiled(*args) for _ in range(5)]
        jax.block_until_ready(results)
        times.append((time.perf_counter() - start) / 5)
    return 1e3 * statistics.median(times)


def compare(name: str, implementations: tuple[str, ...], causal: bool, repeats: int) -> None:
    arrays, context_len, dout = make(*SHAPES[name])
    for implementation in implementations:
        attend = functools.partial(block_attention, causal=causal, implementation=implementation)

        def both(arrays, context_len, dout, attend=attend):
            out, pull = jax.vjp(lambda *arrays: attend(*arrays, context_len), *arrays)
            return out, pull(dout)

        forward = lambda arrays, context_len, attend=attend: attend(*arrays, context_len)  # noqa: E731
        for part, function, inputs in (("forward", forward, (arrays, context_len)), ("forward+backward", both, (arrays, context_len, dout))):
            line = f"{name:9s} {implementation:6s} {part:16s}"
            try:
                compiled = jax.jit(function).lower(*inputs).compile()
                temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
                print(f"{line} {measure(compiled, inputs, repeats):9.3f} ms  temporary memory {temporary:10.1f} MiB", flush=True)
            except jax.errors.JaxRuntimeError as error:
                print(f"{line} failed: {str(error).splitlines()[0][:200]}", flush=True)


def scan(name: str, kernel: str, causal: bool, repeats: int) -> None:
    """Times of one kernel (the backward ones of keys: after that of queries) under every launch of a grid, the best last."""
    arrays, context_len, dout = make(*SHAPES[name])
    static = dict(causal=causal, interpret=False)
    out, lse = jax.jit(functools.partial(pallas_gpu._forward, **static))(*arrays, context_len)
    wanted = {"forward": slice(2), "backward_queries": slice(1), "backward_context": slice(1, 3), "backward_own": slice(3, 5)}[kernel]
    inputs = (*arrays, context_len) if kernel == "forward" else (*arrays, context_len, out, lse, dout)
    function = pallas_gpu._forward if kernel == "forward" else pallas_gpu._backward
    times = []
    for numbers in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)):
        pallas_gpu.LAUNCHES[kernel] = {256: pallas_gpu.Launch(*numbers)}
        try:
            compiled = jax.jit(lambda *inputs: function(*inputs, **static)[wanted]).lower(*inputs).compile()
            times.append((measure(compiled, inputs, repeats), numbers))
        except jax.errors.JaxRuntimeError as error:  # does not fit
            print(f"{name} {kernel} {numbers} failed: {str(error).splitlines()[0][:100]}", flush=True)
    for milliseconds, numbers in sorted(times, reverse=True):
        print(f"{name} {kernel} {milliseconds:8.3f} ms {','.join(map(str, numbers))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--kernels", action="store_true", help="leave the reference out")
    parser.add_argument("--set", nargs="+", default=[], metavar="KERNEL=Q,K,W,S", help=f"launches of {', '.join(pallas_gpu.LAUNCHES)}")
    parser.add_argument("--scan", nargs="+", choices=pallas_gpu.LAUNCHES, default=[], metavar="KERNEL")
    parser.add_argument("--no-split", action="store_true", help="one loop for tiles with and without masks")
    parser.add_argument("--full", action="store_true", help="two-way blocks instead of causal ones")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    pallas_gpu.SPLIT = not args.no_split
    for item in args.set:
        kernel, _, numbers = item.partition("=")
        if kernel not in pallas_gpu.LAUNCHES:
            parser.error(f"--set {item}: no kernel {kernel!r}, only {', '.join(pallas_gpu.LAUNCHES)}")
        pallas_gpu.LAUNCHES[kernel] = {256: pallas_gpu.Launch(*map(int, numbers.split(",")))}
    for name in args.shapes:
        for kernel in args.scan:
            own = pallas_gpu.LAUNCHES[kernel]
            scan(name, kernel, not args.full, args.repeats)
            pallas_gpu.LAUNCHES[kernel] = own
        if not args.scan:
            compare(name, ("pallas",) if args.kernels else ("xla", "pallas"), not args.full, args.repeats)


if __name__ == "__main__":
    main()
