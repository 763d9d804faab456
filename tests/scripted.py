"""Drafters that propose what a table says, texts without a cache, and targets that follow a fixed chain."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from dspine_jax import speculative
from dspine_jax.drafter import Drafter
from dspine_jax.selection import point_mass
from dspine_jax.speculative import Decoder, DecodeState
from dspine_jax.target import Target

ENDS = (118, 119)  # end ids for all tests of one file, so that they share a compiled loop


class Script(nnx.Variable):
    """The table of a scripted drafter: an array, so another script needs no compilation."""


class Scripted(Drafter):
    """Row b with c tokens out proposes ``drafts_BTJ[b, c - 1]``; its context cache is a real one.

    Needs the ``scripts`` fixture. As a class of its own it never shares a compiled loop with a real drafter.
    """

    def __init__(self, target: Target, drafts_BTJ: np.ndarray):
        sizes = {"block_size": drafts_BTJ.shape[2] + 1, "num_layers": 1}
        super().__init__(tiny.train_config("dflash", drafter=sizes).drafter.resolve(target.config), rngs=nnx.Rngs(0))
        self.drafts_BTJ = Script(jnp.asarray(drafts_BTJ, jnp.int32))


def install(patch: pytest.MonkeyPatch) -> None:
    """Let the decode loop read the table of a scripted drafter."""
    real = speculative.propose

    def propose(drafter, target, state, keys_B, settings):
        if not isinstance(drafter, Scripted):
            return real(drafter, target, state, keys_B, settings)
        now_B11 = jnp.maximum(state.count_B - 1, 0)[:, None, None]
        return point_mass(jnp.take_along_axis(drafter.drafts_BTJ[...], now_B11, axis=1)[:, 0]).first(settings.num_draft_tokens)

    patch.setattr(speculative, "propose", propose)


def right_drafts(text_T, J: int) -> np.ndarray:
    """[T-J,J]: with t + 1 tokens out, the J tokens that follow. They run on past any end token."""
    return np.lib.stride_tricks.sliding_window_view(np.asarray(text_T)[1:], J).copy()


def wrong_from(drafts_TJ: np.ndarray, slot: int) -> np.ndarray:
    """The same drafts with another token in one slot (0-based)."""
    drafts_TJ = drafts_TJ.copy()
    drafts_TJ[:, slot] = (drafts_TJ[:, slot] + 1) % tiny.TARGET.num_tokens
    return drafts_TJ


@nnx.jit
def _choices(target, tokens_BW):
    return jnp.argmax(target.logits(target(tokens_BW).hidden_BTD), axis=-1)


def naive_greedy(target: Target, prompts: list[list[int]], count: int, width: int = 96) -> np.ndarray:
    """Greedy text [B,count] by whole forward passes: no cache, no loop of rounds."""
    tokens_BW, length_B = np.zeros((len(prompts), width), np.int32), np.array([len(prompt) for prompt in prompts])
    row_B = np.arange(len(prompts))
    for b, prompt in enumerate(prompts):
        tokens_BW[b, : len(prompt)] = prompt
    for n in range(count):
        choice_BW = np.asarray(_choices(target, jnp.asarray(tokens_BW)))
        tokens_BW[row_B, length_B + n] = choice_BW[row_B, length_B + n - 1]
    return np.stack([tokens_BW[b, length_B[b] : length_B[b] + count] for b in row_B])


def cut(text_T, most: int) -> list[int]:
    """Plain greedy text: to the first of ``ENDS``, or ``most`` tokens."""
    text = [int(t) for t in text_T[:most]]
    return text[: next((i + 1 for i, t in enumerate(text) if t in ENDS), most)]


def renamed(target: Target, names: dict[int, int]):
    """The same target with tokens exchanged for others; its text is the same under the new names. -> (target, rename)."""
    order = np.arange(tiny.TARGET.vocab_size)
    for old, new in names.items():
        order[[old, new]] = order[[new, old]]
    target = nnx.clone(target)
    for table in (target.embed_tokens.embedding, target.lm_head.embedding):
        table.set_value(table[...][order])
    return target, lambda tokens: order[np.asarray(tokens)].tolist()


def begin(decoder: Decoder, prompts: list[list[int]], limits: list[int], *, width: int, room: int) -> DecodeState:
    """``decoder.start`` on lists, without the rounding of shapes that ``generate`` does."""
    tokens_BS = np.zeros((len(prompts), width), np.int32)
    for b, prompt in enumerate(prompts):
        tokens_BS[b, : len(prompt)] = prompt
    lengths_B = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
    return decoder.start(jnp.asarray(tokens_BS), lengths_B, jnp.asarray(limits, jnp.int32), jax.random.split(jax.random.key(0), len(prompts)), room=room)


def chain_target(successor: dict[int, int]) -> Target:
    """A target whose next token depends on the last one alone: given pairs, and a fixed permutation for the rest.

    Attention and MLP add nothing, so the last state is the token's embedding, and the head row of a token is
    the direction of the embedding it follows.
    """
    target = tiny.tiny_target()
    V = tiny.TARGET.num_tokens
    assert len(set(successor.values())) == len(successor)
    free = sorted(set(range(V)) - set(successor.values()))
    rest = sorted(set(range(V)) - set(successor))
    follows = successor | dict(zip(rest, np.roll(free, 1)))
    for layer in target.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.kernel.set_value(jnp.zeros_like(linear.kernel[...]))
    target.norm.weight.set_value(jnp.ones_like(target.norm.weight[...]))
    rows_VD = np.array(target.input_embedding_VD)
    head_VD = np.zeros_like(rows_VD)
    for before, after in follows.items():
        head_VD[after] = rows_VD[before] / np.linalg.norm(rows_VD[before])
    target.lm_head.embedding.set_value(jnp.asarray(head_VD))
    return target


def accept_everything(draft, logits_BKV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A broken ``judge_greedy``: what must be noticed wherever text is compared."""
    choice_BK = jnp.argmax(logits_BKV, axis=-1).astype(jnp.int32)
    accepted_B = jnp.full(choice_BK.shape[:1], draft.tokens_BJ.shape[1])
    return accepted_B, jnp.take_along_axis(choice_BK, accepted_B[:, None], axis=1)[:, 0]
