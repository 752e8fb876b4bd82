r"""Computes the curvature that an update meets, and the descent bound of Theorem 1.

The theorem bounds the change of the loss L at a step from W to :math:`W - \eta O`:

.. math::
  L(W - \eta O) - L(W) \le -\eta \langle \nabla L, O \rangle
  + \tfrac{\eta^2}{2} \tilde\Lambda_O + \dots, \qquad
  \tilde\Lambda_O = \sum_b \bigl\| [\nabla^2 L]_b \bigr\|_2 \, \|[O]_b\|_2^2

where b runs over the rows (output units) or the columns (input features) of a matrix. Terms in
:math:`\eta^3` and the Hessian between different blocks are left out, as in the theorem.

The Hessian is never formed. A Hessian-vector product (HVP) is one forward-mode derivative of a
gradient. If the vector is zero outside of one block, the part of the product in that block is the
diagonal block times the vector.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_muonplus.diagnostics import Side

Matrices = Mapping[str, jax.Array]
"""Matrices (out, in) by name."""


class BlockCurvature(NamedTuple):
    r"""Spectral norms of diagonal blocks of the Hessian, for one matrix."""

    norms: jax.Array
    r""":math:`\|[\nabla^2 L]_b\|_2` of each chosen block, approximated from below."""
    residuals: jax.Array
    r""":math:`\|H^2 v - s^2 v\| / s^2` of each block after the iterations, where s is its norm.
    Some eigenvalue of :math:`H^2` differs from :math:`s^2` by that much, relative to it."""
    index: jax.Array
    """The rows or columns that were chosen, in order."""


class DescentBound(NamedTuple):
    r"""The bound :math:`-\eta \cdot slope + \eta^2 / 2 \cdot curvature`, for one matrix."""

    slope: jax.Array
    r""":math:`\langle \nabla L, O \rangle`; for the exact polar factor, the nuclear norm."""
    curvature: jax.Array
    r""":math:`\tilde\Lambda_O`."""
    mean_curvature: jax.Array
    r""":math:`\tilde\Lambda_O / \|O\|^2`, which does not depend on the size of the update."""
    step_size: jax.Array
    """The step size where the bound is lowest."""
    decrease: jax.Array
    r"""The guaranteed decrease at that step size, :math:`slope^2 / (2 \tilde\Lambda_O)`."""


def block_curvatures(
    loss: Callable[[dict[str, jax.Array]], jax.Array],
    matrices: Matrices,
    side: Side = "row",
    *,
    key: jax.Array,
    blocks: int | None = None,
    iterations: int = 20,
    blocks_at_once: int = 8,
) -> dict[str, BlockCurvature]:
    """Computes spectral norms of the Hessian's diagonal blocks, one for each row or column.

    The cost is ``iterations + 1`` HVPs for each block, of which ``blocks_at_once`` run together.
    Call this under ``jax.jit``, with the text of the loss as an argument.

    Args:
      loss: function of the matrices, twice differentiable.
      matrices: where the curvature is taken.
      side: ``"row"``: a block is the weights of one output unit; ``"col"``: of one input feature.
      key: random key, for the choice of blocks and for the first vectors.
      blocks: number of blocks, drawn at random for each matrix; None for all.
      iterations: number of power iterations.
      blocks_at_once: number of blocks whose HVPs run together.
    """
    found = {}
    for name, own in zip(matrices, jax.random.split(key, len(matrices)), strict=True):

        def loss_of(x: jax.Array, name: str = name) -> jax.Array:
            return loss({**matrices, name: by_block(x, side)})

        for_choice, for_starts = jax.random.split(own)
        x = by_block(matrices[name], side)
        index = jnp.arange(len(x))
        if blocks is not None and blocks < len(x):
            index = jnp.sort(jax.random.choice(for_choice, index, (blocks,), replace=False))
        starts = jax.random.normal(for_starts, (len(index), *x.shape[1:]))
        norms, residuals = norms_of_blocks(loss_of, x, index, starts, iterations, blocks_at_once)
        found[name] = BlockCurvature(norms, residuals, index)
    return found


def norms_of_blocks(
    loss: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    index: jax.Array,
    starts: jax.Array,
    iterations: int,
    at_once: int,
) -> tuple[jax.Array, jax.Array]:
    """Norms and residuals of some blocks of one matrix (blocks, elements of a block)."""
    # The gradient is computed once. Every iteration only applies its derivative.
    _, derivative = jax.linearize(jax.grad(loss), x)

    def of_block(place: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        block, start = place

        def product(v: jax.Array) -> jax.Array:
            return derivative(jnp.zeros_like(x).at[block].set(v))[block]

        return spectral_norm(product, start, iterations)

    return jax.lax.map(of_block, (index, starts), batch_size=min(at_once, len(index)))


def by_block(x: jax.Array, side: Side) -> jax.Array:
    """Lays a matrix out as (blocks, elements of a block), and back."""
    return x if side == "row" else x.T


def weighted_curvature(
    curvature: BlockCurvature, update: jax.Array, side: Side = "row"
) -> jax.Array:
    r"""Computes the curvature :math:`\tilde\Lambda_O` that the update of one matrix meets.

    If blocks were chosen at random, the result is an unbiased estimate: the sum over them, times
    the number of all blocks over that of the chosen ones.
    """
    x = by_block(update, side)
    squares = jnp.sum(jnp.square(x), axis=1)[curvature.index]
    return jnp.sum(curvature.norms * squares) * (len(x) / len(curvature.index))


def descent_bound(
    curvatures: Mapping[str, BlockCurvature],
    gradients: Matrices,
    updates: Matrices,
    side: Side = "row",
) -> dict[str, DescentBound]:
    """Computes the bound on the loss after ``W - eta * update``, for each matrix.

    Updates point along the gradient, as those of `optax_muonplus.scale_by_muonplus` do.
    """
    bounds = {}
    for name, curvature in curvatures.items():
        slope = jnp.sum(gradients[name] * updates[name])
        total = weighted_curvature(curvature, updates[name], side)
        mean = ratio(total, jnp.sum(jnp.square(updates[name])))
        step_size = ratio(slope, total)
        bounds[name] = DescentBound(slope, total, mean, step_size, slope * step_size / 2)
    return bounds


def spectral_norm(
    product: Callable[[jax.Array], jax.Array], start: jax.Array, iterations: int
) -> tuple[jax.Array, jax.Array]:
    r"""Finds the largest ``|eigenvalue|`` by power iteration, and how well it has converged.

    ``s = |H v|`` never decreases and never exceeds the norm. It converges even if H has two largest
    eigenvalues of opposite sign; v then is an eigenvector of H^2 only, and so the residual is that
    of H^2. Both results are zero for H = 0.
    """

    def step(_: int, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        v = carry[1]
        image = product(v)
        s = norm(image)
        return v, ratio(image, s), s

    v = start / norm(start)
    v, image, s = jax.lax.fori_loop(0, iterations, step, (v, v, jnp.zeros_like(v[0])))
    # H v = s * image, so that H^2 v = s * H image.
    last = product(image)
    return norm(last), ratio(norm(last - s * v), s)


def norm(v: jax.Array) -> jax.Array:
    """Computes the l2 norm of a vector, even if squares overflow or underflow."""
    largest = jnp.max(jnp.abs(v))
    return largest * jnp.sqrt(jnp.sum(jnp.square(ratio(v, largest))))


def ratio(a: jax.Array, b: jax.Array) -> jax.Array:
    """Divides; the result is zero where b is zero."""
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))
