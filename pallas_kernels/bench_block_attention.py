"""Time and memory of block attention, reference and kernels, on a GPU: python -m pallas_kernels.bench_block_attention [--set forward=128,64,4,3 ...]

``--set`` tries another launch (queries, keys, warps, stages) of a kernel for every head width; ``--kernels`` times the kernels alone.
"""

from __future__ import annotations

import argparse
import functools
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--set", nargs="+", default=[], metavar="KERNEL=Q,K,W,S", help=f"launch of one of {', '.join(pallas_gpu.LAUNCHES)}")
    parser.add_argument("--kernels", action="store_true", help="leave the reference out")
    parser.add_argument("--full", action="store_true", help="two-way blocks instead of causal ones")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    for item in args.set:
        kernel, _, numbers = item.partition("=")
        if kernel not in pallas_gpu.LAUNCHES:
            parser.error(f"--set {item}: no kernel {kernel!r}, only {', '.join(pallas_gpu.LAUNCHES)}")
        pallas_gpu.LAUNCHES[kernel] = {256: pallas_gpu.Launch(*map(int, numbers.split(",")))}
    for name in args.shapes:
        arrays, context_len, dout = make(*SHAPES[name])
        for implementation in ("pallas",) if args.kernels else ("xla", "pallas"):
            attend = functools.partial(block_attention, causal=not args.full, implementation=implementation)

            def both(arrays, context_len, dout, attend=attend):
                out, pull = jax.vjp(lambda *arrays: attend(*arrays, context_len), *arrays)
                return out, pull(dout)

            forward = lambda arrays, context_len, attend=attend: attend(*arrays, context_len)  # noqa: E731
            for part, function, inputs in (("forward", forward, (arrays, context_len)), ("forward+backward", both, (arrays, context_len, dout))):
                line = f"{name:9s} {implementation:6s} {part:16s}"
                try:
                    compiled = jax.jit(function).lower(*inputs).compile()
                    temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
                    print(f"{line} {measure(compiled, inputs, args.repeats):9.3f} ms  temporary memory {temporary:10.1f} MiB", flush=True)
                except jax.errors.JaxRuntimeError as error:
                    print(f"{line} failed: {str(error).splitlines()[0][:200]}", flush=True)


if __name__ == "__main__":
    main()
