"""From what probes saw at every anchor to figures: accuracies, gains with their units, acceptance lengths, Markdown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspine_jax.acceptance import acceptance_statistics, paired_bootstrap

RESAMPLES, SEED = 2000, 0


def valid_labels(length: int, num_drafts: int, every: int) -> np.ndarray:
    """Which drafts have a token of the answer to be compared with: anchors at 0, every, .. of an answer of ``length`` tokens. -> [n,J] bool."""
    anchors = np.arange(0, max(length - 1, 0), every)
    return anchors[:, None] + 1 + np.arange(num_drafts) < length


def mean(sums_R: np.ndarray, counts_R: np.ndarray) -> float | None:
    """Sum over rows of values over sum of counts, None where nothing was counted."""
    return float(sums_R.sum() / counts_R.sum()) if counts_R.sum() else None


def interval(sums_R: np.ndarray, counts_R: np.ndarray) -> list[float] | None:
    """95% interval of ``mean`` from resampling rows, None for fewer than two counted rows."""
    counted = counts_R > 0
    if counted.sum() < 2:
        return None
    sums_R, counts_R = sums_R[counted], counts_R[counted]
    picks = np.random.default_rng(SEED).integers(0, len(sums_R), (RESAMPLES, len(sums_R)))
    return [float(x) for x in np.percentile(sums_R[picks].sum(1) / counts_R[picks].sum(1), [2.5, 97.5])]


def by_layer_and_draft(values: Sequence[np.ndarray], valid: Sequence[np.ndarray]) -> list[list[float | None]]:
    """Means over anchors. values, a row: [n,L,J]; valid, a row: [n,J] -> [L][J]."""
    sums_LJ = sum((x * keep[:, None]).sum(axis=0, dtype=np.float64) for x, keep in zip(values, valid))
    counts_J = sum(keep.sum(axis=0) for keep in valid)
    return [[float(x / n) if n else None for x, n in zip(sums_J, counts_J)] for sums_J in sums_LJ]


def run_lengths(right_nJ: np.ndarray, start: int) -> np.ndarray:
    """How many drafts in a row are right, from index ``start`` on. [n,J] -> [n]."""
    return np.cumprod(right_nJ[:, start:], axis=1, dtype=np.int64).sum(axis=1)


def points(sums_R: np.ndarray, counts_R: np.ndarray, name: str) -> dict:
    """A difference of accuracies, in percentage points, with its interval."""
    value, spread = mean(sums_R, counts_R), interval(sums_R, counts_R)
    return {f"{name}_points": None if value is None else 100 * value, f"{name}_points_interval": None if spread is None else [100 * x for x in spread]}


def prefix_gains(rows: Sequence[dict], valid: Sequence[np.ndarray], labels: Sequence[str]) -> dict:
    """Correct drafts in a row behind a prefix, as drafted and with the prefix filled at each set of layers: {"by_length", "all"}.

    rows: ``probes.make_context_probe`` of each row. gain_tokens is a difference of means, gain_percent that difference over the plain mean.
    """
    lengths = rows[0]["filled"].shape[1]

    def sums(right_of, m) -> np.ndarray:
        return np.array([(run_lengths(right_of(row) & keep, m) * keep[:, m]).sum() for row, keep in zip(rows, valid)], np.float64)

    plain_mR = np.array([sums(lambda row: row["plain"], m) for m in range(1, lengths + 1)])
    counts_mR = np.array([[keep[:, m].sum() for keep in valid] for m in range(1, lengths + 1)])
    filled_ZmR = np.array([[sums(lambda row, m=m, z=z: row["filled"][:, m - 1, z], m) for m in range(1, lengths + 1)] for z in range(len(labels))])

    def entry(known, plain_R, counts_R, filled_ZR) -> dict:
        sets = {}
        for label, filled_R in zip(labels, filled_ZR):
            gain_R = filled_R - plain_R
            sets[label] = {
                "tokens": mean(filled_R, counts_R),
                "gain_tokens": mean(gain_R, counts_R),
                "gain_tokens_interval": interval(gain_R, counts_R),
                "gain_percent": float(100 * gain_R.sum() / plain_R.sum()) if plain_R.sum() else None,
            }
        return {"known": known, "anchors": int(counts_R.sum()), "plain_tokens": mean(plain_R, counts_R), "sets": sets}

    by_length = [entry(m + 1, plain_mR[m], counts_mR[m], filled_ZmR[:, m]) for m in range(lengths)]
    return {"by_length": by_length, "all": entry(f"1..{lengths}", plain_mR.sum(0), counts_mR.sum(0), filled_ZmR.sum(1))}


def predecessor_gains(rows: Sequence[dict], valid: Sequence[np.ndarray], labels: Sequence[str]) -> dict:
    """Accuracy of a slot whose earlier history is right, by what stands in the slot before: {"by_slot", "all"}.

    loss_points: correct minus drafted predecessor; loss_where_wrong_points: the same among anchors whose draft of the predecessor is wrong;
    gain_points of a set: predecessor supplied at its layers minus undecided (masked).
    """
    lengths = rows[0]["correct"].shape[1]

    def sums(value_of) -> np.ndarray:
        """[m,R] of bool arrays [n,m], over anchors whose successor is in the text."""
        return np.array([(value_of(row) & keep[:, 1:]).sum(axis=0) for row, keep in zip(rows, valid)], np.float64).T

    names = ("correct", "drafted", "undecided")
    right = {name: sums(lambda row, name=name: row[name]) for name in names}
    counts_mR = sums(lambda row: np.ones_like(row["correct"]))
    wrong = lambda row: ~row["draft_right"]  # noqa: E731
    wrong_mR = sums(wrong)
    lost_mR = sums(lambda row: row["correct"] & wrong(row)) - sums(lambda row: row["drafted"] & wrong(row))
    supplied = [sums(lambda row, z=z: row["supplied"][:, :, z]) for z in range(len(labels))]

    def entry(slot, pick) -> dict:
        counts_R = pick(counts_mR)
        percent = lambda sums_R: None if not counts_R.sum() else float(100 * sums_R.sum() / counts_R.sum())  # noqa: E731
        found = {"slot": slot, "anchors": int(counts_R.sum())} | {f"{name}_percent": percent(pick(right[name])) for name in names}
        found |= points(pick(right["correct"]) - pick(right["drafted"]), counts_R, "loss")
        found |= {"wrong_drafts_percent": percent(pick(wrong_mR))} | points(pick(lost_mR), pick(wrong_mR), "loss_where_wrong")
        found["sets"] = {
            label: {"percent": percent(pick(sums_mR))} | points(pick(sums_mR) - pick(right["undecided"]), counts_R, "gain")
            for label, sums_mR in zip(labels, supplied)
        }
        return found

    by_slot = [entry(m + 2, lambda x_mR, m=m: x_mR[m]) for m in range(lengths)]
    return {"by_slot": by_slot, "all": entry(f"2..{lengths + 1}", lambda x_mR: x_mR.sum(0))}


def taus(rounds: dict[str, dict[str, list]], num_drafts: int, baseline: str) -> dict[str, dict]:
    """Acceptance lengths of several ways to draft. rounds[way][benchmark]: a list of ``Round`` a prompt.

    tau: tokens over rounds, the mean over benchmarks; accepted: the same of accepted drafts alone. ratio, ratio_accepted: tau and tau - 1 over the
    baseline's, with 95% intervals from resampling prompts in pairs. A benchmark without a round is left out.
    """
    found, totals = {}, {}
    for way, by_benchmark in rounds.items():
        scored = {name: [r for r in prompts if r] for name, prompts in by_benchmark.items() if any(prompts)}
        statistics = {name: acceptance_statistics(prompts, num_drafts) for name, prompts in scored.items()}
        totals[way] = {name: np.array([[sum(r.tokens for r in rounds), len(rounds)] for rounds in prompts]).T for name, prompts in scored.items()}
        average = lambda key: float(np.mean([s[key] for s in statistics.values()])) if statistics else None  # noqa: E731, B023
        found[way] = {"tau": average("tau_pooled"), "accepted": average("mean_accepted"), "rounds": sum(s["rounds"] for s in statistics.values())}
        if way != baseline and totals[baseline]:
            found[way] |= paired_bootstrap(totals[way], totals[baseline], resamples=RESAMPLES)
    return found


def number(value: float | None, digits: int = 2, sign: bool = False) -> str:
    """A figure for a table, a dash where there is none."""
    return "-" if value is None else f"{value:{'+' if sign else ''}.{digits}f}"


def markdown(results: dict) -> str:
    """Every probe as a small table; the whole by slot is in the JSON and the picture."""
    sets = {label: ",".join(map(str, layers)) for label, layers in results["sets"].items()}
    found = results["probes"]
    lines = [f"{results['method']} drafter {results['drafter']}, {results['prompts']} prompts, {results['dtype']}", ""]
    if "readout" in found:
        accuracy = found["readout"]["accuracy"]
        lines += ["Readout accuracy in percent, by layer and draft:", "", "| layer |" + "".join(f" {j + 1} |" for j in range(len(accuracy[0])))]
        lines += ["|---" * (len(accuracy[0]) + 1) + "|"]
        lines += [f"| {layer} |" + "".join(f" {number(None if x is None else 100 * x, 1)} |" for x in row) for layer, row in enumerate(accuracy)]
        lines.append("")
    if "prefix" in found:
        whole = found["prefix"]["all"]
        lines += [f"Correct drafts in a row behind a prefix of {whole['known']} tokens: {number(whole['plain_tokens'], 3)} as drafted", ""]
        lines += ["| filled at layers | tokens | gain, tokens | gain, percent |", "|---|---|---|---|"]
        for label, entry in whole["sets"].items():
            gains = f"{number(entry['gain_tokens'], 3, True)} | {number(entry['gain_percent'], 1, True)}"
            lines.append(f"| {label} ({sets[label]}) | {number(entry['tokens'], 3)} | {gains} |")
        lines.append("")
    if "predecessor" in found:
        whole = found["predecessor"]["all"]
        lines += [f"Accuracy of slots {whole['slot']} with correct earlier history, by the slot before:", ""]
        lines += ["| predecessor | accuracy, percent | difference, points |", "|---|---|---|"]
        lines.append(f"| correct | {number(whole['correct_percent'], 1)} | |")
        loss = None if whole["loss_points"] is None else -whole["loss_points"]
        lines.append(f"| as drafted | {number(whole['drafted_percent'], 1)} | {number(loss, 1, True)} against correct |")
        lines.append(f"| undecided | {number(whole['undecided_percent'], 1)} | |")
        for label, entry in whole["sets"].items():
            lines.append(f"| supplied at {label} ({sets[label]}) | {number(entry['percent'], 1)} | {number(entry['gain_points'], 1, True)} against undecided |")
        where = f"{number(whole['wrong_drafts_percent'], 1)} percent of the drafted predecessors are wrong; there the loss is "
        lines += ["", f"{where}{number(whole['loss_where_wrong_points'], 1)} points.", ""]
    if "injection" in found:
        views = found["injection"]
        lines += [
            "Writes and predicted features, means over drafts:",
            "",
            "| layer | gate | write / stream | cosine | nearest token, percent |",
            "|---|---|---|---|---|",
        ]
        for index, layer in enumerate(views["layers"]):
            known = {name: [x for x in views[name][index] if x is not None] for name in ("gate", "write", "cosine", "nearest")}
            gate, ratio, cosine, nearest = (float(np.mean(x)) if x else None for x in known.values())
            lines.append(
                f"| {layer} | {number(gate, 3)} | {number(ratio, 3)} | {number(cosine, 3)} | {number(None if nearest is None else 100 * nearest, 1)} |"
            )
        lines.append("")
    if "tau" in found:
        lines += [
            "Acceptance length at temperature 0:",
            "",
            "| drafts | tau, full text | over the product | tau, to the loop onset | over the product |",
            "|---|---|---|---|---|",
        ]
        for way, full in found["tau"]["full"].items():
            onset = found["tau"]["onset"][way]
            cells = [f"{number(scope['tau'], 3)} | {number(scope.get('ratio'), 3)}" for scope in (full, onset)]
            lines.append(f"| {way} | {cells[0]} | {cells[1]} |")
        lines.append("")
    lines += [f"{name}: left out, {reason}" for name, reason in results["left_out"].items()]
    return "\n".join(lines).rstrip() + "\n"
