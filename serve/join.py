"""Evaluations of one drafter each, joined into what one evaluation of all of them gives."""

from __future__ import annotations

from serve.scoring import summarise

HEAD = ("dtype", "max_new_tokens")
KEPT = ("num_draft_tokens", "parameters")  # of a variant, beside folders and benchmarks
SCORED = ("texts_sha256", "loop_share", "cap_share")  # of a benchmark, beside its rounds


def joined(evaluations: list[tuple[str, dict]]) -> dict:
    """(label, content of results.json) of one drafter each, seeds of a method under one label -> content of a results.json of all.

    Raises ValueError naming the method and what differs where two were not scored alike or not on the same texts.
    """
    (first, head), *_ = evaluations
    contents: dict[str, dict] = {temperature: {} for temperature in head["temperatures"]}
    for label, results in evaluations:
        for name in HEAD:
            if results[name] != head[name]:
                raise ValueError(f"{name} is {results[name]} for {label}, but {head[name]} for {first}; score them alike")
        if results["temperatures"].keys() != contents.keys():
            raise ValueError(f"{label} is scored at {', '.join(results['temperatures'])}, {first} at {', '.join(contents)}; score them alike")
        for temperature, content in results["temperatures"].items():
            (method,) = content["methods"].values()
            variants = {method["policy"]: method, **method.get("other_policies", {})}
            for policy in next(iter(content["policies"].values())):  # in the order of scoring: the first of equally good ones counts
                variant = variants[policy]
                _add(contents[temperature].setdefault(label, {}), policy, variant, f"{label}, temperature {temperature[1:]}")
    for temperature, variants in contents.items():
        _same_texts(variants, temperature)
    environments = [results["environment"] for _, results in evaluations]
    more = {} if all(e == environments[0] for e in environments) else {"environments": [dict(e) for e in environments]}
    top = {name: value for name, value in head.items() if name != "temperatures"}
    return top | more | {"temperatures": {temperature: summarise(variants) for temperature, variants in contents.items()}}


def _add(by_policy: dict, policy: str, variant: dict, where: str) -> None:
    kept = {name: variant[name] for name in KEPT}
    ours = by_policy.setdefault(policy, {"folders": [], **kept, "benchmarks": {}})
    if any(ours[name] != value for name, value in kept.items()):
        raise ValueError(f"{where}: seeds of one method differ in {' or '.join(name for name in KEPT if ours[name] != variant[name])}")
    ours["folders"] += variant["folders"]
    for name, entry in variant["benchmarks"].items():
        ours["benchmarks"].setdefault(name, {"rounds": [], **{key: entry[key] for key in SCORED}})
        if entry["texts_sha256"] != ours["benchmarks"][name]["texts_sha256"]:
            raise ValueError(f"{where}: its seeds were not scored on the same texts of {name}; score them again with one folder of continuations")
        ours["benchmarks"][name]["rounds"] += entry["rounds"]


def _same_texts(variants: dict[str, dict[str, dict]], temperature: str) -> None:
    texts = {label: {name: b["texts_sha256"] for name, b in next(iter(by_policy.values()))["benchmarks"].items()} for label, by_policy in variants.items()}
    first = next(iter(texts))
    for label, hashes in texts.items():
        if hashes != texts[first]:
            names = [name for name in sorted({*hashes, *texts[first]}) if hashes.get(name) != texts[first].get(name)]
            raise ValueError(
                f"temperature {temperature[1:]}: {label} and {first} were not scored on the same texts of {', '.join(names)}; "
                "score them again with one folder of continuations"
            )
