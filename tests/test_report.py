"""The README's tables are those of docs/results.json; curves and tables are made from files as they are written."""

import json
from pathlib import Path

import pytest

from serve import report
from train import plot

ROOT = Path(__file__).resolve().parent.parent
ORIGIN = {"hardware": "1 x CPU", "versions": {"jax": "0.0"}, "commit": "abc", "date": "2026-01-01"}


def evaluation(tau: float) -> dict:
    """An evaluation of two methods on every benchmark; dspine's tau is ``tau``, dflash's 2."""
    methods = {}
    for method, value in (("dflash", 2.0), ("dspine", tau)):
        entry = {"full": {"tau_pooled": value}, "onset": {"tau_pooled": value}, "full_by_seed": [value], "onset_by_seed": [value]}
        methods[method] = {
            "folders": ["a"],
            "policy": "greedy",
            "parameters": {"total": 10_000_000, "injection": 0},
            "benchmarks": {name: entry for name in report.BENCHMARKS},
            **{f"{scope}_average_tau{suffix}": [value] if suffix else value for scope in ("full", "onset") for suffix in ("", "_by_seed")},
        }
    margin = {"ratio": tau / 2, "ratio_interval": [1.1, 1.2], "ratio_accepted": tau - 1, "ratio_accepted_interval": [1.2, 1.3]}
    comparisons = {"dspine_over_dflash": {"full": margin, "onset": margin}}
    decoding = {"method": "dspine", "policy": "greedy", "drafts": 7, "batch_size": 1, "prompts": 4, "tokens": 99, "state": "identical", "identical": 4}
    decoding |= {"tokens_per_s": 100.0, "speedup": 1.5, "tau": tau}
    content = {"methods": methods, "comparisons": comparisons, "decoding": [decoding, decoding | {"tokens_per_s": None, "speedup": None, "drafts": 3}]}
    return {"temperatures": {"T0": content}, "dtype": "float32", "environment": ORIGIN}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    return tmp_path


def run(root: Path, tau: float, *extra: str) -> int:
    (root / "results.json").write_text(json.dumps(evaluation(tau)))
    arguments = ["--root", str(root), "--record", str(root / "results.json"), "--target", "t", "--steps", "9", "--command", "c", *extra]
    return report.main(arguments)


def test_readme_holds_the_tables_of_results_json():
    assert report.main(["--check"]) == 0


def test_every_recorded_figure_says_where_it_comes_from():
    for entry in json.loads((ROOT / "docs" / "results.json").read_text()):
        assert isinstance(entry["value"], (int, float))
        assert all(entry[key] for key in ("id", "unit", "command", "commit", "hardware", "versions", "date", "runs"))


def test_newer_figures_replace_older_ones_in_the_tables_and_older_ones_stay(root: Path):
    assert run(root, 2.5) == 0
    assert "**2.500**" in (root / "README.md").read_text()
    assert run(root, 2.75) == 0
    text = (root / "README.md").read_text()
    assert "**2.750**" in text and "**2.500**" not in text and text.startswith("before") and text.endswith("after\n")
    values = [e["value"] for e in json.loads((root / "docs" / "results.json").read_text()) if e["id"] == "tau/t/dspine@9/avg/T0/full"]
    assert values == [2.5, 2.75]
    assert "tau +37.5% [+10.0%, +20.0%], tau - 1 x1.750 [1.200, 1.300]" in text


def test_every_method_has_a_row_and_dspine_a_margin_over_each(root: Path):
    """Methods that stand between the two, one without a model or a training, and a policy of a method whose name holds another's."""
    results = evaluation(2.5)
    content = results["temperatures"]["T0"]
    for method in ("dspark", "prompt-lookup", "dspine-last"):
        content["methods"][method] = content["methods"]["dflash"]
        content["comparisons"][f"dspine_over_{method}"] = content["comparisons"]["dspine_over_dflash"]
    sampled = {"methods": {"dspine-last": content["methods"]["dspine"] | {"other_policies": {"own": content["methods"]["dflash"]}}}, "comparisons": {}}
    results["temperatures"]["T1"] = sampled
    (root / "results.json").write_text(json.dumps(results))
    assert report.main(["--root", str(root), "--record", str(root / "results.json"), "--target", "t", "--steps", "9", "--command", "c"]) == 0
    text = (root / "README.md").read_text()
    assert "| full | DSpark | 2.00 " in text and "| full | prompt lookup |" in text
    assert "* DSpine over DSpark, full text: tau +25.0%" in text and "* DSpine over prompt lookup, to the loop onset" in text
    assert "| prompt lookup | 10.00M | 0.00M | - | - | - |" in text and "nan" not in text
    assert f"| {report.NAMES['dspine-last']}, own |" in text


def test_decoding_speeds_are_recorded_and_withheld_ones_are_not(root: Path):
    assert run(root, 2.5) == 0
    figures = {e["id"]: e for e in json.loads((root / "docs" / "results.json").read_text()) if e["id"].startswith("decode/")}
    assert figures["decode/t/b1/dspine-7drafts-greedy/T0/speedup"]["value"] == 1.5
    assert "text identical (4/4 equal)" in figures["decode/t/b1/dspine-7drafts-greedy/T0/tokens_per_s"]["note"]
    assert {id_ for id_ in figures if "3drafts" in id_} == {"decode/t/b1/dspine-3drafts-greedy/T0/tau"}


def test_a_stale_readme_fails_the_check(root: Path):
    assert run(root, 2.5) == 0
    (root / "README.md").write_text((root / "README.md").read_text().replace("2.500", "2.600"))
    assert report.main(["--root", str(root), "--check"]) == 1


def test_figures_without_an_origin_are_refused(root: Path, capsys):
    results = evaluation(2.5)
    results["environment"] = {**ORIGIN, "commit": "unknown"}
    (root / "results.json").write_text(json.dumps(results))
    arguments = ["--root", str(root), "--record", str(root / "results.json"), "--target", "t", "--steps", "9", "--command", "c"]
    assert report.main(arguments) == 2
    assert "commit" in capsys.readouterr().err
    assert not (root / "docs" / "results.json").exists()
    assert report.main([*arguments, "--environment", '{"commit": "abc"}']) == 0


def test_run_speeds_are_medians_without_the_first_window(root: Path):
    speeds = [9.0, 1.0, 3.0, 2.0]
    (root / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "speed/step_s": s, "speed/tokens_per_s": 1e3}) + "\n" for i, s in enumerate(speeds)))
    assert run(root, 2.5, "--run", f"dspine={root}") == 0
    (entry,) = [e for e in json.loads((root / "docs" / "results.json").read_text()) if e["id"] == "train/t/dspine/step_s"]
    assert (entry["value"], entry["spread"], entry["runs"]) == (2.0, [1.0, 3.0], 3)


def test_curves_of_two_runs_are_drawn(tmp_path: Path):
    for name, path in (("a", "base"), ("b", "conditioned")):
        (tmp_path / name).mkdir()
        record = {"loss/ce_base": 3.0, f"loss/ce_{path}": 2.0, f"accuracy_{path}/slot01": 0.5, f"accuracy_{path}/slot02": 0.25}
        lines = [json.dumps({"step": step, **record}) for step in (1, 2)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert plot.slot_accuracies(record) == [0.5, 0.25]
    output = tmp_path / "out" / "curves.png"
    assert plot.main([str(tmp_path / "a"), f"other={tmp_path / 'b'}", "--output", str(output)]) == 0
    assert output.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("content", [None, "", "{broken\n"])
def test_missing_empty_or_broken_metrics_are_refused_by_name(tmp_path: Path, capsys, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert plot.main([str(tmp_path), "--output", str(tmp_path / "x.png")]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err


def test_runs_of_the_demo_become_a_table(root: Path, capsys):
    for index, tau in enumerate((1.5, 1.7, 1.6)):
        methods = {"dflash": {"tau": 1.2, "shipped_tau": 3.8}, "dspine": {"tau": tau, "shipped_tau": 4.4}}
        speeds = {"tokens_per_s": 400.0, "tau": 3.9}
        demo = methods | {"matches_greedy": True, "speedup": 1.3, "seconds": 300.0 + index, "decoding": speeds, "environment": ORIGIN}
        (root / f"{index}.json").write_text(json.dumps(demo))
    files = [str(root / f"{index}.json") for index in range(3)]
    assert report.main(["--root", str(root), "--demo", *files, "--command", "make demo"]) == 0
    text = (root / "README.md").read_text()
    assert "| trained by the demo | 1.20 [1.20, 1.20] | 1.60 [1.50, 1.70] |" in text and "In all 301 s" in text
    assert "equal to plain greedy decoding in 3 of 3 runs; DSpine above DFlash in 3 of 3" in text
    with pytest.raises(SystemExit):
        report.main(["--root", str(root), "--demo", *files])
    assert "--demo needs --command" in capsys.readouterr().err
