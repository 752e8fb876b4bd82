"""Where a leaf lies on a mesh: its sharding, and questions about the axes of a mesh."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec


class LeafSharding(NamedTuple):
    """The sharding of one leaf: for each of its axes the mesh axes that cut it, major first."""

    mesh: Mesh | AbstractMesh
    spec: tuple[tuple[str, ...], ...]


def usable_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes that no surrounding ``jax.shard_map`` has taken."""
    taken = axes_of_type(mesh, AxisType.Manual)
    return tuple(name for name in mesh.axis_names if name not in taken)


def axes_of_type(mesh: Mesh | AbstractMesh, kind: AxisType) -> tuple[str, ...]:
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, axis_type in pairs if axis_type == kind)


def varying_axes(typed: Any) -> frozenset[str]:
    """Returns the Manual axes over which an array varies, by its type; none if unchecked."""
    kinds = getattr(typed, "manual_axis_type", None)  # since jax 0.10
    return typed.vma if kinds is None else kinds.varying


def as_named(sharding: LeafSharding, kinds: Sequence[AxisType] = tuple(AxisType)) -> NamedSharding:
    """Returns the sharding over those of its mesh axes that are of some kinds."""
    mesh, spec = sharding
    of_kind = {name for kind in kinds for name in axes_of_type(mesh, kind)}
    entries = [tuple(name for name in names if name in of_kind) or None for names in spec]
    return NamedSharding(mesh, PartitionSpec(*entries))
