"""DSpark's Markov heads: a low-rank correction of a slot's logits by the token just before it (BASELINES 4.1)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dspine_jax.config import DrafterConfig
from dspine_jax.layers import Embedding, Linear


class MarkovHead(nnx.Module):
    """logits_k = u_k + W2 code_k, where the code is made of e = E[previous token] and, for 'gated' and 'rnn', of the slot's state.

    The previous token is the one decided for the position before: the anchor, then each draft. Never a mask token.
    """

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, param_dtype=jnp.float32):
        D, R = config.hidden_size, config.markov.rank
        kw = dict(rngs=rngs, param_dtype=param_dtype)
        self.kind = config.markov.kind
        self.markov_w1 = Embedding(config.vocab_size, R, **kw)
        self.markov_w2 = Embedding(config.vocab_size, R, **kw)
        if self.kind == "gated":
            self.gate_proj = Linear(D + R, R, bias=True, **kw)
        if self.kind == "rnn":
            self.joint_proj = Linear(2 * R + D, 3 * R, bias=True, **kw)

    @property
    def recurrent(self) -> bool:
        """Whether a slot's code depends on earlier slots' states, and not on the previous token alone."""
        return self.kind == "rnn"

    @property
    def table_VR(self) -> jax.Array:
        """W2: what a code is multiplied with to correct logits."""
        return self.markov_w2.embedding[...]

    def embed(self, tokens: jax.Array, dtype) -> jax.Array:
        """E of token ids [...] -> [...,R]."""
        return jnp.take(self.markov_w1.embedding[...], tokens, axis=0).astype(dtype)

    def first_state(self, shape: tuple[int, ...]) -> jax.Array:
        """State before the first draft, fp32 [*shape,R] (width 0 without recurrence)."""
        return jnp.zeros((*shape, self.table_VR.shape[1] if self.recurrent else 0), jnp.float32)

    def step(self, state: jax.Array, hidden: jax.Array, previous: jax.Array, draft_index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One draft: state [...,R], hidden [...,D], previous token ids [...] -> (next state, code [...,R])."""
        e = self.embed(previous, hidden.dtype)
        if self.kind == "vanilla":
            return state, e
        if self.kind == "gated":
            return state, jax.nn.sigmoid(self.gate_proj(jnp.concatenate([hidden, e], axis=-1))) * e
        joint = self.joint_proj(jnp.concatenate([state.astype(hidden.dtype), e, hidden], axis=-1))
        gate, candidate, output = jnp.split(joint.astype(jnp.float32), 3, axis=-1)
        keep = jax.nn.sigmoid(gate)
        return keep * state + (1.0 - keep) * jnp.tanh(candidate), jnp.tanh(output).astype(hidden.dtype)
