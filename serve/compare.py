"""The whole comparison: train every method with every seed under equal settings, score each right after its training, and join what is finished.

Each (method, seed) is a job with a folder of its own in --output. A job that is finished is skipped, one that is half trained goes on where it was, and
settings other than those the folder was begun with are refused by name; so the work can be split over several short runs, also on several machines.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS, FINISHED = "comparison.json", "finished.json"
DEMO_RECIPES = "configs/demo/{method}.py"
DEMO = {"steps": 60, "prompts": 16, "max_new_tokens": 64}  # minutes on two CPU cores
DEFAULTS = {"steps": None, "prompts": None, "max_new_tokens": 256}
EPILOG = """examples:
  python -m serve.compare --target SmolLM2-135M-Instruct.Q4_1.gguf --data data/smollm2 --dev data/smollm2_dev --output out/compare --seeds 0 1 2
  timeout -s TERM 9m python -m serve.compare ... --only dspark:0      one job in a short slot; the same command goes on
  python -m serve.compare --output out/compare --report               join what is finished: no target, data or GPU needed
  python -m serve.compare --demo                                      the embedded target, on a CPU in minutes
Methods: dflash, dflash2, dspark, domino, dspine, prompt-lookup (no model), and two with dspine's number of parameters by a wider MLP: dflash-wide, and
dspine-last, which injects after its last layer only.
Written to --output: comparison.json (what all jobs share), a folder for each job (workdir, eval/, and, when it is done, finished.json), continuations/
(texts at temperature > 0, written once for all), and of what is finished results.json, results.md and a PNG for each temperature. To join jobs of several
machines, bring their folders together (without checkpoints/, which a finished job no longer needs) and run --report.
Exit code 3: a training met numbers that are not finite."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One training with its scoring; prompt lookup has no seed."""

    method: str
    seed: int | None

    @property
    def name(self) -> str:
        """Its folder's name."""
        return self.method if self.seed is None else f"{self.method}-seed{self.seed}"


def build_parser() -> argparse.ArgumentParser:
    """Every option."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m serve.compare", description=__doc__, epilog=EPILOG, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("--target", help="HF folder or GGUF file")
    parser.add_argument("--data", type=Path, help="dataset folder to train on")
    parser.add_argument("--dev", type=Path, help="dataset folder of greedy continuations to score on, or a folder of them, one a benchmark")
    parser.add_argument("--output", type=Path, help="folder for everything (with --demo: out/comparison)")
    parser.add_argument("--recipes", metavar="PATTERN", help="config files, {method} stands for the method (default configs/smollm2_135m_{method}.py)")
    parser.add_argument("--methods", nargs="+", help="methods to compare (default: all but the last two)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of training (default 0)")
    parser.add_argument("--steps", type=int, help="training steps of every method (default: as the recipes say; with --demo 60)")
    parser.add_argument("--set", action="append", default=[], metavar="[METHOD:]KEY=VALUE", help="override a config field, of one method or of all; repeatable")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="temperatures to score (default 0 1)")
    parser.add_argument("--prompts", type=int, help="score only the first N prompts of each benchmark (with --demo: 16)")
    parser.add_argument("--max-new-tokens", type=int, help="length of texts at temperature > 0 (default 256; with --demo 64)")
    parser.add_argument("--batch-size", type=int, default=16, help="prompts at a time in scoring (default 16)")
    parser.add_argument("--only", nargs="+", metavar="METHOD[:SEED]", help="do only these jobs now; the report still joins all that are finished")
    parser.add_argument("--report", action="store_true", help="only join what is finished in --output")
    parser.add_argument("--demo", action="store_true", help="compare on the embedded target with its data")
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    from serve.contestants import METHODS, VARIANTS

    parser = build_parser()
    args = parser.parse_args(argv)
    sources = ("target", "data", "dev", "recipes")
    if args.demo:
        given = [name for name in sources if getattr(args, name) is not None]
        if given:
            parser.error(f"--demo brings its own {given[0]}; leave --{given[0]} out")
        args.output = args.output or Path("out/comparison")
    if args.output is None:
        parser.error("--output is needed: the folder for everything")
    absent = [name for name in sources[:3] if getattr(args, name) is None]
    if absent and not (args.demo or args.report):
        parser.error(f"--{' and --'.join(absent)} needed; or --demo, or --report to join what is finished")
    for name, value in (DEMO if args.demo else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("steps", "prompts", "max_new_tokens", "batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    args.methods = args.methods or list(METHODS)
    for name in ("methods", "seeds", "temperatures"):
        if len(set(getattr(args, name))) < len(getattr(args, name)):
            parser.error(f"--{name} {' '.join(map(str, getattr(args, name)))} names one twice")
    for method in args.methods:
        if method not in (*METHODS, *VARIANTS):
            parser.error(f"--methods {method}: no such method; known: {', '.join((*METHODS, *VARIANTS))}")
    args.jobs = jobs_of(args.methods, args.seeds)
    args.selected = args.jobs
    if args.only:
        args.selected = []
        for text in args.only:
            method, _, seed = text.partition(":")
            found = [job for job in args.jobs if job.method == method and seed in ("", str(job.seed))]
            if not found:
                parser.error(f"--only {text}: no such job; --methods and --seeds make {', '.join(job.name for job in args.jobs)}")
            args.selected += [job for job in found if job not in args.selected]
    return args


def jobs_of(methods: list[str], seeds: list[int]) -> list[Job]:
    """Seed by seed, so that a comparison of every method is there early."""
    from serve.contestants import LOOKUP

    found = [Job(method, seed) for seed in seeds for method in methods if method != LOOKUP]
    return found + [Job(method, None) for method in methods if method == LOOKUP]


def with_demo(args: argparse.Namespace) -> None:
    """Fill in the embedded target, its data and its recipes, with a batch that the devices divide. Raises FileNotFoundError where there is none."""
    import jax

    from dspine_jax.config_io import load_config
    from serve.assets import demo_folder

    demo = demo_folder()
    args.target, args.data, args.dev = str(demo / "target"), demo / "data" / "train", demo / "data" / "evaluation"
    args.recipes = str(ROOT / DEMO_RECIPES)
    rows, devices = load_config(args.recipes.replace("{method}", "dspine")).data.batch_size, jax.device_count()
    args.set = [f"data.batch_size={-(-rows // devices) * devices}", *args.set]


class Comparison:
    """The jobs of one --output folder, with everything checked before the first of them begins."""

    def __init__(self, args: argparse.Namespace):
        """Raises ValueError or OSError: an unfair comparison, a folder with other settings, bad input."""
        from serve.benchmarks import dataset_folders
        from serve.contestants import LOOKUP, contestant, shared_settings
        from serve.environment import default_dtype
        from serve.evaluate import content_hash
        from train.data import DatasetFolder
        from train.loop import prepare_run

        if args.demo:
            with_demo(args)
        self.args, self.dtype = args, default_dtype()
        recipes = args.recipes or str(ROOT / "configs" / "smollm2_135m_{method}.py")
        given = [f"target={args.target}", f"data.path={args.data}", f"workdir={args.output}", *args.set]  # each job's own workdir comes later
        given += [] if args.steps is None else [f"steps={args.steps}"]
        methods = [method for method in args.methods if method != LOOKUP] or ["dspine"]  # of whom a lookup alone takes the number of drafts
        prepared = {method: prepare_run(contestant(method, recipes, given)) for method in methods}
        self.configs = {method: config for method, (config, _, _) in prepared.items()}
        _, self.target_config, self.data = prepared[methods[0]]
        shared = shared_settings(self.configs)
        self.num_drafts = shared["drafts a round"]
        dev = {folder.name: DatasetFolder(folder, vocab_size=self.target_config.vocab_size).manifest.sha256 for folder in dataset_folders(args.dev)}
        scoring = {name: getattr(args, name) for name in ("temperatures", "prompts", "max_new_tokens")} | {"dtype": self.dtype}
        files = {"target": content_hash(Path(args.target)), "data": self.data.manifest.sha256, "dev": dev}
        self.settings = json.loads(json.dumps(shared | scoring | files))  # as it reads back: lists for tuples
        args.output.mkdir(parents=True, exist_ok=True)
        path = args.output / SETTINGS
        if path.is_file():
            refuse_others(path, json.loads(path.read_text()), self.settings)
        for job in args.selected:
            self.finished(job)
        write_whole(path, self.settings)

    def config(self, job: Job):
        """A job's training config."""
        return dataclasses.replace(self.configs[job.method], seed=job.seed, workdir=str(self.args.output / job.name))

    def finished(self, job: Job) -> bool:
        """Whether a job is done. Raises ValueError naming what differs where it was done with other settings."""
        from train.loop import check_same_run

        path = self.args.output / job.name / FINISHED
        if not path.is_file():
            return False
        record = json.loads(path.read_text())
        refuse_others(path, record["settings"], self.settings)
        if job.seed is not None:
            check_same_run(record["identity"], self.config(job), self.target_config, self.data.manifest.sha256, path.parent)
        return True

    def run(self) -> None:
        """Every selected job that is not finished, one after the other. Raises as training and scoring do."""
        import jax

        waiting = [job for job in self.args.selected if not self.finished(job)]
        for job in self.args.selected:
            if job not in waiting:
                print(f"{job.name} is finished: skipped", flush=True)
        begin = time.perf_counter()
        for done, job in enumerate(waiting):
            left = f"; about {(time.perf_counter() - begin) / done * (len(waiting) - done) / 60:.0f} min left" if done else ""
            print(f"\n[{done + 1}/{len(waiting)}] {job.name}{left}", flush=True)
            self.do(job, alone=not done)
            jax.clear_caches()  # programs of one method are of no use to the next, and hold memory
            gc.collect()
        if waiting:
            print(f"\n{len(waiting)} jobs in {(time.perf_counter() - begin) / 60:.1f} min", flush=True)

    def do(self, job: Job, *, alone: bool) -> None:
        """Train, score, and set the mark of a finished job. ``alone``: no other job ran in this process."""
        from serve.report import run_entries
        from train.loop import identity_of, run

        folder = self.args.output / job.name
        record = {"method": job.method, "seed": job.seed, "settings": self.settings, "identity": None, "training": {}}
        drafter = job.method
        if job.seed is not None:
            config = self.config(job)
            drafter = f"{job.method}={run(config)}"
            record["identity"] = identity_of(config, self.target_config, self.data)
            record["training"] = {id_.rpartition("/")[2]: value for id_, value, *_ in run_entries(job.name, folder, target="", note="")}
            if not alone:
                record["training"].pop("peak_gib", None)  # the device's peak is that of the whole process, which earlier jobs share
        self.score(folder / "eval", drafter)
        write_whole(folder / FINISHED, record)

    def score(self, output: Path, drafter: str) -> None:
        """One drafter by replay; texts at temperature > 0 are those of every other job."""
        from serve.evaluate import Evaluation, parse_args, write_results

        args = self.args
        options = ["--target", args.target, "--data", str(args.dev), "--drafter", drafter, "--output", str(output), "--dtype", self.dtype]
        options += ["--max-new-tokens", str(args.max_new_tokens), "--batch-size", str(args.batch_size)]
        options += ["--temperature", *map(str, args.temperatures), *([] if args.prompts is None else ["--prompts", str(args.prompts)])]
        output.mkdir(parents=True, exist_ok=True)
        evaluation = Evaluation(parse_args(options), continuations=args.output / "continuations", lookup_drafts=self.num_drafts)
        write_results(evaluation.run(), output)


def refuse_others(path: Path, theirs: dict, ours: dict) -> None:
    """Raise ValueError naming every setting that differs."""
    names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    if names:
        differing = "; ".join(f"{name} {json.dumps(theirs.get(name))} there, {json.dumps(ours.get(name))} now" for name in names)
        raise ValueError(f"{path} is of another comparison: {differing}; give the same settings to go on, or another --output")


def write_whole(path: Path, content: dict) -> None:
    """JSON that appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, path)


def report(output: Path) -> str:
    """Join the finished jobs: results.json, results.md and PNG files in ``output``. -> the Markdown.

    Raises ValueError naming the job that was done with other settings, FileNotFoundError where none is finished.
    """
    from serve.contestants import METHODS, VARIANTS
    from serve.evaluate import write_results
    from serve.join import joined

    records = [(path.parent, json.loads(path.read_text())) for path in output.glob(f"*/{FINISHED}")]
    if not records:
        raise FileNotFoundError(f"{output} holds no finished job (*/{FINISHED}); run the comparison first")
    order = (*METHODS, *VARIANTS)
    records.sort(key=lambda found: (order.index(found[1]["method"]), found[1]["seed"] or 0))
    for folder, record in records:
        refuse_others(folder / FINISHED, record["settings"], records[0][1]["settings"])
    results = joined([(record["method"], json.loads((folder / "eval" / "results.json").read_text())) for folder, record in records])
    results["comparison"] = {"settings": records[0][1]["settings"], "jobs": {folder.name: record["training"] for folder, record in records}}
    begun = sorted(path.parent.name for path in output.glob("*/config.json") if not (path.parent / FINISHED).is_file())
    return write_results(results, output, heading(results, [record for _, record in records], begun))


def heading(results: dict, records: list[dict], begun: list[str]) -> str:
    """What was compared: settings, and parameters, seeds and cost of each method."""
    settings = results["comparison"]["settings"]
    lines = ["### methods", "", "| method | seeds | trained parameters | beyond DFlash | step | training | text tokens/s | peak memory |", "|---" * 8 + "|"]
    first = next(iter(results["temperatures"].values()))
    for label, method in first["methods"].items():
        seeds = [record["seed"] for record in records if record["method"] == label]
        training = [record["training"] for record in records if record["method"] == label and record["training"]]
        known = lambda key: [t[key] for t in training if key in t]  # noqa: B023, E731
        mean = lambda key, form, scale=1.0: form.format(scale * statistics.mean(known(key))) if known(key) else "-"  # noqa: B023, E731
        total, head = (f"{method['parameters'][part] / 1e6:.3f}M" for part in ("total", "head"))
        cells = [", ".join(map(str, seeds)) if seeds != [None] else "-", total, head]
        cells += [mean("step_s", "{:.1f} ms", 1e3), mean("step_s", "{:.0f} s", settings["steps"])]
        cells += [mean("tokens_per_s", "{:.0f}"), mean("peak_gib", "{:.1f} GiB")]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    environment = results["environment"]
    anchors = settings["anchors"]["num_anchors"]
    what = f"{settings['steps']} steps of {settings['data.batch_size']} rows x {anchors} anchors, {settings['drafts a round']} drafts a round"
    lines += ["", f"Equal for all: rows and their order, {what}. A step is the median over windows of the log, training that times the steps."]
    lines += [f"Scored in {settings['dtype']} on {environment['hardware']}, commit {environment['commit']}."]
    lines += [f"Begun and not finished: {', '.join(begun)}."] if begun else []
    return "\n".join([*lines, "", ""])


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns 0, 2 for bad input or a file error, 3 for a training stopped by non-finite numbers, 130 for Ctrl-C."""
    args = parse_args(argv)
    try:
        if not args.report:
            from train.loop import NonFiniteError

            # The end of a time slot (timeout, a preempted machine) stops scoring as Ctrl-C does; training sees to both itself.
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)
            try:
                Comparison(args).run()
            except NonFiniteError as error:
                print(f"stopped: {error}", file=sys.stderr)
                return 3
            finally:
                signal.signal(signal.SIGTERM, before)
        print(report(args.output))
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here, --report joins what is finished", file=sys.stderr)
        return 130
    print(f"tables: {args.output / 'results.md'}   every round: {args.output / 'results.json'}   pictures: {args.output / 'acceptance_T*.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
