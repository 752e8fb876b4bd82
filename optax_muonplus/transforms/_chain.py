"""Chains of links for the matrices of a tree.

Leaves are looked up once at init and once at an update, and every link is told what each of them
is. ``_apply`` runs functions on the matrices.
"""

import contextvars
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from optax_muonplus._parameters import (
    DimensionNumbersTree,
    LeafInfo,
    ResolvedTree,
    ShardingTree,
    beside_updates,
    check_given_shardings,
    check_gradients,
    check_inexact,
    check_labelled,
    check_only_matrices,
    resolve,
    shard_like_params,
)
from optax_muonplus.matrices._matrix_function import ArrayFunction, MatrixFunction
from optax_muonplus.matrices._precision import narrowed
from optax_muonplus.transforms._descent import DecayedWeights, LearningRate, are_wide
from optax_muonplus.transforms._momentum import Momentum, MomentumTransformation
from optax_muonplus.transforms._state_check import update_own_state
from optax_muonplus.transforms._steps import DualNorm, Steps


class Link(Protocol):
    """A link of a chain with a state of its own, which is told what each matrix is."""

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


# What a chain is made of: a function on matrices is any callable on arrays (*batch, out, in).
Part = (
    Momentum
    | MatrixFunction
    | DualNorm
    | Callable[[jax.Array], jax.Array]
    | Link
    | optax.GradientTransformation
)

# Whether a chain runs whose dimension numbers or sharding its Optax links cannot see.
_in_a_chain = contextvars.ContextVar("_in_a_chain", default=False)


class MatrixTransformation(optax.GradientTransformationExtraArgs):
    """A transformation of trees whose leaves all are matrices.

    Attributes:
      parts: what it does, in order, for :func:`matrix_chain`.
      weight_dimension_numbers: as given.
      sharding: as given.
    """

    parts: tuple[Any, ...]
    weight_dimension_numbers: DimensionNumbersTree
    sharding: ShardingTree


def matrix_chain(
    *links: Part,
    weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
) -> MatrixTransformation:
    """One transformation of several links, which all are told what each matrix is.

    Where ``optax.chain`` would read and write, and on a mesh move, each matrix once for every link,
    this does it once for a momentum and all functions on matrices that follow it.

    Args:
      *links: in order, each one of

        - a link of this library, such as ``omp.momentum()`` or ``omp.orthogonalize()``, or what it
          is made of, such as ``omp.polar.Orthogonalize()``;
        - a function on arrays ``(batch, out, in)``;
        - an object with ``init(params, leaves)`` and ``update(updates, state, params, leaves)``,
          for a link with a state of its own, see :class:`Link` and :func:`map_blocks`;
        - any transformation of Optax that needs to know nothing of matrices, such as
          ``optax.trace`` or ``optax.scale_by_learning_rate``.
      weight_dimension_numbers: for all links: tree, prefix tree or function of the updates; None
        means the default rules by path. Every leaf must be a matrix.
      sharding: for all links, as in :func:`optax_muonplus.muonplus`.

    Returns:
      A transformation with a state for each link; a momentum and the functions that follow it have
      one, and a single link's state is the chain's.

    Raises:
      TypeError: for something else.
      ValueError: for a link with dimension numbers or a sharding of its own; at init, for leaves
        that are not matrices, and for links of this library inside of ``optax.chain``, which would
        not get the chain's dimension numbers and sharding.

    Example:
      >>> import jax.numpy as jnp, optax_muonplus as omp
      >>> tx = omp.matrix_chain(omp.momentum(), omp.orthogonalize(), jnp.sign)
      >>> params = {"dense": {"kernel": jnp.ones((4, 8))}}
      >>> updates, state = tx.update(params, tx.init(params))
      >>> updates["dense"]["kernel"].shape
      (4, 8)
    """
    parts = tuple(part for link in links for part in parts_of(link))
    chain = Chain.of(parts)

    def init(params: optax.Params, tree: ResolvedTree) -> optax.OptState:
        check_only_matrices(tree.leaves)
        return chain.init(params, tree.leaves)

    def update(updates: Any, state: Any, params: Any, tree: ResolvedTree, extra: Any) -> Any:
        check_only_matrices(tree.leaves)
        return chain.update(updates, state, params, tree.leaves, extra)

    transformation = MatrixTransformation(
        *for_resolved(init, update, weight_dimension_numbers, sharding)
    )
    transformation.parts = parts
    transformation.weight_dimension_numbers = weight_dimension_numbers
    transformation.sharding = sharding
    return transformation


def parts_of(link: Any) -> tuple[Any, ...]:
    """Returns what a link of a chain is made of."""
    if isinstance(link, MatrixTransformation):
        if link.weight_dimension_numbers is not None or link.sharding is not None:
            raise ValueError(
                "A link of a chain has weight_dimension_numbers or a sharding of its own. Give them"
                " to matrix_chain, or to the optimizer that the chain is for: all links get them."
            )
        return link.parts
    if isinstance(link, MomentumTransformation):
        return (link.average,)
    if isinstance(link, optax.GradientTransformation | MatrixFunction | Momentum | DualNorm):
        return (link,)
    if hasattr(link, "init") and hasattr(link, "update"):
        return (link,)
    if callable(link):
        return (ArrayFunction(link),)
    raise TypeError(
        f"matrix_chain got {type(link).__name__}, which is no link: pass transformations, functions"
        " on arrays (*batch, out, in), or objects with init(params, leaves) and update(updates,"
        " state, params, leaves)."
    )


def links_of(transformation: Any) -> tuple[Any, ...]:
    """Returns the links of the chain in a transformation of this library; none of any other."""
    parts = getattr(transformation, "parts", ())
    return Chain.of(parts).links


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """Links, one after the other.

    Attributes:
      links: in order; transformations of Optax are told nothing of matrices.
      n_matrix_links: how many links there are up to the last one that is told of matrices.
    """

    links: tuple[Any, ...]
    n_matrix_links: int

    @classmethod
    def of(cls, parts: Sequence[Any]) -> "Chain":
        """Returns the chain of ``parts``, with one link for a momentum and its functions."""
        links = _joined(parts)
        numbers = [i for i, link in enumerate(links, 1) if not _is_of_optax(link)]
        for i in numbers[:-1]:
            if isinstance(links[i - 1], Steps):
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
        links = self.links
        states = (state,) if len(links) == 1 else tuple(state)
        rate_state: tuple[Any, ...] = ()
        if self._multiplies_in_steps and are_wide(updates, params):
            *others, steps, decay, rate = links
            dtype = jnp.finfo(jnp.result_type(*jax.tree.leaves(updates), jnp.float32)).dtype
            factor, new_rate_state = rate.update(jnp.ones([], dtype), states[-1])
            links, rate_state = (*others, steps.times(factor), decay), (new_rate_state,)
        new, given = [], updates
        for i, (link, old) in enumerate(zip(links, states, strict=False), 1):
            if _is_of_optax(link):
                link = optax.with_extra_args_support(link)
                updates, state = link.update(updates, old, params, **extra_args)
            else:
                updates, state = link.update(updates, old, params, leaves)
            updates = _like(given, updates) if i == self.n_matrix_links else updates
            new.append(state)
        return updates, (new[0] if len(self.links) == 1 else (*new, *rate_state))

    @property
    def _multiplies_in_steps(self) -> bool:
        """Whether the learning rate may be one more function on matrices.

        It then needs no pass over the updates, and no memory.
        """
        if len(self.links) < 3:
            return False
        steps, decay, rate = self.links[-3:]
        zero = isinstance(decay, DecayedWeights) and decay.is_zero
        return isinstance(steps, Steps) and zero and isinstance(rate, LearningRate)


def _is_of_optax(link: Any) -> bool:
    return isinstance(link, optax.GradientTransformation)


def _joined(parts: Sequence[Any]) -> list[Any]:
    """Links, each a momentum and functions, functions alone, or another part."""
    links: list[Any] = []
    run: list[Any] = []
    for part in (*parts, None):
        is_step = isinstance(part, MatrixFunction | DualNorm)
        if run and not is_step:
            links.append(_of_run(run))
            run = []
        if is_step or isinstance(part, Momentum):
            run.append(part)
        elif part is not None:
            links.append(part)
    return links


def _of_run(run: Sequence[Any]) -> Any:
    average = run[0] if isinstance(run[0], Momentum) else None
    if average is not None and len(run) == 1:
        return optax.GradientTransformation(average.init, average.update)
    return Steps.of(average, run[average is not None :])


def _like(gradients: optax.Updates, updates: optax.Updates) -> optax.Updates:
    """``updates`` in the dtypes of the gradients, which most links give them."""
    return jax.tree.map(
        lambda g, u: u if u.dtype == g.dtype else narrowed(u, g.dtype), gradients, updates
    )


def for_resolved(
    init: Callable[[optax.Params, ResolvedTree], Any],
    update: Callable[..., tuple[optax.Updates, Any]],
    dimension_numbers: DimensionNumbersTree,
    sharding: ShardingTree,
) -> optax.GradientTransformationExtraArgs:
    """A transformation that knows what each leaf is.

    Leaves are looked up anew on the whole tree at init and at every update, by path and shape: the
    containers may differ between the two (``flax.nnx.Optimizer`` gives variables first and plain
    arrays later), and no tree of labels is kept.

    Args:
      init: from parameters and their records to the state.
      update: from updates, state, parameters, records of the updates and extra arguments to updates
        and state.
      dimension_numbers: as in :func:`optax_muonplus.muonplus`.
      sharding: as there. The state is sharded like the parameters.
    """
    own = dimension_numbers is not None or sharding is not None

    def init_fn(params: optax.Params) -> optax.OptState:
        tree = _resolved(params)
        check_inexact(tree.leaves)
        state = _inside(own, init, params, tree)
        given = [leaf.given_sharding for leaf in tree.leaves]
        tree.all_shardings()  # raises for those that do not fit
        check_given_shardings([leaf.name for leaf in tree.leaves], tree.arrays, given)
        paths, shapes = [x.path for x in tree.leaves], [x.shape for x in tree.leaves]
        return shard_like_params(state, paths, shapes, given)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        check_gradients(updates, params)
        tree = _resolved(updates)
        params = beside_updates(updates, params)
        return update_own_state(
            lambda: _inside(own, update, updates, state, params, tree, extra_args),
            lambda like: init(like, _resolved(like)),
            updates if params is None else params,
            state,
        )

    def _resolved(tree: Any) -> ResolvedTree:
        if _in_a_chain.get() and not own:
            raise ValueError(
                "A link of optax_muonplus inside of optax.chain, or of another wrapper, does not"
                " get the dimension numbers and the sharding of the optimizer around it. Make the"
                " chain with optax_muonplus.matrix_chain(...), which hands them to all links."
            )
        resolved = resolve(tree, dimension_numbers, sharding)
        if dimension_numbers is None and _is_masked(tree):
            check_labelled(resolved)
        return resolved

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _is_masked(tree: Any) -> bool:
    """Whether a tree is a group of ``optax.partition``."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    return any(isinstance(x, optax.MaskedNode) for x in leaves)


def _inside(own: bool, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, in which links that look up leaves for themselves are refused."""
    token = _in_a_chain.set(own or _in_a_chain.get())
    try:
        return function(*args)
    finally:
        _in_a_chain.reset(token)
