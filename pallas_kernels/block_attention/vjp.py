"""The gradient that the kernels of a platform share: saved arrays, and where each part runs when arrays are spread over a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from dspine_jax.sharding import BATCH_AXES
from pallas_kernels.mesh import foreign, mesh_in_scope, spread

QUERIES, CONTEXT, LSE = P(BATCH_AXES, None, None, "tensor", None), P(BATCH_AXES, None, "tensor", None), P(BATCH_AXES, "tensor", None)
IN_SPECS = (QUERIES, CONTEXT, CONTEXT, QUERIES, QUERIES, P(BATCH_AXES, None), QUERIES, LSE, QUERIES)


class Passes(NamedTuple):
    """Both passes of a platform, each a function of arrays and of the keywords ``causal`` and ``interpret``.

    forward: q, ctx_k, ctx_v, block_k, block_v, context_len -> (out, log-sum-exp of every query [B,G,..], in an order and base of the platform's own);
    backward: the same arrays, out, log-sum-exp and the gradient of out -> gradients of the first five.
    """

    forward: Callable
    backward: Callable


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9))
def attention(q_BNKHC, ctx_k_BSGC, ctx_v_BSGC, block_k_BNKGC, block_v_BNKGC, context_len_BN, passes: Passes, causal: bool, interpret: bool, mesh):
    """Block attention by ``passes``; mesh: ``mesh_in_scope()``."""
    return _forward(q_BNKHC, ctx_k_BSGC, ctx_v_BSGC, block_k_BNKGC, block_v_BNKGC, context_len_BN, passes, causal, interpret, mesh)[0]


def _forward(q_BNKHC, ctx_k_BSGC, ctx_v_BSGC, block_k_BNKGC, block_v_BNKGC, context_len_BN, passes, causal, interpret, mesh):
    args = q_BNKHC, ctx_k_BSGC, ctx_v_BSGC, block_k_BNKGC, block_v_BNKGC, context_len_BN
    run = functools.partial(passes.forward, causal=causal, interpret=interpret)
    out_BNKHC, lse_BGQ = spread(run, mesh, IN_SPECS[: len(args)], (QUERIES, LSE))(*args)
    return out_BNKHC, (*args, out_BNKHC, lse_BGQ)


def _backward(passes, causal, interpret, mesh, residuals, dout_BNKHC):
    run = functools.partial(passes.backward, causal=causal, interpret=interpret)
    return *spread(run, mesh, IN_SPECS, IN_SPECS[:5])(*residuals, dout_BNKHC), None


attention.defvjp(_forward, _backward)


def unsupported_mesh(B: int, G: int) -> str | None:
    """What keeps kernels from being spread over the mesh in scope, None if nothing does."""
    mesh = mesh_in_scope()
    if mesh is None:
        return None
    if foreign(mesh):
        return foreign(mesh)
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if B % ways or G % mesh.shape["tensor"]:
        return f"{B} rows and {G} kv heads on a mesh of {dict(mesh.shape)}, by which they do not divide"
    return None
