"""Orbax checkpoints of a training run: state, data iterator, rng and config together.

The state is stored as a flat dict of arrays named by tree path, so a checkpoint does not depend on
the classes that held it and a restore can ask for any mesh.
"""

from __future__ import annotations

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


class Checkpointer:
    """Saves asynchronously; a failed save raises at the next call, and close() waits for the last one."""

    def __init__(self, folder: str | Path, *, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(Path(folder).absolute(), options=options)

    def latest_step(self) -> int | None:
        """The newest complete step; unfinished and empty step folders are passed over."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, iterator: grain.DatasetIterator, meta: dict[str, Any]) -> None:
        """Start saving; returns before the write is finished. Raises what an earlier save raised."""
        self._manager.check_for_errors()
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_flatten(state)),
                data=grain.checkpoint.CheckpointSave(iterator),
                meta=ocp.args.JsonSave(meta),
            ),
        )

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
