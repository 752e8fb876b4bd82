"""The state of an optimizer, sharded over replicas of the parameters (ZeRO-1)."""

from typing import Any

import jax
import optax

from optax_muonplus.frame import LeafSharding, as_named, beside_updates, flatten_tree
from optax_muonplus.run import gather, moved_to
from optax_muonplus.trees import ShardingTree, StateSharding, layouts, warn_of_moves

# By index of a leaf whence and where to it is cut.
Moves = dict[int, tuple[LeafSharding, LeafSharding]]


def shard_state(
    inner: optax.GradientTransformation,
    sharding: ShardingTree = None,
    state_sharding: StateSharding = None,
) -> optax.GradientTransformationExtraArgs:
    """Shards the state of any optimizer further than the parameters, as ZeRO-1 does.

    Where parameters are replicated over a mesh axis, such as ``data``, each replica keeps a part of
    the state, and updates that part: gradients and parameters are cut to it, which moves nothing,
    and the updates are gathered, all in one collective. In one program with the gradients' mean
    over replicas the compiler can make a reduce-scatter of the mean and the cut.

    :func:`optax_muonplus.muonplus` and :func:`optax_muonplus.muon` have the same two arguments. An
    optimizer of :mod:`optax_muonplus.baselines` gets ``sharding=state_layout(sharding,
    state_sharding)`` of its own, on a mesh with Auto axes.

    Args:
      inner: any transformation that needs no more than the shards of an array, or that knows how
        they lie, as all of this library do.
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
        found = layouts(tree, sharding, state_sharding, state)
        if state is None:
            warn_of_moves(tree, found)
        return {i: (own, cut) for i, (own, cut) in enumerate(found) if own and cut and own != cut}

    def replaced(tree: Any, arrays: dict[int, jax.Array]) -> Any:
        _, leaves, unflatten = flatten_tree(tree)
        return unflatten(arrays.get(i, x) for i, x in enumerate(leaves))

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
        params = beside_updates(updates, params)
        parts = None if params is None else cut_up(params, chosen)
        new, state = inner.update(cut_up(updates, chosen), state, parts, **extra_args)
        leaves = jax.tree.leaves(new)
        own, cut = zip(*chosen.values(), strict=True)
        whole = gather([leaves[i] for i in chosen], cut, own)
        return replaced(new, dict(zip(chosen, whole, strict=True))), state

    outer = type(inner)(init, update)
    # What this library keeps of its chains, for what looks into them.
    vars(outer).update(vars(inner))
    return outer


def state_layout(sharding: ShardingTree, state_sharding: StateSharding) -> ShardingTree:
    """How the state of :func:`shard_state` lies, as the argument ``sharding`` of its ``inner``.

    Args:
      sharding: as in :func:`shard_state`, like the next; None where arrays tell.
      state_sharding: the sharding of the state.
    """
    if sharding is None or state_sharding is None:
        return sharding

    def of(tree: Any) -> Any:
        found = layouts(tree, sharding, state_sharding, cut=True)
        _, _, unflatten = flatten_tree(tree)
        return unflatten(x.state and as_named(x.state) for x in found)

    return of
