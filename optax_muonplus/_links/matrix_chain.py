"""``matrix_chain`` joins links into one transformation, and checks them and their order."""

import itertools
import reprlib
from collections.abc import Sequence
from typing import Any, Unpack

import optax

from optax_muonplus._chain import chain
from optax_muonplus._chain.chain import ChainTransformation, MatrixTransformation, Part
from optax_muonplus._chain.link import AnyLink, Link, makes_whole_steps
from optax_muonplus._chain.momentum import MomentumTransformation, PlainMomentum
from optax_muonplus._chain.plain import Run
from optax_muonplus._chain.program import DualNorm
from optax_muonplus._core.function import ArrayFunction, MatrixFunction
from optax_muonplus._core.normalize import Normalize
from optax_muonplus._core.orthogonalize import Orthogonalize
from optax_muonplus._core.scale import ScaleByShape
from optax_muonplus._execution.apply import apply
from optax_muonplus._links.where import Matrices, MatricesFields, one_of, where_of


def matrix_chain(
    *links: Part,
    where: Matrices | None = None,
    run: Run = apply,
    **fields: Unpack[MatricesFields],
) -> MatrixTransformation:
    """Joins links into one transformation, and passes each the records of the matrices.

    A momentum and the functions that follow it read and write each matrix once, and on a mesh move
    it once. ``optax.chain`` would do so once per link.

    Args:
      *links: in order, each one of

        - a link of this library, such as ``omp.momentum()`` or ``omp.orthogonalize()``, or its
          value, such as ``omp.polar.Orthogonalize()``;
        - a function of one matrix, ``(out, in) -> (out, in)``, which is mapped over all of them;
        - a link with a state of its own: an object with ``init(params, leaves)`` and
          ``update(updates, state, params, leaves)``. ``leaves`` are records of the matrices,
          :class:`optax_muonplus.transforms.LeafInfo`, in the order of ``jax.tree.leaves``.
          :func:`optax_muonplus.transforms.map_blocks` applies a function to each of them;
        - a transformation of Optax that works on any array, such as ``optax.trace`` or
          ``optax.scale_by_learning_rate``.
      where: which parameters are matrices, and their shardings, for all links. None means the
        ``where`` of a link, or the default rules by path. Every leaf must be a matrix.
      run: applies functions to the matrices. The default works in batches, and on a mesh by a plan.
        :func:`optax_muonplus.transforms.run_plain` is the reference, in a few lines.
      **fields: fields of :class:`optax_muonplus.Matrices`, in place of ``where``.

    Returns:
      A transformation with a state for each link; a momentum and the functions that follow it share
      one. With a single link, its state is the chain's.

    Raises:
      TypeError: for anything else as a link.
      ValueError: for several different ``where``, for a whole optimizer in place of a link, and for
        a link that undoes one before it; at init, for leaves that are not matrices.

    Example:
      >>> import jax.numpy as jnp, optax_muonplus as omp
      >>> tx = omp.matrix_chain(omp.momentum(), omp.orthogonalize(), jnp.sign)
      >>> params = {"dense": {"kernel": jnp.ones((4, 8))}}
      >>> updates, state = tx.update(params, tx.init(params))
      >>> updates["dense"]["kernel"].shape
      (4, 8)
    """
    where = where_of(where, fields)
    inner = [link.where for link in links if isinstance(link, MatrixTransformation)]
    where = one_of(inner if where is None else [where, *inner])
    parts = [part for link in links or [links] for part in parts_of(link)]
    check_order(parts)
    return chain.matrix_chain(*parts, where=where, run=run)


def parts_of(link: Any) -> tuple[Any, ...]:
    """Returns the parts of a link or chain; raises for anything else."""
    if isinstance(link, MatrixTransformation):
        return link.chain.parts
    if isinstance(link, ChainTransformation):
        raise ValueError(
            "A chain got a whole optimizer, such as omp.muonplus(0.02), in place of a link."
            " Pass the rule for matrices alone, such as omp.scale_by_muonplus()."
        )
    if isinstance(link, MomentumTransformation):
        return (link.momentum,)
    if not isinstance(link, type):
        if isinstance(link, MatrixFunction | DualNorm | AnyLink):
            return (link,)
        returned = getattr(link, "__annotations__", {}).get("return")
        if callable(link) and "Transformation" not in str(returned):  # as of omp.momentum itself
            return (ArrayFunction(link),)
    shown = link if callable(link) else reprlib.repr(link)
    raise TypeError(
        f"matrix_chain got {shown}, which is not a link. Pass links one by one: transformations"
        " such as omp.momentum(), functions of one matrix (out, in), or objects with"
        " init(params, leaves) and update(updates, state, params, leaves)."
    )


def check_order(parts: Sequence[Any]) -> None:
    """Raises ValueError if a link for matrices silently undoes one before it."""
    ours = [x for x in parts if not isinstance(x, optax.GradientTransformation)]
    for before, part in itertools.pairwise(ours):
        wrong = ""
        if makes_whole_steps(before):
            wrong = "a link behind whole steps downhill. Put a rule with its own rate last"
        elif _has_momentum(part) and _has_momentum(ours[0]):
            wrong = "a second momentum. Use optax.trace for the other one"
        elif isinstance(part, PlainMomentum):
            wrong = "a momentum of something other than the gradient. Put the momentum first"
        elif isinstance(part, Orthogonalize):
            scaled = isinstance(before, Normalize | ScaleByShape | Orthogonalize)
            scaled = scaled or (isinstance(before, Link) and before.polar_factor is not None)
            wrong = scaled and "a polar factor, which undoes it. Put the polar factor first"
        elif isinstance(part, ScaleByShape) and part.consistent_rms is None:
            known = isinstance(before, Link | ScaleByShape) and before.shape_scale != "none"
            twice = known and part.shape_scale != "none"
            wrong = twice and 'a second factor by shape. Give one of them shape_scale="none"'
        if wrong:
            names = type(before).__name__, type(part).__name__
            raise ValueError(f"The chain has {names[1]} after {names[0]}: {wrong}.")


def _has_momentum(part: Any) -> bool:
    """Whether a part is a momentum, or a rule with a momentum of its own."""
    return isinstance(part, PlainMomentum) or (isinstance(part, Link) and part.momentum is not None)
