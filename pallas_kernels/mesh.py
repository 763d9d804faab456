"""Where a kernel call runs when arrays are spread over a mesh: to the partitioner a kernel is opaque, it would gather all arrays on every device."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, AxisType

from dspine_jax.sharding import AXES


def mesh_in_scope() -> AbstractMesh | None:
    """The mesh over whose devices a kernel call has to be spread by hand, None if there is only one or they are each on their own already."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or all(kind == AxisType.Manual for kind in mesh.axis_types):
        return None
    return mesh


def foreign(mesh: AbstractMesh) -> str | None:
    """What keeps kernels from being spread over a mesh: other axes than the project's, or axes that are not automatic."""
    if tuple(mesh.axis_names) != AXES or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return f"a mesh with axes {dict(zip(mesh.axis_names, mesh.axis_types))} (only automatic {', '.join(AXES)})"
    return None


def spread(function, mesh: AbstractMesh | None, in_specs, out_specs):
    """``function`` on every device's own part of the arrays; as it is without a mesh."""
    if mesh is None:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
