"""Device time of the operations, implementation by implementation, on whatever device is there: python -m pallas_kernels.bench

    python -m pallas_kernels.bench --ops injection --shapes qwen3-8b --batches 1 8 32 --json out/injection.json
    python -m pallas_kernels.bench --ops injection block_attention --shapes smollm2-135m --batches 32 --blocks 48 --gradients
    python -m pallas_kernels.bench --ops injection --shapes qwen3-8b --batches 1 --scan mosaic_gpu --seconds 120
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m pallas_kernels.bench --ops block_attention --shapes qwen3-8b --batches 1 2 4 8 16 32 --blocks 512 \
        --context 4096 --gradients --implementations xla pallas --repeats 5

A program runs an operation on several sets of arguments one after the other, each waiting for the one before, as the layers of a round do: together they
are larger than the caches, so weights come from memory. It does so in a loop on the device, at buffers that stay where they are, as a decode loop does:
a call from the host with this many arguments takes longer than the operations. The time is its wall-clock time over the number of operations, the spread
the distance between the quartiles. The floor is the time that the bytes (every input read once,
every output written once) take at the bandwidth of a large copy, measured first. 'default' is what the operation chooses by itself, 'xla' its reference.
Where a batch does not fit into memory the line says so, larger ones are not tried, and the largest that fitted is printed at the end (JAX takes 75% of a
GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise).

``--scan`` tries the launches that ``candidates`` of an operation's ``pallas_gpu`` (or ``mosaic_gpu``, ``triton_gpu``) offers, kernel after kernel, the best so
far kept for the others; ``--set`` sets one: --set injection.round=128,3,4.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels import block_attention, cached_attention, head_softmax, injection, topk_logits, transition
from pallas_kernels.shapes import BATCHES, MODELS, ModelShape

OPS = (injection, topk_logits, transition, block_attention, cached_attention, head_softmax)
IMPLEMENTATIONS = ("xla", "default", "pallas", "triton", "mosaic_gpu")


def op_name(op) -> str:
    return op.__name__.rpartition(".")[2]


def function_of(op):
    """The operation's function: it has the folder's name, or begins with it (a transition cache is a table and a walk)."""
    return getattr(op, next(name for name in op.__all__ if name.startswith(op_name(op))))


def part(op, module: str):
    """A module of an operation's folder, None if it has no such module."""
    name = f"{op.__name__}.{module}"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def launches(op, implementation: str = "pallas"):
    """The module with an implementation's ``LAUNCHES`` and ``candidates``, None if there is none."""
    return part(op, f"{implementation.removesuffix('_gpu')}_gpu")


def repeated(run, count: int):
    """``run``, ``count`` times one after the other in one program, as a function of its arguments; returns the last results."""

    def program(*args):
        def once(_, carry):
            # Through the order, and not only through the loop, or XLA would run what never changes before it.
            inputs, order = jax.lax.optimization_barrier((args, carry[0]))
            return jax.lax.optimization_barrier((order, run(*inputs)))

        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, *args))
        return jax.lax.fori_loop(0, count, once, (jnp.int32(0), nothing))[1]

    return program


def time_program(compiled, inputs, operations: int, repeats: int) -> tuple[float, float]:
    """(median, distance of the quartiles) in milliseconds an operation."""
    jax.block_until_ready(compiled(*inputs))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*inputs))
        times.append(1e3 * (time.perf_counter() - start) / operations)
    low, median, high = statistics.quantiles(times, n=4)
    return median, high - low


def copy_bandwidth() -> float:
    """Bytes a second, read plus written, of a large copy (1 GiB on an accelerator, 16 MiB on a CPU)."""
    words, count = (2**22, 1) if jax.default_backend() == "cpu" else (2**28, 20)
    x = jnp.zeros((words,), jnp.int32)
    compiled = jax.jit(repeated(lambda x: x + 1, count)).lower(x).compile()
    return 8 * words / (1e-3 * time_program(compiled, (x,), count, 10)[0])


class Case:
    """An operation at one shape: ``sets`` of arguments and what is timed on them."""

    def __init__(self, op, shape: ModelShape, batch: int, dtype, *, blocks: int, gradients: bool, at_least_bytes: float, context: int | None = None):
        specs = part(op, "arg_specs")
        extra = ({} if blocks == 1 else {"blocks": blocks}) | ({} if context is None else {"context": context})
        self.function = function_of(op)
        self.used = functools.partial(specs.used, training=gradients) if hasattr(specs, "used") else lambda outputs: outputs
        self.gradients = gradients
        self.bytes = specs.bytes_moved(shape, batch, dtype, **extra)
        count = max(1, min(40, -int(-at_least_bytes // self.bytes)))
        # A program has to take much longer on the device than its launch takes on the host; in training arithmetic takes longer than the bytes.
        self.rounds = max(1, min(2000, int((40 if blocks == 1 else 4) * at_least_bytes // self.bytes)) // count)
        made = [specs.arguments(shape, batch, jax.random.key(i), dtype, **extra) for i in range(count)]
        self.sets, self.static = [args for args, _ in made], made[0][1]

    @property
    def operations(self) -> int:
        """How many a program runs."""
        return len(self.sets) * self.rounds

    def run(self, args, implementation: str):
        run = functools.partial(self.function, **self.static, implementation=None if implementation == "default" else implementation)
        if not self.gradients:
            return self.used(run(*args))
        # The barrier stands for the layers that come between in training: what the backward pass needs is kept in memory.
        outputs, pull = jax.lax.optimization_barrier(jax.vjp(lambda *args: self.used(run(*args)), *args))
        return outputs, pull(outputs)

    def program(self, sets, implementation: str) -> list:
        run = jax.jit(functools.partial(self.run, implementation=implementation))  # traced once, not for every set
        results = []
        for args in sets:
            if results:  # returned after the barrier: XLA drops what a barrier gives to nobody, and the order with it
                args, results[-1] = jax.lax.optimization_barrier((args, results[-1]))
            results.append(run(args))
        return results

    def time(self, implementation: str, repeats: int) -> tuple[float, float]:
        """(median, spread) in ms. Raises what compiling or running does."""
        program = repeated(functools.partial(self.program, implementation=implementation), self.rounds)
        return time_program(jax.jit(program).lower(self.sets).compile(), (self.sets,), self.operations, repeats)

    def error(self, implementation: str) -> float | None:
        """Largest relative L2 distance of a floating-point output to the reference in fp32; None for gradients and for outputs of integers."""
        if self.gradients:
            return None
        args = self.sets[0]
        wide = jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, args)
        with jax.default_matmul_precision("highest"):
            exact = jax.jit(functools.partial(self.run, implementation="xla"))(wide)
        pairs = zip(jax.tree.leaves(jax.jit(functools.partial(self.run, implementation=implementation))(args)), jax.tree.leaves(exact))
        far = lambda x, y: float(jnp.linalg.norm(x.astype(jnp.float32) - y) / jnp.linalg.norm(y))  # noqa: E731
        return max((far(x, y) for x, y in pairs if jnp.issubdtype(x.dtype, jnp.floating)), default=None)


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:150]}" if str(error) else type(error).__name__


FAILURES = (Exception,)  # each compiler raises types of its own; what cannot run here gets a line that says why, and the others are still timed


def out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)


def compare(op, name: str, batch: int, args, bandwidth: float, full: dict[str, int]) -> list[dict]:
    """A line and a record for each implementation. full: implementation -> batch that did not fit into memory; larger ones are not tried."""
    case, records = None, []
    for implementation in args.implementations:
        record = {"id": f"kernel/{op_name(op)}/{name}/b{batch}/{implementation}"}
        line = f"{op_name(op):17s} {name:13s} {batch:3d} {implementation:10s}"
        records.append(record)
        try:
            if batch > full.get(implementation, batch):
                record["failed"] = f"not tried: a batch of {full[implementation]} was out of memory"
                print(f"{line} {record['failed']}", flush=True)
                continue
            case = case or make_case(op, name, batch, args)
            floor = 1e3 * case.bytes / bandwidth
            record |= {"bytes": case.bytes, "floor_ms": floor, "operations": case.operations}
            median, spread = case.time(implementation, args.repeats)
            record |= {"value": median, "unit": "ms", "spread": spread, "over_floor": median / floor, "relative_l2": case.error(implementation)}
            plain = next((other["value"] for other in records if other["id"].endswith("/xla") and "value" in other), None)
            record["over_xla"] = median / plain if plain else None
            over_xla = f"{record['over_xla']:6.3f}" if plain else "     -"
            error = "-" if record["relative_l2"] is None else f"{record['relative_l2']:.1e}"
            print(f"{line} {median:9.4f} {spread:8.4f} {case.bytes / 2**20:9.1f} {median / floor:7.2f} {over_xla}  {error}", flush=True)
        except FAILURES as failure:
            if out_of_memory(failure):
                full.setdefault(implementation, batch)
            record["failed"] = f"out of memory: {short(failure)}" if out_of_memory(failure) else short(failure)
            print(f"{line} {record['failed']}", flush=True)
    return records


def compare_batches(op, name: str, args, bandwidth: float) -> list[dict]:
    """``compare`` at every batch, and a line with the largest of each implementation if memory ended one."""
    full: dict[str, int] = {}
    records = [record for batch in args.batches for record in compare(op, name, batch, args, bandwidth, full)]
    if full:
        largest = {x: max((b for b in args.batches if b < full.get(x, b + 1)), default=0) for x in args.implementations}
        fits = ", ".join(f"{x} {batch}{'' if x in full else ' (the largest tried)'}" for x, batch in largest.items())
        print(f"{op_name(op)} {name}: largest batch that fits: {fits}", flush=True)
        records.append({"id": f"kernel/{op_name(op)}/{name}/largest_batch", "value": largest, "unit": "rows"})
    return records


def make_case(op, name: str, batch: int, args) -> Case:
    at_least = 2**16 if jax.default_backend() == "cpu" else 2**30
    options = {"blocks": args.blocks, "gradients": args.gradients, "context": args.context}
    return Case(op, MODELS[name], batch, jnp.dtype(args.dtype), **options, at_least_bytes=at_least)


def scan(op, name: str, batch: int, args) -> list[dict]:
    """Times under the launches of ``candidates``, the best of each kernel kept while the next is tried; each kernel has its share of the time."""
    kernels = launches(op, args.scan)
    case, records = make_case(op, name, batch, args), []
    own = {kernel: dict(launches) for kernel, launches in kernels.LAUNCHES.items()}
    for kernel in kernels.LAUNCHES:
        rows, end = [], time.monotonic() + args.seconds / len(own)
        for launch in kernels.candidates(kernel, MODELS[name], batch * args.blocks):
            if time.monotonic() > end:
                print(f"{op_name(op)}.{kernel}: the time is up after {len(rows)} launches")
                break
            kernels.LAUNCHES[kernel] = {2**30: launch}
            try:
                rows.append((case.time(args.scan, args.repeats)[0], launch))
            except FAILURES as failure:  # most often: does not fit into shared memory
                records.append({"kernel": kernel, "launch": launch, "failed": short(failure)})
        kernels.LAUNCHES[kernel] = own[kernel]
        failed = [record["failed"] for record in records if record["kernel"] == kernel and "failed" in record]
        if failed:
            print(f"{op_name(op)}.{kernel}: {len(failed)} launches failed, the first with {failed[0]}")
        for milliseconds, launch in sorted(rows)[: args.top]:
            print(f"{args.scan} {op_name(op)}.{kernel} {name} b{batch} {milliseconds:9.4f} ms {','.join(map(str, launch))}", flush=True)
        records += [{"kernel": kernel, "launch": launch, "value": milliseconds, "unit": "ms"} for milliseconds, launch in sorted(rows)]
        if rows:
            kernels.LAUNCHES[kernel] = {2**30: min(rows)[1]}
    kernels.LAUNCHES.update(own)
    return [{"id": f"scan/{op_name(op)}/{name}/b{batch}/{args.scan}"} | record for record in records]


def set_launch(parser: argparse.ArgumentParser, item: str) -> None:
    target, _, numbers = item.partition("=")
    kernel = target.partition(".")[2]
    known = {f"{op_name(op)}.{kernel}": module for op in OPS for x in ("pallas", "triton", "mosaic_gpu") for module in (launches(op, x),)
             for kernel in getattr(module, "LAUNCHES", {})}  # fmt: skip
    if target not in known:
        parser.error(f"--set {item}: no kernel {target!r}, only {', '.join(known)}")
    kernels = known[target]
    launch = next(iter(kernels.LAUNCHES[kernel].values()))
    try:
        kernels.LAUNCHES[kernel] = {2**30: type(launch)(*map(int, numbers.split(",")))}
    except (ValueError, TypeError):
        parser.error(f"--set {item}: wants {','.join(launch._fields)}")


def write_json(path: Path, settings: dict, records: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"command": " ".join(sys.argv), "jax": jax.__version__} | settings | {"records": records}, indent=1) + "\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [op_name(op) for op in OPS]
    parser.add_argument("--ops", nargs="+", choices=names, default=names)
    parser.add_argument("--shapes", nargs="+", choices=MODELS, default=["qwen3-8b"])
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--blocks", type=int, default=1, help="blocks a row: 1 in decoding, more in training (injection and block attention)")
    parser.add_argument("--context", type=int, help="rows of context of block attention, of the cache of cached attention (default: their arg_specs')")
    parser.add_argument("--gradients", action="store_true", help="time forward and backward pass (injection and block attention)")
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS), help="xla before what to compare with it")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--scan", nargs="?", choices=("pallas", "triton", "mosaic_gpu"), const="pallas", help="try launches of this implementation (pallas)")
    parser.add_argument("--seconds", type=float, default=120.0, help="for one scan of an operation at a shape and batch")
    parser.add_argument("--top", type=int, default=8, help="lines of a scan's table")
    parser.add_argument("--set", nargs="+", default=[], metavar="OP.KERNEL=NUMBERS")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    for item in args.set:
        set_launch(parser, item)
    ops = [op for op in OPS if op_name(op) in args.ops]
    for op in ops:
        specs = part(op, "arg_specs")
        if (args.blocks > 1 or args.gradients) and "blocks" not in specs.arguments.__code__.co_varnames:
            parser.error(f"--blocks {args.blocks}, --gradients: {op_name(op)} runs in decoding alone; leave it out of --ops")
        if args.context is not None and "context" not in specs.arguments.__code__.co_varnames:
            parser.error(f"--context {args.context}: {op_name(op)} reads no context; leave it out of --ops")
        if args.scan and not hasattr(launches(op, args.scan), "candidates"):
            parser.error(f"--scan {args.scan}: {op_name(op)} has no launches to choose from; leave it out of --ops")

    bandwidth = copy_bandwidth()
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {args.dtype}, {bandwidth / 1e9:.0f} GB/s{', forward and backward' if args.gradients else ''}")
    if not args.scan:
        print(f"{'op':17s} {'shape':13s} {'b':>3s} {'impl':10s} {'ms':>9s} {'spread':>8s} {'MiB':>9s} {'/floor':>7s} {'/xla':>6s}  error")
    if args.scan:
        records = [record for op in ops for name in args.shapes for batch in args.batches for record in scan(op, name, batch, args)]
    else:
        records = [record for op in ops for name in args.shapes for record in compare_batches(op, name, args, bandwidth)]
    if args.json:
        settings = {"dtype": args.dtype, "blocks": args.blocks, "context": args.context, "gradients": args.gradients}
        write_json(args.json, {"device": device.device_kind, "bytes_per_second": bandwidth} | settings, records)


if __name__ == "__main__":
    main()
