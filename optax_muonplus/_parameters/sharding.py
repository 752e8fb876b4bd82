"""How leaves lie on a mesh: from the argument ``sharding``, or from the arrays themselves.

A concrete array says how it is sharded, and so does one on Explicit mesh axes, by its type. Under
``jax.jit`` on Auto axes it is not known before the program is compiled.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from optax_muonplus._parameters.paths import Path, by_path, flatten_tree

# A tree or prefix tree of NamedSharding and None, or a function from parameters to one.
ShardingTree = Any


class LeafSharding(NamedTuple):
    """How one leaf lies on a mesh: for each of its axes the mesh axes that cut it, major first."""

    mesh: Mesh | AbstractMesh
    spec: tuple[tuple[str, ...], ...]

    @property
    def sharded_axes(self) -> tuple[tuple[str, ...], ...]:
        """``spec`` without mesh axes of size 1."""
        sizes = self.mesh.shape
        return tuple(tuple(name for name in names if sizes[name] > 1) for names in self.spec)


class Placed(NamedTuple):
    """A leaf whose sharding is asked for."""

    name: str
    array: Any
    given: NamedSharding | None  # its entry in the argument sharding
    whole_axes: Sequence[int]  # those that a surrounding jax.shard_map must not have cut


def leaf_shardings(leaves: Iterable[Placed]) -> list[LeafSharding | None]:
    """How each leaf lies on a mesh; None where that is not known, or on one device.

    Raises:
      ValueError: naming the leaves whose sharding cannot be, is not that of the array's type, is
        known in part only or may cut a matrix; if leaves lie on different meshes.
    """
    shardings, wrong = [], []
    meshes: dict[Any, str] = {}
    for leaf in leaves:
        try:
            _check_varying(leaf)
            known = _leaf_sharding(leaf)
        except ValueError as error:
            wrong.append(f"{leaf.name}: {error}")
            continue
        shardings.append(known)
        if known is not None:
            meshes.setdefault(tuple(known.mesh.shape.items()), f"{leaf.name} is on {known.mesh}")
    if len(meshes) > 1:
        wrong.append(f"all parameters must be on one mesh, but {' and '.join(meshes.values())}")
    if wrong:
        raise ValueError(f"Shardings do not fit. {'; '.join(wrong)}.")
    return shardings


def given_shardings(
    tree: Any, paths: Sequence[Path], sharding: ShardingTree
) -> list[NamedSharding | None]:
    """The entry of ``sharding`` for each leaf of ``tree``; a single device is no entry."""
    if sharding is None:
        return [None] * len(paths)
    expected = "a jax.sharding.NamedSharding, or None where it is not known"
    is_sharding = lambda x: isinstance(x, NamedSharding | SingleDeviceSharding)  # noqa: E731
    entries = by_path(sharding, tree, paths, is_sharding, "shardings", expected)
    return [entry if isinstance(entry, NamedSharding) else None for entry in entries]


def usable_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes that no surrounding ``jax.shard_map`` has taken."""
    taken = _axes_of_type(mesh, AxisType.Manual)
    return tuple(name for name in mesh.axis_names if name not in taken)


def shard_like_params(
    state: Any,
    paths: Sequence[Path],
    shapes: Sequence[tuple[int, ...]],
    given: Sequence[NamedSharding | None],
) -> Any:
    """``state``, with every leaf that mirrors a parameter sharded like that parameter.

    A leaf mirrors a parameter if its path ends in the parameter's and it has its shape. Under
    ``jax.jit`` on Auto axes the zeros of a state would otherwise be made on one device. Paths,
    shapes and entries in the argument ``sharding`` are those of the parameters.
    """
    entries = zip(paths, shapes, given, strict=True)
    params = {path: (shape, argument) for path, shape, argument in entries if argument is not None}
    if not params:
        return state

    def constrained(path: Path, leaf: Any) -> Any:
        suffixes = (path[i:] for i in range(len(path) + 1))
        shape, argument = next((params[s] for s in suffixes if s in params), (None, None))
        return leaf if argument is None or np.shape(leaf) != shape else _constrain(leaf, argument)

    state_paths, leaves, unflatten = flatten_tree(state)
    return unflatten(map(constrained, state_paths, leaves))


def _constrain(leaf: Any, given: NamedSharding) -> Any:
    """Shards ``leaf`` over the Auto axes of ``given``; its type shards it over Explicit ones."""
    actual = concrete_sharding(leaf)
    auto = _axes_of_type(given.mesh, AxisType.Auto)
    inside = _axes_of_type(jax.typeof(leaf).sharding.mesh, AxisType.Manual)
    if not auto or inside or (actual is not None and actual.is_equivalent_to(given, leaf.ndim)):
        return leaf
    spec = [tuple(name for name in names if name in auto) for names in _spec_entries(given.spec)]
    return jax.lax.with_sharding_constraint(leaf, NamedSharding(given.mesh, PartitionSpec(*spec)))


def _spec_entries(spec: PartitionSpec, ndim: int = 0) -> list[tuple[str, ...]]:
    """The mesh axes of each axis, of ``ndim`` axes at least."""
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    return entries + [()] * (ndim - len(entries))


def _axes_of_type(mesh: Mesh | AbstractMesh, kind: AxisType) -> tuple[str, ...]:
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, axis_type in pairs if axis_type == kind)


def concrete_sharding(leaf: Any) -> NamedSharding | None:
    """The sharding of a concrete array."""
    concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return leaf.sharding if concrete and isinstance(leaf.sharding, NamedSharding) else None


def _leaf_sharding(leaf: Placed) -> LeafSharding | None:
    source = leaf.given or concrete_sharding(leaf.array)
    typed = jax.typeof(leaf.array).sharding
    explicit = AxisType.Explicit in typed.mesh.axis_types
    if leaf.given is not None:
        _check_against_type(leaf.given, typed, np.ndim(leaf.array))
    elif source is None and explicit:
        auto = _axes_of_type(typed.mesh, AxisType.Auto)
        unknown = [name for name in auto if typed.mesh.shape[name] > 1]
        if unknown:
            raise ValueError(
                f"its type says {typed.spec}, but nothing about {', '.join(unknown)}, which are"
                " Auto next to Explicit axes. Pass sharding=, or make all axes of the mesh Explicit"
            )
        source = typed
    if source is None:
        return None
    # The same axes may be of other types where the array is used than where the argument was made.
    mesh = source.mesh if typed.mesh.empty else typed.mesh
    spec = _checked_spec(source.spec, np.shape(leaf.array), mesh, leaf.whole_axes)
    if not explicit and math.prod(mesh.shape[name] for name in usable_axes(mesh)) == 1:
        return None
    return LeafSharding(mesh, spec)


def _check_varying(leaf: Placed) -> None:
    """Raises ValueError if a leaf may be a shard of a matrix, and nobody says that it is none."""
    typed = jax.typeof(leaf.array)
    varying = sorted(name for name in varying_axes(typed) if typed.sharding.mesh.shape[name] > 1)
    if varying and leaf.whole_axes and leaf.given is None:
        raise ValueError(
            f"it varies over {', '.join(varying)}, which a surrounding jax.shard_map has taken, so"
            " that it may be a shard of a matrix, and a shard of a matrix has no polar factor."
            " Average gradients first (jax.lax.pmean); update matrices that are cut outside of the"
            " shard_map. Where each device has whole matrices of its own, say so:"
            f" sharding=NamedSharding(mesh, P({varying[0]!r})) if the first axis, of layers or"
            " experts, is cut, P() if none is"
        )


def _checked_spec(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, whole: Sequence[int]
) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each axis that no ``jax.shard_map`` has taken, checked."""
    if len(spec) > len(shape):
        raise ValueError(f"{spec} has more entries than the shape {shape} has axes")
    if PartitionSpec.UNCONSTRAINED in spec:
        raise ValueError(f"{spec} leaves an axis unconstrained; say how it is sharded")
    entries = _spec_entries(spec, len(shape))
    usable = usable_axes(mesh)
    taken = {name for axis in whole for name in entries[axis]} - set(usable)
    if taken:
        raise ValueError(
            f"{spec} names {', '.join(sorted(taken))}, which a surrounding jax.shard_map has taken;"
            " arrays inside of it are single shards, and a shard of a matrix has no polar factor"
        )
    entries = [tuple(name for name in names if name in usable) for names in entries]
    explicit = _axes_of_type(mesh, AxisType.Explicit)
    for size, names in zip(shape, entries, strict=True):
        if [name in explicit for name in names] != sorted(n in explicit for n in names)[::-1]:
            raise ValueError(
                f"{spec} cuts an axis along an Auto mesh axis first and an Explicit one then, which"
                " jax drops in the next operation; name the Explicit one first"
            )
        shards = math.prod(mesh.shape[name] for name in names)
        if size % shards:
            raise ValueError(f"{spec} cuts an axis of {shape}, of size {size}, into {shards}")
    return tuple(entries)


def _check_against_type(given: NamedSharding, typed: NamedSharding, ndim: int) -> None:
    """Raises ValueError unless ``given`` says what the array's type says."""
    if typed.mesh.empty:
        return
    if dict(given.mesh.shape) != dict(typed.mesh.shape):
        raise ValueError(f"sharding= is on {given.mesh}, the array on {typed.mesh}")
    explicit = _axes_of_type(typed.mesh, AxisType.Explicit)
    ours, types = (
        [[name for name in names if name in explicit] for names in _spec_entries(spec, ndim)]
        for spec in (given.spec, typed.spec)
    )
    if ours != types:
        raise ValueError(f"sharding= says {given.spec}, the array's type {typed.spec}")


def varying_axes(typed: Any) -> frozenset[str]:
    """Returns the Manual axes over which an array varies, by its type; none if unchecked."""
    kinds = getattr(typed, "manual_axis_type", None)  # since jax 0.10
    return typed.vma if kinds is None else kinds.varying
