"""One rank of two: the whole drafter split as SGLang splits it, its head by rows; the other end of test_tensor_parallel.py.

    python tensor_parallel_rank.py RANK RENDEZVOUS_FILE CASE_FOLDER

Prints the largest error of the table against golden.npz and the drafted tokens, as JSON.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import conftest  # noqa: F401  before SGLang
import harness
import torch
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.dflash_worker_v2 import _selector_lattice


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[3])
    layout = dict(tp_size=2, tp_rank=rank, attn_tp_size=2, attn_tp_rank=rank, moe_tp_size=2, shared_experts_tp_size=None)
    layout |= {f"{name}_size": 1 for name in ("attn_dp", "attn_cp", "attn_dcp", "moe_ep", "moe_dp", "pp")}
    with get_context().override_server_args(), get_parallel().override(**layout):
        init_distributed_environment(world_size=2, rank=rank, distributed_init_method=f"file://{sys.argv[2]}", local_rank=rank, backend="gloo")
        initialize_model_parallel(backend="gloo")
        case = harness.Case(folder, head=shard)
        g = case.golden
        with torch.no_grad():
            ids, scores = _selector_lattice(case.model, case.run()[:, 1:], g["anchor"].long())
        assert torch.equal(ids, g["candidate_ids"].long())
        tokens, _ = case.model.candidate_selector.sample_path(
            candidate_ids=ids, scores=scores, uniforms=torch.zeros(ids.shape[:2]), temperatures=torch.ones(len(ids)), greedy_mask=torch.ones(len(ids)) > 0
        )
        heads = [layer.self_attn.num_heads for layer in case.model.layers]
        print(json.dumps({"error": float((scores - g["table"]).abs().max()), "tokens": tokens.tolist(), "heads": heads}))
    torch.distributed.destroy_process_group()


def shard(weight: torch.Tensor) -> torch.nn.Module:
    """This rank's half of the head's rows."""
    rank, half = get_parallel().tp_rank, len(weight) // 2
    indices = SimpleNamespace(num_added_elements=0, num_org_elements=half, org_vocab_start_index=rank * half)
    return harness.head_of(weight[rank * half : (rank + 1) * half], org_vocab_size=len(weight), shard_indices=indices)


if __name__ == "__main__":
    main()
