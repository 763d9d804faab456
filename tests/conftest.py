"""Platform, fake devices and fixtures shared by all tests."""

import os
import re
from pathlib import Path

import pytest
from absl import flags

FAKE_DEVICES = "--xla_force_host_platform_device_count=8"


def _choose_platform(marker_expression: str) -> None:
    """Settle JAX's environment before anything imports it; child processes of tests inherit it."""
    platform = os.environ.get("DSPINE_TEST_PLATFORM")
    wants_gpu = re.search(r"(?<!not )\bgpu\b", marker_expression) is not None
    if platform:
        os.environ["JAX_PLATFORMS"] = platform
    elif not wants_gpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        # fp32 products default to TF32 on a GPU, far outside the tolerances; several test processes share its memory.
        os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    xla_flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in xla_flags:
        os.environ["XLA_FLAGS"] = f"{xla_flags} {FAKE_DEVICES}".strip()


def pytest_configure(config):
    _choose_platform(config.getoption("markexpr") or "")
    # Grain reads absl flags, which pytest never parses.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def pytest_collection_modifyitems(items):
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import jax

    backend = jax.default_backend()
    if backend != "gpu":
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU, JAX runs on {backend!r}; on a GPU machine run pytest -m gpu"))


@pytest.fixture(scope="module", autouse=True)
def _bounded_memory():
    """Drop a file's compiled programs at its end: over the whole suite they would fill several GB a worker."""
    yield
    import jax

    jax.clear_caches()


@pytest.fixture(scope="module")
def quick_compiler():
    """XLA without its slow passes, for files that compile much and run it for milliseconds. On a CPU: on a GPU what is compiled is what is tested."""
    import jax

    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Measuring data kept outside the repository: DSPINE_SHARED, else ../shared beside the repository."""
    path = Path(os.environ.get("DSPINE_SHARED") or Path(__file__).resolve().parents[2] / "shared")
    if not (path / "data").is_dir():
        pytest.skip(f"no measuring data at {path}/data; set DSPINE_SHARED to the folder that holds data/")
    return path
