"""The placement of a leaf on a mesh, and the types of mesh axes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec


class LeafSharding(NamedTuple):
    """The sharding of a leaf: the mesh axes that cut each of its axes, major first."""

    mesh: Mesh | AbstractMesh
    spec: tuple[tuple[str, ...], ...]


def usable_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes that no surrounding ``jax.shard_map`` has made Manual."""
    taken = axes_of_type(mesh, AxisType.Manual)
    return tuple(name for name in mesh.axis_names if name not in taken)


def axes_of_type(mesh: Mesh | AbstractMesh, kind: AxisType) -> tuple[str, ...]:
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, axis_type in pairs if axis_type == kind)


def varying_axes(typed: Any) -> frozenset[str]:
    """Returns the Manual axes over which a type varies; none if JAX does not check them."""
    kinds = getattr(typed, "manual_axis_type", None)  # since jax 0.10
    return typed.vma if kinds is None else kinds.varying


def as_named(sharding: LeafSharding, kinds: Sequence[AxisType] = tuple(AxisType)) -> NamedSharding:
    """Returns the sharding over mesh axes of the given types, without the others."""
    mesh, spec = sharding
    of_kind = {name for kind in kinds for name in axes_of_type(mesh, kind)}
    entries = [tuple(name for name in names if name in of_kind) or None for names in spec]
    return NamedSharding(mesh, PartitionSpec(*entries))
