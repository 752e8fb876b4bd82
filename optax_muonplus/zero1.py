"""The state of an optimizer, sharded over replicas of the parameters (ZeRO-1)."""

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding

from optax_muonplus._chain.checks import mask_params_like
from optax_muonplus._chain.paths import Path, flatten_tree, path_name
from optax_muonplus._chain.record import LeafSharding, as_named, axes_of_type
from optax_muonplus._execution.replicas import added_axes, gather, moved_to
from optax_muonplus._params.flatten import FlatTree
from optax_muonplus._params.sharding import (
    ShardingTree,
    broadcast_shardings,
    check_sharding,
    leaf_sharding,
    mirrored,
)

# A tree as for ``sharding``, or the names of mesh axes.
StateSharding = ShardingTree | str | Sequence[str]
# By the index of a leaf: the shardings before and after it is cut.
Moves = dict[int, tuple[LeafSharding, LeafSharding]]


class Shardings(NamedTuple):
    """The sharding of a parameter, and that of its state; None where it is not known."""

    params: LeafSharding | None
    state: LeafSharding | None


def shard_state(
    inner: optax.GradientTransformation,
    sharding: ShardingTree = None,
    state_sharding: StateSharding = None,
) -> optax.GradientTransformationExtraArgs:
    """Shards the state of any optimizer further than the parameters, as ZeRO-1 does.

    Where parameters are replicated over a mesh axis, such as ``data``, each replica keeps a part of
    the state, and updates that part: gradients and parameters are cut to it, which moves nothing,
    and the updates are gathered, all in one collective.

    :func:`optax_muonplus.muonplus` and :func:`optax_muonplus.muon` have the same two arguments. An
    optimizer of :mod:`optax_muonplus.contrib` gets ``sharding=state_layout(sharding,
    state_sharding)`` of its own, on a mesh with Auto axes.

    Args:
      inner: any transformation that needs no more than the shards of an array, or that knows
        their shardings, as all of this library do.
      sharding: of the parameters, as in :func:`optax_muonplus.muonplus`.
      state_sharding: of the state: the name of a mesh axis or several, along which the first axis
        of each parameter that divides is cut too, or a tree, prefix tree or function as
        ``sharding``. None takes the sharding of the arrays in the state, on Explicit axes. Mesh
        axes that are added in front of those that cut an axis already are possible, but each array
        is moved on its own then, which a warning says.

    Returns:
      A transformation with the state of ``inner``, which takes and gives what ``inner`` does.

    Raises:
      ValueError: at init, for shardings that do not fit a parameter, and under ``jax.jit`` on Auto
        axes without ``sharding``.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_muonplus as omp
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> everywhere = jax.NamedSharding(mesh, jax.P())
      >>> tx = omp.transforms.shard_state(optax.adam(1e-3), everywhere, "data")
      >>> state = tx.init({"up": jax.device_put(jnp.ones((4, 6)), everywhere)})
    """
    inner = optax.with_extra_args_support(inner)

    def moves(tree: Any, state: Any = None) -> Moves:
        found = find_shardings(tree, sharding, state_sharding, state)
        if state is None:
            warn_of_moves(tree, found)
        return {i: (own, cut) for i, (own, cut) in enumerate(found) if own and cut and own != cut}

    def replaced(tree: Any, arrays: dict[int, jax.Array]) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten(arrays.get(i, x) for i, x in enumerate(leaves))

    def cut_up(tree: Any, chosen: Moves) -> Any:
        leaves = jax.tree.leaves(tree)
        return replaced(tree, {i: moved_to(leaves[i], cut) for i, (_, cut) in chosen.items()})

    def init(params: optax.Params) -> optax.OptState:
        return inner.init(cut_up(params, moves(params)))

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        chosen = moves(updates, state)
        if not chosen:
            return inner.update(updates, state, params, **extra_args)
        params = mask_params_like(updates, params)
        parts = None if params is None else cut_up(params, chosen)
        new, state = inner.update(cut_up(updates, chosen), state, parts, **extra_args)
        leaves = jax.tree.leaves(new)
        own, cut = zip(*chosen.values(), strict=True)
        whole = gather([leaves[i] for i in chosen], cut, own)
        return replaced(new, dict(zip(chosen, whole, strict=True))), state

    outer = type(inner)(init, update)
    # ``links_of`` and ``describe`` read the chain's attributes.
    vars(outer).update(vars(inner))
    return outer


def state_layout(sharding: ShardingTree, state_sharding: StateSharding) -> ShardingTree:
    """Returns the sharding of the state of :func:`shard_state`, for its ``inner``'s ``sharding``.

    Both arguments are those of :func:`shard_state`.
    """
    if sharding is None or state_sharding is None:
        return sharding

    def of(tree: Any) -> Any:
        found = find_shardings(tree, sharding, state_sharding, cut=True)
        return jax.tree.structure(tree).unflatten(x.state and as_named(x.state) for x in found)

    return of


def warn_of_moves(tree: Any, found: Sequence[Shardings]) -> None:
    """Warns where a part of the state is not in the device's shard of the parameter."""
    moved = [
        (path_name(path), own, state)
        for path, (own, state) in zip(flatten_tree(tree)[0], found, strict=True)
        if own and state and added_axes(state, own) is None
    ]
    if not moved:
        return
    name, own, state = moved[0]
    used = {axis for names in own.spec for axis in names}
    added = tuple(axis for names in state.spec for axis in names if axis not in used)
    others = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
    warnings.warn(
        f"{name}{others} would move between devices at every step, each in collectives of its own:"
        f" the parameter lies as {as_named(own).spec}, its state as {as_named(state).spec}, and a"
        " device's part of the state is not in its shard of the parameter. "
        + (
            f"Pass state_sharding={added}, which adds these axes where nothing moves."
            if added
            else "Leave out state_sharding=, which adds no mesh axis here."
        ),
        stacklevel=4,
    )


def find_shardings(
    tree: Any,
    sharding: ShardingTree,
    state_sharding: StateSharding,
    state: Any = None,
    cut: bool = False,
) -> list[Shardings]:
    """Finds the shardings of each leaf of parameters or updates, and of its state.

    Without arguments they are those of the arrays, and of those in ``state`` on Explicit axes.
    Arrays that are ``cut`` may be sharded as the state already, whatever ``sharding`` says.
    """
    if state_sharding is None and not any(map(_has_a_layout, jax.tree.leaves(state))):
        return [Shardings(None, None)] * len(jax.tree.leaves(tree))
    flat = FlatTree.of(tree)
    paths, leaves = flat.paths, flat.arrays
    given: Sequence[NamedSharding | None] = [None] * len(paths)
    if sharding is not None:
        given = broadcast_shardings(flat, sharding)
    axes = _axis_names(state_sharding)
    entries: Sequence[Any] = [axes] * len(paths)
    if state_sharding is None:
        entries = _of_arrays(state, paths, leaves)
    elif axes is None:
        entries = broadcast_shardings(flat, state_sharding)
    found, wrong = [], []
    for path, x, own, entry in zip(paths, leaves, given, entries, strict=True):
        try:
            # A description has no type that could disagree.
            known = jax.ShapeDtypeStruct(x.shape, x.dtype) if cut and own else x
            found.append(_shardings(known, own, entry))
        except ValueError as error:
            wrong.append(f"{path_name(path)}: {error}")
    if wrong:
        raise ValueError(f"The sharding of the state does not fit. {'; '.join(wrong)}.")
    return found


def _axis_names(given: Any) -> tuple[str, ...] | None:
    if isinstance(given, str):
        return (given,)
    is_names = isinstance(given, list | tuple) and given and all(isinstance(x, str) for x in given)
    return tuple(given) if is_names else None


def _shardings(x: Any, given: NamedSharding | None, wanted: Any) -> Shardings:
    """Finds the shardings of one leaf: ``wanted`` is a sharding, mesh axes to add, or None."""
    if wanted is None:
        return Shardings(None, None)
    own = leaf_sharding(x, given, None)
    if own is None:
        if given is not None or not isinstance(x, jax.core.Tracer):
            return Shardings(None, None)  # one device
        raise ValueError(
            "it is not known how it lies on the mesh, since axes are Auto under jax.jit. Pass"
            " sharding= too, with the shardings of the parameters"
        )
    if isinstance(wanted, tuple):
        return Shardings(own, _over(own, x.shape, wanted))
    if dict(wanted.mesh.shape) != dict(own.mesh.shape):
        raise ValueError(f"state_sharding= is on {wanted.mesh}, the parameter on {own.mesh}")
    return Shardings(own, check_sharding(wanted.spec, x.shape, own.mesh))


def _over(own: LeafSharding, shape: tuple[int, ...], axes: tuple[str, ...]) -> LeafSharding:
    """Cuts the first axis that divides along ``axes`` too; returns ``own`` if none does."""
    mesh, spec = own
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
    if not isinstance(x, jax.Array):
        return False
    return bool(axes_of_type(jax.typeof(x).sharding.mesh, AxisType.Explicit))


def _of_arrays(
    state: Any, paths: Sequence[Path], leaves: Sequence[Any]
) -> list[NamedSharding | None]:
    """Finds for each parameter the sharding of the first array of the state that mirrors it."""
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
