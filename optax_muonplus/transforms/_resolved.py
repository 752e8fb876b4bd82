"""Transformations that look up what each leaf of a tree is, once at init and once at an update."""

import contextvars
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import optax

from optax_muonplus.frame import (
    DimensionNumbersTree,
    ResolvedTree,
    StateCheck,
    beside_updates,
    check_gradients,
    check_inexact,
)
from optax_muonplus.trees import (
    ShardingTree,
    all_shardings,
    check_given_shardings,
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


@dataclasses.dataclass(frozen=True, eq=False)
class Resolved:
    """Looks up what each leaf is, and hands the records to a chain.

    Leaves are looked up anew on the whole tree at init and at every update, by path and shape: the
    containers may differ between the two (``flax.nnx.Optimizer`` gives variables first and plain
    arrays later), and no tree of labels is kept.

    Attributes:
      start: from parameters and their records to the state.
      step: from updates, state, parameters, records of the updates and extra arguments to updates
        and state.
      dimension_numbers: as in :func:`optax_muonplus.muonplus`.
      sharding: as there. The state is sharded like the parameters.
    """

    start: Callable[[optax.Params, ResolvedTree], Any]
    step: Callable[..., tuple[optax.Updates, Any]]
    dimension_numbers: DimensionNumbersTree
    sharding: ShardingTree

    def transformation(self, cls: type[Made], parts: tuple[Any, ...]) -> Made:
        """Returns the transformation of the chain that is made of ``parts``."""
        check = StateCheck(self.init)
        made = cls(check.init, functools.partial(self.update, check))
        made.parts = parts
        made.weight_dimension_numbers, made.sharding = self.dimension_numbers, self.sharding
        return made

    def init(self, params: optax.Params) -> optax.OptState:
        """Returns the state before the first update."""
        tree = self._looked_up(params)
        check_inexact(tree.leaves)
        return _as_params_lie(self._inside(self.start, params, tree), tree)

    def update(
        self,
        check: StateCheck,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        """Returns the updates and the new state."""
        check_gradients(updates, params)
        params = beside_updates(updates, params)
        check(state, updates, params)
        tree = self._looked_up(updates)
        return self._inside(self.step, updates, state, params, tree, extra_args)

    @property
    def _own(self) -> bool:
        return self.dimension_numbers is not None or self.sharding is not None

    def _looked_up(self, tree: Any) -> ResolvedTree:
        if _in_a_chain.get() and not self._own:
            raise ValueError(
                "A link of optax_muonplus inside of optax.chain, or of another wrapper, does not"
                " get the dimension numbers and the sharding of the optimizer around it. Make the"
                " chain with optax_muonplus.matrix_chain(...), which hands them to all links."
            )
        return resolve(tree, self.dimension_numbers, self.sharding)

    def _inside(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns ``function(*args)``; links in it that look up leaves themselves are refused."""
        token = _in_a_chain.set(self._own or _in_a_chain.get())
        try:
            return function(*args)
        finally:
            _in_a_chain.reset(token)


def _as_params_lie(state: Any, tree: ResolvedTree) -> Any:
    """Returns ``state`` sharded like the parameters, after a check that shardings fit them."""
    given = [leaf.given_sharding for leaf in tree.leaves]
    all_shardings(tree)
    check_given_shardings([leaf.name for leaf in tree.leaves], tree.arrays, given)
    paths, shapes = [x.path for x in tree.leaves], [x.shape for x in tree.leaves]
    return shard_like_params(state, paths, shapes, given)
