"""Orbax checkpoints of a training run: state, data iterator, rng and config together.

The state is stored as a flat dict of arrays named by tree path, so a checkpoint does not depend on
the classes that held it and a restore can ask for any mesh.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grain
import jax
import orbax.checkpoint as ocp

from dspine_jax.sharding import path_name


def _flatten(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    flat = {path_name(path): leaf for path, leaf in leaves}
    if len(flat) != len(leaves):
        raise ValueError("two leaves of the training state share a path name")
    return flat


ITEMS = ("state", "data", "meta")


def _set_incomplete_steps_aside(folder: Path) -> None:
    """Rename step folders without all items and Orbax' closing file.

    Orbax counts every folder with a number for a name: an empty one would be resumed from, and, being the
    newest, make it skip the saves of earlier steps without a word.
    """
    for step in folder.glob("*") if folder.is_dir() else ():
        complete = all((step / name).exists() for name in (*ITEMS, "_CHECKPOINT_METADATA"))
        if step.name.isdigit() and not complete:
            step.rename(step.with_name(f"incomplete-{step.name}-{time.time_ns()}"))


class Checkpointer:
    """Saves asynchronously; a failed save raises at the next call, and close() waits for the last one."""

    def __init__(self, folder: str | Path, *, keep: int):
        """Open or make ``folder``. Step folders that are not complete are renamed out of the way."""
        folder = Path(folder).absolute()
        if jax.process_index() == 0:
            _set_incomplete_steps_aside(folder)
        # Folders are made before save() returns: in the background a failure would only show as a time-out of minutes.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=True, async_options=ocp.AsyncOptions(create_directories_asynchronously=False)
        )
        self._manager = ocp.CheckpointManager(folder, options=options)

    def latest_step(self) -> int | None:
        """The newest complete step; unfinished and empty step folders are passed over."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, iterator: grain.DatasetIterator, meta: dict[str, Any]) -> None:
        """Start saving; returns before the write is finished. Raises what an earlier save raised, and when the save is refused."""
        self._manager.check_for_errors()
        started = self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_flatten(state)),
                data=grain.checkpoint.CheckpointSave(iterator),
                meta=ocp.args.JsonSave(meta),
            ),
        )
        if not started:
            raise RuntimeError(f"step {step} was not saved: {self._manager.directory} already holds step {self._manager.latest_step()}")

    def read_meta(self, step: int) -> dict[str, Any]:
        """The JSON stored beside the state."""
        return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def restore(self, step: int, abstract_state: Any, shardings: Any, iterator: grain.DatasetIterator) -> Any:
        """State in the layout asked for (values bit-equal, whatever mesh saved it); the iterator is set in place."""
        abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract_state, shardings)
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(_flatten(abstract)),
                data=grain.checkpoint.CheckpointRestore(iterator),
            ),
        )["state"]
        leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract)
        return jax.tree_util.tree_unflatten(treedef, [restored[path_name(path)] for path, _ in leaves])

    def close(self) -> None:
        """Wait for the last save to be complete on disk. Raises if it failed."""
        self._manager.wait_until_finished()
        self._manager.check_for_errors()
        self._manager.close()
