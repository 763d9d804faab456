"""Transition cache: table and walk (DESIGN 5.5, 8); the table's reference and kernels, and the choice between them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import gpu_or_reference, run_kernel
from pallas_kernels.injection import InjectionWeights
from pallas_kernels.transition import ref
from pallas_kernels.transition.walk import follow, greedy_walk

# Of one block of 16 slots with 16 candidates, 240 of them, XLA's table takes 0.0254 ms and the kernel's 0.0271 (H200, Qwen3-8B).
LEAST_PREDECESSORS = 256

__all__ = ["follow", "greedy_walk", "transition_table"]

IMPLEMENTATIONS = ("xla", "pallas")


def transition_table(
    pre_write_BNKD: jax.Array,
    hidden_gate_BNKD: jax.Array,
    candidate_ids_BNJP: jax.Array,
    anchor_feature_BNR: jax.Array,
    candidate_feature_BNJPR: jax.Array,
    rows_VD: jax.Array,
    weights: InjectionWeights,
    out_norm_D: jax.Array,
    *,
    eps: float,
    implementation: str | None = None,
) -> jax.Array:
    """Scores of every (predecessor, candidate) pair of every drafted slot in one parallel pass.

    ``table[.., i, a, b] = <U[C_i[b]], RMSNorm_out(x_i(C_{i-1}[a]))>`` where x_i(v) is the last write
    of slot i redone with the decoded predecessor v. Slot 1's predecessor is the anchor: all its
    rows are equal.

    J = K-1 drafted slots. pre_write, hidden_gate [B,N,K,D] of the last injection; candidate_ids
    [B,N,J,P]; anchor_feature T[anchor] [B,N,R]; candidate_feature T[C] [B,N,J,P,R]; rows U [V,D]
    -> table [B,N,J,P,P] fp32, axes (slot, predecessor, candidate).

    implementation: 'xla', 'pallas' (a TPU or an NVIDIA GPU; raises NotImplementedError for what its kernel does not serve), or None: on an NVIDIA GPU the
    kernel where it serves more than ``LEAST_PREDECESSORS``, elsewhere XLA. Kernels have no derivative.
    """
    from pallas_kernels.transition import pallas_gpu, pallas_tpu

    arrays = pre_write_BNKD, hidden_gate_BNKD, candidate_ids_BNJP, anchor_feature_BNR, candidate_feature_BNJPR, rows_VD, weights, out_norm_D
    reference = functools.partial(ref.transition_table, eps=eps)
    on_gpu = functools.partial(by_kernel, pallas_gpu.table, eps=eps)
    shapes = pre_write_BNKD, candidate_ids_BNJP, rows_VD, weights
    reason = pallas_gpu.unsupported(*shapes)
    if implementation == "pallas":
        kernels = {"cuda": on_gpu, "tpu": functools.partial(by_kernel, pallas_tpu.table, eps=eps)}
        return run_kernel("transition_table", arrays, kernels, {"cuda": reason, "tpu": pallas_tpu.unsupported(*shapes)})
    pays = candidate_ids_BNJP.size > LEAST_PREDECESSORS
    return gpu_or_reference("transition_table", arrays, reference=reference, kernel=on_gpu, reason=reason, implementation=implementation, pays=pays)


def by_kernel(kernel, *arrays, **options) -> jax.Array:
    """``transition_table`` of the same arrays by a kernel over flat predecessors; XLA gathers the candidates' rows."""
    pre_write_BNKD, hidden_gate_BNKD, candidate_ids_BNJP, anchor_feature_BNR, candidate_feature_BNJPR, rows_VD, weights, out_norm_D = arrays
    B, N, J, P = candidate_ids_BNJP.shape
    K, D = pre_write_BNKD.shape[2:]
    flat = lambda x: x.reshape(B * N, K, D)  # noqa: E731
    feature = ref.predecessor_features(anchor_feature_BNR, candidate_feature_BNJPR)
    candidates = jnp.take(rows_VD, candidate_ids_BNJP, axis=0)
    table = kernel(
        flat(pre_write_BNKD),
        flat(hidden_gate_BNKD),
        feature.reshape(B * N * J * P, -1),
        candidates.reshape(B * N * J * P, D),
        weights,
        out_norm_D,
        num_candidates=P,
        **options,
    )
    return table.reshape(B, N, J, P, P)
