"""Pack SGLang 0.5.23 for a GPU host that has PyTorch but reaches no package index: one archive of some tens of MB.

    python serve/sglang/server/pack.py OUT [--python 3.12] [--demo FOLDER]

writes OUT/site.tar.xz, whose folder site/ goes on PYTHONPATH: SGLang without its multimodal part, tests and compiled extensions; sgl_kernel 0.4.5, whose
library for Hopper fits torch 2.11 (later releases do not), with nothing else compiled; small wheels (requirements.txt); the plugin beside this folder;
stand-ins for two modules that are imported and not used.
--demo adds what ``make sglang-bundle`` exported: served drafters and golden files. steps.py unpacks and uses it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SGLANG, KERNEL = "sglang==0.5.23", "sglang-kernel==0.4.5"
GLIBC = ("2_35", "2_34", "2_28", "2_27", "2_24", "2_17")  # pip takes each platform tag literally
# sglang: compiled extensions have Python twins or serve parts that are left out.
DROPPED = re.compile(r"sglang/(multimodal_gen|test)/|\.so$")
# Path -> content beneath a docstring: imported at start, needed for compressed requests and on Blackwell alone.
STAND_INS = {
    "zstandard.py": "",
    "sglang/kernels/ops/gemm/cutedsl_dual_gemm.py": """
import enum

MAX_DUAL_GEMM_DECODE_TOKENS = 0


class DualGemmQuantMode(enum.Enum):
    UNQUANT = 0
    DYNAMIC_PER_TOKEN = 1
    STATIC_PER_TENSOR = 2


def can_use_dual_gemm(*sizes):
    return False
""",
}
KEPT_KERNEL = re.compile(r"sgl_kernel/(.*\.py|sm90/common_ops\.abi3\.so)$|.*\.dist-info/")


def download(folder: Path, python: str, words: list[str]) -> None:
    """Wheels for Linux on x86-64 and CPython ``python``."""
    platforms = [x for glibc in GLIBC for x in ("--platform", f"manylinux_{glibc}_x86_64")] + ["--platform", "manylinux2014_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    subprocess.run([*command, *platforms, "--dest", str(folder), *words], check=True)


def unpack(wheel: Path, site: Path, keep) -> int:
    """Members of a wheel for which ``keep(name)`` holds; how many bytes they take."""
    size = 0
    with zipfile.ZipFile(wheel) as file:
        for info in file.infolist():
            if not info.is_dir() and keep(info.filename):
                file.extract(info, site)
                size += info.file_size
    return size


def pack(out: Path, python: str, demo: Path | None) -> Path:
    """Write OUT/site.tar.xz and print what went in."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        wheels, site = Path(scratch) / "wheels", Path(scratch) / "site"
        download(wheels, python, [SGLANG, KERNEL, "--requirement", str(HERE / "requirements.txt")])
        for wheel in sorted(wheels.iterdir()):
            name = wheel.name.split("-")[0]
            keep = {"sglang": lambda x: not DROPPED.search(x), "sglang_kernel": KEPT_KERNEL.match}.get(name, lambda x: True)
            print(f"{name:28} {wheel.stat().st_size / 1e6:8.1f} MB as a wheel {unpack(wheel, site, keep) / 1e6:8.1f} MB kept")
        for name, content in STAND_INS.items():
            (site / name).write_text('"""Stands for what this archive leaves out."""\n' + content)
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(HERE.parent)], check=True)
        if demo is not None:
            shutil.copytree(demo, site / "demo")
        for cache in list(site.rglob("__pycache__")):
            shutil.rmtree(cache)
        archive = out / "site.tar.xz"
        with tarfile.open(archive, "w:xz", preset=9) as tar:
            tar.add(site, "site")
    print(f"{archive}: {archive.stat().st_size / 1e6:.1f} MB")
    return archive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default="3.12", help="of the host (default 3.12)")
    parser.add_argument("--demo", type=Path, help="folder to add as site/demo")
    args = parser.parse_args()
    pack(args.out, args.python, args.demo)


if __name__ == "__main__":
    main()
