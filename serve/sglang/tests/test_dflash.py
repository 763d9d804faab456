"""Exported DFlash, DFlash2 and Domino drafters in SGLang's own models: every tensor lands, and hidden states and greedy drafts are JAX's."""

import harness
import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.speculative.dflash_worker_v2 import _DflashDraftSampler, _DominoDraftSampler, _SelectorDraftSampler
from torch import nn


def run(golden_folder, name: str, architecture: str) -> tuple[harness.Case, torch.Tensor]:
    """A loaded drafter and its blocks' hidden states, both checked."""
    case = harness.Case(golden_folder / name)
    assert type(case.model).__module__ == "sglang.srt.models.dflash" and type(case.model).__name__ == architecture
    assert not harness.unused_tensors(case.model, case.folder)  # SGLang passes over what it does not know
    assert all(layer.self_attn.attn_type == AttentionType.ENCODER_ONLY for layer in case.model.layers)
    rows = case.run()
    torch.testing.assert_close(rows, case.golden["hidden"], atol=1e-4, rtol=1e-5)
    return case, rows


def check(case: harness.Case, sampler, rows: torch.Tensor) -> None:
    """The worker's sampler, which a CUDA graph ends with, drafts the golden path."""
    with torch.no_grad():
        sampler(rows.flatten(0, 1), case.ids.reshape(-1))
    assert torch.equal(sampler.out.view(len(rows), -1), case.golden["path"].long())


def test_dflash(golden_folder):
    case, rows = run(golden_folder, "dflash", "DFlashDraftModel")
    (n, B), head = rows.shape[:2], case.golden["head"]
    assert n == 200
    check(case, _DflashDraftSampler(weight=head, block_size=B, num_org=len(head), org_vocab_start=0, max_bs=n), rows)


def test_dflash2(golden_folder):
    case, rows = run(golden_folder, "dflash2", "DFlash2DraftModel")
    n, B = rows.shape[:2]
    sampler = _SelectorDraftSampler(draft_model=case.model, block_size=B, max_bs=n, device="cpu", sampling_enabled=True)
    sampler.stage_sampling_params(bs=n, sampling_info=None)
    check(case, sampler, rows)
    assert (case.golden["path"] != case.golden["argmax"]).float().mean() > 0.1  # a selector that is never read would pass otherwise


@pytest.mark.parametrize("name", ["domino", "domino_same"])
def test_domino(name, golden_folder):
    case, rows = run(golden_folder, name, "DFlashDraftModel")
    (n, B), head, model = rows.shape[:2], case.golden["head"], case.model
    embedding = nn.Embedding.from_pretrained(case.golden["embedding"])
    shifted = model.draft_config.shift_label
    assert shifted is (name == "domino")
    sampler = _DominoDraftSampler(
        target_embedding=embedding, lm_head_weight=head, prefix_gru=model.prefix_gru, embed_proj=model.embed_proj, vocab_size=len(head), block_size=B,
        shift_label=shifted, max_bs=n, candidate_pool_size=0,
    )  # fmt: skip
    check(case, sampler, rows)
    assert (case.golden["path"] != case.golden["argmax"]).float().mean() > 0.1
