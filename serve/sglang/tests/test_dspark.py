"""An exported DSpark drafter in SGLang's own DSpark model: every tensor lands, and hidden states, corrected logits, confidence and drafts are JAX's."""

from __future__ import annotations

import argparse
import shlex
from types import SimpleNamespace

import harness
import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.dspark_components.dspark_config import parse_dspark_draft_config, resolve_runtime_config
from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise
from sglang.srt.speculative.dspark_components.dspark_draft_sampler import DsparkDraftSampler

CONFIDENCE = {"vanilla": 64 + 8, "gated": 64, "rnn": None}  # inputs of the confidence head


def build(golden_folder, kind: str, verify: str) -> harness.Case:
    with envs.SGLANG_RAGGED_VERIFY_MODE.override(verify):
        return harness.Case(golden_folder / f"dspark_{kind}")


def sampler_of(model, requests: int, vocabulary: int) -> DsparkDraftSampler:
    """The worker's, which a CUDA graph ends with; corrected logits kept as for sampling, every row at temperature 0."""
    noise, sync = DraftNoise(key=1, offset=torch.zeros(1, dtype=torch.long)), SimpleNamespace(sync=lambda site, values: values)
    sampler = DsparkDraftSampler(model=model, gamma=model.gamma, max_bs=requests, device="cpu", noise=noise, tp_sync=sync, greedy_draft=False)
    sampler.step_logits = torch.empty(requests, model.gamma, vocabulary)
    sampler.stage_sampling_params(bs=requests, sampling_info=None)
    return sampler


@pytest.mark.parametrize("kind", CONFIDENCE)
def test_sglang_serves_the_exported_dspark_drafter(kind, golden_folder, monkeypatch):
    case = build(golden_folder, kind, "static" if CONFIDENCE[kind] is None else "compact")
    g, model = case.golden, case.model
    assert type(model).__module__ == "sglang.srt.models.dspark" and type(model).__name__ == "Qwen3DSparkModel"
    assert not harness.unused_tensors(model, case.folder)
    assert all(layer.self_attn.attn_type == AttentionType.ENCODER_ONLY for layer in model.layers)
    rows = case.run()
    torch.testing.assert_close(rows, g["hidden"], atol=1e-4, rtol=1e-5)
    n, K = rows.shape[:2]
    assert (n, K, model.gamma, model.sample_from_anchor) == (50, 6, 6, True)
    monkeypatch.setattr("sglang.srt.models.dspark.tensor_model_parallel_all_gather", lambda x, dim: x)  # one rank
    sampler = sampler_of(model, n, len(g["head"]))
    with torch.no_grad():
        sampler(rows.flatten(0, 1), case.ids.reshape(-1))
    torch.testing.assert_close(sampler.step_logits, g["corrected"], atol=1e-4, rtol=1e-5)
    assert torch.equal(sampler.out.view(n, K), g["path"].long())
    assert (g["path"] != g["argmax"]).float().mean() > 0.1  # a head that is never read would pass otherwise
    if CONFIDENCE[kind] is not None:
        assert model.confidence_head.proj.in_features == CONFIDENCE[kind]
        torch.testing.assert_close(sampler.confidence_raw_out, g["confidence"], atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(sampler.confidence_out, g["confidence"].sigmoid(), atol=1e-5, rtol=1e-5)


def test_sglang_reads_the_exported_config(golden_folder):
    for kind in CONFIDENCE:
        config = harness.config_of(golden_folder / f"dspark_{kind}" / "drafter")
        parsed = parse_dspark_draft_config(draft_hf_config=config)
        assert (parsed.gamma, parsed.markov_rank, parsed.markov_head_type) == (6, 8, kind)
        assert parsed.target_layer_ids == [0, 2] and parsed.num_target_layers == 4
        runtime = resolve_runtime_config(draft_hf_config=config, speculative_num_draft_tokens=None, target_vocab_size=128)
        assert (runtime.gamma, runtime.verify_num_draft_tokens, runtime.mask_token_id) == (6, 7, 3)  # 6 drafts, 7 tokens verified


def test_the_model_cards_command_is_one_that_sglang_takes(golden_folder):
    """Every flag is known and the counts are those of the config, for each kind of drafter."""
    for name, algorithm, verified in (("dspark_rnn", "DSPARK", 7), ("tiny", "DFLASH", 8), ("dflash", "DFLASH", 8)):
        card = (golden_folder / name / "drafter" / "README.md").read_text()
        command = card.split("python -m sglang.launch_server")[1].split("```")[0].replace("\\\n", " ")
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        args = parser.parse_args(shlex.split(command.replace("<this folder>", "folder")))
        assert (args.speculative_algorithm, args.speculative_num_draft_tokens, args.dtype) == (algorithm, verified, "bfloat16")
        assert args.speculative_draft_model_path == "folder" and args.speculative_draft_model_quantization == "unquant"


def test_the_confidence_head_is_part_of_ragged_verification_alone(golden_folder):
    """By default SGLang verifies whole blocks and passes over the head; a drafter without one starts in that mode only, and SGLang says so."""
    case = build(golden_folder, "vanilla", "static")
    assert case.model.confidence_head is None
    assert harness.unused_tensors(case.model, case.folder) == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    with pytest.raises(ValueError, match="confidence head is enabled but the checkpoint is missing"):
        build(golden_folder, "rnn", "compact")
