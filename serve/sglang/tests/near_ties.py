"""Where two greedy drafts of one drafter part, and how near a tie that was. Torch alone: tests of the repository that have no SGLang read it too."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Parting(NamedTuple):
    """The first slot at which a request's draft is not the golden one. All differences are of golden's fp32 logits."""

    request: int
    slot: int
    kind: str  # "choice": both tokens were candidates of both; "cut": one of them is a candidate of one side only
    margin: float  # choice: between the two tokens' scores; cut: between that token's base logit and the candidates' end


def partings(golden: dict[str, torch.Tensor], tokens_NJ: torch.Tensor, ids_NJP: torch.Tensor, num_tokens: int) -> list[Parting]:
    """Every request whose tokens are not golden's, judged where it first differs: up to there both walked the same path.

    ``golden``: arrays of golden.npz (DSpine); tokens drafted from candidates ``ids``; ``num_tokens`` usable vocabulary rows.
    """
    path, candidates, table, P = golden["path"].long(), golden["candidate_ids"].long(), golden["table"], ids_NJP.shape[-1]
    found = []
    for n in torch.nonzero((tokens_NJ != path).any(-1))[:, 0].tolist():
        e = int((tokens_NJ[n] != path[n]).int().argmax())
        theirs, ours = candidates[n, e].tolist(), ids_NJP[n, e].tolist()
        wanted, drafted = int(path[n, e]), int(tokens_NJ[n, e])
        if wanted in ours and drafted in theirs:
            before = candidates[n, e - 1].tolist().index(int(path[n, e - 1])) if e else 0
            scores = table[n, e, before]
            found.append(Parting(n, e, "choice", float(scores[theirs.index(wanted)] - scores[theirs.index(drafted)])))
            continue
        base = golden["head"][:num_tokens] @ golden["hidden"][n, e + 1]
        last, first_out = base.sort(descending=True).values[P - 1 : P + 1]
        lost = float(base[wanted] - first_out) if wanted not in ours else 0.0
        gained = float(last - base[drafted]) if drafted not in theirs else 0.0
        found.append(Parting(n, e, "cut", max(lost, gained)))
    return found
