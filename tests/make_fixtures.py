"""Writes tests/fixtures/target_*: tiny random targets and what transformers' torch models say about them.

Needs torch (CPU) and transformers, Python 3.11: ``python tests/make_fixtures.py``. The weights are
rounded to bf16 before the reference runs in fp32, so the small bf16 files hold them exactly. Norm
weights are drawn from [0.5, 1.5]: with all-ones weights a missing or doubled norm would not show.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent / "fixtures"
LONG = 3100  # tokens of the long row; rotary mistakes show only far from 0
LONG_POSITIONS = (0, 3, 1500, 2999, 3000, 3050, 3098, 3099)
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": [2, 5],
    "pad_token_id": None,
}


def random_model(family: str, *, seed: int, layers: int, head_dim: int, theta: float, tied: bool, **more):
    """A tiny fp32 torch model in eval mode whose weights are exact in bf16."""
    config_class, model_class = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[family]
    sizes = SIZES | {"num_hidden_layers": layers, "head_dim": head_dim, "tie_word_embeddings": tied} | more
    config = config_class(**sizes, rope_parameters={"rope_type": "default", "rope_theta": theta})
    config._attn_implementation = "eager"
    model = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
            else:
                # Larger than a trained model's start, so that attention is far from uniform.
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
            parameter.copy_(parameter.bfloat16().float())
    return model


@torch.no_grad()
def reference(model, tokens_BT: np.ndarray) -> dict[str, np.ndarray]:
    """layers [L,B,T,D]: raw output of every decoder layer (hooked: HF's last entry is normed); logits [B,T,V]; hf_states [L+1,B,T,D]."""
    outputs = []
    hooks = [layer.register_forward_hook(lambda _m, _i, out: outputs.append(out[0] if isinstance(out, tuple) else out)) for layer in model.model.layers]
    result = model(torch.from_numpy(tokens_BT.astype(np.int64)), output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    stack = lambda xs: torch.stack(list(xs)).float().numpy()  # noqa: E731
    return {"layers": stack(outputs), "logits": result.logits.float().numpy(), "hf_states": stack(result.hidden_states)}


def long_tokens(vocab_size: int) -> np.ndarray:
    """The long row [1,LONG] of token ids."""
    return np.random.default_rng(11).integers(0, vocab_size, (1, LONG)).astype(np.int32)


def write(name: str, model, *, thetas: tuple[float, ...] = ()) -> None:
    """Folder ``fixtures/name`` with config.json, model.safetensors (bf16) and reference.npz."""
    folder = HERE / name
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config.to_diff_dict()
    for key in ("transformers_version", "dtype", "_attn_implementation"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tied = model.config.tie_word_embeddings
    state = {key: value.bfloat16().contiguous() for key, value in model.state_dict().items() if not (tied and key == "lm_head.weight")}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    short = np.random.default_rng(7).integers(0, SIZES["vocab_size"], (2, 12)).astype(np.int32)
    arrays = {"short_tokens": short, **{f"short_{key}": value for key, value in reference(model, short).items()}}
    at = np.array(LONG_POSITIONS)
    arrays |= {"long_tokens": long_tokens(SIZES["vocab_size"]), "long_positions": at}
    far = reference(model, arrays["long_tokens"])
    arrays |= {"long_layers": far["layers"][:, :, at], "long_logits": far["logits"][:, at]}
    for theta in thetas:
        for module in model.modules():
            if hasattr(module, "inv_freq"):
                C = model.config.head_dim
                module.inv_freq.copy_(1.0 / (theta ** (torch.arange(0, C, 2, dtype=torch.int64).float() / C)))
        arrays[f"long_logits_theta_{theta:.0f}"] = reference(model, arrays["long_tokens"])["logits"][:, at]
    np.savez_compressed(folder / "reference.npz", **arrays)


def main() -> None:
    """Write both folders and print their size."""
    torch.set_num_threads(2)
    # head_dim 32 is not hidden_size / heads (some loaders derive it).
    write("target_qwen3", random_model("qwen3", seed=1, layers=6, head_dim=32, theta=1_000_000.0, tied=False))
    write("target_llama", random_model("llama", seed=2, layers=2, head_dim=16, theta=100_000.0, tied=True), thetas=(1_000_000.0, 10_000_000.0))
    files = sorted(file for file in HERE.rglob("target_*/*") if file.is_file())
    for file in files:
        print(f"{file.stat().st_size:9d} {file.relative_to(HERE)}")
    print(f"{sum(file.stat().st_size for file in files):9d} in all")


if __name__ == "__main__":
    main()
