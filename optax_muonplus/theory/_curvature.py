r"""How curved a model's loss is along each row or column of its matrices.

The paper's descent bound needs the spectral norms of the diagonal blocks :math:`[\nabla^2 L]_b`.
Each block is the part of the Hessian for the weights in one row (output unit) or in one column
(input feature).

The Hessian is never formed. A Hessian-vector product (HVP) is one forward-mode derivative of a
gradient. If the vector is zero outside of one block, the part of the product in that block is the
diagonal block times the vector. Two blocks cannot share an HVP, because each would also receive the
product of the other with the part of the Hessian between them.

Source: Zhang et al., Muon+, arXiv:2602.21545, theorem 1 and the appendix on blockwise descent.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree
from optax_muonplus._parameters.leaves import LeafInfo
from optax_muonplus._parameters.matrix_view import MatrixView
from optax_muonplus._parameters.selection import check_patterns, select
from optax_muonplus.matrices._normalization import Side
from optax_muonplus.matrices._precision import accumulation_dtype, upcast_for_sum
from optax_muonplus.theory._power_iteration import spectral_norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockCurvature:
    r"""Spectral norms of diagonal blocks of the Hessian, for one parameter.

    The fields ``norms``, ``residuals`` and ``index`` have one array ``(batch, blocks)``, or several
    if the parameter has split sizes: one for each run of matrices of one size that are fused side
    by side. The batch axes of the parameter are flattened to ``batch``, and such a run with them.

    Attributes:
      norms: :math:`\|[\nabla^2 L]_b\|_2`, approximated from below.
      residuals: :math:`\|H^2 v - s^2 v\| / s^2` of each block after the iterations, where s is its
        norm. Some eigenvalue of :math:`H^2` differs from :math:`s^2` by that much, relative to
        :math:`s^2`. If residuals are large, use more iterations.
      index: the rows or columns that were chosen, in order.
      view: the way from the parameter to its matrices.
      side: ``"row"`` or ``"col"``.
    """

    norms: tuple[jax.Array, ...]
    residuals: tuple[jax.Array, ...]
    index: tuple[jax.Array, ...]
    view: MatrixView = dataclasses.field(metadata={"static": True})
    side: Side = dataclasses.field(metadata={"static": True})


def block_curvatures(
    loss: Callable[[Any], jax.Array],
    params: optax.Params,
    side: Side = "row",
    weight_dimension_numbers: DimensionNumbersTree = None,
    *,
    key: jax.Array,
    only: str | Sequence[str] | None = None,
    blocks: int | None = None,
    iterations: int = 20,
    blocks_at_once: int = 8,
) -> dict[str, BlockCurvature]:
    """Spectral norms of the Hessian's diagonal blocks for the rows or columns of every matrix.

    Each block H has a power iteration of its own, ``v <- H v / |H v|`` from a random v. The norm
    ``|H v|`` never decreases and converges to the largest ``|eigenvalue|``, even if there are two
    of opposite sign.

    The cost is ``iterations + 1`` HVPs for each block: 768 x 21 for all rows of one 768 x 768
    kernel, 16 x 21 with ``blocks=16``. ``blocks_at_once`` HVPs run together, and each holds
    tangents of the parameter and of all activations. Call this under ``jax.jit``, and pass the
    batch as an argument of the jitted function::

      curvatures = jax.jit(
          lambda params, batch, key: block_curvatures(
              lambda p: loss(p, batch), params, key=key, only="attn", blocks=16
          )
      )(params, batch, key)

    Args:
      loss: function from the parameters to a real scalar, twice differentiable.
      params: parameters.
      side: ``"row"``, if a block is the weights of one output unit; ``"col"``, if it is those of
        one input feature. Dimension numbers say which array axes these are.
      weight_dimension_numbers: as in :func:`optax_muonplus.orthogonalize`.
      key: random key, for the choice of blocks and for the first v.
      only: one regular expression or several, searched in paths such as
        ``blocks/0/attn/qkv/kernel``. None takes all matrices.
      blocks: number of blocks, drawn at random for each matrix. None takes all blocks, and so does
        a number above theirs.
      iterations: number of power iterations.
      blocks_at_once: number of blocks whose HVPs run together.

    Returns:
      For the path of each parameter its :class:`BlockCurvature`, in float32 at least.

    Raises:
      ValueError: for an unknown side, counts below 1, a loss that is not a real scalar, complex
        parameters, or if ``only`` leaves no matrix; and as for
        :func:`optax_muonplus.muon_dimension_numbers`.

    Source: arXiv:2602.21545, theorem 1 and the appendix on blockwise descent.
    """
    _check_options(side, iterations=iterations, blocks_at_once=blocks_at_once, blocks=blocks)
    leaves, treedef = jax.tree_util.tree_flatten(params)
    targets = select(params, check_patterns(only), weight_dimension_numbers)
    if not targets:
        raise ValueError("No matrix is among the parameters: there are none. Pass a model's.")
    _check_dtypes(targets, leaves)
    _check_loss(loss, params)

    def loss_of_leaf(i: int, leaf: jax.Array) -> jax.Array:
        return loss(treedef.unflatten([*leaves[:i], leaf, *leaves[i + 1 :]]))

    curvatures = {}
    for target in targets:
        path, i, view = target.name, target.index, target.matrix
        leaf, leaf_key = jnp.asarray(leaves[i]), jax.random.fold_in(key, i)
        index = _choices(jax.random.fold_in(leaf_key, 0), view, side, blocks)
        starts = jax.random.fold_in(leaf_key, 1)
        results = _norms(
            functools.partial(loss_of_leaf, i),
            by_block(view, side, leaf),
            functools.partial(from_blocks, view, side),
            index,
            jax.random.split(starts, len(index)),
            iterations,
            blocks_at_once,
        )
        norms, residuals = zip(*results, strict=True)
        curvatures[path] = BlockCurvature(norms, residuals, tuple(index), view, side)
    return curvatures


def by_block(view: MatrixView, side: Side, x: jax.Array) -> list[jax.Array]:
    """The matrices of a parameter as arrays ``(batch, blocks, elements of a block)``."""
    return [jnp.moveaxis(m, _block_axis(view, side), 1) for m in view.to_matrices(x)]


def from_blocks(view: MatrixView, side: Side, matrices: list[jax.Array]) -> jax.Array:
    """The inverse of :func:`by_block`."""
    return view.from_matrices([jnp.moveaxis(m, 1, _block_axis(view, side)) for m in matrices])


def _block_axis(view: MatrixView, side: Side) -> int:
    """The axis of rows or of columns, in matrices as they lie in memory."""
    return 1 if (side == "row") != view.transposed else 2


def _choices(key: jax.Array, view: MatrixView, side: Side, blocks: int | None) -> list[jax.Array]:
    """Indices ``(batch, blocks)`` in order, drawn for each matrix unless all are taken."""
    choices = []
    for part, (batch, rows, columns) in enumerate(view.block_shapes()):
        count = rows if side == "row" else columns
        if blocks is None or blocks >= count:
            choices.append(jnp.broadcast_to(jnp.arange(count), (batch, count)))
            continue
        draw = functools.partial(jax.random.choice, a=count, shape=(blocks,), replace=False)
        keys = jax.random.split(jax.random.fold_in(key, part), batch)
        choices.append(jnp.sort(jax.vmap(draw)(keys), axis=1))
    return choices


def _norms(
    loss: Callable[[jax.Array], jax.Array],
    matrices: list[jax.Array],
    from_matrices: Callable[[list[jax.Array]], jax.Array],
    index: list[jax.Array],
    keys: jax.Array,
    iterations: int,
    at_once: int,
) -> list[tuple[jax.Array, jax.Array]]:
    """Norms and residuals ``(batch, blocks)`` for each of the matrices of a parameter."""

    def loss_of_matrix(part: int, x: jax.Array) -> jax.Array:
        return loss(from_matrices([*matrices[:part], x, *matrices[part + 1 :]]))

    norms = []
    for part, (x, chosen, key) in enumerate(zip(matrices, index, keys, strict=True)):
        # The gradient is computed once. Every iteration only applies its derivative.
        _, derivative = jax.linearize(jax.grad(functools.partial(loss_of_matrix, part)), x)
        of_block = functools.partial(_of_block, derivative, x, iterations)
        which = jnp.repeat(jnp.arange(x.shape[0]), chosen.shape[1])
        places = which, chosen.reshape(-1), jax.random.split(key, chosen.size)
        results = jax.lax.map(of_block, places, batch_size=min(at_once, chosen.size))
        norms.append(tuple(result.reshape(chosen.shape) for result in results))
    return norms


def _of_block(
    derivative: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    iterations: int,
    place: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Norm and residual of one block; ``place`` is its matrix, its index and its random key."""
    matrix, block, key = place

    def product(v: jax.Array) -> jax.Array:
        tangent = jnp.zeros_like(x).at[matrix, block].set(v.astype(x.dtype))
        return upcast_for_sum(derivative(tangent)[matrix, block])

    start = jax.random.normal(key, x.shape[2:], accumulation_dtype(x.dtype))
    return spectral_norm(product, start, iterations)


def _check_dtypes(targets: list[LeafInfo], leaves: list[ArrayLike]) -> None:
    dtypes = {target.name: jnp.result_type(leaves[target.index]) for target in targets}
    wrong = [f"{p} ({d})" for p, d in dtypes.items() if not jnp.issubdtype(d, jnp.floating)]
    if wrong:
        raise ValueError(
            f"Curvature is that of real floating-point parameters, got {', '.join(wrong)}. Choose"
            " others with only=."
        )


def _check_options(side: str, **counts: int | None) -> None:
    if side not in get_args(Side):
        raise ValueError(f"Unknown side {side!r}. Known: {', '.join(get_args(Side))}.")
    for name, count in counts.items():
        try:
            enough = count is None or operator.index(count) >= 1
        except TypeError:
            enough = False
        if not enough:
            raise ValueError(f"{name} must be an integer of at least 1, got {count!r}.")


def _check_loss(loss: Callable[[Any], jax.Array], params: optax.Params) -> None:
    value = jax.eval_shape(loss, params)
    if getattr(value, "shape", None) != () or not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"loss(params) must be one real number, got {value}. Average over the batch, and return"
            " nothing beside the loss."
        )
