"""Time of selection (top-P, table, walk) a round on a GPU, plain XLA beside the kernels: python -m pallas_kernels.bench_selection --json out.json

Rounds run one after the other in a loop on the device, as pallas_kernels.bench says. Without the head, top-P starts from logits in memory; each of several
rounds has logits of its own and waits for the one before, or XLA would merge them. ``--parts`` times top-P, table and walk alone, ``--scan`` other launches of
one kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from dspine_jax.vocabulary import mask_padded_vocabulary, vocabulary_logits
from pallas_kernels.bench import repeated, time_program
from pallas_kernels.injection import unit
from pallas_kernels.shapes import BATCHES, MODELS, ModelShape
from pallas_kernels.topk_logits import chunks, pallas_gpu, topk_logits, triton_gpu
from pallas_kernels.transition import arg_specs, greedy_walk, ref, transition_table
from pallas_kernels.transition import pallas_gpu as table_gpu

PADDED = 267  # rows of the LM head without a token, as Qwen3 has
ROUNDS = {1: 10, 8: 6, 32: 3}


def after(x, before):
    """x, but not before ``before`` is there."""
    return x if before is None else jax.lax.optimization_barrier((x, before))[0]


def plain_topk(logits_TV: jax.Array, P: int, *, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    return jax.lax.top_k(mask_padded_vocabulary(logits_TV, num_tokens), P)


def kernel_topk(logits_TV: jax.Array, P: int, *, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    return pallas_gpu.topk(logits_TV, P, num_tokens=num_tokens)


def chunk_topk(logits_TV: jax.Array, P: int, *, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    return chunks.topk(mask_padded_vocabulary(logits_TV, num_tokens), P)


# name -> (top-P of hidden states and U, top-P of logits or None, implementation of the table, walk)
ROUTES = {
    "xla": (functools.partial(topk_logits, implementation="xla"), plain_topk, "xla", ref.greedy_walk),
    "chunks": (functools.partial(topk_logits, implementation="chunks"), chunk_topk, "xla", greedy_walk),
    "kernels, xla table": (functools.partial(topk_logits, implementation="pallas"), kernel_topk, "xla", greedy_walk),
    "pallas": (functools.partial(topk_logits, implementation="pallas"), kernel_topk, "pallas", greedy_walk),
    "pallas, own head": (functools.partial(pallas_gpu.topk_logits, own_head=True), None, "pallas", greedy_walk),
    "triton": (functools.partial(topk_logits, implementation="triton"), None, "pallas", greedy_walk),
    "triton, own head": (functools.partial(triton_gpu.topk_logits, own_head=True), None, "pallas", greedy_walk),
    "default": (topk_logits, None, None, greedy_walk),
}


@dataclasses.dataclass(frozen=True)
class Bench:
    """Arrays of a shape and batch, and how often each measurement is repeated."""

    shape: ModelShape
    batch: int
    repeats: int

    @property
    def num_tokens(self) -> int:
        return self.shape.vocab_size - PADDED

    @functools.cached_property
    def arrays(self):
        """(arguments of the table, mean [D], basis [D,R], hidden states [rounds,T,D])."""
        D, R, T = self.shape.hidden_size, self.shape.transfer_size, self.batch * (self.shape.block_size - 1)

        @jax.jit
        def draw(key):
            keys = jax.random.split(key, 4)
            args = arg_specs.arguments(self.shape, self.batch, keys[0], jnp.bfloat16)[0]
            mean, basis = 0.1 * jax.random.normal(keys[1], (D,)), jax.random.normal(keys[2], (D, R)) * D**-0.5
            return args, mean, basis, jax.random.normal(keys[3], (ROUNDS[self.batch], T, D), jnp.bfloat16)

        return draw(jax.random.key(0))

    @functools.cached_property
    def logits(self) -> tuple[jax.Array, ...]:
        """Logits [T,V] of every round."""
        (*_, rows, _, _), _, _, hidden = self.arrays
        head = jax.jit(lambda h, rows: vocabulary_logits(h, rows, rows.shape[0]))
        return tuple(head(h, rows) for h in hidden)

    def rounds(self, route: str, from_logits: bool):
        """A function of (inputs of all rounds, table arguments, mean, basis) -> tokens of all rounds."""
        by_hidden, by_logits, table, walk = ROUTES[route]
        B, J, P, R = self.batch, self.shape.block_size - 1, self.shape.num_candidates, self.shape.transfer_size

        def run(inputs, args, mean, basis):
            stream, gate, _, anchor, _, rows, weights, norm = args
            out = [None]
            for x in inputs:
                x, anchor = after((x, anchor), out[-1])
                values_ids = by_logits(x, P, num_tokens=self.num_tokens) if from_logits else by_hidden(x, rows, P, num_tokens=self.num_tokens)
                ids = values_ids[1].reshape(B, 1, J, P)
                features = R**0.5 * unit((jnp.take(rows, ids, axis=0).astype(jnp.float32) - mean) @ basis)
                scores = transition_table(stream, gate, ids, anchor, features, rows, weights, norm, eps=1e-6, implementation=table)
                out.append(walk(scores, ids))
            return out[1:]

        return run

    def milliseconds(self, function, *args, rounds: int) -> float:
        """Median time of a round, ``rounds`` of them in a run of the function."""
        count = 1 if jax.default_backend() == "cpu" else -(-60 // rounds)
        compiled = jax.jit(repeated(function, count)).lower(*args).compile()
        return time_program(compiled, args, count * rounds, self.repeats)[0]

    def selection(self, route: str, from_logits: bool) -> float:
        args, mean, basis, hidden = self.arrays
        inputs = self.logits if from_logits else (hidden[0],)
        return self.milliseconds(self.rounds(route, from_logits), inputs, args, mean, basis, rounds=len(inputs))

    def head(self, function) -> float:
        """A function of (hidden states [T,D], U)."""
        (*_, rows, _, _), _, _, hidden = self.arrays
        return self.milliseconds(function, hidden[0], rows, rounds=1)

    def chain(self, function, inputs, *shared) -> float:
        """A function of each of several inputs, one after the other, and of what they share."""

        def run(inputs, *shared):
            out = [None]
            for x in inputs:
                out.append(function(after(x, out[-1]), *shared))
            return out[1:]

        return self.milliseconds(run, inputs, *shared, rounds=len(inputs))

    def parts(self):
        """Names of the parts alone, and functions that time them."""
        P, args = self.shape.num_candidates, self.arrays[0]
        yield "read U", lambda: self.head(lambda h, rows: jnp.max(rows))
        yield "head xla", lambda: self.head(lambda h, rows: vocabulary_logits(h, rows, self.num_tokens))
        kwargs = {"num_candidates": P, "num_tokens": self.num_tokens}
        for route in ("xla", "chunks", "pallas", "pallas, own head", "triton", "triton, own head"):
            by_hidden, by_logits, *_ = ROUTES[route]
            yield f"head+top-P {route}", lambda by_hidden=by_hidden: self.head(functools.partial(by_hidden, **kwargs))
            if by_logits:
                yield f"top-P {route}", lambda by_logits=by_logits: self.chain(lambda x: by_logits(x, P, num_tokens=self.num_tokens), self.logits)
        for implementation in ("xla", "pallas"):
            yield f"table {implementation}", lambda implementation=implementation: self.table(implementation)
        scores = tuple(jax.random.normal(jax.random.key(1), (10, *args[2].shape, P)))
        for name, walk in (("steps", ref.greedy_walk), ("composed", greedy_walk)):
            yield f"walk {name}", lambda walk=walk: self.chain(walk, scores, args[2])

    def table(self, implementation: str) -> float:
        """Five tables, each with anchor features of its own."""
        stream, gate, ids, anchor, *rest = self.arrays[0]

        def call(anchor, stream, gate, ids, *rest):
            return transition_table(stream, gate, ids, anchor, *rest, eps=1e-6, implementation=implementation)

        return self.chain(call, tuple(anchor + i for i in range(5)), stream, gate, ids, *rest)


def scan(bench: Bench, kernel: str):
    """Names and times of launches of one kernel: tile sizes, warps and stages around the chosen ones."""
    tokens = pallas_gpu.launch_for(bench.batch * (bench.shape.block_size - 1), bench.shape.hidden_size, pallas_gpu.LAUNCHES)[0]
    if kernel == "table":
        for numbers in itertools.product((64, 128), (16, 32, 64), (64, 128), (4, 8), (3,)):
            table_gpu.LAUNCHES = {2**31: table_gpu.Launch(*numbers)}
            yield numbers, lambda: bench.table("pallas")
        return
    module = {"head pallas": pallas_gpu, "head triton": triton_gpu}[kernel]
    for rows, depth, warps, stages in itertools.product((64, 128, 256), (64, 128, 256), (4, 8), (3, 4)):
        if 2 * stages * depth * (rows + tokens) > 220 * 1024 or rows * depth < 8192 or (warps == 8 and rows == 64):
            continue
        module.LAUNCHES = {tokens: pallas_gpu.Launch(rows, depth, warps, stages)}
        call = functools.partial(module.topk_logits, own_head=True, num_candidates=bench.shape.num_candidates, num_tokens=bench.num_tokens)
        yield (rows, depth, warps, stages), lambda call=call: bench.head(call)


def attempt(name: str, measure) -> float | None:
    """Milliseconds, printed; None, with the reason printed, where it does not run."""
    try:
        milliseconds = measure()
        print(f"{name:60s} {milliseconds:8.4f} ms", flush=True)
        return milliseconds
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        print(f"{name:60s} failed: {str(error).splitlines()[0][:200]}", flush=True)
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b")
    parser.add_argument("--batches", nargs="+", type=int, choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--candidates", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=["xla", "kernels, xla table", "pallas", "triton", "default"])
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--scan", choices=("head pallas", "head triton", "table"))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "unit": "ms a round"}
    for batch, P in itertools.product(args.batches, args.candidates):
        bench = Bench(dataclasses.replace(MODELS[args.model], num_candidates=P), batch, args.repeats)
        at = f"{args.model} b{batch} P={P}"
        if args.scan:
            for numbers, measure in scan(bench, args.scan):
                name = f"{args.scan} {at} {','.join(map(str, numbers))}"
                results[name] = attempt(name, measure)
            best = sorted((ms, name) for name, ms in results.items() if name.startswith(args.scan) and at in name and ms is not None)
            print("best:", *(f"\n  {ms:8.4f} ms {name}" for ms, name in best[:5]))
        elif args.parts:
            for name, measure in bench.parts():
                results[f"{name} {at}"] = attempt(f"{name} {at}", measure)
        else:
            for from_logits, route in itertools.product((True, False), args.routes):
                if from_logits and ROUTES[route][1] is None:
                    continue
                name = f"selection {'without' if from_logits else 'with'} head, {route}, {at}"
                results[name] = attempt(name, functools.partial(bench.selection, route, from_logits))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
