"""Where a state lies that is sharded over replicas of its parameters, as ZeRO-1 has it."""

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np
from jax.sharding import AxisType, NamedSharding

from optax_muonplus.frame import (
    LeafSharding,
    Path,
    added_axes,
    as_named,
    axes_of_type,
    flatten_tree,
    path_name,
)
from optax_muonplus.trees.flat import FlatTree
from optax_muonplus.trees.sharding import (
    ShardingTree,
    checked_sharding,
    given_shardings,
    leaf_sharding,
    mirrored,
)

# A tree as for ``sharding``, or the names of mesh axes.
StateSharding = ShardingTree | str | Sequence[str]


class Layout(NamedTuple):
    """How a parameter lies on a mesh, and what the state has for it; None is not known."""

    own: LeafSharding | None
    state: LeafSharding | None


def warn_of_moves(tree: Any, found: Sequence[Layout]) -> None:
    """Warns, naming the first leaf, where a state is more than a cut of what each device has."""
    paths, leaves, _ = flatten_tree(tree)
    moved = [
        (path_name(path), x.shape, own, state)
        for path, x, (own, state) in zip(paths, leaves, found, strict=True)
        if own and state and added_axes(state, own) is None
    ]
    if not moved:
        return
    name, shape, own, state = moved[0]
    others = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
    warnings.warn(
        f"{name}{others} would move between devices at every step, each in collectives of its own:"
        f" the parameter lies as {as_named(own).spec}, its state as {as_named(state).spec}, and a"
        " device's part of the state is not in its shard of the parameter."
        f" {_remedy(own, state, shape)}",
        stacklevel=4,
    )


def _remedy(own: LeafSharding, state: LeafSharding, shape: tuple[int, ...]) -> str:
    used = {name for names in own.spec for name in names}
    added = [[name for name in names if name not in used] for names in state.spec]
    given = ", ".join(repr(name) for names in added for name in names)
    if not given:
        return (
            "Place the state as the parameters lie, or leave out state_sharding=, which adds no"
            " mesh axis here."
        )
    behind = tuple((*names, *more) for names, more in zip(own.spec, added, strict=True))
    right = LeafSharding(own.mesh, behind)
    by_name = f"state_sharding=({given},)" if "," not in given else f"state_sharding=({given})"
    cuts = (math.prod(own.mesh.shape[name] for name in names) for names in behind)
    if any(size % cut for size, cut in zip(shape, cuts, strict=True)):
        return f"Pass {by_name}."
    return (
        "Write the added mesh axes behind those that cut the parameter:"
        f" {as_named(right).spec}; or pass {by_name}, which does so for all leaves."
    )


def layouts(
    tree: Any,
    sharding: ShardingTree,
    state_sharding: StateSharding,
    state: Any = None,
    cut: bool = False,
) -> list[Layout]:
    """How each leaf lies on a mesh, and its state.

    Args:
      tree: parameters or updates.
      sharding: of the parameters; None takes that of the arrays.
      state_sharding: of the state; None takes that of the arrays in ``state``, on Explicit axes.
      state: the state, where there is one.
      cut: whether the arrays may lie as the state already, whatever ``sharding`` says.

    Raises:
      ValueError: for shardings that do not fit a leaf, naming it, and where it is not known how a
        parameter lies.
    """
    if state_sharding is None and not any(map(_has_a_layout, jax.tree.leaves(state))):
        return [Layout(None, None)] * len(jax.tree.leaves(tree))
    flat = FlatTree.of(tree)
    paths, leaves = flat.paths, flat.arrays
    given: Sequence[NamedSharding | None] = [None] * len(paths)
    if sharding is not None:
        given = given_shardings(flat, sharding)
    axes = _axis_names(state_sharding)
    entries: Sequence[Any] = [axes] * len(paths)
    if state_sharding is None:
        entries = _of_arrays(state, paths, leaves)
    elif axes is None:
        entries = given_shardings(flat, state_sharding)
    found, wrong = [], []
    for path, x, own, entry in zip(paths, leaves, given, entries, strict=True):
        try:
            # Without a type that could disagree.
            known = jax.ShapeDtypeStruct(x.shape, x.dtype) if cut and own else x
            found.append(_layout(known, own, entry))
        except ValueError as error:
            wrong.append(f"{path_name(path)}: {error}")
    if wrong:
        raise ValueError(f"The sharding of the state does not fit. {'; '.join(wrong)}.")
    return found


def _axis_names(given: Any) -> tuple[str, ...] | None:
    """The mesh axes, if that is what was given."""
    if isinstance(given, str):
        return (given,)
    is_names = isinstance(given, list | tuple) and given and all(isinstance(x, str) for x in given)
    return tuple(given) if is_names else None


def _layout(x: Any, given: NamedSharding | None, wanted: Any) -> Layout:
    """``wanted`` is a sharding, the names of mesh axes to add to that of ``x``, or None."""
    if wanted is None:
        return Layout(None, None)
    own = leaf_sharding(x, given, None)
    if own is None:
        if given is not None or not isinstance(x, jax.core.Tracer):
            return Layout(None, None)  # one device
        raise ValueError(
            "it is not known how it lies on the mesh, since axes are Auto under jax.jit. Pass"
            " sharding= too, with the shardings of the parameters"
        )
    if isinstance(wanted, tuple):
        return Layout(own, _over(own, x.shape, wanted))
    if dict(wanted.mesh.shape) != dict(own.mesh.shape):
        raise ValueError(f"state_sharding= is on {wanted.mesh}, the parameter on {own.mesh}")
    return Layout(own, checked_sharding(wanted.spec, x.shape, own.mesh))


def _over(own: LeafSharding, shape: tuple[int, ...], axes: tuple[str, ...]) -> LeafSharding:
    """``own``, with the first axis that divides cut along ``axes`` too; unchanged if none does."""
    mesh, spec = own
    if unknown := [name for name in axes if name not in mesh.shape]:
        raise ValueError(
            f"the mesh has no axis {', '.join(unknown)}, but {', '.join(mesh.axis_names)}"
        )
    used = {name for names in spec for name in names}
    added = tuple(name for name in axes if name not in used and mesh.shape[name] > 1)
    count = math.prod(mesh.shape[name] for name in added)
    auto = set(axes_of_type(mesh, AxisType.Auto))
    for i, (size, names) in enumerate(zip(shape, spec, strict=True)):
        shards = count * math.prod(mesh.shape[name] for name in names)
        # An Explicit axis behind an Auto one is dropped by JAX.
        possible = not auto.intersection(names) or auto.issuperset(added)
        if added and possible and size and size % shards == 0:
            return LeafSharding(mesh, (*spec[:i], (*names, *added), *spec[i + 1 :]))
    return own


def _has_a_layout(x: Any) -> bool:
    """Whether the type of an array says how it lies, which it does with ``jax.jit`` and without."""
    if not isinstance(x, jax.Array):
        return False
    return bool(axes_of_type(jax.typeof(x).sharding.mesh, AxisType.Explicit))


def _of_arrays(
    state: Any, paths: Sequence[Path], leaves: Sequence[Any]
) -> list[NamedSharding | None]:
    """How the array of a state that mirrors a parameter lies, if it says so."""
    params = {path: np.shape(x) for path, x in zip(paths, leaves, strict=True)}
    found: dict[Path, NamedSharding] = {}
    state_paths, arrays, _ = flatten_tree(state)
    for path, x in zip(state_paths, arrays, strict=True):
        own = mirrored(path, params)
        if own is None or not _has_a_layout(x) or x.shape != params[own]:
            continue
        try:
            sharding = leaf_sharding(x, None, None)
        except ValueError:  # its type does not say all
            continue
        if sharding is not None:
            found.setdefault(own, as_named(sharding))
    return [found.get(path) for path in paths]
