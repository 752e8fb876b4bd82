"""Norms of rows, columns and matrices."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_muonplus import matrices
from optax_muonplus.transforms import MatrixLayout

RMS = 0.2  # root mean square of an update, similar to AdamW's


def divided(x: ArrayLike, size: jax.Array) -> jax.Array:
    """Returns ``x / size``, or zero where the size is zero."""
    counts = size > 0
    return jnp.where(counts, x / jnp.where(counts, size, 1), 0)


def norm_over(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns Euclidean norms over ``axes``, which keep size 1."""
    return matrices.root(matrices.sum_of_squares(x, axes))


def matrix_norm(layout: MatrixLayout, x: jax.Array) -> jax.Array:
    return norm_over(x, layout.matrix_axes)
