"""The spectral norm of a symmetric matrix, from its products with vectors alone."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def spectral_norm(
    product: Callable[[jax.Array], jax.Array], start: jax.Array, iterations: int
) -> tuple[jax.Array, jax.Array]:
    r"""The largest ``|eigenvalue|`` by power iteration, and how well it has converged.

    .. math::
      v \leftarrow H v / \|H v\|, \qquad s = \|H v\|, \qquad
      \text{residual} = \|H^2 v - s^2 v\| / s^2

    s never decreases from one iteration to the next, and never exceeds the norm. It converges to
    the norm even if H has two largest eigenvalues of opposite sign. In that case v alternates
    between two directions and is an eigenvector of H^2 only, which is why the residual is that of
    H^2.

    Args:
      product: the function from v to H v, both ``(n,)``. H is real and symmetric, and need not be
        definite.
      start: a vector ``(n,)`` that is not zero, as a rule a random one.
      iterations: number of iterations. There is one product more than iterations.

    Returns:
      The norm after all products, and the residual of the iteration before the last. Some
      eigenvalue of H^2 differs from s^2 by that much, relative to s^2. Both are zero for H = 0.
    """

    def step(
        _: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
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
    """The l2 norm ``()`` of a vector ``(n,)``, even if squares overflow or underflow."""
    largest = jnp.max(jnp.abs(v))
    return largest * jnp.sqrt(jnp.sum(jnp.square(ratio(v, largest))))


def ratio(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a / b``, or zero where b is zero."""
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))
