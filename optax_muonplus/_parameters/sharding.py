"""Where parameters lie on a mesh: from the argument ``sharding``, or from the arrays themselves.

An array says where it lies if it is concrete, or if the axes of its mesh are Explicit, which makes
its sharding a part of its type. Under ``jax.jit`` on Auto axes nobody knows before the program is
compiled.
"""

import collections
import math
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

from optax_muonplus._parameters.paths import Path, by_path, flatten_with_names, path_name

# A tree or prefix tree of NamedSharding and None, or a function from parameters to one.
ShardingTree = Any


class Home(NamedTuple):
    """Where one parameter lies.

    Attributes:
      mesh: the mesh.
      spec: for each axis of the parameter the mesh axes that it is cut along, major first.
    """

    mesh: Mesh | AbstractMesh
    spec: tuple[tuple[str, ...], ...]

    @property
    def cuts(self) -> tuple[tuple[str, ...], ...]:
        """``spec`` without mesh axes of size 1."""
        return tuple(
            tuple(name for name in names if self.mesh.shape[name] > 1) for names in self.spec
        )


def homes(tree: Any, sharding: ShardingTree = None) -> list[Home | None]:
    """The home of each leaf of ``tree``, in order; None where nobody knows, or on one device.

    Args:
      tree: parameters or updates.
      sharding: see :func:`optax_muonplus.muonplus`.

    Raises:
      ValueError: naming the leaves whose sharding cannot be, is not that of the array's type, or is
        known in part only; if leaves lie on different meshes.
    """
    names, leaves = flatten_with_names(tree)
    found: list[Home | None] = []
    meshes: dict[Any, str] = {}
    wrong = []
    for path, leaf, given in zip(names, leaves, given_shardings(tree, sharding), strict=True):
        name = path_name(path)
        try:
            home = _home(leaf, given)
        except ValueError as error:
            wrong.append(f"{name}: {error}")
            continue
        found.append(home)
        if home is not None:
            meshes.setdefault(tuple(home.mesh.shape.items()), f"{name} is on {home.mesh}")
    if len(meshes) > 1:
        wrong.append(f"all parameters must be on one mesh, but {' and '.join(meshes.values())}")
    if wrong:
        raise ValueError(f"Shardings do not fit. {'; '.join(wrong)}.")
    return found


def given_shardings(tree: Any, sharding: ShardingTree) -> list[NamedSharding | None]:
    """The entry of ``sharding`` for each leaf of ``tree``; a single device is no entry."""
    if sharding is None:
        return [None] * len(flatten_with_names(tree)[0])
    entries = by_path(
        sharding,
        tree,
        lambda x: isinstance(x, NamedSharding | SingleDeviceSharding),
        "shardings",
        "a jax.sharding.NamedSharding, or None where it is not known",
    )
    return [entry if isinstance(entry, NamedSharding) else None for entry in entries]


def sharding_by_label(tree: Any, sharding: ShardingTree, labels: Any) -> dict[str, ShardingTree]:
    """For each label of ``tree`` the part of ``sharding`` that is for its leaves."""
    given = given_shardings(tree, sharding)
    treedef = jax.tree_util.tree_structure(tree)
    marks = treedef.flatten_up_to(labels)
    parts = {
        mark: [x if own == mark else None for x, own in zip(given, marks, strict=True)]
        for mark in set(marks)
    }
    return collections.defaultdict(
        lambda: None,
        {mark: treedef.unflatten(part) for mark, part in parts.items() if any(part)},
    )


def check_sharding(params: Any, sharding: ShardingTree) -> None:
    """Raises ValueError as :func:`homes`, and where ``params`` lie elsewhere than they should."""
    homes(params, sharding)
    names, leaves = flatten_with_names(params)
    wrong = [
        f"{path_name(path)} is {own.spec}, not {given.spec}"
        for path, leaf, given in zip(names, leaves, given_shardings(params, sharding), strict=True)
        if given is not None
        and (own := _own(leaf)) is not None
        and not own.is_equivalent_to(given, leaf.ndim)
    ]
    if wrong:
        raise ValueError(
            f"The argument sharding says otherwise than the parameters: {'; '.join(wrong)}. Give"
            " the shardings that they have, or move them with jax.device_put first."
        )


def settle(state: Any, params: Any, sharding: ShardingTree) -> Any:
    """``state`` with what has a parameter's path and shape sharded as that parameter.

    Under ``jax.jit`` on Auto axes the zeros of a state would else be made on one device.
    """
    paths, leaves = flatten_with_names(params)
    shapes = {
        path: (np.shape(leaf), given)
        for path, leaf, given in zip(paths, leaves, given_shardings(params, sharding), strict=True)
        if given is not None
    }

    def settled(path: Path, leaf: Any) -> Any:
        suffixes = (path[i:] for i in range(len(path) + 1))
        own = next((shapes[s] for s in suffixes if s in shapes), None)
        if own is None or np.shape(leaf) != own[0]:
            return leaf
        return _constrained(leaf, own[1])

    if not shapes:
        return state
    names, values = flatten_with_names(state)
    done = [settled(path, value) for path, value in zip(names, values, strict=True)]
    return jax.tree_util.tree_structure(state).unflatten(done)


def _constrained(leaf: Any, given: NamedSharding) -> Any:
    """``leaf`` cut along the Auto axes of ``given``; along Explicit ones it is by its type."""
    own = _own(leaf)
    auto = _axes_of_type(given.mesh, AxisType.Auto)
    inside = _axes_of_type(jax.typeof(leaf).sharding.mesh, AxisType.Manual)
    if not auto or inside or (own is not None and own.is_equivalent_to(given, leaf.ndim)):
        return leaf
    spec = [tuple(name for name in names if name in auto) for names in _entries(given.spec)]
    return jax.lax.with_sharding_constraint(leaf, NamedSharding(given.mesh, PartitionSpec(*spec)))


def _entries(spec: PartitionSpec, ndim: int = 0) -> list[tuple[str, ...]]:
    """The mesh axes of each axis, of ``ndim`` axes at least."""
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    return entries + [()] * (ndim - len(entries))


def _axes_of_type(mesh: Mesh | AbstractMesh, kind: AxisType) -> tuple[str, ...]:
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, own in pairs if own == kind)


def _home(leaf: Any, given: NamedSharding | None) -> Home | None:
    own, typed = _own(leaf), jax.typeof(leaf).sharding
    explicit = AxisType.Explicit in typed.mesh.axis_types
    source = given or own
    if given is not None:
        _check_against_type(given, typed, np.ndim(leaf))
    elif own is None and explicit:
        _check_fully_typed(typed)
        source = typed
    if source is None:
        return None
    # The same axes may be of other types where the array is used than where the argument was made.
    mesh = source.mesh if typed.mesh.empty else typed.mesh
    axes = _axes(source.spec, np.shape(leaf), mesh)
    if not explicit and math.prod(mesh.shape[name] for name in usable_axes(mesh)) == 1:
        return None
    return Home(mesh, axes)


def usable_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes that no surrounding ``jax.shard_map`` has taken."""
    taken = _axes_of_type(mesh, AxisType.Manual)
    return tuple(name for name in mesh.axis_names if name not in taken)


def _own(leaf: Any) -> NamedSharding | None:
    """The sharding of a concrete array."""
    if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array):
        return None
    return leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None


def _axes(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh | AbstractMesh
) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each axis, checked."""
    if len(spec) > len(shape):
        raise ValueError(f"{spec} has more entries than the shape {shape} has axes")
    if PartitionSpec.UNCONSTRAINED in spec:
        raise ValueError(f"{spec} leaves an axis unconstrained; say how it is sharded")
    entries = _entries(spec, len(shape))
    taken = {name for names in entries for name in names} - set(usable_axes(mesh))
    if taken:
        raise ValueError(
            f"{spec} names {', '.join(sorted(taken))}, which a surrounding jax.shard_map has taken;"
            " arrays inside of it are single shards, and a shard of a matrix has no polar factor"
        )
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


def _check_fully_typed(typed: NamedSharding) -> None:
    auto = _axes_of_type(typed.mesh, AxisType.Auto)
    unknown = [name for name in auto if typed.mesh.shape[name] > 1]
    if unknown:
        raise ValueError(
            f"its type says {typed.spec}, but nothing about {', '.join(unknown)}, which are Auto"
            " beside Explicit axes. Pass sharding=, or make all axes of the mesh Explicit"
        )


def _check_against_type(given: NamedSharding, typed: NamedSharding, ndim: int) -> None:
    """Raises ValueError unless what ``typed`` says is also what ``given`` says."""
    if typed.mesh.empty:
        return
    if dict(given.mesh.shape) != dict(typed.mesh.shape):
        raise ValueError(f"sharding= is on {given.mesh}, the array on {typed.mesh}")
    explicit = _axes_of_type(typed.mesh, AxisType.Explicit)

    def seen(spec: PartitionSpec) -> list[tuple[str, ...]]:
        return [tuple(n for n in names if n in explicit) for names in _entries(spec, ndim)]

    if seen(given.spec) != seen(typed.spec):
        raise ValueError(f"sharding= says {given.spec}, the array's type {typed.spec}")
