"""Checkpoints: any mesh may read what another wrote, unfinished saves are passed over, failed ones are loud."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import grain
import jax
import numpy as np
import pytest
import tiny

from dspine_jax.config import MeshConfig
from dspine_jax.sharding import assert_shardings, make_mesh, tree_shardings
from train.checkpoint import Checkpointer
from train.step import abstract_state, make_optimizer

ROOT = Path(__file__).resolve().parents[1]


def iterator():
    return iter(grain.MapDataset.range(1000).seed(1).shuffle().batch(4).to_iter_dataset())


@pytest.fixture(scope="module")
def config():
    return tiny.resolved(tiny.train_config("dspine"))


@pytest.fixture(scope="module")
def host_state(config):
    """Random numbers in every parameter and both moments (zeros could hide a mix-up), distinct counters."""
    rng = np.random.default_rng(0)

    def fill(x):
        return np.asarray(rng.integers(0, 99), x.dtype) if x.ndim == 0 else rng.normal(size=x.shape).astype(x.dtype)

    return jax.tree.map(fill, abstract_state(config)[1])


def placed(host_state, config, sizes):
    """(state, its planned shardings) on a mesh of the given sizes."""
    mesh = make_mesh(MeshConfig(*sizes), jax.devices()[: int(np.prod(sizes))])
    shardings = tree_shardings(abstract_state(config)[1], mesh)
    return jax.device_put(host_state, shardings), shardings


@pytest.fixture(scope="module")
def saved(tmp_path_factory, host_state, config):
    """A checkpoint written on 4x2 (data x fsdp), with the rows that follow it."""
    folder = tmp_path_factory.mktemp("saved")
    state, _ = placed(host_state, config, (4, 2, 1))
    rows = iterator()
    for _ in range(3):
        next(rows)
    checkpointer = Checkpointer(folder, keep=2)
    checkpointer.save(7, state, rows, {"config": {"steps": 10}})
    following = [next(rows).tolist() for _ in range(3)]
    checkpointer.close()
    return folder, following


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (8, 1, 1), (2, 2, 2)])
def test_restoring_on_another_mesh_gives_equal_bits_in_the_layout_asked_for(saved, host_state, config, sizes):
    """C04, for every parameter and moment."""
    folder, following = saved
    _, shardings = placed(host_state, config, sizes)
    checkpointer = Checkpointer(folder, keep=2)
    assert checkpointer.latest_step() == 7
    assert checkpointer.read_meta(7) == {"config": {"steps": 10}}
    rows = iterator()
    restored = checkpointer.restore(7, abstract_state(config)[1], shardings, rows)
    checkpointer.close()
    tiny.assert_bit_equal(restored, host_state)
    assert_shardings(restored, shardings)
    assert [next(rows).tolist() for _ in range(3)] == following


def test_a_checkpoint_of_other_sizes_is_refused(saved, config):
    """The stored arrays decide: nothing is cut, padded or left at its start value."""
    folder, _ = saved
    other = dataclasses.replace(config, drafter=dataclasses.replace(config.drafter, intermediate_size=80))
    abstract = abstract_state(other)[1]
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    checkpointer = Checkpointer(folder, keep=2)
    with pytest.raises(ValueError):
        checkpointer.restore(7, abstract, tree_shardings(abstract, mesh), iterator())
    checkpointer.close()


def test_masters_and_both_moments_are_fp32_whatever_the_compute_dtype(config):
    """R10."""
    state = abstract_state(dataclasses.replace(config, compute_dtype="bfloat16"))[1]
    moments = state.opt_state[1][0]
    for name, tree in {"params": state.params, "frozen": state.frozen, "mu": moments.mu, "nu": moments.nu}.items():
        assert {x.dtype.name for x in jax.tree.leaves(tree)} == {"float32"}, name


def test_moments_stay_fp32_for_parameters_of_another_dtype():
    """The first moment is fp32 by its own setting, not by luck."""
    moments = make_optimizer(tiny.train_config("dflash").optimizer, 10).init({"w": jax.numpy.ones(3, "bfloat16")})[1][0]
    assert moments.mu["w"].dtype == np.float32


# ---- C05: saves that did not finish or failed ---------------------------------------------------

KILLED = """
import os, signal, sys
import grain, jax.numpy as jnp
from train.checkpoint import Checkpointer

class Killer(grain.DatasetIterator):
    def __init__(self): super().__init__()
    def __next__(self): raise StopIteration
    def set_state(self, state): pass
    def get_state(self):
        # The data iterator is written while the save is under way: arrays and folders exist, the commit does not.
        if kill: os.kill(os.getpid(), signal.SIGKILL)
        return {"at": 0}

kill = False
checkpointer = Checkpointer(sys.argv[1], keep=2)
checkpointer.save(1, {"w": jnp.full((1000,), 1.0)}, Killer(), {"at": 1})
checkpointer._manager.wait_until_finished()
kill = True
checkpointer.save(2, {"w": jnp.full((1000,), 2.0)}, Killer(), {"at": 2})
checkpointer.close()
print("not killed")
"""


def test_a_save_cut_short_by_a_kill_is_passed_over(tmp_path):
    """C05 a and b: kill -9 in the middle of step 2 leaves step 1 the latest; empty and temporary folders do not count."""
    folder = tmp_path / "checkpoints"
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    names = {path.name for path in folder.iterdir()}
    assert "1" in names and any(name.startswith("2") and name != "2" for name in names), names
    (folder / "3").mkdir()
    (folder / "4.orbax-checkpoint-tmp-0").mkdir()
    checkpointer = Checkpointer(folder, keep=2)
    assert checkpointer.latest_step() == 1
    assert checkpointer.read_meta(1) == {"at": 1}
    # The step is then saved anew.
    checkpointer.save(2, {"w": np.full((1000,), 2.0)}, iterator(), {"at": 2})
    checkpointer.close()
    checkpointer = Checkpointer(folder, keep=2)
    assert checkpointer.latest_step() == 2
    checkpointer.close()


def test_a_failed_save_is_loud(tmp_path):
    """C05 c: the folder is replaced by a file, so writing fails for every user."""
    folder = tmp_path / "checkpoints"
    checkpointer = Checkpointer(folder, keep=2)
    checkpointer.save(1, {"w": np.ones(4)}, iterator(), {})
    checkpointer._manager.wait_until_finished()
    shutil.rmtree(folder)
    folder.write_text("in the way")
    with pytest.raises((OSError, ValueError, RuntimeError)):
        checkpointer.save(2, {"w": np.ones(4)}, iterator(), {})
        checkpointer.close()


def test_a_failure_in_the_background_write_is_raised_at_the_next_save_or_at_close(tmp_path, monkeypatch):
    """C05 c: the save call itself has returned by then."""
    folder = tmp_path / "checkpoints"
    for use in ("close", "save"):
        checkpointer = Checkpointer(folder / use, keep=2)
        real = checkpointer._manager.check_for_errors

        def failing(real=real):
            real()
            raise OSError("disk full")

        checkpointer.save(1, {"w": np.ones(4)}, iterator(), {})
        monkeypatch.setattr(checkpointer._manager, "check_for_errors", failing)
        with pytest.raises(OSError, match="disk full"):
            if use == "close":
                checkpointer.close()
            else:
                checkpointer.save(2, {"w": np.ones(4)}, iterator(), {})


def test_the_last_save_is_complete_after_close_and_old_ones_go_only_then(tmp_path):
    """C05 d, and at most ``keep`` steps stay."""
    folder = tmp_path / "checkpoints"
    checkpointer = Checkpointer(folder, keep=2)
    for step in (1, 2, 3):
        checkpointer.save(step, {"w": np.full(1000, step)}, iterator(), {"at": step})
        complete = {int(p.name) for p in folder.iterdir() if p.name.isdigit()}
        assert step == 1 or complete & {step - 2, step - 1, step}, "a moment without any complete step"
    checkpointer.close()
    assert sorted(p.name for p in folder.iterdir()) == ["2", "3"]
    checkpointer = Checkpointer(folder, keep=2)
    assert checkpointer.latest_step() == 3 and checkpointer.read_meta(3) == {"at": 3}
    checkpointer.close()
