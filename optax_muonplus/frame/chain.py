"""A chain of links, each of which receives the records of the matrices."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax

from optax_muonplus.frame.checks import (
    beside_updates,
    check_gradients,
    check_inexact,
    check_no_gradient_is_none,
    check_only_matrices,
)
from optax_muonplus.frame.fused import FusedLink
from optax_muonplus.frame.leaves import LeafInfo, ResolvedTree
from optax_muonplus.frame.momentum import Momentum
from optax_muonplus.frame.plainly import Run, plainly
from optax_muonplus.frame.program import DualNorm
from optax_muonplus.messages import check_leaves, check_state
from optax_muonplus.method import MatrixFunction, narrowed


class Link(Protocol):
    """A link of a chain with a state of its own, which receives the records of matrices."""

    def init(self, params: optax.Params, leaves: Sequence[LeafInfo]) -> Any:
        """Returns the state before the first update.

        Args:
          params: parameters.
          leaves: one record for each of their leaves, all matrices.
        """
        ...

    def update(
        self, updates: optax.Updates, state: Any, params: Any, leaves: Sequence[LeafInfo]
    ) -> tuple[optax.Updates, Any]:
        """Returns the updates and the new state.

        Args:
          updates: of the link before, not rounded to the dtype of the gradients.
          state: before the update.
          params: parameters, or None.
          leaves: one record for each leaf of ``updates``, all matrices.
        """
        ...


# A part of a chain. A function on matrices is any callable on arrays (*batch, out, in).
Part = (
    Momentum
    | MatrixFunction
    | DualNorm
    | Callable[[jax.Array], jax.Array]
    | Link
    | optax.GradientTransformation
)


class Resolver(Protocol):
    """Says which leaves of a tree are matrices, and how they are sharded, as a user says."""

    @property
    def dimension_numbers(self) -> Any: ...
    @property
    def sharding(self) -> Any: ...

    def __call__(self, tree: Any) -> ResolvedTree:
        """Returns the records of all leaves."""
        ...

    def placed(self, state: Any, tree: ResolvedTree) -> Any:
        """Returns the first state of parameters, sharded as they are."""
        ...


class ChainTransformation(optax.GradientTransformationExtraArgs):
    """A transformation with a chain of links in it.

    Attributes:
      parts: links and functions of the chain, in order.
      resolve: says which leaves are matrices, and how they are sharded.
      run: applies functions to the matrices of a tree.
    """

    run: Run
    parts: tuple[Any, ...]
    resolve: Resolver


class MatrixTransformation(ChainTransformation):
    """A transformation of trees whose leaves all are matrices."""


Made = TypeVar("Made", bound=ChainTransformation)


def matrix_chain(*parts: Any, resolve: Resolver, run: Run = plainly) -> MatrixTransformation:
    """Makes one transformation of the parts of what ``optax_muonplus.matrix_chain`` takes."""
    chain = Chain.of(parts, run)

    def init(params: optax.Params, tree: ResolvedTree) -> optax.OptState:
        check_only_matrices(tree.leaves)
        return chain.init(params, tree.leaves)

    def update(updates: Any, state: Any, params: Any, tree: ResolvedTree, extra: Any) -> Any:
        check_only_matrices(tree.leaves)
        return chain.update(updates, state, params, tree.leaves, extra)

    return Resolved(init, update, resolve, run).transformation(MatrixTransformation, parts)


def links_of(transformation: Any) -> tuple[Any, ...]:
    """Returns the links of the chain in a transformation of this library; none of any other."""
    run = getattr(transformation, "run", plainly)
    return Chain.of(getattr(transformation, "parts", ()), run).links


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """Links, one after the other."""

    links: tuple[Any, ...]  # in order; transformations of Optax receive no records
    n_matrix_links: int  # how many there are up to the last one that receives records

    @classmethod
    def of(cls, parts: Sequence[Any], run: Run) -> "Chain":
        """Returns the chain of ``parts``, with one link for a momentum and its functions."""
        links = _joined(parts, run)
        numbers = [i for i, link in enumerate(links, 1) if not _is_of_optax(link)]
        for i in numbers[:-1]:
            if isinstance(links[i - 1], FusedLink):
                links[i - 1] = dataclasses.replace(links[i - 1], rounds=False)
        return cls(tuple(links), max(numbers, default=0))

    def init(self, params: optax.Params, leaves: Sequence[LeafInfo]) -> Any:
        """Returns the state of the only link, or a tuple of those of all."""
        states = tuple(
            link.init(params) if _is_of_optax(link) else link.init(params, leaves)
            for link in self.links
        )
        return states[0] if len(states) == 1 else states

    def update(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None,
        leaves: Sequence[LeafInfo],
        extra_args: Mapping[str, Any],
    ) -> tuple[optax.Updates, Any]:
        """Returns the updates of the last link, and the new state."""
        made, new = updates, []
        states = (state,) if len(self.links) == 1 else state
        for i, (link, old) in enumerate(zip(self.links, states, strict=True), 1):
            if _is_of_optax(link):
                link = optax.with_extra_args_support(link)
                made, now = link.update(made, old, params, **extra_args)
            else:
                made, now = link.update(made, old, params, leaves)
            if i == self.n_matrix_links:  # a link with the rate inside has made the whole step
                made = _like(updates, made, params if hasattr(link, "learning_rate") else None)
                made = made if i == len(self.links) else _promoted(made, params)
            new.append(now)
        return made, tuple(new) if len(self.links) > 1 else new[0]


def _is_of_optax(link: Any) -> bool:
    return isinstance(link, optax.GradientTransformation)


def _joined(parts: Sequence[Any], run: Run) -> list[Any]:
    """Joins a momentum and the functions behind it, or functions alone, to one link."""
    links: list[Any] = []
    together: list[Any] = []
    for part in (*parts, None):
        is_step = isinstance(part, MatrixFunction | DualNorm)
        if together and not is_step:
            links.append(_link_of(together, run))
            together = []
        if is_step or isinstance(part, Momentum):
            together.append(part)
        elif part is not None:
            links.append(_with_run(part, run))
    return links


def _with_run(part: Any, run: Run) -> Any:
    """Gives a rule that applies functions itself the runner of the chain."""
    has_run = dataclasses.is_dataclass(part) and hasattr(part, "run")
    return dataclasses.replace(part, run=run) if has_run else part


def _link_of(parts: Sequence[Any], run: Run) -> Any:
    momentum = parts[0] if isinstance(parts[0], Momentum) else None
    if momentum is not None and len(parts) == 1:
        return optax.GradientTransformation(momentum.init, momentum.update)
    return FusedLink.of(momentum, parts[momentum is not None :], run=run)


def _like(
    gradients: optax.Updates, updates: optax.Updates, params: optax.Params | None
) -> optax.Updates:
    """Rounds updates to the dtypes of the gradients, or those to which they and ``params`` promote.

    Most links give updates the dtypes of the gradients.
    """

    def like(u: jax.Array, *given: Any) -> jax.Array:
        dtype = jnp.result_type(*map(jnp.result_type, given))
        return u if u.dtype == dtype else narrowed(u, dtype)

    return jax.tree.map(like, updates, gradients, *([] if params is None else [params]))


def _promoted(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
    """Gives updates the dtypes that they and their parameters promote to.

    A float16 update of a float32 parameter would underflow when multiplied by the learning rate.
    """
    if params is None:
        return updates
    return jax.tree.map(
        lambda u, p: u.astype(jnp.promote_types(u.dtype, jnp.result_type(p))), updates, params
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Resolved:
    """Resolves a tree, and gives the records of its leaves to a chain.

    Parameters are resolved at init and gradients at an update, each by path and shape: containers
    may differ between the two: ``flax.nnx.Optimizer`` gives variables first and arrays later.
    """

    start: Callable[[optax.Params, ResolvedTree], Any]  # returns the state
    # From updates, state, parameters, records and extra arguments to updates and state.
    step: Callable[..., tuple[optax.Updates, Any]]
    resolve: Resolver  # gives the records; the state is sharded like the parameters
    run: Run

    def transformation(self, cls: type[Made], parts: tuple[Any, ...]) -> Made:
        """Returns the transformation of the chain that is made of ``parts``."""
        made = cls(self.init, self.update)
        made.parts, made.resolve, made.run = parts, self.resolve, self.run
        return made

    def init(self, params: optax.Params) -> optax.OptState:
        """Returns the state before the first update."""
        tree = self.resolve(params)
        check_inexact(tree.leaves)
        return self.resolve.placed(self.start(params, tree), tree)

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        """Returns the updates and the new state."""
        check_no_gradient_is_none(updates, state)
        check_gradients(updates, params)
        params = beside_updates(updates, params)
        tree = self.resolve(updates)
        if params is not None:
            check_leaves(updates, params)
        made, new = self.step(updates, state, params, tree, extra_args)
        check_state(state, new)
        return made, new
