r"""The blockwise descent bound: what an update is guaranteed to gain, given the loss's curvature.

Theorem 1 of the Muon+ paper bounds the change of the loss L at a step from W to :math:`W - \eta O`:

.. math::
  L(W - \eta O) - L(W) \le -\eta \langle \nabla L, O \rangle
  + \tfrac{\eta^2}{2} \tilde\Lambda_O + \dots, \qquad
  \tilde\Lambda_O = \sum_b \bigl\| [\nabla^2 L]_b \bigr\|_2 \, \|[O]_b\|_2^2

where b runs over rows or columns, and :mod:`optax_muonplus.curvature` has the norms. Left out are,
as in the theorem, terms in :math:`\eta^3` and what the Hessian has between blocks.

Source: Zhang et al., Muon+, arXiv:2602.21545, theorem 1 and the appendix on blockwise descent.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_muonplus._parameters.paths import flatten_with_names, path_name
from optax_muonplus.matrices._precision import sum_of_squares, upcast_for_sum
from optax_muonplus.theory._curvature import BlockCurvature, by_block
from optax_muonplus.theory._power_iteration import ratio


class DescentBound(NamedTuple):
    r"""The bound :math:`-\eta \cdot slope + \eta^2 / 2 \cdot curvature`, for each matrix.

    Arrays have one number for each matrix of a parameter: fused matrices one after another, each
    with its batch.

    Attributes:
      slope: :math:`\langle \nabla L, O \rangle`. For the exact polar factor of the gradient it is
        the nuclear norm that the theorem has.
      curvature: :math:`\tilde\Lambda_O`.
      mean_curvature: :math:`\tilde\Lambda_O / \|O\|^2`, the average of the block curvatures by the
        update's squared block norms. It does not depend on the size of the update: compare
        optimizers by this or by ``decrease``.
      step_size: :math:`\eta = slope / \tilde\Lambda_O`, where the bound is lowest; it is negative
        up to twice that.
      decrease: the decrease that it guarantees there, :math:`slope^2 / (2 \tilde\Lambda_O)`.
    """

    slope: jax.Array
    curvature: jax.Array
    mean_curvature: jax.Array
    step_size: jax.Array
    decrease: jax.Array


def weighted_curvature(
    curvatures: Mapping[str, BlockCurvature], updates: Any
) -> dict[str, jax.Array]:
    r"""The curvature :math:`\tilde\Lambda_O` that an update meets, for each matrix.

    .. math::
      \tilde\Lambda_O = \sum_b \bigl\| [\nabla^2 L]_b \bigr\|_2 \, \|[O]_b\|_2^2

    Where ``curvatures`` has a random choice of blocks, it is the unbiased estimate: their sum times
    all blocks over chosen ones. The same choice for two updates compares them well. It grows with
    the square of the update: :class:`DescentBound` has what does not.

    Args:
      curvatures: of :func:`block_curvatures`.
      updates: tree with the parameters' paths and shapes, or more: updates of any optimizer.

    Returns:
      For each path in ``curvatures`` an array with one number for each matrix: fused matrices one
      after another, each with its batch.

    Raises:
      ValueError: if an update is missing or has another shape than its parameter.

    Source: arXiv:2602.21545, equation ``lambda_O_block_appendix``.
    """
    return {
        path: _weighted(curvature, leaf)
        for path, curvature, leaf in _matched(curvatures, updates, "updates")
    }


def descent_bound(
    curvatures: Mapping[str, BlockCurvature], gradients: Any, updates: Any
) -> dict[str, DescentBound]:
    r"""The second-order bound on the loss after ``params - eta * updates``, for each matrix.

    Arguments are as in :func:`weighted_curvature`; ``gradients`` are those of the loss. Updates
    point along the gradient, as those of :func:`optax_muonplus.scale_by_muonplus` do; for updates
    that are to be added, as whole optimizers make them, ``slope`` and ``step_size`` are negative.

    Source: arXiv:2602.21545, theorem 1 and its proof, where the first term is this for any update.
    """
    result = {}
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
        result[path] = DescentBound(
            slope, total, ratio(total, squares), step_size, slope * step_size / 2
        )
    return result


def _weighted(curvature: BlockCurvature, update: Any) -> jax.Array:
    sums = []
    blocks = by_block(curvature.view, curvature.side, jnp.asarray(update))
    for norms, index, x in zip(curvature.norms, curvature.index, blocks, strict=True):
        squares = jnp.take_along_axis(sum_of_squares(x, (2,))[:, :, 0], index, axis=1)
        sums.append(jnp.sum(norms * squares, axis=1) * (x.shape[1] / index.shape[1]))
    return jnp.concatenate(sums)


def _matched(
    curvatures: Mapping[str, BlockCurvature], tree: Any, what: str
) -> list[tuple[str, BlockCurvature, Any]]:
    """Each path with its curvature and its leaf of ``tree``."""
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
