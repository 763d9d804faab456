"""DFlash-family drafter: context projection, block layers, and the parts that make other methods of it.

One code path serves training and decoding: a block attends to per-layer context keys/values of
which the first ``context_len`` rows are visible. In training those rows are a whole sequence
and ``context_len`` is each anchor's position; in decoding they are a cache and its counter.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from dspine_jax.candidate_selector import CandidateSelector
from dspine_jax.confidence import ConfidenceHead
from dspine_jax.config import DEFAULT_KERNELS, DrafterConfig, KernelConfig
from dspine_jax.dynamic_convolution import GroupedDynamicConvolution
from dspine_jax.gru_head import PrefixGRU, embed_projection
from dspine_jax.kv_cache import KVCache, write_rows
from dspine_jax.layers import Attention, Linear, RMSNorm, SwiGLU
from dspine_jax.markov import MarkovHead
from dspine_jax.transfer import TransferSpace
from pallas_kernels.block_attention import block_attention
from pallas_kernels.injection import InjectionWeights, injection, write


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockOutput:
    """What a block pass leaves for selection and losses.

    hidden_BNKD: after the final norm, last write done with predicted features (the base path).
    pre_write_BNKD, hidden_gate_BNKD: last layer's stream before its write and the gate part that
    depends on it, for redoing the write; None unless the last layer injects.
    features: predicted features p, one [B,N,K,R] fp32 array per injected layer.
    """

    hidden_BNKD: jax.Array
    pre_write_BNKD: jax.Array | None
    hidden_gate_BNKD: jax.Array | None
    features: tuple[jax.Array, ...]


class DrafterLayer(nnx.Module):
    """Qwen3-style layer over block slots, with the context as extra keys and values."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, param_dtype=jnp.float32, kernels: KernelConfig = DEFAULT_KERNELS):
        D, eps = config.hidden_size, config.rms_norm_eps
        self.kernels = kernels
        self.causal = config.block_attention == "causal"
        self.convolves = config.convolution is not None
        self.input_layernorm = RMSNorm(D, eps, param_dtype=param_dtype)
        self.self_attn = Attention(
            D,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qk_norm=True,
            eps=eps,
            rope_theta=config.rope_theta,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.post_attention_layernorm = RMSNorm(D, eps, param_dtype=param_dtype)
        self.mlp = SwiGLU(D, config.intermediate_size, rngs=rngs, param_dtype=param_dtype)

    def add_convolutions(self, config: DrafterConfig, *, rngs: nnx.Rngs, param_dtype) -> None:
        """Put a convolution around each sublayer."""
        kw = dict(rngs=rngs, param_dtype=param_dtype)
        self.attention_conv = GroupedDynamicConvolution(config.hidden_size, config.convolution, **kw)
        self.mlp_conv = GroupedDynamicConvolution(config.hidden_size, config.convolution, **kw)

    def __call__(
        self, x_BNKD: jax.Array, ctx_k_BSGC: jax.Array, ctx_v_BSGC: jax.Array, context_len_BN: jax.Array, positions_BNK: jax.Array
    ) -> jax.Array:
        """x [B,N,K,D] -> [B,N,K,D]; context arrays [B,S,G,C], visible rows j < context_len [B,N]."""

        def attend(z):
            q = self.self_attn.queries(z, positions_BNK)
            k, v = self.self_attn.keys_values(z, positions_BNK)
            options = dict(causal=self.causal, implementation=self.kernels.block_attention)
            return self.self_attn.o_proj(block_attention(q, ctx_k_BSGC, ctx_v_BSGC, k, v, context_len_BN, **options))

        def filtered(convolution: GroupedDynamicConvolution, sublayer, z):
            deltas = convolution.deltas(z)
            return convolution(sublayer(convolution(z, deltas, 0)), deltas, 1)

        z = self.input_layernorm(x_BNKD)
        x_BNKD = x_BNKD + (filtered(self.attention_conv, attend, z) if self.convolves else attend(z))
        z = self.post_attention_layernorm(x_BNKD)
        return x_BNKD + (filtered(self.mlp_conv, self.mlp, z) if self.convolves else self.mlp(z))


class Injection(nnx.Module):
    """Parameters of one adjacent causal injection (DESIGN 5.2, 5.3)."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, param_dtype=jnp.float32):
        D, R = config.hidden_size, config.injection.transfer_size
        kw = dict(rngs=rngs, param_dtype=param_dtype)
        self.norm = RMSNorm(D, config.rms_norm_eps, param_dtype=param_dtype)
        self.feature = Linear(D, R, **kw)
        self.gate_predecessor = Linear(R, D, **kw)
        self.gate_hidden = Linear(D, D, bias=True, **kw)
        self.message = Linear(R, D, std=config.injection.message_init_std, **kw)

    @property
    def weights(self) -> InjectionWeights:
        """The raw arrays, as the injection operation takes them."""
        return InjectionWeights(
            self.norm.weight[...],
            self.feature.kernel[...],
            self.gate_predecessor.kernel[...],
            self.gate_hidden.kernel[...],
            self.gate_hidden.bias[...],
            self.message.kernel[...],
        )


class Drafter(nnx.Module):
    """A drafter of any method. Embedding and LM head are the target's and never part of this module."""

    def __init__(
        self, config: DrafterConfig, *, rngs: nnx.Rngs, param_dtype=jnp.float32, remat: bool = False, kernels: KernelConfig = DEFAULT_KERNELS
    ):
        """``config`` must be resolved (DrafterConfig.resolve). ``kernels`` belongs to the process, not to the weights: it is never saved."""
        D, taps = config.hidden_size, len(config.target_layer_ids)
        self.config = config
        self.remat = remat
        self.kernels = kernels
        # fc sees M tapped states at once: 1/sqrt(inputs) keeps its output at the scale of one of them.
        self.fc = Linear(taps * D, D, rngs=rngs, std=(taps * D) ** -0.5, param_dtype=param_dtype)
        self.hidden_norm = RMSNorm(D, config.rms_norm_eps, param_dtype=param_dtype)
        self.layers = nnx.List([DrafterLayer(config, rngs=rngs, param_dtype=param_dtype, kernels=kernels) for _ in range(config.num_layers)])
        self.norm = RMSNorm(D, config.rms_norm_eps, param_dtype=param_dtype)
        kw = dict(rngs=rngs, param_dtype=param_dtype)
        # Drawn after the backbone, so all methods start from the same backbone at the same seed.
        if config.convolution is not None:
            for layer in self.layers:
                layer.add_convolutions(config, **kw)
        if config.selector is not None:
            self.candidate_selector = CandidateSelector(config, **kw)
        if config.markov is not None:
            self.markov_head = MarkovHead(config, **kw)
        if config.confidence:
            self.confidence_head = ConfidenceHead(config, **kw)
        if config.gru is not None:
            self.prefix_gru = PrefixGRU(config.hidden_size, config.gru.hidden_size, **kw)
            self.embed_proj = embed_projection(config, **kw)
        if config.injection is not None:
            self.injections = nnx.Dict({str(i): Injection(config, rngs=rngs, param_dtype=param_dtype) for i in config.injection_layers})
            self.transfer = TransferSpace(D, config.injection.transfer_size)

    def context_kv(self, target_hidden_BTE: jax.Array, positions_BT: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Context keys and values of every layer from tapped target states.

        ctx = hidden_norm(fc(taps)) is the same for every layer and bypasses the layers' input norm.
        target_hidden [B,T,M*D], positions [B,T] -> (keys, values), L arrays [B,T,G,C] each.
        """
        ctx_BTD = self.hidden_norm(self.fc(target_hidden_BTE))
        pairs = [layer.self_attn.keys_values(ctx_BTD, positions_BT) for layer in self.layers]
        return tuple(k for k, _ in pairs), tuple(v for _, v in pairs)

    def empty_cache(self, batch: int, capacity: int, dtype) -> KVCache:
        """An empty context cache for decoding."""
        c = self.config
        return KVCache.empty(batch, capacity, c.num_layers, c.num_kv_heads, c.head_dim, dtype)

    def extend_cache(self, cache: KVCache, target_hidden_BTE: jax.Array, count_B: jax.Array) -> KVCache:
        """Append the context of newly verified positions; row b commits its first count_B[b] of T rows.

        Rows beyond the count are overwritten by the next call and never visible.
        """
        T = target_hidden_BTE.shape[1]
        positions_BT = cache.lengths_B[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
        keys, values = self.context_kv(target_hidden_BTE, positions_BT)
        return KVCache(
            tuple(write_rows(old, new, cache.lengths_B) for old, new in zip(cache.keys, keys)),
            tuple(write_rows(old, new, cache.lengths_B) for old, new in zip(cache.values, values)),
            cache.lengths_B + count_B,
        )

    def __call__(
        self,
        noise_embedding_BNKD: jax.Array,
        ctx_keys: tuple[jax.Array, ...],
        ctx_values: tuple[jax.Array, ...],
        context_len_BN: jax.Array,
        positions_BNK: jax.Array,
        anchor_feature_BNR: jax.Array | None = None,
    ) -> BlockOutput:
        """Run blocks [anchor, mask x (K-1)] through all layers.

        noise_embedding [B,N,K,D] in the compute dtype; ctx_keys, ctx_values per layer [B,S,G,C];
        context_len [B,N] visible context rows; positions [B,N,K]; anchor_feature T[anchor] [B,N,R]
        (DSpine only) -> BlockOutput.
        """
        x = noise_embedding_BNKD
        pre_write = hidden_gate = None
        features = []
        for index, layer in enumerate(self.layers):
            run = jax.checkpoint(layer.__call__) if self.remat else layer
            x = run(x, ctx_keys[index], ctx_values[index], context_len_BN, positions_BNK)
            if index in self.config.injection_layers:
                pre_write = x
                weights = self.injections[str(index)].weights
                x, p, hidden_gate = injection(x, anchor_feature_BNR, weights, eps=self.config.rms_norm_eps, implementation=self.kernels.injection)
                features.append(p)
        if not self.config.redoes_last_write:
            pre_write = hidden_gate = None
        return BlockOutput(self.norm(x), pre_write, hidden_gate, tuple(features))

    def confidence_logits(self, hidden_BNJD: jax.Array, predecessors_BNJ: jax.Array) -> jax.Array:
        """Logits of the confidence in every draft, from its state and the token id before it (DSpark). -> [B,N,J] fp32."""
        parts = [hidden_BNJD]
        if self.config.confidence_with_markov:
            parts.append(self.markov_head.embed(predecessors_BNJ, hidden_BNJD.dtype))
        return self.confidence_head(*parts)

    def conditioned(self, block: BlockOutput, predecessor_feature_BNJR: jax.Array) -> jax.Array:
        """Redo the last write of slots 1..K-1 with decoded predecessors (DESIGN 5.4).

        predecessor_feature: T of the token before each drafted slot, [B,N,K-1,R]
        -> final-normed hidden states [B,N,K-1,D].
        """
        weights = self.injections[str(self.config.num_layers - 1)].weights
        written = write(block.pre_write_BNKD[:, :, 1:], block.hidden_gate_BNKD[:, :, 1:], predecessor_feature_BNJR, weights)
        return self.norm(written)
