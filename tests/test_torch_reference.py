"""The torch reference of the SGLang plugin computes what JAX computes, from the exported files alone (E12)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import served_golden

from dspine_jax.drafter_io import load_drafter
from dspine_jax.target_io import load_target

torch = pytest.importorskip("torch", reason="the reference is torch; JAX needs none")

PLUGIN = Path(__file__).resolve().parents[1] / "serve" / "sglang"


@pytest.fixture(scope="module")
def reference():
    """dspine_sglang.reference, which is a distribution of its own."""
    sys.path.insert(0, str(PLUGIN))
    import dspine_sglang.reference as module

    yield module
    sys.path.remove(str(PLUGIN))


@pytest.fixture(scope="module")
def near_ties():
    """The judge that the plugin's tests use."""
    sys.path.append(str(PLUGIN / "tests"))
    import near_ties as module

    yield module
    sys.path.remove(str(PLUGIN / "tests"))


@pytest.fixture(scope="module", params=["tiny", "demo"])
def case(request, tmp_path_factory, reference):
    folder = tmp_path_factory.mktemp(request.param)
    getattr(served_golden, request.param)(folder)
    golden = {name: torch.from_numpy(x) for name, x in np.load(folder / "golden.npz").items()}
    return reference.Drafter.from_folder(folder / "drafter"), golden, folder / "drafter"


def close(ours: torch.Tensor, theirs: torch.Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=1e-5)


def test_every_step_equals_jax_and_every_token_is_the_same(case, reference):
    drafter, g, _ = case
    B, S = g["taps"].shape[:2]
    context = drafter.context(g["taps"], torch.arange(S).expand(B, S))
    for index, (k, v) in enumerate(context):
        close(k, g["keys"][index])
        close(v, g["values"][index])
    rows = [(k[g["row"]], v[g["row"]]) for k, v in context]
    anchor = g["anchor"].long()
    block = drafter(anchor, g["embedding"], rows, g["context_len"].long())
    close(block.hidden_NKD, g["hidden"])
    close(block.pre_write_NKD, g["pre_write"])
    ids, logits = drafter.candidates(block, g["head"])
    assert torch.equal(ids, g["candidate_ids"].long())
    close(logits, g["base_logits"])
    table = drafter.table(block, ids, anchor, g["head"])
    close(table, g["table"])
    path = reference.greedy_walk(table, ids)
    assert torch.equal(path, g["path"].long()) and len(path) in (50, 200)
    assert torch.equal(drafter.propose(anchor, g["embedding"], g["head"], rows, g["context_len"].long()), path)
    # Otherwise a table that is never read would pass.
    assert (path != g["argmax"]).float().mean() > 0.1 and len(path.unique()) > 20
    # The stored T is that of the LM head.
    close(drafter.transfer.of_rows(g["head"]), drafter.transfer.table.data, atol=2e-5)


@pytest.mark.parametrize("case", ["demo"], indirect=True)
def test_bfloat16_drafts_differ_at_near_ties_only(case, reference, near_ties):
    """JAX and the reference in bf16 at the trained drafter's 200 anchors, against the tokens of fp32.

    bf16 moves logits of 10 to 20 by up to 0.13. Two candidates may change places only within 0.05; the best token of a slot may also be lost or found where
    the candidates end, between the eighth and ninth base logit.
    """
    fp32, g, folder = case
    half = reference.Drafter.from_folder(folder).to(torch.bfloat16)
    rows, anchor, num_tokens = g["row"].long(), g["anchor"].long(), fp32.config.keys.num_tokens
    embedding, head, taps = (g[name].to(torch.bfloat16) for name in ("embedding", "head", "taps"))
    context = [(k[rows], v[rows]) for k, v in half.context(taps, torch.arange(taps.shape[1]).expand(taps.shape[:2]))]
    block = half(anchor, embedding, context, g["context_len"].long())
    assert block.hidden_NKD.dtype == torch.bfloat16
    ids, _ = half.candidates(block, head)
    drafts = {"reference": (reference.greedy_walk(half.table(block, ids, anchor, head), ids), ids)}

    target = load_target(served_golden.DEMO / "target", dtype=jnp.bfloat16)
    drafter = load_drafter(served_golden.DEMO / "dspine", target.config, dtype=jnp.bfloat16)
    tokens, anchors = map(jnp.asarray, served_golden.demo_anchors())
    out = served_golden.compute(drafter, target, jnp.asarray(g["taps"].numpy(), jnp.bfloat16), tokens, anchors)["blocks"]
    assert out["hidden"].dtype == jnp.bfloat16
    flat = lambda x: torch.from_numpy(np.asarray(jax.device_get(x), np.int64)).flatten(0, 1)  # noqa: E731
    drafts["jax"] = flat(out["path"]), flat(out["candidate_ids"])

    for name, (path, ids) in drafts.items():
        found = near_ties.partings(g, path, ids, num_tokens)
        print(name, f"{(path == g['path']).float().mean():.4f}", *found, sep="\n")
        assert len(path) == 200 and len(found) < 30
        assert all(parting.margin < {"choice": 0.05, "cut": 0.1}[parting.kind] for parting in found)


def test_a_slot_does_not_hear_later_ones(case):
    drafter, g, _ = case
    few, rows = slice(0, 4), g["row"][:4]
    context = [(k[rows], v[rows]) for k, v in zip(g["keys"], g["values"])]
    anchor, length = g["anchor"].long()[few], g["context_len"].long()[few]
    whole = drafter(anchor, g["embedding"], context, length).hidden_NKD
    for slot in (1, 3):
        # Only slot ``slot`` reads another embedding: the mask's, with a nudge.
        hook = drafter.layers[0].input_layernorm.register_forward_pre_hook(lambda m, x, s=slot: (x[0] + (torch.arange(x[0].shape[1]) == s)[:, None],))
        changed = drafter(anchor, g["embedding"], context, length).hidden_NKD
        hook.remove()
        assert torch.equal(changed[:, :slot], whole[:, :slot]) and (changed[:, slot:] != whole[:, slot:]).any(-1).all()


def test_files_that_do_not_fit_are_refused(case, reference, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(case[2], tmp_path / "drafter")
    whole = load_file(folder / "model.safetensors")
    for tensors, words in (
        ({k: v for k, v in whole.items() if k != "injections.1.message.weight"}, "Missing key.*injections.1.message.weight"),
        (whole | {"extra.weight": torch.zeros(1)}, "Unexpected key.*extra.weight"),
    ):
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(RuntimeError, match=f"(?s){words}"):
            reference.Drafter.from_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value, words in (("dspine_top_k", 6, "power of two"), ("dspine_version", 2, "version"), ("dspine_layers", [0], "no write to redo")):
        (folder / "config.json").write_text(json.dumps(config | {"dflash_config": config["dflash_config"] | {key: value}}))
        with pytest.raises(ValueError, match=words):
            reference.Drafter.from_folder(folder)


def test_its_kernels_are_copies(reference):
    """jax-triton and torch run the same files at the same launches."""
    import dspine_sglang.kernels as theirs
    from pallas_kernels.injection import triton_gpu as injection
    from pallas_kernels.topk_logits import pallas_gpu as topk

    for name, copy in (("injection", "injection_triton.py"), ("topk_logits", "topk_triton.py")):
        original = PLUGIN.parents[1] / "pallas_kernels" / name / "triton_kernels.py"
        assert (PLUGIN / "dspine_sglang" / "kernels" / copy).read_bytes() == original.read_bytes()
    assert {kernel: {rows: tuple(x) for rows, x in launches.items()} for kernel, launches in injection.LAUNCHES.items()} == theirs.INJECTION
    assert {tokens: tuple(x) for tokens, x in topk.LAUNCHES.items()} == theirs.HEAD
    assert (injection.LEAST_ROWS, topk.SELECT_WARPS) == (theirs.LEAST_ROWS, theirs.SELECT_WARPS)


def test_importing_it_needs_neither_jax_nor_sglang():
    code = "import sys, dspine_sglang.reference, dspine_sglang.config; sys.exit(any(m in sys.modules for m in ('jax', 'flax', 'sglang', 'dspine_jax')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=PLUGIN, env={"PYTHONPATH": str(PLUGIN)}, check=False).returncode == 0
