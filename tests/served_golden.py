"""A served drafter folder with what JAX computes on it, for tests that have torch but not this package (serve/sglang/tests).

    python tests/served_golden.py FOLDER

writes FOLDER/tiny, FOLDER/demo (DSpine) and FOLDER/dflash, each with drafter/ (a served folder, fp32) and golden.npz. Arrays of golden.npz: embedding, head
[V,D]; taps [B,S,M*D] of whole rows; for each of N anchors row_N, anchor_N (token), context_len_N; context keys and values [L,B,S,G,C]; hidden [N,K,D];
path [N,J], the greedy draft. DSpine also: pre_write [N,K,D]; candidate_ids, base_logits [N,J,P]; table [N,J,P,P]; argmax [N,J], each slot's own best token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspine_jax.drafter import Drafter
from dspine_jax.drafter_io import load_drafter, save_drafter
from dspine_jax.selection import anchor_features, select_greedy, transition_cache
from dspine_jax.target import Target
from dspine_jax.target_io import load_target, save_target
from pallas_kernels.topk_logits import topk_logits
from serve.export import export_drafter

DEMO = Path(__file__).resolve().parents[1] / "assets" / "demo"


@nnx.jit
def compute(drafter: Drafter, target: Target, tokens_BS: jax.Array, anchors_BN: jax.Array) -> dict[str, jax.Array]:
    """What golden.npz holds, blocks still [B,N,...]."""
    c, (B, S), U = drafter.config, tokens_BS.shape, target.output_embedding_VD
    num_tokens = target.config.num_tokens
    taps = target(tokens_BS, target_layer_ids=c.target_layer_ids).tapped_BTE
    keys, values = drafter.context_kv(taps, jnp.broadcast_to(jnp.arange(S), (B, S)))
    anchor_BN = jnp.take_along_axis(tokens_BS, anchors_BN, axis=1)
    ids = jnp.full((*anchors_BN.shape, c.block_size), c.mask_token_id).at[..., 0].set(anchor_BN)
    positions = anchors_BN[..., None] + jnp.arange(c.block_size)
    features = anchor_features(drafter, U, anchor_BN)
    block = drafter(target.input_embedding_VD[ids], keys, values, anchors_BN, positions, features)
    path = select_greedy(drafter, target, block, anchor_BN, features)
    blocks = {"anchor": anchor_BN, "context_len": anchors_BN, "hidden": block.hidden_BNKD, "path": path}
    if c.method == "dspine":
        table, candidate_ids = transition_cache(drafter, block, U, features, num_tokens=num_tokens)
        base, _ = topk_logits(block.hidden_BNKD[:, :, 1:], U, c.injection.num_candidates, num_tokens=num_tokens)
        blocks |= {"pre_write": block.pre_write_BNKD, "candidate_ids": candidate_ids, "base_logits": base, "table": table, "argmax": candidate_ids[..., 0]}
    return {"taps": taps, "keys": jnp.stack(keys), "values": jnp.stack(values), "blocks": blocks}


def write_golden(folder: Path, drafter_folder: Path, target_folder: Path, tokens_BS: np.ndarray, anchors_BN: np.ndarray) -> None:
    """Export the drafter to ``folder/drafter`` and write ``folder/golden.npz``."""
    target = load_target(target_folder, dtype=jnp.float32)
    export_drafter(drafter_folder, str(target_folder), folder / "drafter", dtype="float32")
    out = jax.device_get(compute(load_drafter(drafter_folder, target.config), target, jnp.asarray(tokens_BS), jnp.asarray(anchors_BN)))
    blocks = {name: x.reshape(-1, *x.shape[2:]) for name, x in out.pop("blocks").items()}
    row = np.repeat(np.arange(len(tokens_BS)), anchors_BN.shape[1])
    np.savez(folder / "golden.npz", row=row, embedding=target.input_embedding_VD, head=target.output_embedding_VD, **out, **blocks)


def tiny(folder: Path) -> None:
    """A random drafter whose greedy path is not each slot's own best token; 2 rows x 25 anchors; eight padded vocabulary rows."""
    from fixtures.drafter_models import random_tokens, tiny_drafter, tiny_target

    target = tiny_target()
    save_target(folder / "target", target, dtype=jnp.float32)
    tokenizer = {"model": {"vocab": {str(i): i for i in range(target.config.num_tokens)}}}
    (folder / "target" / "tokenizer.json").write_text(json.dumps(tokenizer))
    drafter = tiny_drafter(target, "dspine", block_size=8, injection={"transfer_size": 8, "num_candidates": 4})
    for injection in drafter.injections.values():  # loud, or predecessors hardly change what is best
        injection.message.kernel[...] = 4 * injection.message.kernel[...]
    save_drafter(folder / "own", drafter)
    anchors = np.stack([np.arange(1, 26), np.arange(4, 29)])
    write_golden(folder, folder / "own", folder / "target", random_tokens(3, 2, 30), anchors)


def demo(folder: Path, drafter: str = "dspine") -> None:
    """The trained demo drafter at 40 anchors of each of 5 evaluation rows."""
    data = DEMO / "data" / "evaluation"
    tokens, mask = np.load(data / "tokens.npy", allow_pickle=False)[:5], np.load(data / "loss_mask.npy", allow_pickle=False)[:5]
    anchors = np.stack([np.flatnonzero(row)[:40] for row in mask])
    write_golden(folder, DEMO / drafter, DEMO / "target", tokens[:, : anchors.max() + 1].astype(np.int32), anchors.astype(np.int32))


def dflash(folder: Path) -> None:
    """The demo's DFlash drafter at the same anchors."""
    demo(folder, "dflash")


if __name__ == "__main__":
    for case in (tiny, demo, dflash):
        (Path(sys.argv[1]) / case.__name__).mkdir(parents=True, exist_ok=True)
        case(Path(sys.argv[1]) / case.__name__)
