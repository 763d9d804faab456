"""The DSpine drafter as a draft model of SGLang's DFLASH worker.

The backbone is SGLang's DFlash. Injections and transfer space are the reference's own modules, replicated on every rank. A block's returned row is
[final hidden ; stream before the last write], twice the width: redoing the last write needs only that, so nothing is kept between calls and a CUDA graph
may hold it all.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import torch
from sglang.srt.distributed.communication_op import tensor_model_parallel_all_reduce
from sglang.srt.layers.logits_processor import LogitsProcessorOutput, should_apply_lm_head_quant_method
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.models.dflash import CandidateSelector, DFlashDraftModel, candidate_topk
from sglang.srt.runtime_context import get_parallel, get_server_args
from sglang.srt.speculative.dflash_utils import is_dense_head_weight
from torch import nn

from dspine_sglang import kernels
from dspine_sglang.config import DSpineKeys
from dspine_sglang.reference import Config, Drafter, Injection, Transfer, predecessors

PROBES = 64  # vocabulary rows by which another target is recognised


class DSpineSelector(CandidateSelector):
    """Scores of all pairs of neighbouring candidates by the model; the walk is SGLang's."""

    def __init__(self, model: DSpineDraftModel, top_k: int):
        nn.Module.__init__(self)  # the parent's would make two codebooks
        self.top_k = top_k
        # Not a submodule: its parameters would appear twice.
        self.__dict__["model"] = model

    def build_lattice(
        self, *, candidate_ids: torch.Tensor, unary_logits: torch.Tensor, hidden_states: torch.Tensor, anchor_token_ids: torch.Tensor
    ) -> torch.Tensor:
        """candidate_ids [b,J,P], hidden_states [b,J,2D], anchor_token_ids [b] -> scores [b,J,P,P] fp32; the unary logits are part of no score."""
        return self.model.transition_table(candidate_ids, hidden_states, anchor_token_ids)


class DSpineDraftModel(DFlashDraftModel):
    """See the module. Raises ValueError or RuntimeError for what it does not serve, naming the setting and the mend."""

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        if quant_config is not None:
            raise ValueError("a quantised DSpine drafter is not served; pass --speculative-draft-model-quantization unquant")
        if _pipeline_size() > 1:
            raise ValueError(f"--pp-size {_pipeline_size()}: DSpine is served without pipeline parallelism only")
        keys = DSpineKeys.read(config.dflash_config, int(config.num_hidden_layers))
        if getattr(config, "is_causal", None) is not True:
            raise ValueError("is_causal is not true: a DSpine slot may not see later ones; export the drafter again with dspine-export")
        types = getattr(config, "layer_types", None)
        if types != ["full_attention"] * int(config.num_hidden_layers):
            raise ValueError(f"layer_types is {types}; every layer of a DSpine drafter has full_attention")
        super().__init__(config=config, quant_config=None, prefix=prefix)
        for index, layer in enumerate(self.layers):
            if layer.self_attn.attn_type != AttentionType.DECODER or layer.self_attn.sliding_window_size != -1:
                raise ValueError(f"layer {index} was built with attention {layer.self_attn.attn_type}, not causal in the block")
        self.keys = keys
        self.lm_head: nn.Module | None = None  # the target's, attached by the worker
        self.injections = nn.ModuleDict({str(i): Injection(int(config.hidden_size), keys.rank, self.rms_norm_eps) for i in keys.layers})
        self.transfer = Transfer(int(config.vocab_size), int(config.hidden_size), keys.rank)
        self.injections.requires_grad_(False)
        self.candidate_selector = DSpineSelector(self, keys.top_k)
        self._whole = False  # whether a full checkpoint was loaded
        self._kernel_weights: dict[str, kernels.InjectionWeights] = {}  # filled where the project's kernels run

    # ---- the target's head ------------------------------------------------------------------------

    def __setattr__(self, name: str, value) -> None:
        if name == "lm_head" and value is not None:
            self._check_head(value)
        super().__setattr__(name, value)

    def _check_head(self, head: nn.Module) -> None:
        weight = getattr(head, "weight", None)
        if not is_dense_head_weight(weight) or should_apply_lm_head_quant_method(head, getattr(head, "quant_method", None)):
            raise ValueError("the target's LM head is quantised; DSpine reads its rows and needs it in fp16, bf16 or fp32")
        shard, rows = getattr(head, "shard_indices", None), len(self.transfer.table)
        if shard is not None and shard.num_added_elements:
            raise ValueError(f"the target's LM head has {shard.num_added_elements} added tokens; the drafter knows none of them")
        if head.org_vocab_size > rows:
            raise ValueError(f"the target's LM head has {head.org_vocab_size} rows, the drafter was exported for {rows}: another target")
        if get_parallel().tp_size == 1:
            probes = torch.linspace(0, head.org_vocab_size - 1, PROBES, device=weight.device).long()
            cosine = torch.cosine_similarity(self.transfer.of_rows(weight[probes]), self.transfer.table[probes].float(), dim=-1).mean().item()
            if not cosine > 0.99:
                raise ValueError(f"the target's LM head is not the one that the drafter was trained with (mean cosine of features {cosine:.3f})")

    # ---- the block --------------------------------------------------------------------------------

    def set_block_size(self, block_size: int) -> None:
        """Up to the trained size: rows depend on earlier rows only, so fewer of them are a prefix."""
        if block_size > self.keys.block_size:
            raise ValueError(f"--speculative-num-draft-tokens {block_size}: the drafter was trained for blocks of {self.keys.block_size}")
        super().set_block_size(block_size)

    @torch.no_grad()
    def forward(self, input_ids, positions, forward_batch, input_embeds=None, get_embedding: bool = False, pp_proxy_tensors=None) -> LogitsProcessorOutput:
        """Rows of whole blocks [n*B] with the target's embeddings [n*B,D] -> hidden_states [n*B,2D]."""
        if input_embeds is None:
            raise ValueError("DSpine needs input_embeds (the target's embedding)")
        B, D = self.block_size, input_embeds.shape[-1]
        if len(input_embeds) == 0:
            return LogitsProcessorOutput(next_token_logits=None, hidden_states=input_embeds.new_empty(0, 2 * D))
        anchor_feature = self.transfer.table[input_ids.view(-1, B)[:, 0]]
        hidden, residual = input_embeds, None
        for index, layer in enumerate(self.layers):
            hidden, residual = layer(positions, hidden, forward_batch, residual)
            if str(index) in self.injections:
                # A new tensor, which no later kernel writes to: on a GPU the fused add-norm overwrites both of its arguments.
                before = hidden + residual
                hidden = self._inject(index, before.view(-1, B, D), anchor_feature).view(-1, D)
                residual = None
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=torch.cat([self.norm(hidden), before], dim=-1))

    def _inject(self, index: int, x_NKD: torch.Tensor, anchor_feature_NR: torch.Tensor) -> torch.Tensor:
        if self._kernel_weights:
            return kernels.inject(x_NKD, anchor_feature_NR, self._kernel_weights[str(index)], self.rms_norm_eps)
        return self.injections[str(index)](x_NKD, anchor_feature_NR)

    # ---- candidates and their pairs ---------------------------------------------------------------

    def compute_candidates(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [N,2D] -> the P best usable tokens of each row: ids [N,P] int64, base logits [N,P] fp32."""
        D = int(self.config.hidden_size)
        if hidden.shape[-1] != 2 * D:
            raise ValueError(f"rows of {hidden.shape[-1]} values where DSpine returns {2 * D}: data-parallel attention is not served")
        if self._kernel_weights and get_parallel().tp_size == 1 and self.lm_head.weight.dtype == hidden.dtype and len(hidden):
            return kernels.best_tokens(hidden[:, :D], self.lm_head.weight, self.keys.top_k, min(self.keys.num_tokens, self.lm_head.org_vocab_size))
        ids, logits, _ = candidate_topk(hidden[:, :D], self._usable_head(), self.keys.top_k)
        return ids, logits.float()

    def _usable_head(self) -> SimpleNamespace:
        """The attached head without rows that the tokenizer cannot give; they were masked in training."""
        head, most = self.lm_head, self.keys.num_tokens
        shard = getattr(head, "shard_indices", None)
        if get_parallel().tp_size > 1:
            own = max(0, min(most - shard.org_vocab_start_index, shard.num_org_elements))
            shard = SimpleNamespace(num_org_elements=own, org_vocab_start_index=shard.org_vocab_start_index)
        return SimpleNamespace(weight=head.weight, quant_method=None, org_vocab_size=min(most, head.org_vocab_size), shard_indices=shard)

    def transition_table(self, candidate_ids: torch.Tensor, hidden_states: torch.Tensor, anchor_token_ids: torch.Tensor) -> torch.Tensor:
        """Logit of every candidate of a slot after each possible predecessor, its last write redone: [b,J,P (predecessor),P (candidate)] fp32."""
        features = self.transfer.table[predecessors(anchor_token_ids, candidate_ids)]
        redone = self.injections[str(len(self.layers) - 1)].redo(hidden_states[..., int(self.config.hidden_size) :], features)
        # fp32: a bf16 product has steps of 0.125 at logits of 16 to 32 and ties near ones.
        normed = self.norm(redone.flatten(0, 2)).view_as(redone).float()
        head, sharded = self.lm_head, get_parallel().tp_size > 1
        if sharded:
            shard = head.shard_indices
            local = candidate_ids - shard.org_vocab_start_index
            owned = (local >= 0) & (local < shard.num_org_elements)
            rows = head.weight[local.clamp(0, shard.num_org_elements - 1)].float() * owned[..., None]
        else:
            rows = head.weight[candidate_ids].float()
        table = torch.einsum("njad,njbd->njab", normed, rows)
        return tensor_model_parallel_all_reduce(table) if sharded else table

    # ---- weights ----------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a checkpoint. The parent passes over what it does not know and leaves out what is missing; here both are errors.

        The first call must bring every tensor, later ones may bring some.
        """
        with torch.device("meta"):
            expected = {name: tuple(x.shape) for name, x in Drafter(Config.read(self.config.to_dict())).state_dict().items()}
        seen: set[str] = set()

        def checked():
            for name, tensor in weights:
                short = name.removeprefix("model.")
                if short not in expected:
                    raise ValueError(f"the drafter's weights hold {name}, which a DSpine drafter does not have")
                if tuple(tensor.shape) != expected[short]:
                    raise ValueError(f"the drafter's weights hold {name} of shape {list(tensor.shape)}, its config asks for {list(expected[short])}")
                if short in seen:
                    raise ValueError(f"the drafter's weights hold {name} twice")
                seen.add(short)
                yield name, tensor

        super().load_weights(checked())
        missing = sorted(set(expected) - seen)
        if missing and not self._whole:
            raise ValueError(f"the drafter's weights lack {len(missing)} tensors: {', '.join(missing[:8])}")
        self._whole = True
        weight = self.transfer.table
        if kernels.wanted() and weight.is_cuda and weight.dtype == torch.bfloat16:
            self._kernel_weights = {index: kernels.InjectionWeights.of(injection) for index, injection in self.injections.items()}


def _pipeline_size() -> int:
    """--pp-size of the server; 1 where there is none (tests, tools)."""
    try:
        return int(get_server_args().pp_size)
    except ValueError:
        return 1


EntryClass = DSpineDraftModel
