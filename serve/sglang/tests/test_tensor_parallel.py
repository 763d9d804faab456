"""Two ranks with SGLang's own process groups, over gloo: the drafter split by heads, the LM head by rows, and the same tokens as one rank's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import harness
import torch


def test_two_ranks_draft_what_one_does(golden_folder, tmp_path):
    folder, script = golden_folder / "tiny", Path(__file__).with_name("tensor_parallel_rank.py")
    command = [sys.executable, script, "{}", tmp_path / "rendezvous", folder]
    ranks = [subprocess.Popen([str(x).format(rank) for x in command], stdout=subprocess.PIPE, text=True, env=os.environ) for rank in range(2)]
    try:
        answers = [json.loads(rank.communicate(timeout=240)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert answers[0] == answers[1], "a walk of its own on each rank: any difference would part the ranks"
    assert torch.equal(torch.tensor(answers[0]["tokens"]), harness.golden_of(folder)["path"].long())
    assert answers[0]["error"] < 1e-4 and answers[0]["heads"] == [2, 2]  # of 4
