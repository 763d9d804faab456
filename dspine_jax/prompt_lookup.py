"""A drafter without a model: what followed the last time the text ended as it ends now (suffix n-gram lookup)."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspine_jax.selection import Draft, point_mass

NOT_PROPOSED = -2  # in drafts of a replay: the slot has no proposal; never a token id


@dataclasses.dataclass(frozen=True)
class PromptLookupConfig:
    """``num_draft_tokens`` J a round; of the suffixes of ``shortest`` to ``longest`` tokens the longest one that occurs earlier is used."""

    num_draft_tokens: int = 15
    longest: int = 8
    shortest: int = 1

    # What the decode loop and the evaluation ask of a drafter's config. The law is a point mass: there is no other policy.
    method = "prompt-lookup"
    policies = ("own",)
    target_layer_ids = ()
    confidence = False
    template_mode = None

    def __post_init__(self):
        if self.num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens {self.num_draft_tokens} must be at least 1")
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"shortest {self.shortest} and longest {self.longest} must satisfy 1 <= shortest <= longest")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TextHistory:
    """tokens [B,capacity] int32, of which the first ``lengths`` [B] were fed to the target; it takes the place of a context cache."""

    tokens_BS: jax.Array
    lengths_B: jax.Array


def lookup(tokens_BS: jax.Array, length_B: jax.Array, config: PromptLookupConfig) -> tuple[jax.Array, jax.Array]:
    """Continue each text as after the latest earlier occurrence of its longest known suffix. -> (drafts [B,J] int32, found [B] bool).

    length [B] >= 1 counts the newest token. A copy that reaches the text's end reads on in what it has written, so a loop is drafted whole.
    """
    S = tokens_BS.shape[1]
    last_B1 = length_B[:, None] - 1
    place_S = jnp.arange(S)
    same_BS, run_BS = jnp.ones(tokens_BS.shape, bool), jnp.zeros(tokens_BS.shape, jnp.int32)
    for back in range(config.longest):
        wanted_B1 = jnp.take_along_axis(tokens_BS, jnp.maximum(last_B1 - back, 0), axis=1)
        same_BS &= (jnp.roll(tokens_BS, back, axis=1) == wanted_B1) & (place_S >= back) & (last_B1 >= back)
        run_BS += same_BS
    usable_BS = (run_BS >= config.shortest) & (place_S < last_B1)
    # Longest first, then latest: one number orders both.
    end_B1 = jnp.argmax(jnp.where(usable_BS, run_BS * S + place_S, -1), axis=1)[:, None]
    distance_B1 = jnp.maximum(last_B1 - end_B1, 1)
    source_BJ = end_B1 + 1 + jnp.arange(config.num_draft_tokens) % distance_B1
    return jnp.take_along_axis(tokens_BS, jnp.minimum(source_BJ, S - 1), axis=1).astype(jnp.int32), usable_BS.any(axis=1)


class PromptLookup(nnx.Module):
    """The lookup in the form of a drafter that the decode loop takes. It has no parameters and reads no hidden state."""

    def __init__(self, config: PromptLookupConfig):
        self.config = config

    def empty_cache(self, batch: int, capacity: int, dtype) -> TextHistory:
        """An empty history; ``dtype`` is that of the models and has no say here."""
        return TextHistory(jnp.zeros((batch, capacity), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def extend_cache(self, cache: TextHistory, tokens_BT: jax.Array, count_B: jax.Array) -> TextHistory:
        """Append the first count [B] of T tokens that the target was fed; rows beyond are overwritten by the next call."""
        B, T = tokens_BT.shape
        place_BT = cache.lengths_B[:, None] + jnp.arange(T)
        tokens_BS = cache.tokens_BS.at[jnp.arange(B)[:, None], place_BT].set(tokens_BT, mode="drop")
        return TextHistory(tokens_BS, cache.lengths_B + count_B)

    def propose(self, cache: TextHistory, anchor_B: jax.Array) -> Draft:
        """The draft after each row's newest token, which the target was not fed yet; nothing is proposed where nothing is found."""
        known = self.extend_cache(cache, anchor_B[:, None], jnp.int32(1))
        tokens_BJ, found_B = lookup(known.tokens_BS, known.lengths_B, self.config)
        draft = point_mass(tokens_BJ)
        return dataclasses.replace(draft, cut_B=jnp.where(found_B, draft.cut_B, 0))


@functools.partial(jax.jit, static_argnames="config")
def lookups_at(tokens_BS: jax.Array, anchors_BN: jax.Array, config: PromptLookupConfig) -> jax.Array:
    """Drafts after every anchor position of given texts, as decoding makes them there: [B,N,J], NOT_PROPOSED where nothing is found."""

    def one(anchor_B):
        drafts_BJ, found_B = lookup(tokens_BS, anchor_B + 1, config)
        return jnp.where(found_B[:, None], drafts_BJ, NOT_PROPOSED)

    return jnp.moveaxis(jax.lax.map(one, anchors_BN.T), 0, 1)


def num_proposed(drafts_TJ: np.ndarray) -> np.ndarray:
    """How many leading slots of each row were proposed. -> [T]."""
    return np.cumprod(drafts_TJ != NOT_PROPOSED, axis=1).sum(axis=1)
