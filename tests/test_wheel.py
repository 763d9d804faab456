"""The wheel: built from a copy of the sources, installed in an environment of its own, its console scripts run outside the repository."""

import json
import os
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("dspine_jax", "pallas_kernels", "train", "serve", "assets", "pyproject.toml", "README.md", "LICENSE")

pytestmark = pytest.mark.slow


def run(*command, **options) -> str:
    """Output of a command that must succeed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    answer = subprocess.run([str(x) for x in command], capture_output=True, text=True, env=environment, **options)
    assert answer.returncode == 0, f"{command}: {answer.stdout[-2000:]}{answer.stderr[-2000:]}"
    return answer.stdout


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Path:
    """bin folder of an environment that holds the wheel; dependencies come from the environment of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "source").mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, folder / "source" / name)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, folder / "source")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env")
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "pip", "--python", folder / "env/bin/python", "install", "--no-deps", "--no-index", wheel)
    (packages,) = (folder / "env/lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return folder / "env/bin"


def script_names() -> list[str]:
    section = (ROOT / "pyproject.toml").read_text().split("[project.scripts]")[1].split("[")[0]
    return re.findall(r"^(dspine-\w+) =", section, flags=re.MULTILINE)


@pytest.mark.parametrize("name", script_names())
def test_console_scripts_show_their_help(scripts, name, tmp_path):
    assert f"usage: {name}" in run(scripts / name, "--help", cwd=tmp_path)


def test_the_installed_package_decodes_with_the_demo(scripts, tmp_path):
    out = run(scripts / "dspine-generate", "--check", "--json", "--max-new-tokens", "48", "What is a cloud made of?", cwd=tmp_path)
    report = json.loads(out)
    assert report["matches_greedy"] and report["tau"] > 1.5 and report["text"]
    # Nothing of the checkout was used.
    where = run(scripts / "python", "-c", "import serve.assets as a, dspine_jax; print(a.demo_folder(), dspine_jax.__file__)", cwd=tmp_path)
    assert str(ROOT) not in where and "share/dspine-jax/demo" in where


def test_the_installed_demo_says_that_it_needs_a_checkout(scripts, tmp_path):
    answer = subprocess.run([scripts / "python", "-m", "serve.demo"], capture_output=True, text=True, cwd=tmp_path, env={"PATH": os.environ["PATH"]})
    assert answer.returncode == 2 and "checkout of the repository" in answer.stderr
