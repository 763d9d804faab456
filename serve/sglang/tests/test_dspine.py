"""The model class in SGLang 0.5.23, on a CPU: resolved by the loader, equal to JAX, and refusing what it does not serve.

Every class of SGLang is the real one; in place of its GPU attention stands one of ours (harness.py).
"""

from __future__ import annotations

import inspect
import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import harness
import pytest
import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from sglang.srt.speculative.dflash_worker_v2 import _selector_lattice, _SelectorDraftSampler

from dspine_sglang import compat
from dspine_sglang.reference import Drafter, greedy_walk

ATOL = 1e-4


@pytest.fixture(scope="module", params=["tiny", "demo"])
def case(request, golden_folder) -> harness.Case:
    return harness.Case(golden_folder / request.param)


@pytest.fixture(scope="module")
def tiny(golden_folder) -> harness.Case:
    return harness.Case(golden_folder / "tiny")


def config_with(folder, **changes):
    """config.json of a folder with changed keys; dspine_*, block_size and label_shift go into dflash_config."""
    config = harness.config_of(folder)
    for name, value in changes.items():
        if name.startswith("dspine_") or name == "label_shift":
            config.dflash_config = {k: v for k, v in (config.dflash_config | {name: value}).items() if v is not None}
        else:
            setattr(config, name, value)
    return config


def lattice(case: harness.Case, rows: torch.Tensor, chosen: slice = slice(None)):
    with torch.no_grad():
        return _selector_lattice(case.model, rows[:, 1:], case.golden["anchor"][chosen].long())


def walk(case: harness.Case, ids: torch.Tensor, scores: torch.Tensor, *, uniforms=None, temperatures=None, greedy: bool = True):
    b, J, _ = ids.shape
    uniforms = torch.zeros(b, J) if uniforms is None else uniforms
    temperatures = torch.ones(b) if temperatures is None else temperatures
    return case.model.candidate_selector.sample_path(
        candidate_ids=ids, scores=scores, uniforms=uniforms, temperatures=temperatures, greedy_mask=torch.full((b,), greedy)
    )


# ---- 1, 12: plugin, drift -------------------------------------------------------------------------


def test_the_loader_resolves_the_plugin_and_jax_stays_out():
    code = """
import conftest, sys
with conftest.one_rank():
    from importlib.metadata import entry_points
    assert [e.value for e in entry_points(group="sglang.srt.plugins") if e.name == "dspine"] == ["dspine_sglang:register"]
    from sglang.srt.models.registry import ModelRegistry
    assert ModelRegistry.resolve_model_cls(["DSpineDraftModel"])[1] != "DSpineDraftModel"  # the fallback of Transformers
    from sglang.srt.plugins import load_plugins
    load_plugins()
    cls, name = ModelRegistry.resolve_model_cls(["DSpineDraftModel"])
    from dspine_sglang.models.dspine import DSpineDraftModel
    assert cls is DSpineDraftModel and name == "DSpineDraftModel"
assert not {m for m in sys.modules if m.split(".")[0] in ("jax", "flax", "dspine_jax")}
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=os.path.dirname(__file__), env=os.environ)


def test_a_failed_check_is_raised_where_the_model_is_built(monkeypatch, tiny):
    import dspine_sglang

    monkeypatch.setitem(compat.SIGNATURES, f"{compat.DFLASH}:candidate_topk", ("hidden",))
    monkeypatch.setitem(ModelRegistry.models, dspine_sglang.ARCHITECTURE, None)
    dspine_sglang.register()
    with pytest.raises(RuntimeError, match=r"cannot serve here: sglang 0\.5\.23 differs.*candidate_topk takes"):
        ModelRegistry.models[dspine_sglang.ARCHITECTURE](config=None)


def test_another_release_is_refused_and_may_be_tried(monkeypatch, caplog):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.5.99")
    with pytest.raises(RuntimeError, match=r"sglang 0\.5\.99 is installed; this plugin was tested with 0\.5\.23"):
        compat.check()
    monkeypatch.setenv(compat.UNTESTED, "1")
    with caplog.at_level(logging.WARNING):
        compat.check()
    assert "0.5.99" in caplog.text


def test_what_the_worker_uses_is_as_recorded():
    assert compat.differences(compat.SIGNATURES) == []
    worker = "sglang.srt.speculative.dflash_worker_v2"
    assert compat.differences(
        {
            f"{worker}:_selector_lattice": ("draft_model", "pred_hidden", "anchor_token_ids"),
            f"{worker}:_SelectorDraftSampler.__init__": ("self", "draft_model", "block_size", "max_bs", "device", "sampling_enabled"),
            f"{worker}:_SelectorDraftSampler.__call__": ("self", "hidden_states", "input_ids"),
            f"{worker}:DFlashWorkerV2.prewarm_sampling": ("self",),
            f"{worker}:DFlashWorkerV2._propose_selector_block": ("self", "draft_logits_output", "bs", "lm_head", "anchor_token_ids", "sampling_info"),
            "sglang.kernels.ops.speculative.dflash:selector_walk_triton": ("candidate_ids", "scores", "uniforms", "temperatures", "greedy_mask"),
        }
    ) == []
    # A captured graph feeds embeddings only to a forward with this parameter and without forward_embed.
    from dspine_sglang.models.dspine import DSpineDraftModel

    assert "input_embeds" in inspect.signature(DSpineDraftModel.forward).parameters and not hasattr(DSpineDraftModel, "forward_embed")


def test_the_prewarm_hook_is_off_unless_asked_for():
    code = """
import conftest, sys
with conftest.one_rank():
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
    from sglang.srt.plugins import load_plugins
    held = [DFlashWorkerV2.prewarm_sampling]  # in a list: a patch also reaches every module's own name for it
    load_plugins()
    assert (DFlashWorkerV2.prewarm_sampling is not held[0]) == (sys.argv[1] == "1")
    from types import SimpleNamespace
    assert DFlashWorkerV2.prewarm_sampling(SimpleNamespace(model_runner=SimpleNamespace(prewarm_sampling=lambda: 7))) == 7
"""
    for asked in ("0", "1"):
        environment = os.environ | {"DSPINE_SGLANG_SKIP_PREWARM": asked}
        subprocess.run([sys.executable, "-c", code, asked], check=True, cwd=os.path.dirname(__file__), env=environment)


# ---- 2, 3: config and weights ---------------------------------------------------------------------


def test_sglang_reads_the_exported_config(case):
    config = harness.config_of(case.folder)
    written = json.loads((case.folder / "config.json").read_text())
    parsed = parse_dflash_draft_config(draft_hf_config=config)
    own = written["dflash_config"]
    assert parsed.target_layer_ids == own["target_layer_ids"] and parsed.mask_token_id == own["mask_token_id"]
    assert parsed.resolve_block_size(default=16) == own["block_size"] == 8 and parsed.num_target_layers == written["num_target_layers"]
    assert config.is_causal is True and config.layer_types == ["full_attention"] * written["num_hidden_layers"]
    from sglang.srt.utils.hf_transformers_utils import get_rope_config

    assert get_rope_config(config)[0] == written["rope_theta"] == case.model.layers[0].self_attn.rotary_emb.base
    assert case.model.num_context_features == len(own["target_layer_ids"])


def test_every_parameter_is_its_source(case):
    sources, used = harness.tensors_of(case.folder), set()
    for name, parameter in case.model.named_parameters():
        if name.startswith("lm_head."):
            continue
        parts = [name]
        for stacked, names in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
            if stacked in name:
                parts = [name.replace(stacked, part) for part in names]
        assert torch.equal(parameter, torch.cat([sources[part] for part in parts])), name
        used |= set(parts)
    assert used == set(sources)


def test_weights_must_be_exactly_those_of_the_config(tiny):
    whole = harness.tensors_of(tiny.folder)
    config = harness.config_of(tiny.folder)
    for name in ("layers.1.self_attn.k_proj.weight", "fc.weight", "injections.0.gate_hidden.bias", "transfer.table"):
        with pytest.raises(ValueError, match=f"lack 1 tensors: {name}"):
            harness.build(config, [(n, x) for n, x in whole.items() if n != name])
        with pytest.raises(ValueError, match=f"hold {name}x, which"):
            harness.build(config, [(f"{n}x" if n == name else n, x) for n, x in whole.items()])
        with pytest.raises(ValueError, match=f"hold {name} of shape"):
            harness.build(config, [(n, x[:-1] if n == name else x) for n, x in whole.items()])
    with pytest.raises(ValueError, match="hold markov_head.w, which a DSpine drafter does not have"):
        harness.build(config, [*whole.items(), ("markov_head.w", torch.zeros(1))])
    with pytest.raises(ValueError, match="hold norm.weight twice"):
        harness.build(config, [*whole.items(), ("norm.weight", whole["norm.weight"])])
    model = harness.build(config, [(f"model.{n}", x) for n, x in whole.items()])
    model.load_weights([("norm.weight", torch.full_like(whole["norm.weight"], 2.0))])  # an update may be partial
    assert (model.norm.weight == 2).all()


# ---- 4: refusals ----------------------------------------------------------------------------------


def test_attention_is_causal_in_the_block(case):
    assert [(x.self_attn.attn_type, x.self_attn.sliding_window_size) for x in case.model.layers] == [(AttentionType.DECODER, -1)] * len(case.model.layers)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_causal": None}, "is_causal is not true"),
        ({"is_causal": False}, "is_causal is not true"),
        ({"layer_types": None}, "layer_types is None"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "every layer of a DSpine drafter has full_attention"),
        ({"dspine_top_k": 6}, "needs a power of two"),
        ({"dspine_top_k": 1}, "needs a power of two"),
        ({"dspine_top_k": None}, "dspine_top_k is None"),
        ({"dspine_rank": None}, "dspine_rank is None"),
        ({"dspine_version": 2}, "dspine_version is 2"),
        ({"dspine_layers": [0]}, "no write to redo"),
        ({"label_shift": "shifted"}, "label_shift is 'shifted'"),
    ],
)
def test_configs_that_are_not_served(tiny, changes, words):
    with pytest.raises(ValueError, match=words):
        harness.build(config_with(tiny.folder, **changes))


def test_servers_that_are_not_served(tiny, monkeypatch):
    config = harness.config_of(tiny.folder)
    with pytest.raises(ValueError, match="--speculative-draft-model-quantization unquant"):
        harness.build(config, quant_config=object())
    monkeypatch.setattr("dspine_sglang.models.dspine.get_server_args", lambda: SimpleNamespace(pp_size=2))
    with pytest.raises(ValueError, match="--pp-size 2"):
        harness.build(config)
    with pytest.raises(ValueError, match="--speculative-num-draft-tokens 9: the drafter was trained for blocks of 8"):
        tiny.model.set_block_size(9)
    with pytest.raises(ValueError, match="data-parallel attention is not served"):
        tiny.model.compute_candidates(torch.zeros(2, 64))


def test_heads_that_are_not_the_targets(tiny):
    weight = tiny.golden["head"]
    model = harness.build(harness.config_of(tiny.folder), harness.tensors_of(tiny.folder).items())
    shard = SimpleNamespace(num_added_elements=3, num_org_elements=len(weight), org_vocab_start_index=0)
    for head, words in (
        (harness.head_of(weight.to(torch.float8_e4m3fn)), "is quantised"),
        (harness.head_of(weight, quant_method=SimpleNamespace(apply=lambda *a: None)), "is quantised"),
        (harness.head_of(weight, shard_indices=shard), "3 added tokens"),
        (harness.head_of(torch.cat([weight, weight])), "256 rows, the drafter was exported for 128"),
        (harness.head_of(weight.flip(0)), "is not the one that the drafter was trained with"),
    ):
        with pytest.raises(ValueError, match=words):
            model.lm_head = head
        assert model.lm_head is None
    model.lm_head = harness.head_of(weight)


# ---- 5, 6, 7: numbers -----------------------------------------------------------------------------


def test_every_step_equals_jax_and_every_token_is_the_same(case):
    rows, g = case.run(), case.golden
    D, n = g["hidden"].shape[-1], len(g["anchor"])
    assert n in (50, 200) and rows.shape == (n, 8, 2 * D)
    for index, (k, v) in case.context.layers.items():
        torch.testing.assert_close(k, g["keys"][index][g["row"].long()], atol=ATOL, rtol=1e-5)
        torch.testing.assert_close(v, g["values"][index][g["row"].long()], atol=ATOL, rtol=1e-5)
    torch.testing.assert_close(rows[..., :D], g["hidden"], atol=ATOL, rtol=1e-5)
    torch.testing.assert_close(rows[..., D:], g["pre_write"], atol=ATOL, rtol=1e-5)
    ids, scores = lattice(case, rows)
    assert torch.equal(ids, g["candidate_ids"].long())
    with torch.no_grad():
        _, base = case.model.compute_candidates(rows[:, 1:].reshape(-1, 2 * D))
    torch.testing.assert_close(base.view_as(g["base_logits"]), g["base_logits"], atol=ATOL, rtol=1e-5)
    torch.testing.assert_close(scores, g["table"], atol=ATOL, rtol=1e-5)
    tokens, q = walk(case, ids, scores)
    assert torch.equal(tokens, g["path"].long())
    assert (tokens != g["argmax"]).float().mean() > 0.1  # a table that is never read would pass otherwise
    assert torch.equal(q.argmax(-1), (ids == tokens[..., None]).int().argmax(-1)) and (q.sum(-1) == 1).all()


def test_the_reference_says_the_same(case):
    """JAX, reference and this class are one chain; here its second link is closed on files alone."""
    g, drafter = case.golden, Drafter.from_folder(case.folder)
    rows = g["row"].long()
    context = [(k[rows], v[rows]) for k, v in drafter.context(g["taps"], torch.arange(g["taps"].shape[1]).expand(g["taps"].shape[:2]))]
    tokens = drafter.propose(g["anchor"].long(), g["embedding"], g["head"], context, g["context_len"].long())
    ids, scores = lattice(case, case.run())
    assert torch.equal(walk(case, ids, scores)[0], tokens) and torch.equal(greedy_walk(scores, ids), tokens)


def test_scores_are_the_last_write_redone(tiny):
    """Every row of the table by hand, for some requests: write with that predecessor's T, norm, LM head."""
    rows, g, few = tiny.run(), tiny.golden, 3
    ids, scores = lattice(tiny, rows)
    t, last = harness.tensors_of(tiny.folder), f"injections.{len(tiny.model.layers) - 1}"
    rms = lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w  # noqa: E731
    for b, e, p in itertools.product(range(few), range(7), range(4)):
        x = rows[b, e + 1, 64:]
        before = g["anchor"][b].long() if e == 0 else ids[b, e - 1, p]
        f = t["transfer.table"][before]
        gate = t[f"{last}.gate_predecessor.weight"] @ f + t[f"{last}.gate_hidden.weight"] @ rms(x, t[f"{last}.norm.weight"]) + t[f"{last}.gate_hidden.bias"]
        hidden = rms(x + torch.sigmoid(gate) * (t[f"{last}.message.weight"] @ f), t["norm.weight"])
        torch.testing.assert_close(scores[b, e, p], g["head"][ids[b, e]] @ hidden, atol=ATOL, rtol=1e-5)
    # The first slot's predecessor is the anchor on both paths, later ones' is not.
    assert (scores[:, 0] - g["base_logits"][:, 0, None]).abs().max() < 2e-5
    assert (scores[:, 1:, 0] - g["base_logits"][:, 1:]).abs().amax() > 0.1


def test_the_greedy_walk_is_the_best_of_each_step_and_no_padded_row_is_drafted(case):
    """Brute force: from the anchor on, the best candidate after the one chosen; ids that the tokenizer cannot give stay out."""
    ids, scores = lattice(case, case.run())
    tokens = walk(case, ids, scores)[0]
    for b in range(len(ids)):
        row = 0
        for e in range(ids.shape[1]):
            row = max(range(ids.shape[2]), key=lambda c: float(scores[b, e, row, c]))  # noqa: B023
            assert tokens[b, e] == ids[b, e, row]
    assert int(ids.max()) < case.model.keys.num_tokens


# ---- 8: the worker's own sampler ------------------------------------------------------------------


def test_the_workers_sampler(tiny):
    rows, b = tiny.run(slice(0, 6)), 6
    ids, scores = lattice(tiny, rows, slice(0, 6))
    sampler = _SelectorDraftSampler(draft_model=tiny.model, block_size=8, max_bs=9, device="cpu", sampling_enabled=True)
    with torch.no_grad():
        sampler.stage_sampling_params(bs=b, sampling_info=None)
        sampler(rows.reshape(b * 8, -1), tiny.ids.reshape(-1))
    assert torch.equal(sampler.out[: b * 7].view(b, 7), tiny.golden["path"][:6].long()) and torch.equal(sampler.candidate_out[:b], ids)


def test_sampling_is_the_inverse_of_the_rows_law(tiny):
    ids, scores = lattice(tiny, tiny.run())
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(ids.shape[:2], generator=generator)
    temperatures = torch.linspace(0.3, 1.5, len(ids))
    tokens, q = walk(tiny, ids, scores, uniforms=uniforms, temperatures=temperatures, greedy=False)
    torch.testing.assert_close(q.sum(-1), torch.ones_like(q[..., 0]))
    for b in range(len(ids)):
        row = 0
        for e in range(ids.shape[1]):
            law = torch.softmax(scores[b, e, row] / temperatures[b], -1)
            torch.testing.assert_close(q[b, e], law)
            row = min(int((uniforms[b, e] >= law.cumsum(-1)).sum()), 3)
            assert tokens[b, e] == ids[b, e, row]
    assert (tokens != tiny.golden["path"]).any()


# ---- 9: who hears whom ----------------------------------------------------------------------------


def test_slots_hear_earlier_ones_only_and_requests_nobody(tiny):
    some = slice(0, 4)
    whole = tiny.run(some)
    for slot in (0, 3, 7):
        changed = tiny.run(some, embeds_change=lambda x, s=slot: x + (torch.arange(8) == s)[:, None].float())
        assert torch.equal(changed[:, :slot], whole[:, :slot]) and (changed[:, slot:] != whole[:, slot:]).any(-1).all()
    changed = tiny.run(some, embeds_change=lambda x: x + (torch.arange(4) == 0)[:, None, None].float())
    assert torch.equal(changed[1:], whole[1:]) and not torch.equal(changed[0], whole[0])
    torch.testing.assert_close(tiny.run(some, block_size=4), whole[:, :4], atol=ATOL, rtol=1e-5)


# ---- 10: shapes and types -------------------------------------------------------------------------


def test_an_empty_batch(tiny):
    tiny.model.set_block_size(8)
    out = tiny.model(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long), SimpleNamespace(batch_size=0), input_embeds=torch.zeros(0, 64))
    assert out.hidden_states.shape == (0, 128)


def test_bfloat16_drafts_nearly_the_same(golden_folder):
    half = harness.Case(golden_folder / "demo", torch.bfloat16)
    assert half.model.transfer.mean.dtype == half.model.transfer.basis.dtype == torch.float32
    rows = half.run()
    assert rows.dtype == torch.bfloat16
    ids, scores = lattice(half, rows)
    assert scores.dtype == torch.float32
    agree = (walk(half, ids, scores)[0] == half.golden["path"]).float().mean()
    assert agree > 0.9, agree


def test_an_add_norm_that_overwrites_its_arguments_changes_nothing(tiny, monkeypatch):
    """As the fused one of a GPU does."""
    few = slice(0, 5)
    whole = tiny.run(few)

    def in_place(self, x, residual=None, *args, **kwargs):
        normed = lambda y: y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.variance_epsilon) * self.weight  # noqa: E731
        if residual is None:
            return normed(x)
        residual.add_(x)
        x.copy_(normed(residual))
        return x, residual

    monkeypatch.setattr(RMSNorm, "forward", in_place)
    torch.testing.assert_close(tiny.run(few), whole, atol=ATOL, rtol=1e-5)


def test_the_folder_alone_is_enough(tiny, tmp_path):
    """Nothing beside config.json and model.safetensors is needed."""
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(tiny.folder / name, tmp_path / name)
    harness.build(harness.config_of(tmp_path), harness.tensors_of(tmp_path).items())
