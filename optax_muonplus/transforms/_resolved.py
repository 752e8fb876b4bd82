"""Transformations that look up what each leaf of a tree is, once at init and once at an update."""

import contextvars
from collections.abc import Callable
from typing import Any, TypeVar

import optax

from optax_muonplus.frame import DimensionNumbersTree, ResolvedTree
from optax_muonplus.transforms._qk_clip import not_clipped
from optax_muonplus.transforms._state_check import update_own_state
from optax_muonplus.trees import (
    ShardingTree,
    all_shardings,
    beside_updates,
    check_given_shardings,
    check_gradients,
    check_inexact,
    resolve,
    shard_like_params,
)

# Whether a chain runs whose dimension numbers or sharding its Optax links cannot see.
_in_a_chain = contextvars.ContextVar("_in_a_chain", default=False)


class ChainTransformation(optax.GradientTransformationExtraArgs):
    """A transformation with a chain of links in it.

    Attributes:
      parts: what the chain is made of, in order.
      weight_dimension_numbers: as given.
      sharding: as given.
    """

    parts: tuple[Any, ...]
    weight_dimension_numbers: DimensionNumbersTree
    sharding: ShardingTree


Made = TypeVar("Made", bound=ChainTransformation)


def for_resolved(
    cls: type[Made],
    parts: tuple[Any, ...],
    init: Callable[[optax.Params, ResolvedTree], Any],
    update: Callable[..., tuple[optax.Updates, Any]],
    dimension_numbers: DimensionNumbersTree,
    sharding: ShardingTree,
) -> Made:
    """A transformation that knows what each leaf is.

    Leaves are looked up anew on the whole tree at init and at every update, by path and shape: the
    containers may differ between the two (``flax.nnx.Optimizer`` gives variables first and plain
    arrays later), and no tree of labels is kept.

    Args:
      cls: class of the transformation.
      parts: of its chain.
      init: from parameters and their records to the state.
      update: from updates, state, parameters, records of the updates and extra arguments to updates
        and state.
      dimension_numbers: as in :func:`optax_muonplus.muonplus`.
      sharding: as there. The state is sharded like the parameters.
    """
    own = dimension_numbers is not None or sharding is not None

    def init_fn(params: optax.Params) -> optax.OptState:
        tree = looked_up(params)
        check_inexact(tree.leaves)
        return _as_params_lie(_inside(own, init, params, tree), tree)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        check_gradients(not_clipped(updates), params)
        tree = looked_up(updates)
        params = beside_updates(updates, params)
        return update_own_state(
            lambda: _inside(own, update, updates, state, params, tree, extra_args),
            lambda like: init(like, looked_up(like)),
            updates,
            params,
            state,
        )

    def looked_up(tree: Any) -> ResolvedTree:
        if _in_a_chain.get() and not own:
            raise ValueError(
                "A link of optax_muonplus inside of optax.chain, or of another wrapper, does not"
                " get the dimension numbers and the sharding of the optimizer around it. Make the"
                " chain with optax_muonplus.matrix_chain(...), which hands them to all links."
            )
        return resolve(tree, dimension_numbers, sharding)

    transformation = cls(init_fn, update_fn)
    transformation.parts = parts
    transformation.weight_dimension_numbers, transformation.sharding = dimension_numbers, sharding
    return transformation


def _as_params_lie(state: Any, tree: ResolvedTree) -> Any:
    """Returns ``state`` sharded like the parameters, after a check that shardings fit them."""
    given = [leaf.given_sharding for leaf in tree.leaves]
    all_shardings(tree)
    check_given_shardings([leaf.name for leaf in tree.leaves], tree.arrays, given)
    paths, shapes = [x.path for x in tree.leaves], [x.shape for x in tree.leaves]
    return shard_like_params(state, paths, shapes, given)


def _inside(own: bool, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, in which links that look up leaves for themselves are refused."""
    token = _in_a_chain.set(own or _in_a_chain.get())
    try:
        return function(*args)
    finally:
        _in_a_chain.reset(token)
