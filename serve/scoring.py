"""From logged rounds to tables: statistics by benchmark, averages, comparisons, Markdown."""

from __future__ import annotations

import numpy as np

from dspine_jax.acceptance import acceptance_statistics, average_interval, paired_bootstrap
from dspine_jax.replay import Round
from serve.report import BENCHMARKS

SCOPES = {"full": "full text", "onset": "to the loop onset"}
OURS = "dspine"  # the method whose margin over the others is in question


def plain_rounds(by_prompt: list) -> list[list[list[int]]]:
    """Rounds as [anchor, proposed, accepted, tokens], by prompt, so that tau can be computed again from the log."""
    return [[[r.anchor, r.proposed, r.accepted, r.tokens] for r in rounds] for rounds in by_prompt]


def summarise(variants: dict[str, dict[str, dict]]) -> dict:
    """Statistics of one temperature, comparisons with the first method, and of our method (``ours_of``) with each other.

    variants[label][policy] holds folders, num_draft_tokens, parameters and benchmarks[name]["rounds"], one log a seed. The policy
    with the best average on full text stands for its method. -> {"methods", "policies", "comparisons", "ours", "strongest"}; the given dicts are
    completed. comparisons["a_over_b"][scope] is ``paired_bootstrap`` of the average, with its "benchmarks" one by one; strongest[scope] is the
    rival of the highest average, None where there is none.
    """
    methods, totals, policies = {}, {}, {}
    for label, by_policy in variants.items():
        scored = {policy: (variant, _score(variant)) for policy, variant in by_policy.items()}
        policies[label] = {policy: variant["full_average_tau"] for policy, (variant, _) in scored.items()}
        best = max(scored, key=lambda policy: policies[label][policy] or 0.0)
        methods[label], totals[label] = scored[best]
        methods[label]["policy"] = best
        for policy, (variant, _) in scored.items():
            if policy != best:
                methods[label].setdefault("other_policies", {})[policy] = variant
    first, *others = methods
    ours = ours_of(list(methods))
    pairs = dict.fromkeys([(label, first) for label in others] + [(ours, label) for label in methods if label != ours])
    comparisons = {f"{label}_over_{other}": _comparison(totals[label], totals[other]) for label, other in pairs}
    strongest = {scope: _strongest(methods, ours, scope) for scope in SCOPES}
    return {"methods": methods, "policies": policies, "comparisons": comparisons, "ours": ours, "strongest": strongest}


def ours_of(labels: list[str]) -> str:
    """``OURS`` where a label is it, else the last label."""
    return OURS if OURS in labels else labels[-1]


def _strongest(methods: dict[str, dict], ours: str, scope: str) -> str | None:
    # A label that holds our method's name (dspine-last, shipped_dspine) is a variant of it, not a rival.
    variant = lambda label: label == ours or (ours == OURS and OURS in label)  # noqa: E731
    rivals = [label for label, method in methods.items() if not variant(label) and method[f"{scope}_average_tau"] is not None]
    return max(rivals, key=lambda label: methods[label][f"{scope}_average_tau"], default=None)


def _comparison(ours: dict[str, dict], theirs: dict[str, dict]) -> dict[str, dict]:
    """By scope: the paired bootstrap of the average, and of each benchmark alone. A scope without a round is left out."""
    alone = lambda scope, name: paired_bootstrap({name: ours[scope][name]}, {name: theirs[scope][name]})  # noqa: E731
    scopes = [scope for scope in SCOPES if theirs[scope]]
    return {scope: paired_bootstrap(ours[scope], theirs[scope]) | {"benchmarks": {b: alone(scope, b) for b in theirs[scope]}} for scope in scopes}


def _score(variant: dict) -> dict[str, dict[str, np.ndarray]]:
    """Complete a variant with its statistics. -> totals[scope][benchmark]: (tokens, rounds) by prompt."""
    totals = {}
    for scope in SCOPES:
        for entry in variant["benchmarks"].values():
            seeds = [[[Round(*r) for r in rounds] for rounds in seed[scope]] for seed in entry["rounds"]]
            # Seeds of one prompt are pooled: the prompt stays the unit of the bootstrap.
            by_prompt = [[r for rounds in prompts for r in rounds] for prompts in zip(*seeds)]
            entry[scope] = acceptance_statistics(by_prompt, variant["num_draft_tokens"])
            entry[f"{scope}_by_seed"] = [acceptance_statistics(seed, variant["num_draft_tokens"]).get("tau_pooled") for seed in seeds]
            entry[f"{scope}_tokens_rounds"] = [[sum(r.tokens for r in rounds), len(rounds)] for rounds in by_prompt]
        # An answer that is over, or loops, at its first token has no round whatever the drafter: there is nothing in it to average or resample.
        scored = {name: entry for name, entry in variant["benchmarks"].items() if entry[scope]["rounds"]}
        totals[scope] = {name: np.array([pair for pair in entry[f"{scope}_tokens_rounds"] if pair[1]]).T for name, entry in scored.items()}
        variant[f"{scope}_average_tau"] = float(np.mean([entry[scope]["tau_pooled"] for entry in scored.values()])) if scored else None
        variant[f"{scope}_average_tau_interval"] = average_interval(totals[scope]) if scored else None
        variant[f"{scope}_average_tau_by_seed"] = [float(np.mean(taus)) for taus in zip(*(entry[f"{scope}_by_seed"] for entry in scored.values()))]
    return totals


def markdown(results: dict) -> str:
    """Tables of every temperature: tau by benchmark, acceptance, per-slot rates, comparisons, real decoding."""
    lines: list[str] = []
    for temperature, content in results["temperatures"].items():
        lines += _temperature_tables(f"temperature {temperature[1:]}", content)
        if content.get("decoding"):
            lines += _decoding_table(f"temperature {temperature[1:]}", content["decoding"])
    return "\n".join(lines) + "\n"


def _temperature_tables(title: str, content: dict) -> list[str]:
    methods = content["methods"]
    names = in_order(next(iter(methods.values()))["benchmarks"])
    lines = []
    for scope, words in SCOPES.items():
        lines += [f"### tau, {title}, {words} (pooled; per request in brackets)", ""]
        lines += ["| method | " + " | ".join(names) + " | average [95%] | tau - 1 | accepted / proposed |", "|---" * (len(names) + 4) + "|"]
        for label, method in methods.items():
            entries = [method["benchmarks"][name][scope] for name in names]
            cells = [f"{s['tau_pooled']:.3f} ({s['tau_per_request']:.3f})" if s["rounds"] else "-" for s in entries]
            average = method[f"{scope}_average_tau"]
            name = label if method["policy"] == "greedy" else f"{label} ({method['policy']})"
            if average is None:
                lines.append(f"| {name} | " + " | ".join(cells) + " | - | - | - |")
            else:
                share = np.mean([s["accepted_over_proposed"] for s in entries if s["rounds"]])
                low, high = method[f"{scope}_average_tau_interval"]
                lines.append(f"| {name} | " + " | ".join(cells) + f" | **{average:.3f}** [{low:.3f}, {high:.3f}] | {average - 1:.3f} | {share:.3f} |")
        lines += ["", *_margin_table(title, content, scope, names)]
    if any(len(by_policy) > 1 for by_policy in content["policies"].values()):
        for label, by_policy in content["policies"].items():
            known = {policy: tau for policy, tau in by_policy.items() if tau is not None}
            lines.append(f"{label}, average tau by policy: " + ", ".join(f"{policy} {tau:.3f}" for policy, tau in known.items()) + ".")
        lines.append("")
    share = next(iter(methods.values()))["benchmarks"]
    lines += ["Answers that start to loop: " + ", ".join(f"{n} {share[n]['loop_share']:.0%}" for n in names) + ".", ""]
    lines += ["Answers cut by the cap: " + ", ".join(f"{n} {share[n]['cap_share']:.0%}" for n in names) + ".", ""]
    for label, comparison in content["comparisons"].items():
        for scope, c in comparison.items():
            low, high = c["ratio_interval"]
            accepted = "tau - 1 without a ratio: nothing accepted"
            if c["ratio_accepted"] is not None:
                accepted = "tau - 1 x{:.3f} [{:.3f}, {:.3f}]".format(c["ratio_accepted"], *c["ratio_accepted_interval"])
            lines.append(f"{label}, {scope}: tau x{c['ratio']:.3f} [{low:.3f}, {high:.3f}], {accepted} (paired bootstrap over prompts, 95%)")
    lines += ["", f"### acceptance by slot, {title}, full text, mean over benchmarks", ""]
    slots = next(iter(methods.values()))["num_draft_tokens"]
    lines += ["| method | rate | " + " | ".join(str(k + 1) for k in range(slots)) + " |", "|---" * (slots + 2) + "|"]
    for label, method in methods.items():
        for rate, key in (("conditional", "cond_accept"), ("survival", "accept_rate")):
            cells = [f"{v:.2f}" if v is not None else "-" for v in slot_rates(method, key)]
            lines.append(f"| {label} | {rate} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def in_order(names) -> list[str]:
    """Benchmarks as the paper's table orders them, then any others."""
    return sorted(names, key=lambda name: BENCHMARKS.index(name) if name in BENCHMARKS else len(BENCHMARKS))


def _margin_table(title: str, content: dict, scope: str, names: list[str]) -> list[str]:
    """Our method over each other: ratios of tau by benchmark, of the average and of its accepted part, with intervals."""
    ours, strongest = content["ours"], content["strongest"][scope]
    found = [(label, content["comparisons"][f"{ours}_over_{label}"].get(scope)) for label in content["methods"] if label != ours]
    found = [(label, c) for label, c in found if c]
    if not found:
        return []
    spread = lambda c, key: "-" if c[key] is None else "x{:.3f} [{:.3f}, {:.3f}]".format(c[key], *c[f"{key}_interval"])  # noqa: E731
    lines = [f"### {ours} over each, {title}, {SCOPES[scope]} (ratios of tau, 95% of a paired bootstrap over prompts; strongest rival in bold)", ""]
    lines += ["| over | " + " | ".join(names) + " | average | average of tau - 1 |", "|---" * (len(names) + 3) + "|"]
    for label, c in found:
        cells = [spread(c["benchmarks"][name], "ratio") if name in c["benchmarks"] else "-" for name in names]
        name = f"**{label}**" if label == strongest else label
        lines.append(f"| {name} | " + " | ".join([*cells, spread(c, "ratio"), spread(c, "ratio_accepted")]) + " |")
    return [*lines, ""]


def slot_rates(method: dict, key: str) -> list[float | None]:
    """Mean over benchmarks of a per-slot rate; None for a slot that was proposed nowhere."""
    slots = method["num_draft_tokens"]
    columns = [[entry["full"].get(key, [None] * slots)[k] for entry in method["benchmarks"].values()] for k in range(slots)]
    known = [[v for v in column if v is not None] for column in columns]
    return [float(np.mean(column)) if column else None for column in known]


def _decoding_table(title: str, entries: list[dict]) -> list[str]:
    lines = [f"### real decoding, {title}", ""]
    lines += ["| method | policy | drafts | batch | prompts | tau | replay | tokens/s | speed-up | text | longest repeat | looping |", "|---" * 12 + "|"]
    number = lambda value, form: "-" if value is None else format(value, form)  # noqa: E731
    for e in entries:
        text = "sampled" if e["state"] == "sampled" else f"{e['state']} ({e['identical']}/{e['prompts']} equal)"
        cells = [e["method"], e["policy"], e["drafts"], e["batch_size"], e["prompts"], number(e["tau"], ".3f"), number(e["replay_tau"], ".3f")]
        cells += [number(e["tokens_per_s"], ".0f"), number(e["speedup"], ".2f"), text, e["longest_repeat"], f"{e['looped_share']:.0%}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    withheld = [e for e in entries if e["withheld"]]
    if withheld:
        lines += ["", "Speed withheld: " + "; ".join(f"{e['method']} {e['policy']} ({e['withheld']})" for e in withheld) + "."]
    return [*lines, ""]
