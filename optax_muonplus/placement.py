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

from optax_muonplus.paths import Path, by_path, flatten_with_names, path_name

# A tree or prefix tree of NamedSharding and None, or a function from parameters to one.
ShardingTree = Any


class Home(NamedTuple):
    """Where one parameter lies.

    Attributes:
      mesh: the mesh.
      axes: for each axis of the parameter the mesh axes that it is cut along, major first. Mesh
        axes of size 1 are left out.
    """

    mesh: Mesh | AbstractMesh
    axes: tuple[tuple[str, ...], ...]


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
        for mark in marks
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
        shape, given = next((shapes[s] for s in suffixes if s in shapes), (None, None))
        return jax.lax.with_sharding_constraint(leaf, given) if np.shape(leaf) == shape else leaf

    if not shapes:
        return state
    names, values = flatten_with_names(state)
    done = [settled(path, value) for path, value in zip(names, values, strict=True)]
    return jax.tree_util.tree_structure(state).unflatten(done)


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
    return tuple(
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind != AxisType.Manual
    )


def _own(leaf: Any) -> NamedSharding | None:
    """The sharding of a concrete array."""
    if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array):
        return None
    return leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None


def _axes(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh | AbstractMesh
) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each axis, those of size 1 left out."""
    if len(spec) > len(shape):
        raise ValueError(f"{spec} has more entries than the shape {shape} has axes")
    found = []
    for size, entry in zip(shape, (*spec, *[None] * (len(shape) - len(spec))), strict=True):
        if entry is PartitionSpec.UNCONSTRAINED:
            raise ValueError(f"{spec} leaves an axis unconstrained; say how it is sharded")
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        taken = [name for name in names if name not in usable_axes(mesh)]
        if taken:
            raise ValueError(
                f"{spec} names {', '.join(taken)}, over which a surrounding jax.shard_map works;"
                " the arrays inside are single shards, and a shard of a matrix has no polar factor"
            )
        names = tuple(name for name in names if mesh.shape[name] > 1)
        shards = math.prod(mesh.shape[name] for name in names)
        if size % shards:
            raise ValueError(f"{spec} cuts an axis of {shape}, of size {size}, into {shards}")
        found.append(names)
    return tuple(found)


def _check_fully_typed(typed: NamedSharding) -> None:
    mesh = typed.mesh
    unknown = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto and mesh.shape[name] > 1
    ]
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
    mesh = typed.mesh
    explicit = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }

    def seen(spec: PartitionSpec) -> list[tuple[str, ...]]:
        entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
        entries += [()] * (ndim - len(entries))
        return [tuple(name for name in entry if name in explicit) for entry in entries]

    if seen(given.spec) != seen(typed.spec):
        raise ValueError(f"sharding= says {given.spec}, the array's type {typed.spec}")
