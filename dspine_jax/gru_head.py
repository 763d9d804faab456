"""Domino's head: a GRU over the tokens decided so far corrects the logits of every draft but the first (BASELINES 4.3)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from dspine_jax.config import DrafterConfig
from dspine_jax.layers import Embedding, Linear


class PrefixGRU(nnx.Module):
    """A GRU cell without biases, gates in the order r, z, n; weights in torch layout under torch's names."""

    def __init__(self, input_size: int, hidden_size: int, *, rngs: nnx.Rngs, param_dtype=jnp.float32):
        def uniform(width):
            bound = hidden_size**-0.5  # torch's own initialisation
            return nnx.Param(jax.random.uniform(rngs.params(), (3 * hidden_size, width), param_dtype, -bound, bound))

        self.weight_ih_l0 = uniform(input_size)
        self.weight_hh_l0 = uniform(hidden_size)

    def __call__(self, state: jax.Array, x: jax.Array) -> jax.Array:
        """state [...,G] fp32, x [...,D] -> next state [...,G] fp32; products in x's dtype."""
        product = lambda a, w: jnp.einsum("...d,gd->...g", a.astype(x.dtype), w[...].astype(x.dtype), preferred_element_type=jnp.float32)  # noqa: E731
        input_r, input_z, input_n = jnp.split(product(x, self.weight_ih_l0), 3, axis=-1)
        state_r, state_z, state_n = jnp.split(product(state, self.weight_hh_l0), 3, axis=-1)
        z = jax.nn.sigmoid(input_z + state_z)
        n = jnp.tanh(input_n + jax.nn.sigmoid(input_r + state_r) * state_n)
        return (1.0 - z) * n + z * state


def embed_projection(config: DrafterConfig, *, rngs: nnx.Rngs, param_dtype=jnp.float32) -> nnx.Dict:
    """W_0 and W_2 of the correction W_2 SiLU(W_0 [h ; s]), named by their places in the published module."""
    kw = dict(rngs=rngs, param_dtype=param_dtype)
    first = Linear(config.hidden_size + config.gru.hidden_size, config.gru.projection_size, **kw)
    return nnx.Dict({"0": first, "2": Embedding(config.vocab_size, config.gru.projection_size, **kw)})


@dataclasses.dataclass(frozen=True)
class GRUHead:
    """The parts of a Domino drafter that correct logits, with the frozen target embedding that its GRU reads."""

    gru: PrefixGRU
    projection: nnx.Dict
    embedding_VD: jax.Array

    recurrent = True

    @property
    def table_VR(self) -> jax.Array:
        """W_2: what a code is multiplied with to correct logits."""
        return self.projection["2"].embedding[...]

    def first_state(self, shape: tuple[int, ...]) -> jax.Array:
        """State before the first draft, fp32 [*shape,G]."""
        return jnp.zeros((*shape, self.gru.weight_hh_l0[...].shape[1]), jnp.float32)

    def step(self, state: jax.Array, hidden: jax.Array, previous: jax.Array, draft_index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One draft: the GRU reads the token before it, the anchor first. -> (state [...,G], code [...,E]; zeros for the first draft)."""
        state = self.gru(state, jnp.take(self.embedding_VD, previous, axis=0).astype(hidden.dtype))
        code = jax.nn.silu(self.projection["0"](jnp.concatenate([hidden, state.astype(hidden.dtype)], axis=-1)))
        return state, jnp.where(draft_index > 0, code, 0).astype(hidden.dtype)
