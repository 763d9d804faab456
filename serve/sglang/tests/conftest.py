"""SGLang on a machine without a GPU: what has to be settled before its first import, and a server's context for one rank."""

from __future__ import annotations

import os
import sys
import types
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # SGLang compiles the walk; minutes on a CPU
os.environ.setdefault("SGLANG_IS_FLASHINFER_AVAILABLE", "false")

import pytest  # noqa: E402
import torch  # noqa: E402
from torch import library  # noqa: E402

# Off CUDA SGLang's RoPE imports this and then runs its own path.
_ops = types.ModuleType("vllm._custom_ops")
_ops.rotary_embedding = None
sys.modules.setdefault("vllm", types.ModuleType("vllm"))
sys.modules.setdefault("vllm._custom_ops", _ops)
if not torch.cuda.is_available():
    # A torchvision built for CUDA cannot load its operators beside a CPU torch; SGLang needs their names alone.
    _torchvision = library.Library("torchvision", "DEF")
    _torchvision.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _torchvision.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@contextmanager
def one_rank():
    """SGLang's context of a single process: default server settings, one rank."""
    from sglang.srt.model_executor.cuda_graph_config import default_cuda_graph_config
    from sglang.srt.runtime_context import get_context, get_parallel

    group = SimpleNamespace(world_size=1, rank_in_group=0, ranks=[0], device_group=None)
    settings = get_context().override_server_args(cuda_graph_config=default_cuda_graph_config())  # read by layers on a GPU
    with settings, get_parallel().override(tp_size=1, tp_rank=0, attn_tp_size=1, attn_tp_rank=0, tp_group=group):
        yield


@pytest.fixture(scope="session", autouse=True)
def _rank():
    with one_rank():
        yield


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    """What tests/served_golden.py of the repository wrote."""
    folder = Path(os.environ["DSPINE_GOLDEN"])
    assert (folder / "tiny" / "golden.npz").is_file(), f"{folder} holds no golden files; run make sglang-test"
    return folder
