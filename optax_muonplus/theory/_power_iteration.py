"""The spectral norm of a symmetric matrix that is known by its products with vectors."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def spectral_norm(
    product: Callable[[jax.Array], jax.Array], start: jax.Array, iterations: int
) -> tuple[jax.Array, jax.Array]:
    r"""The largest ``|eigenvalue|`` by power iteration, and how far it has settled.

    .. math::
      v \leftarrow H v / \|H v\|, \qquad s = \|H v\|, \qquad
      \text{residual} = \|H^2 v - s^2 v\| / s^2

    s never falls from one iteration to the next and never exceeds the norm. It tends to it also
    where two eigenvalues of opposite sign share it: there v goes back and forth, and only v of
    H^2 settles, which is why the residual is that of H^2.

    Args:
      product: v to H v, both ``(n,)``; H real and symmetric, not necessarily definite.
      start: a vector ``(n,)`` that is not zero, random unless one knows better.
      iterations: number of iterations; there is one product more.

    Returns:
      The norm after all products, and the residual of the iteration before the last: some
      eigenvalue of H^2 is, relatively, that close to s^2. Both are zero for H = 0.
    """

    def step(
        _: Any, carry: tuple[jax.Array, jax.Array, jax.Array]
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
    """The l2 norm ``()`` of ``(n,)`` numbers, also where their squares leave the dtype."""
    largest = jnp.max(jnp.abs(v))
    return largest * jnp.sqrt(jnp.sum(jnp.square(ratio(v, largest))))


def ratio(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a / b``, and zero where b is."""
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))
