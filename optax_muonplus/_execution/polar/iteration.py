r"""The Newton-Schulz iteration as it runs; ``_core.newton_schulz`` defines what it computes.

One loop runs the plain iteration and its Gram form, whose equations are in ``polar_factor``. If the
rows are the shorter side of X, a step multiplies X from the left by a polynomial P of the Gram
matrix R. These matrices commute: R and P alone determine the next Gram matrix.

A *segment* is a run of steps that multiplies with X only at its ends: it computes :math:`R = X
X^H`, and multiplies X once by the product of its :math:`P_i`. In plain Newton-Schulz every step is
a segment. In the Gram form a *restart* begins a new one before rounding errors in R grow large.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_muonplus._core.coefficients import Row
from optax_muonplus._core.function import MatrixArray
from optax_muonplus._core.newton_schulz import Preconditioning
from optax_muonplus._core.precision import (
    as_real,
    divide_by_pow2,
    root,
    scale_by_pow2,
    sum_of_squares,
)
from optax_muonplus._execution.polar.products import (
    Products,
    Scale,
    Square,
    diagonal,
    is_positive,
    part,
    round_to,
)


@dataclasses.dataclass(frozen=True)
class Iteration:
    """All choices for the iteration of matrices of one shape and dtype on one platform."""

    rows: tuple[Row, ...]  # one for each step
    restarts: tuple[int, ...]  # steps, counted from 0, that compute the Gram matrix again
    safety_factor: float  # multiplies the norm
    preconditioning: Preconditioning  # the norm that divides
    exact_norm: bool  # whether it is the norm before rounding
    products: Products


def operations(shape: Sequence[int], rows: Sequence[Row], restarts: tuple[int, ...]) -> int:
    """Counts multiplications and additions in the products of :func:`iterate`, for one matrix."""
    n, m = sorted(shape[-2:])
    count = 0
    for start, stop in _segments(len(rows), restarts):
        powers = sum(len(row) - 2 for row in rows[start:stop])
        updates = 3 * (stop - start - 1)  # R P, (R P) P, and the product of the P
        count += 4 * n * n * m + 2 * n**3 * (powers + updates)
    return count


# jax.jit compiles it once for each shape even if the caller is not jitted.
@functools.partial(jax.jit, static_argnames="iteration")
def iterate(
    x: MatrixArray, eps: ArrayLike, iteration: Iteration, largest: Scale | None = None
) -> MatrixArray:
    """Runs an iteration, with ``eps`` added to the norm; ``largest`` values save a pass."""
    rows, products = iteration.rows, iteration.products
    operand, dtype = products.operand, products.dtype
    # XLA's CPU products are 5 to 10% slower with an axis of size 1 in front (jaxlib 0.10.2).
    y = (x.reshape(x.shape[-2:]) if math.prod(x.shape[:-2]) == 1 else x).astype(dtype)
    if largest is None:
        y, magnitude = scale_by_pow2(y)
    else:
        size = largest.astype(jnp.finfo(dtype).dtype)
        y, magnitude = divide_by_pow2(y, size.reshape(*y.shape[:-2], 1, 1))
    scaled_eps = as_real(eps, magnitude.dtype) / magnitude
    wide, y = y, products.pad(round_to(y, operand))
    measured = products.pad(wide) if iteration.exact_norm else y
    gram = products.gram(measured, iteration.exact_norm)
    norm = iteration.safety_factor, iteration.preconditioning, products.saves_passes
    scale = _scale(measured, gram, scaled_eps, *norm)
    if not products.saves_passes:
        gram = round_to(gram * scale * jnp.swapaxes(scale, -1, -2), operand)
    rows = _monic(rows, iteration.restarts) if products.saves_passes else rows
    # Not a jax loop: that would copy its carry at every step, 5% of the time on a CPU.
    for start, stop in _segments(len(rows), iteration.restarts):
        if start:
            gram, scale = products.gram(y), None
        y = products.segment(y, gram, rows[start:stop], scale)
    return part(y, x.shape[-2:]).astype(x.dtype).reshape(x.shape)


def _segments(steps: int, restarts: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(itertools.pairwise((0, *restarts, steps)))


def _monic(rows: tuple[Row, ...], restarts: tuple[int, ...]) -> tuple[Row, ...]:
    """Returns the rows for iterates ``Y_i = X_i / t_i``, whose last coefficients are 1."""
    # X_{i+1} = (a + b R + c R^2) X_i becomes Y_{i+1} = (a / (c t_i^4) + b / (c t_i^2) R + R^2) Y_i.
    # Here t_{i+1} = c t_i^5, and R is the Gram matrix of Y_i. The last t is 1. Only positive
    # polynomials that are a segment by themselves, other than the first, become monic.
    made, t = list(rows), 1.0
    for start, stop in reversed(_segments(len(rows), restarts)):
        row = rows[stop - 1]
        if 0 < start == stop - 1 and is_positive(row):
            a, b, c = row
            t = (t / c) ** 0.2
            made[start] = a / (c * t**4), b / (c * t**2), 1.0
        else:
            made[stop - 1], t = tuple(c / t for c in row), 1.0
    return tuple(made)


@functools.partial(jax.jit, static_argnums=(3, 4, 5), inline=True)
def _scale(
    y: MatrixArray,
    gram: Square,
    eps: Scale,
    safety_factor: float,
    preconditioning: Preconditioning,
    reads_diagonal: bool,
) -> Scale:
    """Returns the factor of the short side of ``y``: a number, or for aol one for each row."""
    # All norms but the spectral one come from the Gram matrix, without a pass over ``y``.
    wide = gram.astype(jnp.promote_types(gram.dtype, eps.dtype))
    if preconditioning == "spectral":
        norm = jnp.linalg.norm(y.astype(wide.dtype), ord=2, axis=(-2, -1), keepdims=True)
    elif preconditioning == "schatten":
        norm = root(sum_of_squares(wide, (-2, -1)), degree=4)
    elif preconditioning == "aol":
        norm = root(jnp.sum(jnp.abs(wide), axis=-1, keepdims=True))
    else:
        if reads_diagonal:
            trace = jnp.sum(diagonal(gram), axis=-1, dtype=wide.dtype)
        else:  # XLA reads the whole matrix
            trace = jnp.trace(wide, axis1=-2, axis2=-1)
        norm = root(jnp.real(trace)[..., None, None])
    # The norm of a zero matrix, or for aol of a zero row, is 0, and eps may be 0 too.
    divisor = jnp.where(norm > 0, safety_factor * norm + eps, 1)
    return jnp.where(norm > 0, 1 / divisor, 0)
