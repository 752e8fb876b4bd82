"""Shardings of leaves: from the argument ``sharding``, or from the arrays themselves.

A concrete array has a sharding, and an array on Explicit mesh axes has one in its type. Under
``jax.jit`` on Auto axes the sharding is unknown until the program is compiled.
"""

import math
from collections.abc import Sequence
from typing import Any

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

from optax_muonplus._leaves.layout import MatrixLayout
from optax_muonplus._leaves.paths import Path, flatten_tree
from optax_muonplus._leaves.placement import (
    LeafSharding,
    as_named,
    axes_of_type,
    usable_axes,
    varying_axes,
)
from optax_muonplus._leaves.record import LeafInfo, ResolvedTree
from optax_muonplus._params.flatten import FlatTree, broadcast_prefix

# A tree or prefix tree of NamedSharding and None, or a function from parameters to one.
ShardingTree = Any


def broadcast_shardings(tree: FlatTree, sharding: ShardingTree) -> list[NamedSharding | None]:
    """Returns the entry of ``sharding`` for each leaf of ``tree``; None for a single device."""
    expected = "a jax.sharding.NamedSharding, or None where it is not known"
    kinds = NamedSharding | SingleDeviceSharding | None
    entries = broadcast_prefix(sharding, tree, kinds, "shardings", expected)
    return [entry if isinstance(entry, NamedSharding) else None for entry in entries]


def shard_like_params(state: Any, tree: ResolvedTree) -> Any:
    """Shards the arrays of ``state`` like the parameters at whose paths they are.

    An array may have the parameter's shape, or a number for each block of it.
    """
    # Under jax.jit on Auto axes the zeros of a state would otherwise be made on one device.
    shardings_of(tree, tree.leaves)
    params = {x.path: (x.shape, x.given_sharding) for x in tree.leaves if x.given_sharding}
    if not params:
        return state
    _check_against_arrays(tree)

    def constrain(path: Path, leaf: Any) -> Any:
        start = next((i for i in range(len(path) + 1) if path[i:] in params), None)
        if start is None:
            return leaf
        shape, sharding = params[path[start:]]
        blocks = np.shape(leaf)
        pairs = zip(shape, blocks, strict=False)
        fits = len(blocks) == len(shape) and all(n == k or (k and n % k == 0) for n, k in pairs)
        return _constrain(leaf, _over_blocks(sharding, blocks)) if fits else leaf

    paths, leaves, unflatten = flatten_tree(state)
    return unflatten(map(constrain, paths, leaves))


def shardings_of(tree: ResolvedTree, leaves: Sequence[LeafInfo]) -> list[LeafSharding | None]:
    """Returns the shardings of ``leaves``, checked; None where a sharding is not known."""
    shardings, wrong = [], []
    meshes: dict[Any, str] = {}
    for leaf in leaves:
        try:
            known = _leaf_sharding(tree.arrays[leaf.index], leaf.given_sharding, leaf.layout)
        except ValueError as error:
            wrong.append(f"{leaf.name}: {error}")
            continue
        shardings.append(known)
        if known is not None:
            sizes = tuple(known.mesh.shape.items())
            meshes.setdefault(sizes, f"{leaf.name} is on {known.mesh}")
    if len(meshes) > 1:
        wrong.append(f"all parameters must be on one mesh, but {' and '.join(meshes.values())}")
    if wrong:
        raise ValueError(f"Shardings do not fit. {'; '.join(wrong)}.")
    return shardings


def _over_blocks(given: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Returns ``given`` without axes whose shards do not divide ``shape``."""
    entries = _spec_entries(given.spec, len(shape))
    shards = (math.prod(given.mesh.shape[name] for name in names) for names in entries)
    rows = zip(shape, entries, shards, strict=True)
    kept = tuple(names if size % count == 0 else () for size, names, count in rows)
    return as_named(LeafSharding(given.mesh, kept))


def _constrain(leaf: Any, given: NamedSharding) -> Any:
    """Shards ``leaf`` over the Auto axes of ``given``; its type has the Explicit ones."""
    actual = concrete_sharding(leaf)
    auto = axes_of_type(given.mesh, AxisType.Auto)
    inside = axes_of_type(jax.typeof(leaf).sharding.mesh, AxisType.Manual)
    if not auto or inside or (actual is not None and actual.is_equivalent_to(given, leaf.ndim)):
        return leaf
    entries = LeafSharding(given.mesh, tuple(_spec_entries(given.spec)))
    return jax.lax.with_sharding_constraint(leaf, as_named(entries, [AxisType.Auto]))


def _spec_entries(spec: PartitionSpec, ndim: int = 0) -> list[tuple[str, ...]]:
    """Returns the mesh axes of each array axis, for at least ``ndim`` axes."""
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    return entries + [()] * (ndim - len(entries))


def concrete_sharding(leaf: Any) -> NamedSharding | None:
    concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return leaf.sharding if concrete and isinstance(leaf.sharding, NamedSharding) else None


def _leaf_sharding(
    x: Any, given: NamedSharding | None, layout: MatrixLayout | None
) -> LeafSharding | None:
    """Returns the sharding of a leaf; None if it is unknown or on one device."""
    typed = jax.typeof(x).sharding
    sizes = typed.mesh.shape
    varying = sorted(name for name in varying_axes(jax.typeof(x)) if sizes[name] > 1)
    explicit = axes_of_type(typed.mesh, AxisType.Explicit)
    if given is None and varying and layout is not None:
        axis = varying[0]
        raise ValueError(
            f"it varies over {', '.join(varying)}, which a surrounding jax.shard_map has taken: it"
            " may be a shard of a matrix, which has no polar factor. Average gradients first"
            " (jax.lax.pmean), and update sharded matrices outside of the shard_map. If each device"
            f" has whole matrices of its own, pass sharding=NamedSharding(mesh, P({axis!r})), or"
            " P() if the first axis (of layers or experts) is not cut"
        )
    source = given or concrete_sharding(x) or (typed if explicit else None)
    if source is None:
        return None
    # The types of the mesh axes may have changed since the argument was made.
    mesh = source.mesh if typed.mesh.empty else typed.mesh
    spec = _check_spec(source.spec, np.shape(x), mesh, layout.matrix_axes if layout else ())
    on_one_device = math.prod(mesh.shape[name] for name in usable_axes(mesh)) == 1
    return None if on_one_device and not explicit else LeafSharding(mesh, spec)


def _check_against_arrays(tree: ResolvedTree) -> None:
    wrong = []
    for leaf, x in zip(tree.leaves, tree.arrays, strict=True):
        given, actual = leaf.given_sharding, concrete_sharding(x)
        if given and actual and not actual.is_equivalent_to(given, x.ndim):
            wrong.append(f"{leaf.name} is {actual.spec}, not {given.spec}")
    if wrong:
        raise ValueError(
            f"The argument sharding disagrees with the parameters' shardings: {'; '.join(wrong)}."
            " Give the shardings that they have, or move them with jax.device_put first."
        )


def _check_spec(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, whole: Sequence[int]
) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes of each array axis, without those that ``jax.shard_map`` has taken."""
    entries, usable = _spec_entries(spec, len(shape)), usable_axes(mesh)
    if taken := {name for axis in whole for name in entries[axis]}.difference(usable):
        raise ValueError(
            f"{spec} names {', '.join(sorted(taken))}, which the mesh of the parameters lacks or a"
            " surrounding jax.shard_map has taken, and a shard of a matrix has no polar factor"
        )
    entries = tuple(tuple(name for name in names if name in usable) for names in entries)
    shards = [math.prod(mesh.shape[name] for name in names) for names in entries]
    if len(entries) > len(shape) or any(n % k for n, k in zip(shape, shards, strict=True)):
        raise ValueError(f"{spec} cuts the shape {shape} into {shards}, which do not divide it")
    return entries
