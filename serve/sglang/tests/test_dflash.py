"""An exported DFlash drafter in SGLang's own DFlash model: every tensor lands, the block sees itself both ways, and hidden states and drafts are JAX's."""

import harness
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.speculative.dflash_worker_v2 import _DflashDraftSampler


def test_sglang_serves_the_exported_dflash_drafter(golden_folder):
    case = harness.Case(golden_folder / "dflash")
    g, model = case.golden, case.model
    assert type(model).__module__ == "sglang.srt.models.dflash" and type(model).__name__ == "DFlashDraftModel"
    # SGLang passes over tensors that it does not know: none may be left.
    sources = harness.tensors_of(case.folder)
    stacked = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    used = set()
    for name, parameter in model.named_parameters():
        if not name.startswith("lm_head."):
            parts = next(([name.replace(whole, part) for part in names] for whole, names in stacked.items() if whole in name), [name])
            assert torch.equal(parameter, torch.cat([sources[part] for part in parts])), name
            used |= set(parts)
    assert used == set(sources)
    assert all(layer.self_attn.attn_type == AttentionType.ENCODER_ONLY for layer in model.layers)
    rows = case.run()
    torch.testing.assert_close(rows, g["hidden"], atol=1e-4, rtol=1e-5)
    n, B = rows.shape[:2]
    sampler = _DflashDraftSampler(weight=g["head"], block_size=B, num_org=len(g["head"]), org_vocab_start=0, max_bs=n)
    sampler(rows.flatten(0, 1))
    assert n == 200 and torch.equal(sampler.out.view(n, -1), g["path"].long())
