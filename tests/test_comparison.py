"""`python -m serve.compare`: jobs that stop and go on, what is refused, and a joined report that is one evaluation of all."""

import dataclasses
import json
import os
import shutil
import signal

import numpy as np
import pytest
import tiny
from flax import nnx
from matplotlib import image

from dspine_jax.drafter import Drafter
from dspine_jax.target_io import read_target_config
from serve import assets, compare, contestants, evaluate
from serve.join import joined
from serve.scoring import summarise
from train import loop
from train.compare_torch import SHAPES
from train.data import Manifest, write_dataset
from train.log import RunLog

pytestmark = pytest.mark.usefixtures("quick_compiler")
JOBS = ["dflash", "dspine:0", "prompt-lookup"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tiny target, its recipes, training rows, and texts of two benchmarks with much repetition."""
    root = tmp_path_factory.mktemp("comparison")
    tiny.write_target(root / "target")
    tiny.write_data(root / "data")
    for method in ("dflash", "dspine"):
        config = f"tiny.train_config({method!r}, steps=3, checkpoint=CheckpointConfig(every=1), drafter={{\"num_layers\": 1}})"
        (root / f"{method}.py").write_text(f"import tiny\nfrom dspine_jax.config import CheckpointConfig\nconfig = {config}\n")
    rng = np.random.default_rng(0)
    for name, count in (("mbpp", 2), ("gsm8k", 3)):
        mask = np.broadcast_to(np.arange(24) >= 6, (count, 24))
        write_dataset(root / "dev" / name, rng.integers(4, 8, (count, 24)), mask, np.full(count, 24), Manifest(name=name, source="test"))
    return root


def run(root, *extra: str, output: str = "out") -> int:
    given = ["--target", str(root / "target"), "--data", str(root / "data"), "--dev", str(root / "dev"), "--recipes", str(root / "{method}.py")]
    shape = ["--methods", "dflash", "dspine", "prompt-lookup", "--seeds", "0", "1", "--max-new-tokens", "12", "--batch-size", "2"]
    return compare.main([*given, *shape, "--output", str(root / output), *extra])


@pytest.fixture(scope="module")
def finished(files):
    """The jobs of ``JOBS``, done in three runs; the second was stopped in the middle of DSpine's training. -> what the third run trained."""
    assert run(files, "--only", "dflash:0") == 0
    advance, steps = RunLog.advance, []

    def stopping(log):
        advance(log)
        steps.append(1)
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLog, "advance", stopping)
        assert run(files, "--only", "dspine:0") == 130
    assert len(steps) == 2 and not (files / "out" / "dspine-seed0" / "finished.json").exists()
    assert compare.main(["--output", str(files / "out"), "--report"]) == 0
    assert "Begun and not finished: dspine-seed0." in (files / "out" / "results.md").read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.Evaluation, "run", lambda evaluation: os.kill(os.getpid(), signal.SIGTERM))
        assert run(files, "--only", "prompt-lookup") == 130, "a time slot may also end while a drafter is scored"
    assert not (files / "out" / "prompt-lookup" / "finished.json").exists()
    trained, real = [], loop.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "run", lambda config: trained.append(config.workdir.rpartition("/")[2]) or real(config))
        assert run(files, "--only", *JOBS) == 0
    return trained


def read(path) -> dict:
    return json.loads(path.read_text(), parse_constant=pytest.fail)


@pytest.mark.slow
def test_finished_jobs_are_skipped_and_a_stopped_one_goes_on(files, finished, monkeypatch, capsys):
    assert finished == ["dflash-seed1", "dspine-seed0"]
    records = [json.loads(line) for line in (files / "out" / "dspine-seed0" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3], "the stopped run goes on after its second step"
    monkeypatch.setattr(loop, "run", pytest.fail)
    monkeypatch.setattr(evaluate, "Evaluation", pytest.fail)
    assert run(files, "--only", *JOBS) == 0
    out = capsys.readouterr().out
    assert all(f"{name} is finished: skipped" in out for name in ("dflash-seed0", "dflash-seed1", "dspine-seed0", "prompt-lookup"))


@pytest.mark.slow
def test_the_joined_report_is_one_evaluation_of_all(files, finished, tmp_path):
    jobs = {"dflash": ("dflash-seed0", "dflash-seed1"), "dspine": ("dspine-seed0",)}
    drafters = [f"{method}={files / 'out' / name / 'drafter'}" for method, names in jobs.items() for name in names] + ["prompt-lookup"]
    options = ["--target", str(files / "target"), "--data", str(files / "dev"), "--temperature", "0", "1", "--max-new-tokens", "12", "--batch-size", "2"]
    assert evaluate.main([*options, *(x for d in drafters for x in ("--drafter", d)), "--output", str(tmp_path)]) == 0
    one, ours = read(tmp_path / "results.json"), read(files / "out" / "results.json")
    assert set(ours["temperatures"]) == {"T0", "T1"} and ours["temperatures"] == one["temperatures"]
    for temperature in ("T0", "T1"):
        content = ours["temperatures"][temperature]
        assert list(content["methods"]) == ["dflash", "dspine", "prompt-lookup"] and content["ours"] == "dspine"
        assert {"dspine_over_dflash", "dspine_over_prompt-lookup"} <= set(content["comparisons"])
        assert len(content["methods"]["dflash"]["folders"]) == 2 and content["methods"]["prompt-lookup"]["num_draft_tokens"] == 3
    text = (files / "out" / "results.md").read_text()
    assert text.endswith((tmp_path / "results.md").read_text())
    count = contestants.parameters(tiny.resolved(tiny.train_config("dspine", drafter={"num_layers": 1})).drafter)
    assert f"| dspine | 0 | {count / 1e6:.3f}M |" in text and "| dflash | 0, 1 |" in text and "3 steps of 8 rows x 4 anchors, 3 drafts a round" in text
    assert "| method | gsm8k | mbpp | average [95%] |" in text, "benchmarks stand in the paper's order"


@pytest.mark.slow
def test_a_report_needs_only_the_jobs_folders(files, finished, tmp_path):
    shutil.copytree(files / "out", tmp_path, ignore=shutil.ignore_patterns("checkpoints", "drafter", "results.*", "*.png", "continuations"), dirs_exist_ok=True)
    for name in ("dflash-seed0", "dflash-seed1", "dspine-seed0", "prompt-lookup"):
        shutil.copy(files / "out" / name / "eval" / "results.json", tmp_path / name / "eval")
    assert compare.main(["--output", str(tmp_path), "--report"]) == 0
    assert read(tmp_path / "results.json") == read(files / "out" / "results.json")
    for temperature in ("T0", "T1"):
        pixels = image.imread(tmp_path / f"acceptance_{temperature}.png")
        assert min(pixels.shape[:2]) > 300 and len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 20, "a picture with curves and bars"


@pytest.mark.parametrize(
    "extra, words",
    [
        (["--steps", "4"], "steps 3 there, 4 now"),
        (["--temperatures", "0"], "temperatures [0.0, 1.0] there, [0.0] now"),
        (["--prompts", "1"], "prompts null there, 1 now"),
        (["--set", "anchors.num_anchors=2"], "anchors {"),
        (["--dev", "{root}/dev/mbpp"], "dev {"),
        (["--set", "loss.loss_decay_gamma=3"], "loss.loss_decay_gamma: 7.0 saved, 3.0 now"),
        (["--set", "dspine:optimizer.learning_rate=0.5"], "optimizer.learning_rate: 0.01 saved, 0.5 now"),
        (["--set", "dspine:anchors.num_anchors=2"], "an unfair comparison: anchors is"),
        (["--set", "dspine:drafter.block_size=3"], "an unfair comparison: drafts a round is 2 for dspine, but 3 for dflash"),
        (["--set", "dspyne:steps=2"], "dspyne is no method"),
        (["--set", "dspine:drafter.injection=None"], "makes a dflash drafter, not dspine"),
    ],
)
@pytest.mark.slow
def test_changed_or_unequal_settings_are_refused_by_name(files, finished, capsys, extra, words):
    before = tiny.fingerprints(files / "out")
    assert run(files, "--only", *JOBS, *(text.format(root=files) for text in extra)) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("error: ")
    assert tiny.fingerprints(files / "out") == before


@pytest.mark.slow
def test_a_report_of_jobs_of_unequal_settings_is_refused(files, finished, tmp_path, capsys):
    shutil.copytree(files / "out", tmp_path, ignore=shutil.ignore_patterns("checkpoints"), dirs_exist_ok=True)
    path = tmp_path / "dspine-seed0" / "finished.json"
    record = read(path)
    path.write_text(json.dumps(record | {"settings": record["settings"] | {"steps": 9}}))
    assert compare.main(["--output", str(tmp_path), "--report"]) == 2
    error = capsys.readouterr().err
    assert str(path) in error and "steps 9 there, 3 now" in error
    assert compare.main(["--output", str(tmp_path / "none"), "--report"]) == 2
    assert "holds no finished job" in capsys.readouterr().err


@pytest.mark.slow
def test_evaluations_of_other_texts_are_never_joined(files, finished):
    names = ("dflash-seed0", "dflash-seed1", "dspine-seed0")
    evaluations = [(name.partition("-seed")[0], read(files / "out" / name / "eval" / "results.json")) for name in names]
    assert joined(evaluations)["temperatures"]["T1"]["methods"].keys() == {"dflash", "dspine"}
    for index, words in ((1, "dflash, temperature 1: its seeds were not"), (2, "temperature 1: dspine and dflash were not")):
        changed = json.loads(json.dumps(evaluations))
        for policies in changed[index][1]["temperatures"]["T1"]["methods"].values():
            for variant in (policies, *policies["other_policies"].values()):
                variant["benchmarks"]["mbpp"]["texts_sha256"] = "other"
        with pytest.raises(ValueError, match=f"{words}.* scored on the same texts of mbpp"):
            joined(changed)
    with pytest.raises(ValueError, match="dtype is bfloat16 for dspine, but float32 for dflash"):
        joined([evaluations[0], ("dspine", evaluations[2][1] | {"dtype": "bfloat16"})])


def variant(taus: dict[str, list[int]]) -> dict:
    """One seed with one round a prompt, of these many tokens."""
    rounds = {name: [[[0, 3, tokens - 1, tokens]] for tokens in by_prompt] for name, by_prompt in taus.items()}
    benchmarks = {name: {"rounds": [{"full": r, "onset": r}]} for name, r in rounds.items()}
    return {"greedy": {"folders": ["x"], "num_draft_tokens": 3, "parameters": {"total": 1}, "benchmarks": benchmarks}}


def test_our_method_is_compared_with_each_rival_and_the_strongest():
    taus = {"dflash": ([1, 2], [2, 2]), "dspark": ([3, 2], [2, 2]), "dspine-last": ([4, 4], [4, 4]), "dspine": ([3, 4], [2, 2])}
    content = summarise({label: variant({"a": a, "b": b}) for label, (a, b) in taus.items()})
    assert (content["ours"], content["strongest"]) == ("dspine", {"full": "dspark", "onset": "dspark"}), "a variant of ours is no rival"
    over = content["comparisons"]["dspine_over_dspark"]["full"]
    assert over["ratio"] == pytest.approx(2.75 / 2.25) and over["ratio_accepted"] == pytest.approx(1.75 / 1.25)
    assert over["benchmarks"]["a"]["ratio"] == pytest.approx(3.5 / 2.5) and over["benchmarks"]["b"]["ratio_interval"] == [1.0, 1.0]
    # The three equally likely means of benchmark a's resamples are 3, 3.5 and 4.
    assert content["methods"]["dspine"]["full_average_tau_interval"] == pytest.approx([2.5, 3.0])
    assert {"dspark_over_dflash", "dspine-last_over_dflash", "dspine_over_dspine-last"} <= set(content["comparisons"])


@pytest.mark.parametrize("target", ["tiny", "demo", "smollm2-135m"])
def test_variants_have_the_parameters_of_dspine(target, tmp_path):
    """By the method that a comparison uses, at the sizes of each target; the counts are those of real modules."""
    if target == "tiny":
        folder, recipes = tiny.write_target(tmp_path / "target"), str(tmp_path / "{method}.py")
        for method in ("dflash", "dspine"):
            (tmp_path / f"{method}.py").write_text(f"import tiny\nconfig = tiny.train_config({method!r})\n")
    elif target == "demo":
        folder, recipes = assets.demo_folder() / "target", str(compare.ROOT / compare.DEMO_RECIPES)
    else:
        folder, recipes = tmp_path, str(compare.ROOT / "configs" / "smollm2_135m_{method}.py")
        write_sizes(tmp_path, SHAPES["smollm2-135m"].target)
    sizes = read_target_config(folder)
    configs = {method: contestants.contestant(method, recipes, [f"target={folder}"]).drafter.resolve(sizes) for method in ("dspine", *contestants.VARIANTS)}
    counts = {method: contestants.parameters(config) for method, config in configs.items()}
    assert all(abs(count / counts["dspine"] - 1) <= 0.01 for count in counts.values()), counts
    assert configs["dspine-last"].injection_layers == (configs["dspine"].num_layers - 1,) and configs["dspine-last"].scores_pairs
    assert configs["dflash-wide"].method == "dflash"
    changed = {f.name for f in dataclasses.fields(configs["dspine"]) if getattr(configs["dspine"], f.name) != getattr(configs["dspine-last"], f.name)}
    assert changed == {"injection", "intermediate_size"}
    if target == "smollm2-135m":
        assert counts["dspine"] == 22_684_672, "as configs/smollm2_135m_dspine.py is known to be"
    else:
        real = nnx.state(nnx.eval_shape(lambda: Drafter(configs["dflash-wide"], rngs=nnx.Rngs(0))), nnx.Param)
        assert counts["dflash-wide"] == sum(np.prod(x.get_value().shape) for _, x in nnx.to_flat_state(real))


def write_sizes(folder, sizes) -> None:
    """A Llama folder's config.json and vocabulary without weights: enough to read its sizes."""
    content = {
        "model_type": "llama", "vocab_size": sizes.vocab_size, "hidden_size": sizes.hidden_size, "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads, "num_key_value_heads": sizes.num_kv_heads, "head_dim": sizes.head_dim, "eos_token_id": 2,
        "intermediate_size": sizes.intermediate_size, "rope_theta": sizes.rope_theta, "rms_norm_eps": sizes.rms_norm_eps,
        "tie_word_embeddings": sizes.tie_embeddings, "max_position_embeddings": sizes.max_position_embeddings,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {str(i): i for i in range(sizes.num_tokens)}}}))


def test_no_width_close_enough_is_refused():
    with pytest.raises(ValueError, match="no MLP width gives the dflash drafter 1000 parameters within 1%"):
        contestants.widened(tiny.train_config("dflash").drafter, tiny.TARGET, 1000)


def test_demo_recipes_of_every_method_are_equal_where_they_must_be():
    target = assets.demo_folder() / "target"
    methods = [method for method in (*contestants.METHODS, *contestants.VARIANTS) if method != contestants.LOOKUP]
    for recipes, given in ((compare.DEMO_RECIPES, [f"target={target}"]), ("configs/smollm2_135m_{method}.py", [])):
        wanted = methods if given else methods[:5]  # the variants need the target's sizes
        shared = contestants.shared_settings({m: contestants.contestant(m, str(compare.ROOT / recipes), given) for m in wanted})
        assert shared["drafts a round"] == (7 if given else 15)


@pytest.mark.parametrize(
    "text, words",
    [
        ("--output x", "--target and --data and --dev needed"),
        ("--target x", "--output is needed"),
        ("--demo --data x", "--demo brings its own data"),
        ("--demo --methods dspyne", "--methods dspyne: no such method"),
        ("--demo --seeds 1 1", "--seeds 1 1 names one twice"),
        ("--demo --steps 0", "--steps 0 must be at least 1"),
        ("--demo --only dspine:3", "--only dspine:3: no such job"),
    ],
)
def test_bad_options_are_refused(text, words, capsys):
    with pytest.raises(SystemExit) as stop:
        compare.main(text.split())
    assert stop.value.code == 2 and words in capsys.readouterr().err
