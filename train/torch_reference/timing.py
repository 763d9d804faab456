"""Time the PyTorch step with random weights, in the fastest of its forms (train/torch_reference)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dspine_jax.config import TargetConfig, TrainConfig
from serve.environment import GIB, stamp
from train.profile import BATCHES, synthetic_batches, timing
from train.torch_reference.model import Drafter, Target
from train.torch_reference.step import TorchStep

WARM_UP = 3


def randomise(module: nn.Module, *, fc_inputs: int = 1, message_std: float = 0.0) -> None:
    """Weights at the scales of a fresh model: norms 1, biases 0, matrices N(0, 0.02), fc N(0, 1/sqrt(inputs)), messages as given."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            nn.init.constant_(parameter, float(name.endswith("weight")))
        else:
            std = fc_inputs**-0.5 if name.startswith("fc.") else message_std if ".message." in name else 0.02
            nn.init.normal_(parameter, std=std)


def choose_target_attention(config: TargetConfig, rows: int, width: int, dtype: torch.dtype) -> dict[str, float]:
    """Time PyTorch's fused causal attentions at the target's shape on the GPU and let the process use the fastest alone. -> milliseconds by name."""
    q = torch.randn(rows, width, config.num_heads, config.head_dim, device="cuda", dtype=dtype).transpose(1, 2)
    k = torch.randn(rows, width, config.num_kv_heads, config.head_dim, device="cuda", dtype=dtype).transpose(1, 2)
    found = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with torch.no_grad(), sdpa_kernel(backend):
                run = lambda: F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)  # noqa: E731
                found[backend.name] = 1e3 * min(seconds_of(run, 20) for _ in range(3))
        except RuntimeError as error:
            print(f"{backend.name} does not serve the target's attention: {str(error).splitlines()[0]}")
    if found:
        best = min(found, key=found.get)
        torch.backends.cuda.enable_flash_sdp(best == SDPBackend.FLASH_ATTENTION.name)
        torch.backends.cuda.enable_cudnn_sdp(best == SDPBackend.CUDNN_ATTENTION.name)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    return found


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], object], count: int) -> float:
    """Seconds of one of ``count`` calls, after one that is not timed."""
    run()
    synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        run()
    synchronize()
    return (time.perf_counter() - begin) / count


class GraphedStep:
    """A whole step, from the drawing of anchors to the update, as one CUDA graph."""

    def __init__(self, step: TorchStep, batch: dict[str, Tensor]):
        self._step, self._inputs = step, {name: x.clone() for name, x in batch.items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step(**self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = step.device_work(**self._inputs)

    def __call__(self, **batch: Tensor) -> tuple[Tensor, Tensor]:
        """As TorchStep's; the outputs are overwritten by the next call."""
        for name, value in batch.items():
            self._inputs[name].copy_(value)
        self._step.set_learning_rate()
        self._graph.replay()
        return self._outputs


def time_torch_step(
    config: TrainConfig, target_config: TargetConfig, *, width: int, steps: int, repeats: int, modes: Sequence[str], chunks: Sequence[int]
) -> dict:
    """Figures of the fastest form, as ``train.profile.time_step`` reports ours.

    Every mode of torch.compile, vocabulary chunk, and launching with or without a CUDA graph is tried for ``steps`` steps ("trials" in the report, with the
    error of what failed); the fastest is then timed ``repeats`` times. ``config`` resolved. Raises RuntimeError when no form runs.
    """
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high")  # TF32 for the transfer space, the one fp32 product; our step's default on a GPU too
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, config.compute_dtype)
    on_gpu, tokens = device == "cuda", config.data.batch_size * width
    attention_ms = choose_target_attention(target_config, config.data.batch_size, width, dtype) if on_gpu else {}
    target = Target(target_config, config.drafter.target_layer_ids, width, device=device, dtype=dtype)
    randomise(target)
    rows = synthetic_batches(config, target_config.num_tokens, width)
    batches = [
        {"tokens_BS": torch.tensor(r["tokens"], dtype=torch.int64, device=device), "loss_mask_BS": torch.tensor(r["loss_mask"], device=device)} for r in rows
    ]

    def form(mode: str) -> TorchStep:
        """A step that starts anew, in this mode."""
        torch.compiler.reset()
        drafter = Drafter(config.drafter, width, device=device, attention="flex" if on_gpu else "dense")
        injection = config.drafter.injection
        randomise(drafter, fc_inputs=drafter.fc.in_features, message_std=injection.message_init_std if injection else 0.0)
        if injection is not None:
            drafter.transfer.basis.normal_()
        return TorchStep(config, target, drafter, num_tokens=target_config.num_tokens, chunk=chunks[0], mode=None if mode == "eager" else mode)

    def run(call: Callable, count: int) -> Tensor:
        for i in range(count):
            loss, _ = call(**batches[i % BATCHES])
        synchronize()
        return loss

    def attempt(step: TorchStep, mode: str, chunk: int, graph: bool) -> dict:
        trial = {"mode": mode, "vocab_chunk": chunk, "cuda_graph": graph}
        step.chunk = chunk
        try:
            begin = time.perf_counter()
            run(step, 1)
            trial["compile_s"] = time.perf_counter() - begin
            call = GraphedStep(step, batches[0]) if graph else step
            run(call, WARM_UP)
            begin = time.perf_counter()
            run(call, steps)
            trial["step_ms"] = 1e3 * (time.perf_counter() - begin) / steps
        except Exception as error:  # a form that fails here is no reason to lose the others
            trial["error"] = f"{type(error).__name__}: {error}"[:2000]
            step.drafter.zero_grad(set_to_none=True)
        print(trial, flush=True)
        return trial

    trials, step = [], None
    for mode in modes:
        step = None  # one at a time in memory
        step = form(mode)
        for chunk in chunks:
            trials += [attempt(step, mode, chunk, graph) for graph in ((False, True) if on_gpu else (False,))]
    working = [trial for trial in trials if "step_ms" in trial]
    if not working:
        raise RuntimeError(f"no form of the PyTorch step ran: {trials[0]['error']}")
    best = min(working, key=lambda trial: trial["step_ms"])
    if best["mode"] != modes[-1]:
        step = None
        step = form(best["mode"])
    step.chunk = best["vocab_chunk"]
    run(step, 1)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    call = GraphedStep(step, batches[0]) if best["cuda_graph"] else step
    run(call, steps)
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        loss = run(call, steps)
        seconds.append((time.perf_counter() - begin) / steps)
    return {
        "method": config.drafter.method, **timing(seconds, tokens), "loss": loss.item(),
        "compile_s": max(trial["compile_s"] for trial in working if trial["mode"] == best["mode"]),
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if on_gpu else None,
        "form": {name: best[name] for name in ("mode", "vocab_chunk", "cuda_graph")}, "target_attention_ms": attention_ms, "trials": trials,
        "environment": stamp(f"1 x {torch.cuda.get_device_name()}" if on_gpu else "cpu", ("torch", "triton") if on_gpu else ("torch",)),
    }  # fmt: skip
