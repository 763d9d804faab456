"""Steps on a GPU host from the archive of pack.py: is everything there, does the model class run, does a server serve, how fast.

    python3 serve/sglang/server/steps.py check                      imports, versions, libraries; the flags of the server
    python3 serve/sglang/server/steps.py model                      the model class on the GPU without a server: tokens, CUDA graph, time a round
    python3 serve/sglang/server/steps.py serve plain eager graph    servers one after the other: text, acceptance length, tokens/s
    python3 serve/sglang/server/steps.py all                        the three
    python3 serve/sglang/server/steps.py serve plain graph dflash --target out/SmolLM2 --drafters out/served --prompts gsm8k.jsonl humaneval.jsonl

Modes of ``serve``: plain (no drafter); eager (no CUDA graphs); sampler (graphs, the selector outside of them); graph (graphs with the selector inside);
kernels (graph, with the project's Triton kernels), all four with the drafter folder "dspine"; dflash, dflash2, domino, dspark (graphs, SGLang's own models
with the drafter folder of that name). Each has its own time limit; a step that fails does not stop the next. Speed is measured with SGLang's own client,
``sglang.benchmark.serving``, benchmark by benchmark. Results and logs go to --out (default $OUT, else out/sglang): one JSON a step, logs beside it.

Outside of a pinned installation (torch 2.14.1, sglang-kernel 0.4.10) this is SGLang on parts it was not released with: say so beside any figure.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import signal
import statistics
import subprocess
import sys
import tarfile
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


class Mode(NamedTuple):
    """What a server runs with: the drafter's folder, flags and environment beyond ``COMMON`` and ``ENVIRONMENT``."""

    drafter: str | None
    flags: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    algorithm: str = "DFLASH"


MODES = {
    "plain": Mode(None),
    "eager": Mode("dspine", ("--cuda-graph-backend-decode", "disabled")),
    "sampler": Mode("dspine", variables=(("SGLANG_DFLASH_EAGER_DRAFT_SAMPLER", "1"),)),
    "graph": Mode("dspine"),
    "kernels": Mode("dspine", variables=(("DSPINE_SGLANG_KERNELS", "1"),)),
    "dflash": Mode("dflash"),
    "dflash2": Mode("dflash2"),
    "domino": Mode("domino"),
    "dspark": Mode("dspark", algorithm="DSPARK"),
}
COMMON = [
    *("--dtype", "bfloat16", "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--mem-fraction-static", "0.3", "--max-running-requests", "32", "--skip-server-warmup", "--disable-custom-all-reduce", "--disable-radix-cache"),
    *("--max-total-tokens", "65536", "--sleep-on-idle"),  # room for several servers on one GPU, which leave its cores alone while they wait
    *("--cuda-graph-max-bs-decode", "32", "--cuda-graph-backend-prefill", "disabled"),
]
ENVIRONMENT = {
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    "DSPINE_SGLANG_SKIP_PREWARM": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
CONCURRENCIES = (1, 8, 32)


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Of every child process: the archive before the host's packages, compiled kernels kept beside it."""
    cache = {"SGLANG_JIT_CACHE_DIR": str(args.work / "jit"), "TRITON_CACHE_DIR": str(args.work / "triton"), "TVM_FFI_CACHE_DIR": str(args.work / "tvm")}
    return os.environ | ENVIRONMENT | cache | {"PYTHONPATH": str(args.site)}


def unpack(args: argparse.Namespace) -> None:
    """The archive's site/ below --work, once."""
    if args.site.is_dir() or args.archive is None:
        return
    with tarfile.open(args.archive) as tar:
        tar.extractall(args.work, filter="data")


def child(args: argparse.Namespace, name: str, limit: int, label: str | None = None) -> dict:
    """Run a function of this file in a process with the archive's packages; its JSON line, or the end of its output."""
    started = time.perf_counter()
    command = [sys.executable, str(Path(__file__).resolve()), f"_{name}", "--site", str(args.site), "--work", str(args.work), "--target", str(args.target)]
    command += ["--device", args.device, "--out", str(args.out), "--port", str(args.port), "--new-tokens", str(args.new_tokens), "--count", str(args.count)]
    command += ["--prompts", *map(str, args.prompts)]
    log = args.out / f"{label or name}.log"
    with open(log, "w") as file:
        try:
            code = subprocess.run(command, env=environment(args), stdout=file, stderr=subprocess.STDOUT, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            code = f"stopped after {limit} s"
    lines = log.read_text(errors="replace").splitlines()
    found = next((json.loads(line[6:]) for line in reversed(lines) if line.startswith("JSON: ")), {})
    if code != 0:
        found["tail"] = lines[-25:]
    return {"exit": code, "seconds": round(time.perf_counter() - started, 1)} | found


# ---- check ----------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> None:
    """What the host and the archive hold, and whether the parts that a server needs import. A part that fails is named, the others go on."""
    import importlib
    import importlib.metadata as metadata

    found: dict = {"python": sys.version.split()[0]}
    for name in ("torch", "triton", "transformers", "huggingface_hub", "sglang", "apache-tvm-ffi"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    import torch

    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    failed = {}
    parts = ["sglang.srt.server_args", "sglang.srt.entrypoints.http_server", "sglang.srt.speculative.dflash_worker_v2", "sglang.srt.managers.scheduler"]
    if found["gpu"]:
        parts.insert(0, "sgl_kernel")
    else:  # a rehearsal
        sys.path.insert(0, str(HERE.parent / "tests"))
        import conftest  # noqa: F401
    for part in [*parts, "dspine_sglang.models.dspine", "sglang.launch_server"]:
        started = time.perf_counter()
        try:
            importlib.import_module(part)
        except BaseException as error:  # a library that does not load may raise anything
            failed[part] = f"{type(error).__name__}: {str(error)[:400]}"
        found[f"import {part}"] = round(time.perf_counter() - started, 1)
    if not found["gpu"]:
        found["names in sgl_kernel"] = kernel_names(args.site)
    found["sgl_kernel operators"] = len([x for x in dir(torch.ops.sgl_kernel) if not x.startswith("_")])
    if complaint := check_flags(args):
        failed["flags"] = complaint
    print("JSON: " + json.dumps(found | {"failed": failed}))
    sys.exit(1 if failed else 0)


def kernel_names(site: Path) -> int:
    """How many names sgl_kernel's Python files give without its library, which is for Hopper. Raises ImportError where one of them is not packed."""
    import importlib.util
    import types

    spec = importlib.util.spec_from_file_location("sgl_kernel.load_utils", site / "sgl_kernel" / "load_utils.py")
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    for name in ("_load_architecture_specific_ops", "_preload_cuda_library"):
        setattr(loader, name, lambda: types.ModuleType("common_ops"))
    for name in [name for name in sys.modules if name.split(".")[0] == "sgl_kernel"]:
        del sys.modules[name]
    sys.modules["sgl_kernel.load_utils"] = loader
    return len(dir(importlib.import_module("sgl_kernel")))


def check_flags(args: argparse.Namespace) -> str | None:
    """What SGLang's parser says against a command line of ``serve``; None where it takes them all."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    for mode in MODES:
        try:
            parser.parse_args(server_command(args, mode, 30000)[3:])
        except (argparse.ArgumentError, SystemExit) as error:
            return f"{mode}: {error}"
    return None


# ---- model ----------------------------------------------------------------------------------------


def _model(args: argparse.Namespace) -> None:
    """The model class, SGLang's Triton walk and a reference attention on the GPU: tokens of JAX in fp32, then a CUDA graph of a round and its time in bf16."""
    import torch

    sys.path.insert(0, str(HERE.parent / "tests"))
    import conftest  # noqa: F401  before SGLang
    import harness
    from sglang.srt.speculative.dflash_worker_v2 import _SelectorDraftSampler

    torch.backends.cuda.matmul.allow_tf32 = False
    found = {}
    with conftest.one_rank(), torch.no_grad():
        for dtype, name, own in ((torch.float32, "float32", "0"), (torch.bfloat16, "bfloat16", "0"), (torch.bfloat16, "bfloat16, own kernels", "1")):
            if own == "1" and args.device != "cuda":
                continue
            os.environ["DSPINE_SGLANG_KERNELS"] = own
            case = harness.Case(args.site / "demo" / "golden", dtype, device=args.device)
            rows = case.run()
            n, B = rows.shape[:2]
            sampler = _SelectorDraftSampler(draft_model=case.model, block_size=B, max_bs=n, device=args.device, sampling_enabled=True)
            sampler.stage_sampling_params(bs=n, sampling_info=None)
            sampler(rows.reshape(n * B, -1), case.ids.reshape(-1))
            equal = (sampler.out.view(n, -1) == case.golden["path"]).float().mean().item()
            found[name] = {"requests": n, "tokens as JAX's": round(equal, 4)}
            first = sampler.out[: B - 1].clone()
            inputs = case.inputs(slice(0, 1))
            one = lambda: sampler(case.forward(inputs), inputs["input_ids"])  # noqa: B023, E731
            for _ in range(2):
                one()
            found[name]["one request as in its batch"] = bool(torch.equal(sampler.out[: B - 1], first))
            if args.device == "cuda":
                found[name] |= captured(one, sampler.out[: B - 1])
    print("JSON: " + json.dumps(found))


def captured(one, out) -> dict:
    """A round as a CUDA graph: whether it gives what it gave, and its time."""
    import torch

    before, graph = out.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one()
    out.zero_()
    start, end, times = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), []
    for _ in range(100):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return {"replay equals eager": bool(torch.equal(out, before)), "ms a round, batch 1": round(statistics.median(times), 4)}


# ---- serve ----------------------------------------------------------------------------------------


def server_command(args: argparse.Namespace, mode: str, port: int) -> list[str]:
    """python -m sglang.launch_server ... of a mode."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(args.target), "--port", str(port), *COMMON]
    drafter, flags, _, algorithm = MODES[mode]
    if drafter is not None:
        command += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(args.drafters / drafter)]
        command += ["--speculative-draft-model-quantization", "unquant", "--speculative-draft-attention-backend", "triton"]
    return [*command, *flags]


class Running(NamedTuple):
    """A server's process, the arguments with its port, its log, when it was started and until when it may run (of ``time.perf_counter``)."""

    mode: str
    args: argparse.Namespace
    process: subprocess.Popen
    log: Path
    started: float
    deadline: float


def launch(args: argparse.Namespace, mode: str, limit: int, port: int) -> Running:
    """Start a server of a mode, without waiting for it."""
    args = argparse.Namespace(**vars(args) | {"port": port})
    log, started = args.out / f"server-{mode}.log", time.perf_counter()
    variables = environment(args) | dict(MODES[mode].variables)
    with open(log, "w") as file:
        process = subprocess.Popen(server_command(args, mode, port), env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    return Running(mode, args, process, log, started, started + limit)


def when_ready(server: Running) -> float:
    """Wait until it has answered; the seconds since its start. Raises RuntimeError where it ended, or takes too long."""
    while True:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended with code {server.process.returncode}")
        if time.perf_counter() > server.deadline:
            raise RuntimeError(f"not ready after {server.deadline - server.started:.0f} s")
        try:
            get(server.args, "/health", 30)  # generates a token: kernels compile meanwhile
            return round(time.perf_counter() - server.started, 1)
        except OSError:
            time.sleep(1)


def attempt(server: Running, step) -> dict:
    """What ``step`` finds out, or its error with the end of the server's log."""
    try:
        return step()
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        return {"error": f"{type(error).__name__}: {error}", "tail": server.log.read_text(errors="replace").splitlines()[-40:]}


def serve(args: argparse.Namespace, modes: list[str], limit: int):
    """Servers of some modes, started at once; when all are ready each is asked while the others are idle, and stopped. -> pairs (mode, what was found)."""
    servers = [launch(args, mode, limit, args.port + 100 * i) for i, mode in enumerate(modes)]
    try:
        ready = [attempt(server, lambda: {"ready after s": when_ready(server)}) for server in servers]  # noqa: B023
        for server, found in zip(servers, ready):
            if "error" not in found:
                found |= attempt(server, lambda: questions(server.args, server.mode, server.deadline))  # noqa: B023
            stop(server.process)
            yield server.mode, found
    finally:
        for server in servers:
            stop(server.process)


def stop(server: subprocess.Popen) -> None:
    """End a server and what it started, which share its process group; once more does nothing."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, sign)
            server.wait(15)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def get(args: argparse.Namespace, path: str, timeout: float, body: dict | None = None) -> bytes:
    """Answer of the local server."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{args.port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return answer.read()


def ask(args: argparse.Namespace, prompt: list[int], deadline: float, temperature: float = 0.0) -> dict:
    """One completion: token ids and what the server says of it."""
    body = {"input_ids": prompt, "sampling_params": {"temperature": temperature, "max_new_tokens": args.new_tokens}}
    return json.loads(get(args, "/generate", max(5.0, deadline - time.perf_counter()), body))


def read_prompts(path: Path) -> list[str]:
    """First user turns of a JSONL file of {"turns": [...]} or {"prompt": ...}."""
    texts = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    return [text.get("prompt") or text["turns"][0] for text in texts]


def prompt_ids(args: argparse.Namespace, path: Path) -> list[list[int]]:
    """A file's prompts in the target's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    messages = [[{"role": "user", "content": text}] for text in read_prompts(path)]
    return [list(tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False)) for m in messages]


def questions(args: argparse.Namespace, mode: str, deadline: float) -> dict:
    """By benchmark: greedy text against the plain server's, acceptance length, tokens/s at several concurrencies; and one sampled answer."""
    found: dict = {}
    for path in args.prompts:
        prompts = prompt_ids(args, path)[: args.count]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda prompt: ask(args, prompt, deadline), prompts))  # noqa: B023
        entry = found[path.stem] = {"prompts": len(prompts), "tokens": sum(len(answer["output_ids"]) for answer in answers)}
        # Several at a time, so the text may part from the plain server's at near ties: these answers tell acceptance, text is compared one by one.
        verifications = [answer["meta_info"].get("spec_verify_ct") for answer in answers]
        if all(verifications):
            generated = [answer["meta_info"]["completion_tokens"] for answer in answers]
            entry["acceptance length, pooled"] = round(sum(generated) / sum(verifications), 3)
            entry["acceptance length, by request"] = round(statistics.mean(answer["meta_info"]["spec_accept_length"] for answer in answers), 3)
        texts = [ask(args, prompt, deadline)["output_ids"] for prompt in prompts[:8]]
        file = args.out / f"texts-plain-{path.stem}.json"
        if mode == "plain":
            file.write_text(json.dumps(texts))
        elif file.is_file():
            plain = json.loads(file.read_text())
            parted = [next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None) for ours, theirs in zip(texts, plain)]
            entry["texts equal to plain"] = f"{sum(x is None for x in parted)} of {len(texts)}"
            entry["first differing token"] = [x for x in parted if x is not None]
    found |= child(args, "bench", int(deadline - time.perf_counter()), label=f"bench-{mode}")
    try:  # last: without a selector SGLang compiles its sampler against flashinfer's headers, and a server that cannot ends
        found["sampled tokens"] = len(ask(args, prompts[0], deadline, temperature=1.0)["output_ids"])
    except OSError as error:
        found["sampled tokens"] = f"{type(error).__name__}: {error}"
    return found


# ---- speed, by SGLang's own client -----------------------------------------------------------------


def _bench(args: argparse.Namespace) -> None:
    """``sglang.benchmark.serving`` for every benchmark and concurrency, in one process, because its import takes longer than a measurement."""
    import types

    try:
        import datasets  # noqa: F401
    except ImportError:  # the client imports it for benchmarks that it would fetch
        sys.modules["datasets"] = types.ModuleType("datasets")
        sys.modules["datasets"].load_dataset = None
    from sglang.benchmark import serving

    found: dict = {}
    for path in args.prompts:
        requests = args.out / f"requests-{path.stem}.jsonl"
        turns = [{"conversations": [{"content": text}, {"content": "-"}]} for text in read_prompts(path)]
        for concurrency in CONCURRENCIES:
            count = max(args.count // 2, 2 * concurrency)
            requests.write_text("".join(json.dumps(turns[i % len(turns)]) + "\n" for i in range(count)))
            output = args.out / f"client-{path.stem}-{concurrency}.jsonl"
            output.unlink(missing_ok=True)
            sys.argv = ["serving", "--backend", "sglang", "--host", "127.0.0.1", "--port", str(args.port), "--model", str(args.target)]
            sys.argv += ["--dataset-name", "custom", "--dataset-path", str(requests), "--apply-chat-template", "--num-prompts", str(count)]
            sys.argv += ["--sharegpt-output-len", str(args.new_tokens), "--max-concurrency", str(concurrency), "--output-file", str(output)]
            sys.argv += ["--warmup-requests", str(concurrency), "--disable-ignore-eos", "--disable-tqdm"]
            serving.cli_main()
            result = json.loads(output.read_text().split("\n")[0])
            kept = ("completed", "output_throughput", "accept_length", "median_tpot_ms", "median_e2e_latency_ms")
            found.setdefault(path.stem, {})[f"client at {concurrency}"] = {k: round(result[k], 3) for k in kept if result.get(k) is not None}
            print("JSON: " + json.dumps({"client": found}), flush=True)  # what is there if the time ends


# ---- command --------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("check", "model", "serve", "all", "_check", "_model", "_bench"))
    parser.add_argument("modes", nargs="*", help=f"of serve (default {' '.join(MODES)})")
    parser.add_argument("--archive", type=Path, default=ROOT / "build" / "sglang-server" / "site.tar.xz")
    parser.add_argument("--work", type=Path, default=Path("/tmp/dspine-sglang"), help="where the archive is unpacked and kernels are kept")
    parser.add_argument("--site", type=Path, help="an unpacked archive (default WORK/site)")
    parser.add_argument("--target", type=Path, default=ROOT / "assets" / "demo" / "target")
    parser.add_argument("--drafters", type=Path, help="folder of served drafters, one a method (default: the archive's, for the demo's target)")
    parser.add_argument("--prompts", type=Path, nargs="+", help="JSONL files of prompts, one a benchmark (default: the demo's)")
    parser.add_argument("--count", type=int, default=32, help="prompts of each benchmark (default 32)")
    parser.add_argument("--new-tokens", type=int, default=128, help="of an answer (default 128)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "out" / "sglang"))
    parser.add_argument("--limit", type=int, default=180, help="seconds for each step and each server (default 180)")
    parser.add_argument("--together", action="store_true", help="start all servers at once, which saves minutes, and ask one after the other, the others idle")
    parser.add_argument("--port", type=int, default=30000, help="of the first server; with --together the next ones take every hundredth (default 30000)")
    parser.add_argument("--device", default="cuda", help="of the step model (default cuda)")
    args = parser.parse_args()
    args.site = args.site or args.work / "site"
    args.drafters = args.drafters or args.site / "demo"
    args.prompts = args.prompts or [args.target.parent / "prompts.jsonl"]
    if args.step.startswith("_"):
        {"_check": _check, "_model": _model, "_bench": _bench}[args.step](args)
        return 0
    for mode in args.modes:
        if mode not in MODES:
            parser.error(f"mode {mode} is none of {', '.join(MODES)}")
    for folder in (args.work, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    unpack(args)
    results = {}
    for name in ("check", "model"):
        if args.step in (name, "all"):
            results[name] = child(args, name, args.limit)
            report(args, name, results[name])
    if args.step in ("serve", "all"):
        modes = args.modes or list(MODES)
        for group in [modes] if args.together else [[mode] for mode in modes]:
            for mode, found in serve(args, group, args.limit):
                results[mode] = found
                report(args, f"server-{mode}", found)
    return 1 if any(result.get("exit") or "error" in result for result in results.values()) else 0


def report(args: argparse.Namespace, name: str, result: dict) -> None:
    """To a file at once, so that a step that takes the whole time loses nothing, and to the screen."""
    (args.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    tail = result.pop("tail", None)
    print(f"{name}: {json.dumps(result)}", flush=True)
    if tail:
        print("\n".join(f"    {line[:300]}" for line in tail[-12:]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
