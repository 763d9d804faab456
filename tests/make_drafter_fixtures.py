"""Writes tests/fixtures/drafter_dflash and drafter_dflash2: tiny random drafters and what PyPI dflash says about them.

Needs torch (CPU), transformers and dflash 0.1.0, Python 3.11: ``python -m tests.make_drafter_fixtures``. Weights are rounded to
bf16 before the reference runs in fp32, so the small file holds them exactly; the tensors keep the names that dflash gives them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from safetensors.torch import save_file
from transformers import DynamicCache, Qwen3Config

from dspine_jax.config import ConvolutionConfig, DrafterConfig, SelectorConfig
from dspine_jax.config_io import save_config

HERE = Path(__file__).parent / "fixtures"
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / heads
    "intermediate_size": 96,
    "rms_norm_eps": 1e-6,
}
THETA, VOCAB, TARGET_LAYERS, TAPS, MASK_ID, BLOCK = 1e6, 128, 8, (0, 3, 4), 7, 6
CONTEXT = 13
PIECES = (5, 1, 7, 3)  # new context rows before each cached block
TEMPERATURE = 8.0
ANCHORS = (0, 3, 4, 5, 17, 24)  # closer than a block, at the start and at the end of the context


SECOND = {"conv_kernel_size": 3, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}


def random_dflash(*, seed: int, theta: float = THETA, second: dict | None = None, **sizes) -> DFlashDraftModel:
    """A tiny fp32 dflash model in eval mode whose weights are exact in bf16; ``second`` holds DFlash2's own sizes."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        **SIZES | sizes,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        num_target_layers=TARGET_LAYERS,
        block_size=BLOCK,
        dflash_config={"target_layer_ids": list(TAPS), "mask_token_id": MASK_ID} | (second or {}),
    )
    model = (DFlash2DraftModel if second else DFlashDraftModel)(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 1.5 if "codebook" in name else 0.15  # a selector that changes drafts
            value = 0.5 + torch.rand(parameter.shape, generator=generator) if "norm" in name else std * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(value.bfloat16().float())
    return model


def drafter_config(model: DFlashDraftModel) -> DrafterConfig:
    """The same architecture in our own config, every size explicit."""
    c, second = model.config, {}
    if isinstance(model, DFlash2DraftModel):
        own = c.dflash_config
        second["convolution"] = ConvolutionConfig(own["conv_kernel_size"], own["conv_group_size"])
        second["selector"] = SelectorConfig(own["selector_rank"], own["selector_top_k"])
    return DrafterConfig(
        **second,
        mask_token_id=MASK_ID,
        block_size=BLOCK,
        num_layers=c.num_hidden_layers,
        target_layer_ids=TAPS,
        block_attention="bidirectional",
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        intermediate_size=c.intermediate_size,
        rope_theta=float(c.rope_parameters["rope_theta"]),
        rms_norm_eps=c.rms_norm_eps,
        hidden_size=c.hidden_size,
        vocab_size=VOCAB,
        num_target_layers=TARGET_LAYERS,
    )


def write_folder(folder: Path, model: DFlashDraftModel) -> None:
    """A drafter folder with dflash's own tensor names."""
    folder.mkdir(parents=True, exist_ok=True)
    save_config(drafter_config(model), folder / "config.json")
    # Files hold the codebooks under their bare names, which dflash maps to its embedding modules when it loads them.
    tensors = {name.replace("codebook.weight", "codebook"): value.bfloat16().contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def anchor_mask(anchors: tuple[int, ...], context: int, block: int, *, causal: bool) -> np.ndarray:
    """Boolean [N*K, S+N*K], written out pair by pair."""
    mask = np.zeros((len(anchors) * block, context + len(anchors) * block), bool)
    for n, anchor in enumerate(anchors):
        for slot in range(block):
            for j in range(context):
                mask[n * block + slot, j] = j < anchor
            for other in range(block):
                mask[n * block + slot, context + n * block + other] = other <= slot or not causal
    return mask


@torch.no_grad()
def reference(model: DFlashDraftModel, *, seed: int) -> dict[str, np.ndarray]:
    """Inputs and the model's hidden states, two-way and causal: plain, far (positions from 3000), cached, many anchors."""
    rng = np.random.default_rng(seed)
    D = model.config.hidden_size
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    total = sum(PIECES)
    arrays = {
        "plain_taps": draw(2, CONTEXT, len(TAPS) * D),
        "plain_noise": draw(2, BLOCK, D),
        "cached_taps": draw(1, total, len(TAPS) * D),
        "cached_noise": draw(len(PIECES), BLOCK, D),
        "anchors": np.array(ANCHORS),
        "anchors_taps": draw(1, max(ANCHORS) + 2, len(TAPS) * D),
        "anchors_noise": draw(1, len(ANCHORS) * BLOCK, D),
    }
    tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
    for kind, causal in (("two_way", False), ("causal", True)):
        model.config.is_causal = causal
        for layer in model.layers:
            layer.self_attn.is_causal = causal
        for name, start in (("plain", 0), ("far", 3000)):
            positions = start + torch.arange(CONTEXT + BLOCK)[None].expand(2, -1)
            out = model(position_ids=positions, noise_embedding=tensors["plain_noise"], target_hidden=tensors["plain_taps"])
            arrays[f"{name}_{kind}"] = out.numpy()
        cache, length, outs = DynamicCache(config=model.config), 0, []
        cache.activate_past_recording()
        for piece, noise in zip(PIECES, tensors["cached_noise"]):
            positions = torch.arange(length, length + piece + BLOCK)[None]
            taps = tensors["cached_taps"][:, length : length + piece]
            outs.append(model(position_ids=positions, noise_embedding=noise[None], target_hidden=taps, past_key_values=cache, use_cache=True))
            length += piece
            cache.crop(-(cache.get_seq_length() - length))
        arrays[f"cached_{kind}"] = torch.cat(outs).numpy()
        S = tensors["anchors_taps"].shape[1]
        mask = torch.from_numpy(anchor_mask(ANCHORS, S, BLOCK, causal=causal))[None, None]
        positions = torch.cat([torch.arange(S), (tensors["anchors"][:, None] + torch.arange(BLOCK)).flatten()])[None]
        out = model(position_ids=positions, noise_embedding=tensors["anchors_noise"], target_hidden=tensors["anchors_taps"], attention_mask=mask)
        arrays[f"anchors_{kind}"] = out.numpy()
    return arrays


@torch.no_grad()
def reference_of_second(model: DFlash2DraftModel, *, seed: int) -> dict[str, np.ndarray]:
    """Inputs, hidden states (fresh and cached), greedy drafts, and candidates and law along a sampled path. Many rows, so that paths differ."""
    rng = np.random.default_rng(seed)
    D, rows = model.config.hidden_size, 8
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    arrays = {"taps": draw(rows, CONTEXT, len(TAPS) * D), "noise": draw(rows, BLOCK, D), "head": draw(VOCAB, D), "anchors": rng.integers(0, VOCAB, rows)}
    taps, noise, anchors = (torch.from_numpy(arrays[name]) for name in ("taps", "noise", "anchors"))
    head = torch.nn.Linear(D, VOCAB, bias=False)
    head.weight.copy_(torch.from_numpy(arrays["head"]))
    positions = torch.arange(CONTEXT + BLOCK)[None].expand(rows, -1)
    hidden = model(position_ids=positions, noise_embedding=noise, target_hidden=taps)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    for start, stop in ((0, CONTEXT - 3), (CONTEXT - 3, CONTEXT)):
        kw = dict(position_ids=positions[:, start : stop + BLOCK], past_key_values=cache, use_cache=True)
        cached = model(noise_embedding=noise, target_hidden=taps[:, start:stop], **kw)
        cache.crop(-BLOCK)
    arrays |= {"hidden": hidden.numpy(), "cached": cached.numpy()}
    arrays["greedy"] = model.propose(hidden[:, 1:], anchors, head, 0.0)[0].numpy()
    torch.manual_seed(seed)
    sampled, candidates, law = model.propose(hidden[:, 1:], anchors, head, TEMPERATURE)
    return arrays | {"sampled": sampled.numpy(), "candidates": candidates.numpy(), "law": law.numpy()}


def main() -> None:
    """Write the folders and print their sizes."""
    torch.set_num_threads(2)
    first, second = random_dflash(seed=3), random_dflash(seed=5, second=SECOND)
    for name, model, make in (("drafter_dflash", first, reference), ("drafter_dflash2", second, reference_of_second)):
        folder = HERE / name
        write_folder(folder, model)
        np.savez_compressed(folder / "reference.npz", **make(model, seed=4))
        for file in sorted(folder.iterdir()):
            print(f"{file.stat().st_size:9d} {file.relative_to(HERE)}")


if __name__ == "__main__":
    main()
