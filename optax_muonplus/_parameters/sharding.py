"""How leaves lie on a mesh: from the argument ``sharding``, or from the arrays themselves.

An array says how it is sharded if it is concrete, or if the axes of its mesh are Explicit, which
makes its sharding a part of its type. Under ``jax.jit`` on Auto axes it is not known before the
program is compiled.
"""

import math
from collections.abc import Sequence
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

from optax_muonplus._parameters.paths import Path, by_path
from optax_muonplus._xla.sharding import varying_axes

# A tree or prefix tree of NamedSharding and None, or a function from parameters to one.
ShardingTree = Any


class LeafSharding(NamedTuple):
    """How one leaf lies on a mesh.

    Attributes:
      mesh: the mesh.
      spec: for each axis of the leaf the mesh axes that it is sharded over, major first.
    """

    mesh: Mesh | AbstractMesh
    spec: tuple[tuple[str, ...], ...]

    @property
    def sharded_axes(self) -> tuple[tuple[str, ...], ...]:
        """``spec`` without mesh axes of size 1."""
        return tuple(
            tuple(name for name in names if self.mesh.shape[name] > 1) for names in self.spec
        )


def leaf_shardings(
    names: Sequence[str],
    leaves: Sequence[Any],
    given: Sequence[NamedSharding | None],
    whole_axes: Sequence[Sequence[int]],
) -> list[LeafSharding | None]:
    """How each leaf lies on a mesh; None where that is not known, or on one device.

    Args:
      names: of the leaves, for messages.
      leaves: parameters or updates.
      given: for each leaf its entry in the argument ``sharding``.
      whole_axes: for each leaf the axes that a surrounding ``jax.shard_map`` must not have cut.

    Raises:
      ValueError: naming the leaves whose sharding cannot be, is not that of the array's type, or is
        known in part only, and those that may be shards of a matrix; if leaves lie on different
        meshes.
    """
    shardings: list[LeafSharding | None] = []
    meshes: dict[Any, str] = {}
    wrong = []
    for name, leaf, argument, whole in zip(names, leaves, given, whole_axes, strict=True):
        try:
            _check_varying(leaf, argument, whole)
            known = _leaf_sharding(leaf, argument, whole)
        except ValueError as error:
            wrong.append(f"{name}: {error}")
            continue
        shardings.append(known)
        if known is not None:
            meshes.setdefault(tuple(known.mesh.shape.items()), f"{name} is on {known.mesh}")
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
    entries = by_path(
        sharding,
        tree,
        paths,
        lambda x: isinstance(x, NamedSharding | SingleDeviceSharding),
        "shardings",
        "a jax.sharding.NamedSharding, or None where it is not known",
    )
    return [entry if isinstance(entry, NamedSharding) else None for entry in entries]


def check_given_shardings(
    names: Sequence[str], leaves: Sequence[Any], given: Sequence[NamedSharding | None]
) -> None:
    """Raises ValueError where ``leaves`` lie elsewhere than the argument ``sharding`` says."""
    wrong = [
        f"{name} is {actual.spec}, not {argument.spec}"
        for name, leaf, argument in zip(names, leaves, given, strict=True)
        if argument is not None
        and (actual := concrete_sharding(leaf)) is not None
        and not actual.is_equivalent_to(argument, leaf.ndim)
    ]
    if wrong:
        raise ValueError(
            f"The argument sharding says otherwise than the parameters: {'; '.join(wrong)}. Give"
            " the shardings that they have, or move them with jax.device_put first."
        )


def spec_entries(spec: PartitionSpec, ndim: int = 0) -> list[tuple[str, ...]]:
    """The mesh axes of each axis, of ``ndim`` axes at least."""
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    return entries + [()] * (ndim - len(entries))


def axes_of_type(mesh: Mesh | AbstractMesh, kind: AxisType) -> tuple[str, ...]:
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, axis_type in pairs if axis_type == kind)


def _leaf_sharding(
    leaf: Any, given: NamedSharding | None, whole: Sequence[int]
) -> LeafSharding | None:
    concrete, typed = concrete_sharding(leaf), jax.typeof(leaf).sharding
    explicit = AxisType.Explicit in typed.mesh.axis_types
    source = given or concrete
    if given is not None:
        _check_against_type(given, typed, np.ndim(leaf))
    elif concrete is None and explicit:
        _check_fully_typed(typed)
        source = typed
    if source is None:
        return None
    # The same axes may be of other types where the array is used than where the argument was made.
    mesh = source.mesh if typed.mesh.empty else typed.mesh
    spec = _checked_spec(source.spec, np.shape(leaf), mesh, whole)
    if not explicit and math.prod(mesh.shape[name] for name in usable_axes(mesh)) == 1:
        return None
    return LeafSharding(mesh, spec)


def usable_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes that no surrounding ``jax.shard_map`` has taken."""
    taken = axes_of_type(mesh, AxisType.Manual)
    return tuple(name for name in mesh.axis_names if name not in taken)


def concrete_sharding(leaf: Any) -> NamedSharding | None:
    """The sharding of a concrete array."""
    if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array):
        return None
    return leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None


def _check_varying(leaf: Any, given: NamedSharding | None, whole: Sequence[int]) -> None:
    """Raises ValueError if ``leaf`` may be a shard of a matrix, and nobody says that it is none."""
    if given is not None or not whole:
        return
    typed = jax.typeof(leaf)
    varying = sorted(name for name in varying_axes(typed) if typed.sharding.mesh.shape[name] > 1)
    if varying:
        axes = ", ".join(varying)
        raise ValueError(
            f"it varies over {axes}, which a surrounding jax.shard_map has taken, so that it may be"
            " a shard of a matrix, and a shard of a matrix has no polar factor. Average gradients"
            " first (jax.lax.pmean); update matrices that are cut outside of the shard_map. Where"
            " each device has whole matrices of its own, say so: sharding=NamedSharding(mesh,"
            f" P({varying[0]!r})) if the first axis, of layers or experts, is cut, P() if none is"
        )


def _checked_spec(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, whole: Sequence[int]
) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each axis that no ``jax.shard_map`` has taken, checked."""
    if len(spec) > len(shape):
        raise ValueError(f"{spec} has more entries than the shape {shape} has axes")
    if PartitionSpec.UNCONSTRAINED in spec:
        raise ValueError(f"{spec} leaves an axis unconstrained; say how it is sharded")
    entries = spec_entries(spec, len(shape))
    usable = usable_axes(mesh)
    taken = {name for axis in whole for name in entries[axis]} - set(usable)
    if taken:
        raise ValueError(
            f"{spec} names {', '.join(sorted(taken))}, which a surrounding jax.shard_map has taken;"
            " arrays inside of it are single shards, and a shard of a matrix has no polar factor"
        )
    entries = [tuple(name for name in names if name in usable) for names in entries]
    explicit = axes_of_type(mesh, AxisType.Explicit)
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
    auto = axes_of_type(typed.mesh, AxisType.Auto)
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
    explicit = axes_of_type(typed.mesh, AxisType.Explicit)

    def seen(spec: PartitionSpec) -> list[tuple[str, ...]]:
        return [tuple(n for n in names if n in explicit) for names in spec_entries(spec, ndim)]

    if seen(given.spec) != seen(typed.spec):
        raise ValueError(f"sharding= says {given.spec}, the array's type {typed.spec}")
