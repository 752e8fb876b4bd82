"""The state of an optimizer, sharded over replicas of the parameters (ZeRO-1)."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import optax
from jax.sharding import AxisType

from optax_muonplus._chain.chain import ChainTransformation
from optax_muonplus._chain.checks import mask_params_like
from optax_muonplus._execution.mesh.replicas import Cut, cut_to, gather
from optax_muonplus._leaves.placement import LeafSharding, as_named, axes_of_type
from optax_muonplus._leaves.record import ResolvedTree
from optax_muonplus._params.flatten import FlatTree
from optax_muonplus._params.sharding import (
    ShardingTree,
    broadcast_shardings,
    concrete_sharding,
    shardings_of,
)

StateSharding = str | Sequence[str]  # names of mesh axes


def shard_state(
    inner: optax.GradientTransformation,
    sharding: ShardingTree,
    state_sharding: StateSharding,
) -> optax.GradientTransformationExtraArgs:
    """Shards the state of any optimizer further than the parameters, as ZeRO-1 does.

    Where parameters are replicated over a mesh axis, such as ``data``, each replica keeps one part
    of the state and updates that part. Gradients and parameters are cut to it, which moves nothing.
    One collective gathers the updates.

    :func:`optax_muonplus.muonplus` and :func:`optax_muonplus.muon` have the same two arguments. On
    a mesh with Auto axes, an optimizer of :mod:`optax_muonplus.contrib` takes
    ``sharding=state_layout(sharding, state_sharding)`` itself.

    Args:
      inner: any transformation that works on shards alone, or that knows their shardings, as all of
        this library do.
      sharding: of the parameters, as in :func:`optax_muonplus.muonplus`.
      state_sharding: the name of a mesh axis, or several. They also cut the first axis of each
        parameter that they divide.

    Returns:
      A transformation with the state and arguments of ``inner``.

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

    def find_cuts(tree: Any) -> dict[int, Cut]:
        found = _find_cuts(tree, sharding, state_sharding)
        return {i: cut for i, cut in enumerate(found) if cut and cut.names}

    def cut_up(tree: Any, cuts: dict[int, Cut]) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        parts = (cut_to(x, cuts[i].sharding) if i in cuts else x for i, x in enumerate(leaves))
        return structure.unflatten(parts)

    def init(params: Any) -> Any:
        return inner.init(cut_up(params, find_cuts(params)))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        cuts = find_cuts(updates)
        if not cuts:
            return inner.update(updates, state, params, **extra_args)
        params = cut_up(mask_params_like(updates, params), cuts)
        new, state = inner.update(cut_up(updates, cuts), state, params, **extra_args)
        leaves, structure = jax.tree.flatten(new)
        whole = gather([leaves[i] for i in cuts], tuple(cuts.values()))
        for i, x in zip(cuts, whole, strict=True):
            leaves[i] = x
        return structure.unflatten(leaves), state

    if isinstance(inner, ChainTransformation):
        return ChainTransformation(init, update, inner.chain, inner.where)
    return optax.GradientTransformationExtraArgs(init, update)


def state_layout(sharding: ShardingTree, state_sharding: StateSharding) -> ShardingTree:
    """Returns the sharding of the state of :func:`shard_state`, whose two arguments it takes."""
    if sharding is None:
        return None

    def of(tree: Any) -> Any:
        # Arrays may already be cut like the state; a description has no type that disagrees.
        described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        found = _find_cuts(described, sharding, state_sharding)
        return jax.tree.structure(tree).unflatten(cut and as_named(cut.sharding) for cut in found)

    return of


def _find_cuts(
    tree: Any, sharding: ShardingTree, state_sharding: StateSharding
) -> list[Cut | None]:
    """Finds for each leaf how its state is cut; None on one device."""
    flat = FlatTree.of(tree)
    names = (state_sharding,) if isinstance(state_sharding, str) else tuple(state_sharding)
    leaves = flat.records()
    if sharding is not None:
        given = broadcast_shardings(flat, sharding)
        leaves = [x._replace(given_sharding=entry) for x, entry in zip(leaves, given, strict=True)]
    known = shardings_of(ResolvedTree(leaves, flat.arrays, flat.unflatten, None), leaves)
    traced = any(isinstance(x, jax.core.Tracer) for x in flat.arrays)
    lying = (*known, *(x.given_sharding for x in leaves), *map(concrete_sharding, flat.arrays))
    axes = {name for x in lying if x is not None for name in x.mesh.axis_names}
    if sharding is None and None in known and traced:
        raise ValueError(
            "The shardings of parameters are not known: under jax.jit, arrays on Auto axes have"
            " none. Pass sharding= too."
        )
    if axes and not axes.issuperset(names):  # on one device there may be no mesh
        raise ValueError(
            f"state_sharding={state_sharding!r} must name axes of the mesh: {sorted(axes)}."
        )
    pairs = zip(leaves, known, strict=True)
    return [None if whole is None else _cut(whole, leaf.shape, names) for leaf, whole in pairs]


def _cut(whole: LeafSharding, shape: tuple[int, ...], names: tuple[str, ...]) -> Cut:
    """Cuts the first axis that ``names`` divide too, if there is one."""
    mesh, spec = whole
    used = {name for entry in spec for name in entry}
    added = tuple(name for name in names if name not in used and mesh.shape[name] > 1)
    auto = set(axes_of_type(mesh, AxisType.Auto))
    for axis, (size, entry) in enumerate(zip(shape, spec, strict=True)):
        shards = math.prod(mesh.shape[name] for name in entry + added)
        # JAX drops an Explicit axis behind an Auto one.
        possible = not auto.intersection(entry) or auto.issuperset(added)
        if possible and size and size % shards == 0:
            return Cut(whole, axis, added)
    return Cut(whole, 0, ())
