"""Mesh and the one table of sharding rules for target, drafter and optimiser state.

Each rule names the logical axes of a parameter; ``MESH_AXIS`` maps logical axes to mesh axes. A
dimension that does not divide by its mesh axis is refused by name: XLA would otherwise replicate
it without a word.
"""

from __future__ import annotations

import re

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dspine_jax.config import MeshConfig

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

MESH_AXIS = {"vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "embed": "fsdp"}

RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(embed_tokens|lm_head)/embedding$", ("vocab", "embed")),
    (r"q_proj/kernel$", ("embed", "heads", None)),
    (r"(k|v)_proj/kernel$", ("embed", "kv_heads", None)),
    (r"o_proj/kernel$", ("heads", None, "embed")),
    (r"mlp/(gate|up)_proj/kernel$", ("embed", "mlp")),
    (r"mlp/down_proj/kernel$", ("mlp", "embed")),
    (r"(^|/)fc/kernel$", (None, "embed")),
    (r"injections/\d+/(feature|gate_hidden)/kernel$", ("embed", None)),
    (r"injections/\d+/(gate_predecessor|message)/kernel$", (None, "embed")),
    (r"injections/\d+/gate_hidden/bias$", (None,)),
    (r"(attention|mlp)_conv/base_kernel$", (None, None, None)),
    (r"(attention|mlp)_conv/kernel_projection/kernel$", ("embed", None, None, None)),
    (r"candidate_selector/(predecessor|successor)_codebook$", ("vocab", None)),
    (r"candidate_selector/hidden_projection/kernel$", ("embed", None)),
    (r"markov_head/markov_w[12]/embedding$", ("vocab", None)),
    (r"markov_head/(gate|joint)_proj/kernel$", (None, None)),
    (r"markov_head/(gate|joint)_proj/bias$", (None,)),
    (r"confidence_head/proj/kernel$", (None, None)),
    (r"confidence_head/proj/bias$", (None,)),
    (r"prefix_gru/weight_(ih|hh)_l0$", (None, None)),
    (r"embed_proj/0/kernel$", (None, None)),
    (r"embed_proj/2/embedding$", ("vocab", None)),
    (r"norm/weight$|layernorm/weight$", (None,)),
    (r"transfer/mean$", (None,)),
    (r"transfer/basis$", (None, None)),
)


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Mesh with axes data, fsdp, tensor over the given (default: all) devices.

    One axis may be -1. Raises ValueError when the product is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [config.data, config.fsdp, config.tensor]
    known = int(np.prod([s for s in sizes if s != -1]))
    if sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
        raise ValueError(f"mesh sizes {dict(zip(AXES, sizes))}: each must be positive, and at most one -1")
    if -1 in sizes and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if int(np.prod(sizes)) != len(devices):
        raise ValueError(f"mesh {dict(zip(AXES, sizes))} does not use exactly {len(devices)} devices; change mesh.data, mesh.fsdp or mesh.tensor")
    return Mesh(np.array(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * 3)


def path_name(path: tuple) -> str:
    """'layers/0/mlp/up_proj/kernel' from a tree path; wrapper keys of state containers are dropped."""
    parts = []
    for key in path:
        name = getattr(key, "key", getattr(key, "idx", getattr(key, "name", None)))
        if name is not None and str(name) != "value":
            parts.append(str(name))
    return "/".join(parts)


def parameter_spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """PartitionSpec of one parameter by the rules table.

    Raises ValueError when no rule fits, or when a dimension does not divide by its mesh axis.
    """
    logical = next((axes for pattern, axes in RULES if re.search(pattern, name)), None)
    if logical is None:
        raise ValueError(f"no sharding rule matches parameter {name} {shape}; add one to RULES in dspine_jax/sharding.py")
    spec = []
    for axis, size in zip(logical, shape, strict=True):
        mesh_axis = MESH_AXIS.get(axis)
        if mesh_axis is not None and size % mesh.shape[mesh_axis]:
            raise ValueError(
                f"{name} {shape}: axis '{axis}' of size {size} does not divide by mesh.{mesh_axis} = {mesh.shape[mesh_axis]}; "
                f"choose a mesh.{mesh_axis} that divides {size}"
            )
        spec.append(mesh_axis)
    return P(*spec)


def tree_shardings(tree, mesh: Mesh):
    """NamedSharding for every leaf: parameters and moments by the rules, scalars and keys replicated."""

    def one(path, leaf):
        if leaf.ndim == 0 or path_name(path).endswith("rng"):
            return NamedSharding(mesh, P())
        return NamedSharding(mesh, parameter_spec(path_name(path), leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(one, tree)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data and fsdp together."""
    return NamedSharding(mesh, P(BATCH_AXES))


def check_batch(batch_size: int, mesh: Mesh) -> None:
    """Refuse a batch that does not divide over the batch axes. Raises ValueError."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch_size % ways:
        raise ValueError(
            f"data.batch_size {batch_size} does not divide by mesh.data x mesh.fsdp = {mesh.shape['data']} x {mesh.shape['fsdp']}; "
            f"use a multiple of {ways} or a smaller mesh.data"
        )


def constrain_batch(x: jax.Array) -> jax.Array:
    """Pin axis 0 of an activation to the batch axes of the mesh in scope; without one, do nothing.

    Left to itself the partitioner may follow a parameter's fsdp axis into the activations. A batch
    that does not divide is left to the partitioner: a single prompt decodes on any mesh.
    Training refuses such a batch by name before it starts (``check_batch``).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if "data" not in mesh.axis_names or x.shape[0] % (mesh.shape["data"] * mesh.shape["fsdp"]):
        return x
    return jax.lax.with_sharding_constraint(x, P(BATCH_AXES))


def assert_shardings(tree, planned) -> None:
    """Compare each leaf's real ``.sharding`` with the plan: trust the array, not the wish. Raises RuntimeError."""

    def one(path, leaf, plan):
        if not leaf.sharding.is_equivalent_to(plan, leaf.ndim):
            raise RuntimeError(f"{path_name(path)} {leaf.shape} is laid out as {leaf.sharding}, planned {plan}")

    jax.tree_util.tree_map_with_path(one, tree, planned)
