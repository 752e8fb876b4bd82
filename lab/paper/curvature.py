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

from lab.paper.imbalance import Side, squared_norms

Matrices = Mapping[str, jax.Array]
"""Matrices (out, in) by name."""


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
    iterations: int = 20,
) -> dict[str, jax.Array]:
    r"""Computes :math:`\|[\nabla^2 L]_b\|_2` of each row or column b, from below.

    The cost is ``iterations + 1`` HVPs for each block. Call this under ``jax.jit``.

    Args:
      loss: function of the matrices, twice differentiable.
      matrices: where the curvature is taken.
      side: ``"row"``: a block is the weights of one output unit; ``"col"``: of one input feature.
      key: random key, for the first vectors.
      iterations: number of power iterations.
    """
    found = {}
    for name, own in zip(matrices, jax.random.split(key, len(matrices)), strict=True):

        def loss_of(x: jax.Array, name: str = name) -> jax.Array:
            return loss({**matrices, name: by_block(x, side)})

        x = by_block(matrices[name], side)
        found[name] = norms_of_blocks(loss_of, x, jax.random.normal(own, x.shape), iterations)
    return found


def norms_of_blocks(
    loss: Callable[[jax.Array], jax.Array], x: jax.Array, starts: jax.Array, iterations: int
) -> jax.Array:
    """Computes the norms for one matrix (blocks, elements of a block)."""
    # The gradient is computed once. Every iteration only applies its derivative.
    _, derivative = jax.linearize(jax.grad(loss), x)

    def of_block(place: tuple[jax.Array, jax.Array]) -> jax.Array:
        block, start = place

        def product(v: jax.Array) -> jax.Array:
            return derivative(jnp.zeros_like(x).at[block].set(v))[block]

        return spectral_norm(product, start, iterations)

    return jax.lax.map(of_block, (jnp.arange(len(x)), starts), batch_size=min(8, len(x)))


def by_block(x: jax.Array, side: Side) -> jax.Array:
    """Lays a matrix out as (blocks, elements of a block), and back."""
    return x if side == "row" else x.T


def descent_bound(
    curvatures: Matrices, gradients: Matrices, updates: Matrices, side: Side = "row"
) -> dict[str, DescentBound]:
    """Computes the bound on the loss after ``W - eta * update``, for each matrix.

    Updates point along the gradient, as those of `optax_muonplus.scale_by_muonplus` do.
    """
    bounds = {}
    for name, norms in curvatures.items():
        slope = jnp.sum(gradients[name] * updates[name])
        squares = squared_norms(updates[name], side)
        total = jnp.sum(norms * squares)
        step_size = ratio(slope, total)
        mean = ratio(total, jnp.sum(squares))
        bounds[name] = DescentBound(slope, total, mean, step_size, slope * step_size / 2)
    return bounds


def spectral_norm(
    product: Callable[[jax.Array], jax.Array], start: jax.Array, iterations: int
) -> jax.Array:
    r"""Finds the largest ``|eigenvalue|`` by power iteration.

    ``s = |H v|`` never decreases and never exceeds the norm. It converges even if H has two largest
    eigenvalues of opposite sign, where v does not. The result is zero for H = 0.
    """

    def step(_: int, v: jax.Array) -> jax.Array:
        image = product(v)
        return ratio(image, norm(image))

    return norm(product(jax.lax.fori_loop(0, iterations, step, start / norm(start))))


def norm(v: jax.Array) -> jax.Array:
    """Computes the l2 norm of a vector, even if squares overflow or underflow."""
    largest = jnp.max(jnp.abs(v))
    return largest * jnp.sqrt(jnp.sum(jnp.square(ratio(v, largest))))


def ratio(a: jax.Array, b: jax.Array) -> jax.Array:
    """Divides; the result is zero where b is zero."""
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))
