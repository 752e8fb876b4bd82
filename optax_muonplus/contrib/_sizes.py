"""Sizes of rows, columns and matrices, which several rivals divide by."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_muonplus import matrices
from optax_muonplus.transforms import MatrixLayout

RMS = 0.2  # root mean square of an update, about that of AdamW's


def divided(x: ArrayLike, size: jax.Array, least: ArrayLike = 0) -> jax.Array:
    """Returns ``x / size``, and zero where the size is not above ``least``."""
    counts = size > least
    return jnp.where(counts, x / jnp.where(counts, size, 1), 0)


def matrix_axes(layout: MatrixLayout) -> tuple[int, ...]:
    """Returns the axes of a matrix in its block."""
    return (*layout.output_axes, *layout.reduction_axes)


def norm_over(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns the Euclidean norms over axes, which are kept with size 1."""
    return matrices.root(matrices.sum_of_squares(x, axes))


def matrix_norm(layout: MatrixLayout, x: jax.Array) -> jax.Array:
    """Returns the Frobenius norm of each matrix of a block."""
    return norm_over(x, matrix_axes(layout))
