r"""How curved a model's loss is along each row or column of its matrices.

The paper's descent bound asks for the spectral norms of the blocks :math:`[\nabla^2 L]_b`: the
square part of the Hessian for the weights in one row (output unit) or one column (input feature).

No Hessian is formed. A Hessian-vector product (HVP) is one forward-mode derivative of a gradient;
for a vector that is zero outside one block, what comes back within that block is the block times
the vector. One HVP cannot serve two blocks: each would see what the Hessian has between them.

Source: Zhang et al., Muon+, arXiv:2602.21545, theorem 1 and the appendix on blockwise descent.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp

from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree, MatrixView
from optax_muonplus._parameters.selection import Target, check_patterns, select
from optax_muonplus.diagnostics._imbalance import Side
from optax_muonplus.matrices._precision import accumulation_dtype, upcast_for_sum
from optax_muonplus.theory._power_iteration import spectral_norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockCurvature:
    r"""Spectral norms of diagonal blocks of the Hessian, for one parameter.

    One array ``(batch, blocks)`` for each matrix that is fused in the parameter (one, unless it has
    split sizes); ``batch`` counts indices along batch axes.

    Attributes:
      norms: :math:`\|[\nabla^2 L]_b\|_2`, from below.
      residuals: :math:`\|H^2 v - s^2 v\| / s^2` of each block at the end, s being its norm: some
        eigenvalue of :math:`H^2` is that close to :math:`s^2`, relatively. Large ones ask for more
        iterations.
      index: which rows or columns these are, in order.
      view: how the parameter is matrices.
      side: ``"row"`` or ``"col"``.
    """

    norms: tuple[jax.Array, ...]
    residuals: tuple[jax.Array, ...]
    index: tuple[jax.Array, ...]
    view: MatrixView = dataclasses.field(metadata={"static": True})
    side: Side = dataclasses.field(metadata={"static": True})


def block_curvatures(
    loss: Callable[[Any], jax.Array],
    params: Any,
    side: Side = "row",
    weight_dimension_numbers: DimensionNumbersTree = None,
    *,
    key: jax.Array,
    only: str | Sequence[str] | None = None,
    blocks: int | None = None,
    iterations: int = 20,
    blocks_at_once: int = 8,
) -> dict[str, BlockCurvature]:
    """Spectral norms of the Hessian's blocks for the rows or columns of every matrix.

    Each block is iterated by itself: ``v <- H v / |H v|`` from a random v. The norm ``|H v|`` never
    falls from one iteration to the next and tends to the largest ``|eigenvalue|``, also where two
    of opposite sign share it.

    It costs ``iterations + 1`` HVPs for each block and matrix: 768 x 21 for all rows of one 768 x
    768 kernel, 16 x 21 with ``blocks=16``. ``blocks_at_once`` of them are made together, each with
    tangents of the parameter and of all activations. Put the call under ``jax.jit``, with batches
    as arguments of the jitted function::

      curvatures = jax.jit(
          lambda params, batch, key: block_curvatures(
              lambda p: loss(p, batch), params, key=key, only="attn", blocks=16
          )
      )(params, batch, key)

    Args:
      loss: function of the parameters to a real scalar, twice differentiable.
      params: parameters.
      side: ``"row"``: a block is the weights of an output unit; ``"col"``: of an input feature.
        Whatever the array axes, the dimension numbers say which is which.
      weight_dimension_numbers: as in :func:`optax_muonplus.orthogonalize`.
      key: for the choice of blocks and for the starts.
      only: regular expression, or several, searched in paths such as ``blocks/0/attn/qkv/kernel``.
        None takes all matrices.
      blocks: number of blocks, drawn at random for each matrix; None or too many take all.
      iterations: power iterations.
      blocks_at_once: blocks whose HVPs are made together.

    Returns:
      For the path of each parameter its :class:`BlockCurvature`, in float32 at least.

    Raises:
      ValueError: for an unknown side, numbers below 1, a loss that is not a real scalar, parameters
        that are complex, no matrix among what is asked for, and as
        :func:`optax_muonplus.muon_dimension_numbers`.
    """
    _check_words(side, iterations=iterations, blocks_at_once=blocks_at_once, blocks=blocks)
    leaves, treedef = jax.tree_util.tree_flatten(params)
    targets = select(params, check_patterns(only), weight_dimension_numbers)
    if not targets:
        raise ValueError("No matrix is among the parameters: there are none. Pass a model's.")
    _check_dtypes(targets, leaves)
    _check_loss(loss, params)

    def of_leaf(i: int, leaf: jax.Array) -> jax.Array:
        return loss(treedef.unflatten([*leaves[:i], leaf, *leaves[i + 1 :]]))

    result = {}
    for path, i, _, view, _ in targets:
        leaf, own = jnp.asarray(leaves[i]), jax.random.fold_in(key, i)
        index = _choices(jax.random.fold_in(own, 0), view, side, blocks)
        starts = jax.random.fold_in(own, 1)
        found = _norms(
            functools.partial(of_leaf, i),
            by_block(view, side, leaf),
            functools.partial(from_blocks, view, side),
            index,
            jax.random.split(starts, len(index)),
            iterations,
            blocks_at_once,
        )
        norms, residuals = zip(*found, strict=True)
        result[path] = BlockCurvature(norms, residuals, tuple(index), view, side)
    return result


def by_block(view: MatrixView, side: Side, x: jax.Array) -> list[jax.Array]:
    """The matrices of a parameter as arrays ``(batch, blocks, numbers in a block)``."""
    return [jnp.moveaxis(m, _block_axis(view, side), 1) for m in view.to_matrices(x)]


def from_blocks(view: MatrixView, side: Side, matrices: list[jax.Array]) -> jax.Array:
    """The inverse of :func:`by_block`."""
    return view.from_matrices([jnp.moveaxis(m, 1, _block_axis(view, side)) for m in matrices])


def _block_axis(view: MatrixView, side: Side) -> int:
    return 1 if (side == "row") != view.transposed else 2


def _choices(key: jax.Array, view: MatrixView, side: Side, blocks: int | None) -> list[jax.Array]:
    """Indices ``(batch, blocks)`` in order, drawn for each matrix unless all are taken."""
    found = []
    for part, (batch, rows, columns) in enumerate(view.block_shapes()):
        count = rows if side == "row" else columns
        if blocks is None or blocks >= count:
            found.append(jnp.broadcast_to(jnp.arange(count), (batch, count)))
            continue
        draw = functools.partial(jax.random.choice, a=count, shape=(blocks,), replace=False)
        keys = jax.random.split(jax.random.fold_in(key, part), batch)
        found.append(jnp.sort(jax.vmap(draw)(keys), axis=1))
    return found


def _norms(
    loss: Callable[[jax.Array], jax.Array],
    matrices: list[jax.Array],
    joined: Callable[[list[jax.Array]], jax.Array],
    index: list[jax.Array],
    keys: jax.Array,
    iterations: int,
    at_once: int,
) -> list[tuple[jax.Array, jax.Array]]:
    """Norms and residuals ``(batch, blocks)`` for each of the matrices that make a parameter."""

    def of_matrix(part: int, x: jax.Array) -> jax.Array:
        return loss(joined([*matrices[:part], x, *matrices[part + 1 :]]))

    found = []
    for part, (x, chosen, key) in enumerate(zip(matrices, index, keys, strict=True)):
        # The gradient is taken once; what is iterated is its derivative.
        _, derivative = jax.linearize(jax.grad(functools.partial(of_matrix, part)), x)
        of_block = functools.partial(_of_block, derivative, x, iterations)
        which = jnp.repeat(jnp.arange(x.shape[0]), chosen.shape[1])
        places = which, chosen.reshape(-1), jax.random.split(key, chosen.size)
        results = jax.lax.map(of_block, places, batch_size=min(at_once, chosen.size))
        found.append(tuple(result.reshape(chosen.shape) for result in results))
    return found


def _of_block(
    derivative: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    iterations: int,
    place: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Norm and residual of the block at ``(matrix, block, key)`` in ``x``."""
    matrix, block, key = place

    def product(v: jax.Array) -> jax.Array:
        tangent = jnp.zeros_like(x).at[matrix, block].set(v.astype(x.dtype))
        return upcast_for_sum(derivative(tangent)[matrix, block])

    start = jax.random.normal(key, x.shape[2:], accumulation_dtype(x.dtype))
    return spectral_norm(product, start, iterations)


def _check_dtypes(targets: list[Target], leaves: list[Any]) -> None:
    dtypes = {target.path: jnp.result_type(leaves[target.index]) for target in targets}
    wrong = [f"{p} ({d})" for p, d in dtypes.items() if not jnp.issubdtype(d, jnp.floating)]
    if wrong:
        raise ValueError(
            f"Curvature is that of real floating-point parameters, got {', '.join(wrong)}. Choose"
            " others with only=."
        )


def _check_words(side: str, **counts: int | None) -> None:
    if side not in get_args(Side):
        raise ValueError(f"Unknown side {side!r}. Known: {', '.join(get_args(Side))}.")
    for name, count in counts.items():
        try:
            enough = count is None or operator.index(count) >= 1
        except TypeError:
            enough = False
        if not enough:
            raise ValueError(f"{name} must be an integer of at least 1, got {count!r}.")


def _check_loss(loss: Callable[[Any], jax.Array], params: Any) -> None:
    made = jax.eval_shape(loss, params)
    if getattr(made, "shape", None) != () or not jnp.issubdtype(made.dtype, jnp.floating):
        raise ValueError(
            f"loss(params) must be one real number, got {made}. Average over the batch, and return"
            " nothing beside the loss."
        )
