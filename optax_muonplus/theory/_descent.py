r"""The blockwise descent bound: the decrease of the loss that an update is guaranteed to make.

Theorem 1 of the Muon+ paper bounds the change of the loss L at a step from W to :math:`W - \eta O`:

.. math::
  L(W - \eta O) - L(W) \le -\eta \langle \nabla L, O \rangle
  + \tfrac{\eta^2}{2} \tilde\Lambda_O + \dots, \qquad
  \tilde\Lambda_O = \sum_b \bigl\| [\nabla^2 L]_b \bigr\|_2 \, \|[O]_b\|_2^2

where b runs over rows or columns; :func:`optax_muonplus.theory.block_curvatures` computes the
norms. As in the theorem, terms in :math:`\eta^3` and the Hessian between different blocks are left
out.

Source: Zhang et al., Muon+, arXiv:2602.21545, theorem 1 and the appendix on blockwise descent.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_muonplus._parameters.paths import flatten_with_names, path_name
from optax_muonplus.matrices._precision import sum_of_squares, upcast_for_sum
from optax_muonplus.theory._curvature import BlockCurvature, by_block
from optax_muonplus.theory._power_iteration import ratio


class DescentBound(NamedTuple):
    r"""The bound :math:`-\eta \cdot slope + \eta^2 / 2 \cdot curvature`, for each matrix.

    Each array has one element for each matrix of a parameter: fused matrices follow one another,
    each with its batch.

    Attributes:
      slope: :math:`\langle \nabla L, O \rangle`. For the exact polar factor of the gradient this is
        the nuclear norm of the theorem.
      curvature: :math:`\tilde\Lambda_O`.
      mean_curvature: :math:`\tilde\Lambda_O / \|O\|^2`, the average of the block curvatures,
        weighted by the squared block norms of the update. It does not depend on the size of the
        update: compare optimizers by this or by ``decrease``.
      step_size: :math:`\eta = slope / \tilde\Lambda_O`, where the bound is lowest. The bound is
        negative for step sizes up to twice that.
      decrease: the guaranteed decrease at that step size, :math:`slope^2 / (2 \tilde\Lambda_O)`.
    """

    slope: jax.Array
    curvature: jax.Array
    mean_curvature: jax.Array
    step_size: jax.Array
    decrease: jax.Array


def weighted_curvature(
    curvatures: Mapping[str, BlockCurvature], updates: optax.Updates
) -> dict[str, jax.Array]:
    r"""The curvature :math:`\tilde\Lambda_O` that an update meets, for each matrix.

    .. math::
      \tilde\Lambda_O = \sum_b \bigl\| [\nabla^2 L]_b \bigr\|_2 \, \|[O]_b\|_2^2

    If ``curvatures`` has a random choice of blocks, the result is an unbiased estimate: the sum
    over these blocks, times the number of all blocks over the number of chosen ones. To compare two
    updates, use the same choice for both. The result grows with the square of the update;
    :class:`DescentBound` has values that do not.

    Args:
      curvatures: the result of :func:`block_curvatures`.
      updates: updates of any optimizer. The tree must have the paths and shapes of the parameters,
        and may have more.

    Returns:
      For each path in ``curvatures`` an array with one element for each matrix: fused matrices
      follow one another, each with its batch.

    Raises:
      ValueError: if an update is missing, or if its shape is not that of its parameter.

    Source: arXiv:2602.21545, equation ``lambda_O_block_appendix``.
    """
    return {
        path: _weighted(curvature, leaf)
        for path, curvature, leaf in _matched(curvatures, updates, "updates")
    }


def descent_bound(
    curvatures: Mapping[str, BlockCurvature], gradients: optax.Updates, updates: optax.Updates
) -> dict[str, DescentBound]:
    r"""The second-order bound on the loss after ``params - eta * updates``, for each matrix.

    .. math::
      L(W - \eta O) - L(W) \le -\eta \langle \nabla L, O \rangle + \tfrac{\eta^2}{2}
      \tilde\Lambda_O

    Args:
      curvatures: the result of :func:`block_curvatures`.
      gradients: gradients of the loss, a tree like the updates.
      updates: updates O, as in :func:`weighted_curvature`. They point along the gradient, as those
        of :func:`optax_muonplus.scale_by_muonplus` do. Whole optimizers return updates that are to
        be added to the parameters: for these ``slope`` and ``step_size`` are negative.

    Returns:
      For each path in ``curvatures`` its :class:`DescentBound`.

    Raises:
      ValueError: as for :func:`weighted_curvature`.

    Source: arXiv:2602.21545, theorem 1. The first term is the one of its proof, for any update.
    """
    bounds = {}
    pairs = _matched(curvatures, gradients, "gradients"), _matched(curvatures, updates, "updates")
    for (path, curvature, gradient), (_, _, update) in zip(*pairs, strict=True):
        view = curvature.view
        g, o = (
            [upcast_for_sum(x) for x in view.to_matrices(jnp.asarray(leaf))]
            for leaf in (gradient, update)
        )
        slope = jnp.concatenate([jnp.sum(a * b, axis=(1, 2)) for a, b in zip(g, o, strict=True)])
        squares = jnp.concatenate([sum_of_squares(x, (1, 2))[:, 0, 0] for x in o])
        total = _weighted(curvature, update)
        step_size = ratio(slope, total)
        bounds[path] = DescentBound(
            slope, total, ratio(total, squares), step_size, slope * step_size / 2
        )
    return bounds


def _weighted(curvature: BlockCurvature, update: ArrayLike) -> jax.Array:
    """The weighted curvature of one parameter's update, one element for each matrix."""
    sums = []
    blocks = by_block(curvature.view, curvature.side, jnp.asarray(update))
    for norms, index, x in zip(curvature.norms, curvature.index, blocks, strict=True):
        squares = jnp.take_along_axis(sum_of_squares(x, (2,))[:, :, 0], index, axis=1)
        sums.append(jnp.sum(norms * squares, axis=1) * (x.shape[1] / index.shape[1]))
    return jnp.concatenate(sums)


def _matched(
    curvatures: Mapping[str, BlockCurvature], tree: optax.Updates, what: str
) -> list[tuple[str, BlockCurvature, ArrayLike]]:
    """Each path with its curvature and its leaf of ``tree``, which errors call ``what``."""
    names, leaves = flatten_with_names(tree)
    by_name = {path_name(path): leaf for path, leaf in zip(names, leaves, strict=True)}
    missing = [path for path in curvatures if path not in by_name]
    if missing:
        raise ValueError(
            f"No {what} for {', '.join(missing)}: there are {', '.join(by_name) or 'none'}. Pass a"
            " tree of the same structure as the parameters."
        )
    wrong = [
        f"{path} has {jnp.shape(by_name[path])}, its parameter {curvature.view.shape}"
        for path, curvature in curvatures.items()
        if jnp.shape(by_name[path]) != curvature.view.shape
    ]
    if wrong:
        raise ValueError(f"Shapes of {what} and of parameters differ: {'; '.join(wrong)}.")
    return [(path, curvature, by_name[path]) for path, curvature in curvatures.items()]
