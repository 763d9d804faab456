"""The Triton kernels as the model class calls them, in Triton's interpreter on the CPU: the same numbers as the reference's.

In fp16: the interpreter multiplies bf16 matrices by their bit patterns.
"""

import os
import subprocess
import sys

CODE = """
import torch
from dspine_sglang import kernels
from dspine_sglang.reference import Injection

kernels.PREFETCH = False
torch.manual_seed(0)
for N, K, D, R in ((1, 8, 64, 24), (3, 8, 64, 32), (2, 16, 96, 16)):  # one tile and several, ragged ones
    injection = Injection(D, R, 1e-6).to(torch.float16)
    for parameter in injection.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, anchor = torch.randn(N, K, D).half(), torch.randn(N, R)
    with torch.no_grad():
        ours = kernels.inject(x, anchor, kernels.InjectionWeights.of(injection), 1e-6).float()
        exact = injection.float()(x.float(), anchor)
        rounded = injection.half()(x, anchor).float()
    error = lambda y: ((y - exact).norm() / exact.norm()).item()
    changed = ((exact - x.float()).norm() / exact.norm()).item()
    assert error(ours) < 1.5 * error(rounded) + 1e-3 and changed > 0.1, (error(ours), error(rounded), changed)
    assert torch.equal(ours[:, 0], x[:, 0].float())
for T, V, D, P, usable in ((7, 300, 64, 4, 290), (40, 1000, 32, 8, 1000)):
    hidden, head = torch.randn(T, D).half(), torch.randn(V, D).half()
    ids, logits = kernels.best_tokens(hidden, head, P, usable)
    values, expected = (hidden.float() @ head[:usable].float().T).sort(dim=-1, descending=True, stable=True)
    assert ids.dtype == torch.int64 and torch.equal(ids, expected[:, :P])
    torch.testing.assert_close(logits, values[:, :P], atol=1e-4, rtol=1e-5)
"""


def test_kernels_compute_the_references_numbers():
    subprocess.run([sys.executable, "-c", CODE], check=True, env=os.environ | {"TRITON_INTERPRET": "1"})


MODEL = """
import conftest, sys, torch
from pathlib import Path
with conftest.one_rank():
    import harness
    from dspine_sglang import kernels
    kernels.PREFETCH = False
    case = harness.Case(Path(sys.argv[1]), torch.float16)
    few = slice(0, 3)
    plain = case.run(few)
    candidates = case.model.compute_candidates(plain[:, 1:].flatten(0, 1))
    assert not case.model._kernel_weights  # no GPU
    case.model._kernel_weights = {index: kernels.InjectionWeights.of(x) for index, x in case.model.injections.items()}
    called = []
    for name in ("inject", "best_tokens"):
        setattr(kernels, name, lambda *args, run=getattr(kernels, name), name=name: (called.append(name), run(*args))[1])
    ours = case.run(few)
    assert (ours - plain).float().norm() / plain.float().norm() < 5e-3
    ids, logits = case.model.compute_candidates(plain[:, 1:].flatten(0, 1))
    assert called == ["inject", "inject", "best_tokens"]
    assert (ids == candidates[0]).float().mean() > 0.95 and logits.dtype == torch.float32
    torch.testing.assert_close(logits, candidates[1], atol=2e-2, rtol=2e-3)
"""


def test_the_model_class_with_them_drafts_the_same(golden_folder):
    environment = os.environ | {"TRITON_INTERPRET": "1", "DSPINE_SGLANG_KERNELS": "1"}
    folder = os.path.dirname(__file__)
    subprocess.run([sys.executable, "-c", MODEL, golden_folder / "tiny"], check=True, env=environment, cwd=folder)
