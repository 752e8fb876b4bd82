"""A chain of links: from the gradients of a tree to its updates, matrix by matrix.

Optax calls a ``ChainTransformation``. It reads the tree and passes the records of the matrices to a
``Chain``, which calls its links in order.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import optax

from optax_muonplus._chain.checks import (
    StateCheck,
    check_gradients,
    check_inexact,
    check_only_matrices,
    mask_params_like,
)
from optax_muonplus._chain.fused import FusedLink
from optax_muonplus._chain.link import AnyLink, Link, makes_whole_steps
from optax_muonplus._chain.momentum import PlainMomentum
from optax_muonplus._chain.plain import Run, run_plain
from optax_muonplus._chain.program import DualNorm
from optax_muonplus._core.function import MatrixFunction
from optax_muonplus._core.precision import saturating_cast
from optax_muonplus._leaves.record import LeafInfo, ResolvedTree

# A part of a chain. A callable is a function of one matrix (out, in).
Part = (
    PlainMomentum
    | MatrixFunction
    | DualNorm
    | Callable[[jax.Array], jax.Array]
    | AnyLink
    | optax.GradientTransformation
)


class TreeReader(Protocol):
    """Decides which leaves of a tree are matrices, and how they are sharded."""

    def read(self, tree: Any) -> ResolvedTree: ...

    def place(self, state: Any, tree: ResolvedTree) -> Any: ...


class Scaling(optax.GradientTransformation):
    """A transformation of Optax that multiplies all updates by one number, as a learning rate."""

    # After functions on matrices it becomes their factor. On a CPU a separate pass took 15% more
    # bytes, and 11.8 MB in place of 2.7 for twelve layers of width 256.


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """Links, one after the other."""

    parts: tuple[Any, ...]  # as given, in order
    run: Run  # applies functions to the matrices of a tree
    links: tuple[Any, ...]  # made of parts; transformations of Optax receive no records
    n_matrix_links: int  # number of links up to the last one that receives records
    ends_in_scalings: bool  # whether only scalings follow that one, a FusedLink

    @classmethod
    def of(cls, parts: Sequence[Any], run: Run) -> "Chain":
        """Returns the chain of ``parts``, with one link for a momentum and its functions."""
        links = _join_parts(parts, run)
        numbers = [i for i, link in enumerate(links, 1) if not _is_of_optax(link)]
        for i in numbers[:-1]:
            if isinstance(links[i - 1], FusedLink):
                links[i - 1] = dataclasses.replace(links[i - 1], rounds=False)
        count = max(numbers, default=0)
        fused = len(links) > count > 0 and isinstance(links[count - 1], FusedLink)
        scalings = fused and all(isinstance(link, Scaling) for link in links[count:])
        return cls(tuple(parts), run, tuple(links), count, scalings)

    def over(self, leaves: Sequence[LeafInfo]) -> optax.GradientTransformationExtraArgs:
        """Returns the chain as a transformation of trees with these matrices."""
        init = functools.partial(self.init, leaves=leaves)
        update = functools.partial(self.update, leaves=leaves)
        return optax.GradientTransformationExtraArgs(init, update)

    def init(self, params: optax.Params, leaves: Sequence[LeafInfo]) -> Any:
        states = [x.init(params) if _is_of_optax(x) else x.init(params, leaves) for x in self.links]
        return states[0] if len(states) == 1 else tuple(states)

    def update(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        leaves: Sequence[LeafInfo],
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        gradients = updates
        links, states = self.links, (state,) if len(self.links) == 1 else state
        scaled: list[Any] = []
        if self.ends_in_scalings and _are_wide(updates, params):
            links, states, scaled = self._with_factor(updates, states)
        new = []
        for i, (link, old) in enumerate(zip(links, states, strict=True), 1):
            if _is_of_optax(link):
                link = optax.with_extra_args_support(link)
                updates, now = link.update(updates, old, params, **extra_args)
            else:
                updates, now = link.update(updates, old, params, leaves)
            if i == self.n_matrix_links:
                like = params if makes_whole_steps(link) else None  # whole steps include the rate
                updates = _like(gradients, updates, like)
                updates = updates if i == len(self.links) else promote(updates, params)
            new.append(now)
        new += scaled
        return updates, tuple(new) if len(self.links) > 1 else new[0]

    def _with_factor(self, updates: Any, states: Any) -> tuple[tuple[Any, ...], Any, list[Any]]:
        """Makes scalings the factor of the link before them; returns their new states last."""
        first = self.n_matrix_links
        dtype = jnp.result_type(*jax.tree.leaves(updates), jnp.float32)
        factor, new = jnp.ones([], jnp.finfo(dtype).dtype), []  # a scaling of 1 is its factor
        for link, old in zip(self.links[first:], states[first:], strict=True):
            factor, now = link.update(factor, old)
            new.append(now)
        *before, fused = self.links[:first]
        return (*before, dataclasses.replace(fused, factor=factor)), states[:first], new


def _is_of_optax(link: Any) -> bool:
    return isinstance(link, optax.GradientTransformation)


def _join_parts(parts: Sequence[Any], run: Run) -> list[Any]:
    """Makes one link of a momentum and the functions that follow it."""
    groups: list[list[Any]] = []
    for part in parts:
        joins = groups and isinstance(groups[-1][-1], PlainMomentum | MatrixFunction | DualNorm)
        if joins and isinstance(part, MatrixFunction | DualNorm):
            groups[-1].append(part)
        else:
            groups.append([part])
    return [_link_of(*group, run=run) for group in groups]


def _link_of(part: Any, *functions: Any, run: Run) -> Any:
    if isinstance(part, MatrixFunction | DualNorm):
        return FusedLink(None, [part, *functions], run=run)
    if isinstance(part, PlainMomentum) and functions:
        return FusedLink(part, functions, run=run)
    if isinstance(part, PlainMomentum):
        return optax.GradientTransformation(part.init, part.update)
    return part.with_run(run) if isinstance(part, Link) else part


def _are_wide(updates: optax.Updates, params: optax.Params | None) -> bool:
    """Returns whether updates have 32 bits at least, and as many as parameters need."""

    def is_wide(update: Any, parameter: Any) -> bool:
        dtype = jnp.result_type(update)
        promotes = jnp.promote_types(dtype, jnp.result_type(parameter)) != dtype
        return jnp.finfo(dtype).bits >= 32 and not promotes

    others = updates if params is None else params
    return all(jax.tree.leaves(jax.tree.map(is_wide, updates, others)))


def _like(
    gradients: optax.Updates, updates: optax.Updates, params: optax.Params | None
) -> optax.Updates:
    """Rounds updates to the dtypes of the gradients, promoted by ``params`` if given."""

    def like(u: jax.Array, *given: Any) -> jax.Array:
        dtype = jnp.result_type(*map(jnp.result_type, given))
        return u if u.dtype == dtype else saturating_cast(u, dtype)

    return jax.tree.map(like, updates, gradients, *([] if params is None else [params]))


def promote(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
    """Promotes the dtype of each update with that of its parameter."""
    if params is None:
        return updates

    # A float16 update of a float32 parameter would underflow when a learning rate multiplies it.
    def widen(u: Any, p: Any) -> jax.Array:
        return jnp.asarray(u, jnp.promote_types(jnp.result_type(u), jnp.result_type(p)))

    return jax.tree.map(widen, updates, params)


class ChainTransformation(optax.GradientTransformationExtraArgs):
    """A transformation with a chain of links, for trees that are read by path and shape."""

    chain: Chain  # for matrices
    where: TreeReader

    # JAX rebuilds a named tuple from its two fields alone.
    def __new__(cls, init: Any, update: Any, chain: Any = None, where: Any = None) -> Self:
        self = super().__new__(cls, init, update)
        self.chain, self.where = chain, where
        return self

    @classmethod
    def of(
        cls,
        over: Callable[[ResolvedTree], optax.GradientTransformation],
        chain: Chain,
        where: TreeReader,
    ) -> Self:
        """Makes a transformation that reads and checks each tree, and applies ``over(tree)``."""
        check_state = StateCheck()

        def init(params: optax.Params) -> optax.OptState:
            tree = where.read(params)  # flax.nnx.Optimizer passes variables here, and arrays later
            check_inexact([leaf.path for leaf in tree.leaves], [leaf.dtype for leaf in tree.leaves])
            return where.place(over(tree).init(params), tree)

        def update(
            updates: optax.Updates, state: optax.OptState, params: Any = None, **extra_args: Any
        ) -> tuple[optax.Updates, optax.OptState]:
            check_gradients(updates, params)
            params = mask_params_like(updates, params)
            made = over(where.read(updates))
            check_state(state, made.init, updates if params is None else params, params)
            return made.update(updates, state, params, **extra_args)

        return cls(init, update, chain, where)


class MatrixTransformation(ChainTransformation):
    """A transformation of trees whose leaves are all matrices."""

    def labels(self, params: optax.Params) -> Any:
        """Returns ``"muon"`` or ``"adam"`` for each leaf."""
        return self.where.read(params).labels


def matrix_chain(*parts: Any, where: TreeReader, run: Run = run_plain) -> MatrixTransformation:
    chain = Chain.of(parts, run)

    def over(tree: ResolvedTree) -> optax.GradientTransformationExtraArgs:
        check_only_matrices(tree.leaves)
        return chain.over(tree.leaves)

    return MatrixTransformation.of(over, chain, where)
