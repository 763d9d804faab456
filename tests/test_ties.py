"""Where texts part, judged by the target's own logits."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dspine_jax.ties import BFLOAT16_GAP, first_difference, parting_gaps
from serve import decoding


@pytest.mark.parametrize(
    ("ours", "theirs", "index"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 3], 1), ([], [4], 0), ([], [], None), ([5, 2], [4, 2], 0)]
)
def test_first_difference(ours, theirs, index):
    assert first_difference(ours, theirs) == first_difference(theirs, ours) == index


@pytest.fixture(scope="module")
def parted():
    """A target, prompts, texts, and for the one that parts the logits there."""
    target = tiny.tiny_target()
    prompts, ours, theirs = [[4, 5, 6], [7, 8], [9]], [[10, 11, 12], [13, 14], [15, 16]], [[10, 11, 12], [13, 20], [15]]
    logits_V = np.asarray(target.logits(target(jnp.array([[7, 8, 13]])).hidden_BTD)[0, -1])
    return target, prompts, ours, theirs, logits_V


def test_gaps_are_those_of_the_worse_token_below_the_best_logit(parted):
    target, prompts, ours, theirs, logits_V = parted
    gap, endless = parting_gaps(target, prompts, ours, theirs, dtype="float32")
    assert gap == pytest.approx(logits_V.max() - min(logits_V[14], logits_V[20]), rel=1e-5) and endless == float("inf")
    assert parting_gaps(target, prompts, ours, ours, dtype="float32") == []


def test_only_near_ties_in_bfloat16_excuse_a_difference(parted, monkeypatch):
    """The verdict of an evaluation: in fp32 none is excused, in bf16 those within the bound."""
    target, prompts, ours, theirs, _ = parted
    pairs = prompts[:2], ours[:2], theirs[:2]
    for gap, dtype, state in ((BFLOAT16_GAP, "bfloat16", "near ties"), (1.01 * BFLOAT16_GAP, "bfloat16", "differs"), (1e-6, "float32", "differs")):
        monkeypatch.setattr(decoding, "parting_gaps", lambda *args, gap=gap, **kwargs: [gap])
        assert decoding._proof(target, *pairs, dtype) == {"identical": 1, "state": state, "gaps": [gap]}
    monkeypatch.undo()
    assert decoding._proof(target, prompts, ours, ours, "bfloat16") == {"identical": 3, "state": "identical"}
    assert decoding._proof(target, prompts, ours, theirs, "bfloat16")["gaps"][1] is None  # one text ends inside the other
