"""Looking into a drafter's layers: what each can read out, and what features of known tokens are worth at which layers.

Every probe runs blocks at anchors along a stored text, so all history before the anchor is right. Three words:

* *Reading*: a stream is put through the final norm and the LM head; its best token is compared with the text. Heads that correct
  logits (table, selector, Markov, GRU) are not read: a probe asks what the backbone knows.
* *Known slots*: slots that hold the embedding of a given token instead of the mask token's. The anchor's slot always is one. What DSpine writes
  from a known slot into the next is T of its token, as for any decoded slot; from an undecided one it is the predicted feature.
* *Filling a slot at a layer*: in that layer every **other** slot reads the filled slot's stream from a donor run in which it is known; the filled
  slot's own stream goes on as it was. So a set of layers is a number of deliveries, and the same number can be made earlier or later. Where a
  method writes between slots after a layer (DSpine), the write after a filled layer sends what the donor sends. Filled at all layers, the other
  slots cannot tell the block from the donor's.

Layers count from 0. Layer 0 reads embeddings; the last layer's reading is the drafter's own before any head.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspine_jax.anchors import Blocks
from dspine_jax.config import DrafterConfig
from dspine_jax.drafter import Drafter
from dspine_jax.objective import run_blocks
from dspine_jax.replay import compiled, over_anchors
from dspine_jax.selection import anchor_features, select_greedy
from dspine_jax.target import Target
from dspine_jax.transfer import token_table
from pallas_kernels.injection import injection, write
from pallas_kernels.topk_logits import topk_logits

Context = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Write:
    """What an injection did: the stream it read, predicted features p and those each slot sent, and the gate's part that is of a slot's own stream (fp32)."""

    pre_write_BNKD: jax.Array
    feature_BNKR: jax.Array
    sent_BNKR: jax.Array
    hidden_gate_BNKD: jax.Array


def run_layer(
    drafter: Drafter, index: int, x_BNKD: jax.Array, context: Context, blocks: Blocks, token_feature_BNKR: jax.Array | None, known_K: jax.Array
) -> tuple[jax.Array, Write | None]:
    """One layer and, where it injects, the write after it: each slot sends T of its token if it is known, else its predicted feature.

    token_feature: T of the tokens in the slots, None without injection; known [K] bool, the anchor's slot among them.
    """
    keys, values = context
    x = drafter.layers[index](x_BNKD, keys[index], values[index], blocks.context_len_BN, blocks.positions_BNK)
    if index not in drafter.config.injection_layers:
        return x, None
    weights = drafter.injections[str(index)].weights
    _, p_BNKR, hidden_gate = injection(
        x, token_feature_BNKR[:, :, 0], weights, eps=drafter.config.rms_norm_eps, implementation=drafter.kernels.injection
    )
    sent_BNKR = jnp.where(known_K[:, None], token_feature_BNKR, p_BNKR)
    written = write(x[:, :, 1:], hidden_gate[:, :, 1:], sent_BNKR[:, :, :-1], weights)
    return jnp.concatenate([x[:, :, :1], written], axis=2), Write(x, p_BNKR, sent_BNKR, hidden_gate)


def block_input(drafter: Drafter, target: Target, tokens_BNK: jax.Array, known_K: jax.Array, dtype) -> tuple[jax.Array, jax.Array | None]:
    """What enters the first layer with these tokens in the known slots, and T of the tokens: [B,N,K,D], [B,N,K,R] or None."""
    ids_BNK = jnp.where(known_K, tokens_BNK, drafter.config.mask_token_id)
    return jnp.take(target.input_embedding_VD, ids_BNK, axis=0).astype(dtype), anchor_features(drafter, target.output_embedding_VD, tokens_BNK)


def block_streams(
    drafter: Drafter,
    target: Target,
    context: Context,
    blocks: Blocks,
    dtype,
    *,
    tokens_BNK: jax.Array,
    known_K: jax.Array,
    donor: Sequence[jax.Array] | None = None,
    filled_K: jax.Array | None = None,
    layers_L: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """The stream that enters each layer and the one that leaves the last: L+1 arrays [B,N,K,D].

    tokens: what stands in known slots. ``donor``: the result of the same run with the slots ``filled_K`` [K] bool known too; at ``layers`` [L] bool all
    other slots read these slots from it. Layers may be traced, so that many sets share one program; every layer then runs twice.
    """
    x, feature_BNKR = block_input(drafter, target, tokens_BNK, known_K, dtype)
    streams = [x]
    for index in range(drafter.config.num_layers):
        out, _ = run_layer(drafter, index, x, context, blocks, feature_BNKR, known_K)
        if donor is not None:
            here_K = filled_K & layers_L[index]
            seen, _ = run_layer(drafter, index, jnp.where(here_K[:, None], donor[index], x), context, blocks, feature_BNKR, known_K | here_K)
            out = jnp.where(filled_K[:, None], out, seen)
        x = out
        streams.append(x)
    return tuple(streams)


def slot_tokens(blocks: Blocks) -> jax.Array:
    """The text's token at every slot's position, the anchor first. -> [B,N,K] int32 (a shifted block has a label more than slots to hold them)."""
    anchors_BN1 = blocks.noise_ids_BNK[..., :1]
    return jnp.concatenate([anchors_BN1, blocks.labels_BNJ], axis=-1)[..., : blocks.noise_ids_BNK.shape[-1]]


def only_anchor(config: DrafterConfig) -> jax.Array:
    """Known slots of a block as it is drafted. -> [K] bool."""
    return jnp.arange(config.block_size) == 0


def read_out(drafter: Drafter, target: Target, stream: jax.Array) -> jax.Array:
    """The best token of a stream [...,D] by the final norm and the LM head, ties to the lowest id. -> [...] int32."""
    return topk_logits(drafter.norm(stream), target.output_embedding_VD, 1, num_tokens=target.config.num_tokens)[1][..., 0]


def drafting_slots(config: DrafterConfig, stream_xKD: jax.Array) -> jax.Array:
    """A stream's slots that draft, in the order of their drafts: [...,K,D] -> [...,J,D]."""
    return stream_xKD[..., config.first_slot : config.first_slot + config.num_draft_tokens, :]


def refusal(config: DrafterConfig) -> str | None:
    """Why known tokens in a drafter's slots cannot be probed (``make_context_probe``); None where they can."""
    if config.label_shift != "same_position":
        return "in the shifted layout a draft leaves the slot that holds its own predecessor: no other slot is there to read the predecessor from"
    if config.num_draft_tokens < 2:
        return f"blocks of {config.block_size} hold one draft, which has no successor"
    return None


STATIC = ("drafter_graph", "target_graph", "dtype", "anchors_per_chunk")


def make_readout_probe(drafter: Drafter, target: Target, *, dtype, anchors_per_chunk: int) -> Callable[[np.ndarray, np.ndarray], jax.Array]:
    """``(tokens [B,S], anchors [B,N]) -> [B,N,L,J] bool``: whether reading each layer's stream gives the text. Any drafter with layers."""
    return compiled(_readout, drafter, target, dtype=jnp.dtype(dtype), anchors_per_chunk=anchors_per_chunk)


@functools.partial(jax.jit, static_argnames=STATIC)
def _readout(drafter_state, target_state, tokens_BS, anchors_BN, *, drafter_graph, target_graph, dtype, anchors_per_chunk):
    drafter, target = nnx.merge(drafter_graph, drafter_state), nnx.merge(target_graph, target_state)

    def use(context, blocks):
        known_K = only_anchor(drafter.config)
        streams = block_streams(drafter, target, context, blocks, dtype, tokens_BNK=slot_tokens(blocks), known_K=known_K)
        right = [read_out(drafter, target, drafting_slots(drafter.config, x)) == blocks.labels_BNJ for x in streams[1:]]
        return jnp.stack(right, axis=2)

    return over_anchors(drafter, target, tokens_BS, anchors_BN, dtype, anchors_per_chunk, use)[0]


def make_context_probe(
    drafter: Drafter, target: Target, sets: tuple[tuple[int, ...], ...], *, dtype, anchors_per_chunk: int
) -> Callable[[np.ndarray, np.ndarray], dict[str, jax.Array]]:
    """What tokens known in a block's first slots are worth, and at which layers. Same-position drafters of two drafts and more.

    ``(tokens [B,S], anchors [B,N])`` -> bool arrays, whether the last layer's reading gives the text; prefixes of m = 1..J-1 tokens, Z sets of layers:

    * "plain" [B,N,J]: the block as it is drafted.
    * "filled" [B,N,m,Z,J]: slots 1..m filled at the set's layers, from the same block with slots 1..m known. Drafts from index m on count.
    * "correct", "undecided", "drafted" [B,N,m]: the successor of slot m, draft index m, with slots 1..m-1 known and slot m known, masked, or
      holding the token that the drafter drafts there. "draft_right" [B,N,m]: whether that is the text's token.
    * "supplied" [B,N,m,Z]: the successor in "undecided" with slot m filled at the set's layers from "correct".

    Raises ValueError for a drafter that has nothing to probe (``refusal``) and a layer that it lacks.
    """
    reason = refusal(drafter.config)
    if reason:
        raise ValueError(f"the prefix of this {drafter.config.method} drafter cannot be probed: {reason}")
    check_sets(sets, drafter.config.num_layers)
    return compiled(_context, drafter, target, dtype=jnp.dtype(dtype), anchors_per_chunk=anchors_per_chunk, sets=sets)


def check_sets(sets: Sequence[tuple[int, ...]], num_layers: int) -> None:
    """Raises ValueError for a layer that the drafter lacks."""
    for layers in sets:
        for layer in layers:
            if not 0 <= layer < num_layers:
                raise ValueError(f"layer {layer} of the set {','.join(map(str, layers))} is outside 0..{num_layers - 1}, the drafter's layers")


@functools.partial(jax.jit, static_argnames=(*STATIC, "sets"))
def _context(drafter_state, target_state, tokens_BS, anchors_BN, *, drafter_graph, target_graph, dtype, anchors_per_chunk, sets):
    drafter, target = nnx.merge(drafter_graph, drafter_state), nnx.merge(target_graph, target_state)
    J = drafter.config.num_draft_tokens
    slot_K = jnp.arange(drafter.config.block_size)
    layers_ZL = jnp.array([[layer in layers for layer in range(drafter.config.num_layers)] for layers in sets])

    def use(context, blocks):
        run = functools.partial(block_streams, drafter, target, context, blocks, dtype)
        text_BNK = slot_tokens(blocks)
        block, feature = run_blocks(drafter, target, context, blocks, dtype)
        drafts_BNJ = select_greedy(drafter, target, block, text_BNK[..., 0], feature)
        drafts_BNK = jnp.concatenate([text_BNK[..., :1], drafts_BNJ], axis=-1)

        def right(stream, drafts):  # stream [...,j,D] of these drafts' slots
            return read_out(drafter, target, stream) == blocks.labels_BNJ[..., drafts]

        def all_right(stream):
            return right(drafting_slots(drafter.config, stream), slice(None))

        def one_prefix(shorter, m):
            """``shorter``: the run with slots 1..m-1 known."""
            anchor_K, before_K, last_K = slot_K == 0, slot_K < m, slot_K == m
            longer = run(tokens_BNK=text_BNK, known_K=before_K | last_K)
            drafted = run(tokens_BNK=jnp.where(last_K, drafts_BNK, text_BNK), known_K=before_K | last_K)
            last_streams = jax.lax.map(
                lambda given: run(tokens_BNK=text_BNK, known_K=given[0], donor=longer, filled_K=given[1], layers_L=given[2])[-1],
                (
                    jnp.repeat(jnp.stack([anchor_K, before_K]), len(sets), axis=0),
                    jnp.repeat(jnp.stack([~anchor_K & (before_K | last_K), last_K]), len(sets), axis=0),
                    jnp.tile(layers_ZL, (2, 1)),
                ),
            )
            filled_ZBNKD, supplied_ZBNKD = last_streams[: len(sets)], last_streams[len(sets) :]

            def successor_right(stream):  # draft index m leaves slot m + 1
                return right(jnp.take(stream, m + 1, axis=-2), m)

            return longer, {
                "correct": successor_right(longer[-1]),
                "undecided": successor_right(shorter[-1]),
                "drafted": successor_right(drafted[-1]),
                "draft_right": jnp.take(drafts_BNK, m, axis=2) == jnp.take(text_BNK, m, axis=2),
                "supplied": jnp.moveaxis(successor_right(supplied_ZBNKD), 0, -1),
                "filled": jnp.moveaxis(all_right(filled_ZBNKD), 0, 2),
            }

        plain = run(tokens_BNK=text_BNK, known_K=only_anchor(drafter.config))
        _, by_prefix = jax.lax.scan(one_prefix, plain, jnp.arange(1, J))
        return {"plain": all_right(plain[-1])} | jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), by_prefix)

    return over_anchors(drafter, target, tokens_BS, anchors_BN, dtype, anchors_per_chunk, use)[0]


def make_injection_probe(drafter: Drafter, target: Target, *, dtype, anchors_per_chunk: int) -> Callable[[np.ndarray, np.ndarray], dict[str, jax.Array]]:
    """DSpine's writes as they happen in drafting, with predicted features: I injected layers, J drafted slots.

    ``(tokens [B,S], anchors [B,N])`` -> [B,N,I,J] arrays: "gate", the gate's mean over channels, in 0..1; "write", the norm of what is added over the
    norm of the stream before; "cosine", cos(p_i, T[y_i]) of a slot's predicted feature and its true token's; "nearest" bool, whether of all
    tokens' features T[y_i] is nearest to p_i (highest cosine, ties to the lowest id). Raises ValueError for a drafter without injection.
    """
    if drafter.config.injection is None:
        raise ValueError(f"this {drafter.config.method} drafter injects nothing (drafter.injection): it has no gate and no predicted feature")
    return compiled(_injections, drafter, target, dtype=jnp.dtype(dtype), anchors_per_chunk=anchors_per_chunk)


@functools.partial(jax.jit, static_argnames=STATIC)
def _injections(drafter_state, target_state, tokens_BS, anchors_BN, *, drafter_graph, target_graph, dtype, anchors_per_chunk):
    drafter, target = nnx.merge(drafter_graph, drafter_state), nnx.merge(target_graph, target_state)
    config, rows_VD, num_tokens = drafter.config, target.output_embedding_VD, target.config.num_tokens
    table_VR = token_table(drafter.transfer, rows_VD, jnp.float32)

    def use(context, blocks):
        true_BNJR = anchor_features(drafter, rows_VD, blocks.labels_BNJ)
        known_K = only_anchor(config)
        x, feature_BNKR = block_input(drafter, target, slot_tokens(blocks), known_K, dtype)
        views = []
        for index in range(config.num_layers):
            x, done = run_layer(drafter, index, x, context, blocks, feature_BNKR, known_K)
            if done is None:
                continue
            p_BNJR, read_BNJR = done.feature_BNKR[:, :, 1:], done.sent_BNKR[:, :, :-1]
            predecessor_BNJD = read_BNJR.astype(x.dtype) @ drafter.injections[str(index)].weights.gate_predecessor_RD.astype(x.dtype)
            gate_BNJD = jax.nn.sigmoid(predecessor_BNJD.astype(jnp.float32) + done.hidden_gate_BNKD[:, :, 1:])
            before, after = (stream[:, :, 1:].astype(jnp.float32) for stream in (done.pre_write_BNKD, x))
            norm = functools.partial(jnp.linalg.norm, axis=-1)
            views.append(
                {
                    "gate": gate_BNJD.mean(axis=-1),
                    "write": norm(after - before) / norm(before),
                    "cosine": jnp.sum(p_BNJR * true_BNJR, axis=-1) / (norm(p_BNJR) * norm(true_BNJR)),
                    "nearest": topk_logits(p_BNJR, table_VR, 1, num_tokens=num_tokens)[1][..., 0] == blocks.labels_BNJ,
                }
            )
        return jax.tree.map(lambda *layers: jnp.stack(layers, axis=2), *views)

    return over_anchors(drafter, target, tokens_BS, anchors_BN, dtype, anchors_per_chunk, use)[0]
