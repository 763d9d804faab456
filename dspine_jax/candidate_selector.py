"""DFlash2's candidate selector: scores every pair of neighbouring candidates, to be walked like a transition cache (BASELINES 4.4b)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dspine_jax.config import DrafterConfig
from dspine_jax.layers import Linear, normal_init
from pallas_kernels.topk_logits import topk_logits


class CandidateSelector(nnx.Module):
    """score(b | previous) = u(b) + <A[previous] * (W_h h), B[b]> with codebooks A, B [V,R]. B starts at 0: then the walk is DFlash's argmax."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, param_dtype=jnp.float32):
        V, R = config.vocab_size, config.selector.rank
        self.predecessor_codebook = nnx.Param(normal_init(0.02)(rngs.params(), (V, R), param_dtype))
        self.successor_codebook = nnx.Param(jnp.zeros((V, R), param_dtype))
        self.hidden_projection = Linear(config.hidden_size, R, rngs=rngs, param_dtype=param_dtype)

    def pair_scores(self, hidden_xD: jax.Array, previous_xA: jax.Array, candidates_xP: jax.Array) -> jax.Array:
        """The selector's part of the score for each of A previous tokens and P candidates of a slot: [...,D], [...,A], [...,P] -> [...,A,P] fp32."""
        rows = lambda codebook, ids: jnp.take(codebook[...], ids, axis=0).astype(hidden_xD.dtype)  # noqa: E731
        left = rows(self.predecessor_codebook, previous_xA) * self.hidden_projection(hidden_xD)[..., None, :]
        return jnp.einsum("...ar,...pr->...ap", left, rows(self.successor_codebook, candidates_xP), preferred_element_type=jnp.float32)


def selector_table(
    selector: CandidateSelector,
    hidden_BNJD: jax.Array,
    anchors_BN: jax.Array,
    rows_VD: jax.Array,
    num_candidates: int,
    *,
    num_tokens: int,
    topk: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Candidates of every draft and the scores of all their pairs; the first draft's predecessor is the anchor in every row.

    hidden [B,N,J,D], anchors [B,N] token ids -> (table [B,N,J,P,P] fp32, axes draft, predecessor, candidate; candidate ids [B,N,J,P] int32).
    topk: implementation of ``topk_logits``.
    """
    values_BNJP, ids_BNJP = topk_logits(hidden_BNJD, rows_VD, num_candidates, num_tokens=num_tokens, implementation=topk)
    first_BN1P = jnp.broadcast_to(anchors_BN[..., None, None], ids_BNJP[:, :, :1].shape)
    previous_BNJP = jnp.concatenate([first_BN1P, ids_BNJP[:, :, :-1]], axis=2)
    return values_BNJP[..., None, :] + selector.pair_scores(hidden_BNJD, previous_BNJP, ids_BNJP), ids_BNJP
