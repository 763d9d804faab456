"""The frozen target: a decoder-only transformer of the Qwen3 or Llama family.

The two families differ only in q/k norm. Tap id k means the *output* of decoder layer k
(0-based), which is HF ``hidden_states[k + 1]``; the last layer is never tapped, because HF's
last entry is taken after the final norm and engines disagree about its meaning.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from dspine_jax.attention import causal_attention
from dspine_jax.config import DEFAULT_KERNELS, KernelConfig, TargetConfig, check_target_layer_ids
from dspine_jax.kv_cache import KVCache, write_rows
from dspine_jax.layers import Attention, Embedding, RMSNorm, SwiGLU
from dspine_jax.vocabulary import vocabulary_logits
from pallas_kernels.cached_attention import cached_attention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetOutput:
    """hidden_BTD: after the final norm; tapped_BTE: concatenated taps [B,T,M*D] or None; cache or None."""

    hidden_BTD: jax.Array
    tapped_BTE: jax.Array | None
    cache: KVCache | None


class DecoderLayer(nnx.Module):
    """Pre-norm decoder layer: x += o(attention(norm(x))); x += mlp(norm(x))."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, param_dtype=jnp.float32):
        D, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(D, eps, param_dtype=param_dtype)
        self.self_attn = Attention(
            D,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qk_norm=config.qk_norm,
            eps=eps,
            rope_theta=config.rope_theta,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.post_attention_layernorm = RMSNorm(D, eps, param_dtype=param_dtype)
        self.mlp = SwiGLU(D, config.intermediate_size, rngs=rngs, param_dtype=param_dtype)

    def finish(self, x_BTD: jax.Array, attended_BTHC: jax.Array) -> jax.Array:
        """Residual add of the attention output, then of the MLP. [B,T,D] -> [B,T,D]."""
        x_BTD = x_BTD + self.self_attn.o_proj(attended_BTHC)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Target(nnx.Module):
    """Decoder-only language model with prefill, verify, step and tapped layers."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, param_dtype=jnp.float32, kernels: KernelConfig = DEFAULT_KERNELS):
        self.config = config
        self.kernels = kernels
        kw = dict(rngs=rngs, param_dtype=param_dtype)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **kw)
        self.layers = nnx.List([DecoderLayer(config, **kw) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype)
        # Tied means one array used twice, never a second copy that training could move apart.
        self.lm_head = None if config.tie_embeddings else Embedding(config.vocab_size, config.hidden_size, **kw)

    @property
    def input_embedding_VD(self) -> jax.Array:
        """Token embedding rows [V,D]."""
        return self.embed_tokens.embedding[...]

    @property
    def output_embedding_VD(self) -> jax.Array:
        """LM-head rows U [V,D]; the input embedding itself when tied."""
        return (self.lm_head or self.embed_tokens).embedding[...]

    def logits(self, hidden_BTD: jax.Array) -> jax.Array:
        """Final-normed hidden states [...,D] -> logits [...,V] in fp32, padded columns at -1e30."""
        return vocabulary_logits(hidden_BTD, self.output_embedding_VD, self.config.num_tokens)

    def __call__(self, tokens_BT: jax.Array, *, target_layer_ids: tuple[int, ...] = (), dtype=jnp.float32) -> TargetOutput:
        """Causal forward over whole rows, without a cache (training, teacher forcing).

        tokens [B,T] int at positions 0..T-1 -> TargetOutput with cache None. Right padding needs
        no mask: causality keeps it out of every earlier position.
        """
        return self._forward(tokens_BT, None, target_layer_ids, dtype, capacity=None)

    def prefill(
        self,
        tokens_BS: jax.Array,
        lengths_B: jax.Array,
        *,
        capacity: int,
        target_layer_ids: tuple[int, ...] = (),
        dtype=jnp.float32,
    ) -> TargetOutput:
        """Run right-padded prompts and fill a new cache of ``capacity`` rows.

        tokens [B,S] int, lengths [B] int -> TargetOutput whose cache has lengths ``lengths``.
        Raises ValueError when the prompt is wider than the cache.
        """
        if tokens_BS.shape[1] > capacity:
            raise ValueError(f"prompt of {tokens_BS.shape[1]} tokens does not fit a cache of {capacity} rows; raise the capacity")
        out = self._forward(tokens_BS, None, target_layer_ids, dtype, capacity=capacity)
        return dataclasses.replace(out, cache=out.cache.with_lengths(lengths_B))

    def verify(
        self, block_BK: jax.Array, cache: KVCache, *, target_layer_ids: tuple[int, ...] = (), dtype=jnp.float32, width: int | None = None
    ) -> TargetOutput:
        """Run K tokens against the cache, at positions lengths..lengths+K-1.

        The K new rows are written, the counters are left as they are: the caller commits what was
        accepted with ``cache.with_lengths``. hidden [B,K,D], taps [B,K,M*D]. With ``width`` only that many rows
        of the cache are read; it must cover lengths + K of every row that matters.
        """
        return self._forward(block_BK, cache, target_layer_ids, dtype, capacity=None, width=width)

    def step(self, token_B: jax.Array, cache: KVCache, *, target_layer_ids: tuple[int, ...] = (), dtype=jnp.float32) -> TargetOutput:
        """Feed one token per row and commit it. hidden [B,1,D]."""
        out = self.verify(token_B[:, None], cache, target_layer_ids=target_layer_ids, dtype=dtype)
        return dataclasses.replace(out, cache=out.cache.with_lengths(cache.lengths_B + 1))

    def _forward(self, tokens_BT, cache, target_layer_ids, dtype, *, capacity, width=None) -> TargetOutput:
        check_target_layer_ids(target_layer_ids, self.config.num_layers)
        B, T = tokens_BT.shape
        start_B = jnp.zeros((B,), jnp.int32) if cache is None else cache.lengths_B
        positions_BT = start_B[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
        x_BTD = jnp.take(self.input_embedding_VD, tokens_BT, axis=0).astype(dtype)
        taps: dict[int, jax.Array] = {}
        keys, values = [], []
        for index, layer in enumerate(self.layers):
            z = layer.input_layernorm(x_BTD)
            q = layer.self_attn.queries(z, positions_BT)
            k, v = layer.self_attn.keys_values(z, positions_BT)
            if cache is not None:
                k, v = write_rows(cache.keys[index], k, start_B), write_rows(cache.values[index], v, start_B)
                attended = cached_attention(q, k, v, start_B, width=width, implementation=self.kernels.cached_attention)
            else:
                attended = causal_attention(q, k, v)
            if cache is not None or capacity is not None:
                room = ((0, 0), (0, 0 if cache is not None else capacity - T), (0, 0), (0, 0))
                keys.append(jnp.pad(k, room))
                values.append(jnp.pad(v, room))
            x_BTD = layer.finish(x_BTD, attended)
            if index in target_layer_ids:
                taps[index] = x_BTD
        tapped = jnp.concatenate([taps[i] for i in target_layer_ids], axis=-1) if target_layer_ids else None
        new_cache = KVCache(tuple(keys), tuple(values), start_B) if keys else None
        return TargetOutput(self.norm(x_BTD), tapped, new_cache)
