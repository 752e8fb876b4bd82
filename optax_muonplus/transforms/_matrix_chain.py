"""Chains of links for the matrices of a tree.

Leaves are looked up once at init and once at an update, and every link is told what each of them
is. ``run`` applies functions to the matrices.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from optax_muonplus.frame import DimensionNumbersTree, ResolvedTree, check_only_matrices
from optax_muonplus.method import ArrayFunction, MatrixFunction
from optax_muonplus.transforms._apply import Run, efficiently
from optax_muonplus.transforms._chain import Chain, Link
from optax_muonplus.transforms._momentum import Momentum, MomentumTransformation
from optax_muonplus.transforms._order import check_order
from optax_muonplus.transforms._resolved import ChainTransformation, Resolved
from optax_muonplus.transforms._steps import DualNorm
from optax_muonplus.trees import LayerAxes, Rules, ShardingTree, reader_of

# What a chain is made of: a function on matrices is any callable on arrays (*batch, out, in).
Part = (
    Momentum
    | MatrixFunction
    | DualNorm
    | Callable[[jax.Array], jax.Array]
    | Link
    | optax.GradientTransformation
)


class MatrixTransformation(ChainTransformation):
    """A transformation of trees whose leaves all are matrices.

    Attributes:
      run: how its functions are applied to the matrices of a tree.
    """

    run: Run


def matrix_chain(
    *links: Part,
    weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
    rules: Rules = (),
    layer_axes: LayerAxes = None,
    run: Run = efficiently,
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
          for a link with a state of its own, see
          :class:`optax_muonplus.transforms.Link` and :func:`optax_muonplus.transforms.map_blocks`;
        - any transformation of Optax that needs to know nothing of matrices, such as
          ``optax.trace`` or ``optax.scale_by_learning_rate``.
      weight_dimension_numbers: for all links: tree, prefix tree or function of the updates; None
        means the default rules by path. Every leaf must be a matrix.
      sharding: for all links, as in :func:`optax_muonplus.muonplus`, like the next two.
      rules: in place of dimension numbers.
      layer_axes: with ``rules`` or without.
      run: how functions are applied to the matrices: in batches and on a mesh by a plan, or by
        another function with the same results. :func:`optax_muonplus.transforms.plainly` is the
        reference, in a few lines.

    Returns:
      A transformation with a state for each link; a momentum and the functions that follow it have
      one, and a single link's state is the chain's.

    Raises:
      TypeError: for something else.
      ValueError: for a link with dimension numbers or a sharding of its own, a whole optimizer in
        the place of a link, two momenta, what follows a learning rate, and a polar factor right
        after another one; at init, for leaves that are not matrices, for links of this library
        inside of ``optax.chain``, which would not get the chain's dimension numbers and sharding,
        and for an optimizer of Optax before a learning rate.

    Example:
      >>> import jax.numpy as jnp, optax_muonplus as omp
      >>> tx = omp.matrix_chain(omp.momentum(), omp.orthogonalize(), jnp.sign)
      >>> params = {"dense": {"kernel": jnp.ones((4, 8))}}
      >>> updates, state = tx.update(params, tx.init(params))
      >>> updates["dense"]["kernel"].shape
      (4, 8)
    """
    parts = tuple(part for link in links for part in parts_of(link))
    check_order(parts)
    chain = Chain.of(parts, run)

    def init(params: optax.Params, tree: ResolvedTree) -> optax.OptState:
        check_only_matrices(tree.leaves)
        return chain.init(params, tree.leaves)

    def update(updates: Any, state: Any, params: Any, tree: ResolvedTree, extra: Any) -> Any:
        check_only_matrices(tree.leaves)
        return chain.update(updates, state, params, tree.leaves, extra)

    dims = reader_of(weight_dimension_numbers, rules, layer_axes)
    resolved = Resolved(init, update, dims, sharding)
    transformation = resolved.transformation(MatrixTransformation, parts)
    transformation.run = run
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
    if isinstance(link, ChainTransformation):
        raise ValueError(
            "A chain got a whole optimizer, such as omp.muonplus(0.02), in the place of a link: it"
            " has a learning rate and AdamW of its own. Pass the rule for matrices alone, such as"
            " omp.scale_by_muonplus()."
        )
    if isinstance(link, MomentumTransformation):
        return (link.average,)
    if isinstance(link, optax.GradientTransformation | MatrixFunction | Momentum | DualNorm):
        return (link,)
    if hasattr(link, "init") and hasattr(link, "update"):
        return (link,)
    if callable(link):
        return (ArrayFunction(link),)
    if isinstance(link, list | tuple):
        raise TypeError("matrix_chain got a list. Pass its links one by one: matrix_chain(*links).")
    raise TypeError(
        f"matrix_chain got {type(link).__name__}, which is no link: pass transformations, functions"
        " on arrays (*batch, out, in), or objects with init(params, leaves) and update(updates,"
        " state, params, leaves)."
    )


def links_of(transformation: Any) -> tuple[Any, ...]:
    """Returns the links of the chain in a transformation of this library; none of any other."""
    parts = getattr(transformation, "parts", ())
    return Chain.of(parts, efficiently).links
