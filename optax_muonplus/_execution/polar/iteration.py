r"""The Newton-Schulz iteration as it runs; ``_core.newton_schulz`` defines what it computes.

It is either plain or on the Gram matrix, in one loop. If the shorter side of X is the left one, a
step multiplies X from the left by a polynomial P of the Gram matrix R. All of these matrices
commute, so that R and P alone give the next Gram matrix:

.. math::
  P_i = c_0 I + c_1 R_i + c_2 R_i^2 + \dots, \qquad
  X_{i+1} = P_i X_i, \qquad R_{i+1} = X_{i+1} X_{i+1}^H = R_i P_i^2

A *segment* is a run of steps that multiplies with X only at its ends. It computes :math:`R = X
X^H`, forms the product of its :math:`P_i` on the short side, and multiplies X by it once. In plain
Newton-Schulz every step is a segment. Gram Newton-Schulz has as few segments as rounding allows: a
*restart* begins a new one before the errors in R become large.

Source of the Gram form: Dao-AILab, gram-newton-schulz (2026),
https://dao-ailab.github.io/blog/2026/gram-newton-schulz/.
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
from optax_muonplus._core.function import Matrices
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

# The Frobenius norm that float16 operands are scaled to. Entries of the Gram matrix are then
# at most 4 x 64^2, a quarter of float16's range.
_NORM = 64.0


@dataclasses.dataclass(frozen=True)
class Iteration:
    """All choices for the iteration of matrices of one shape and dtype on one platform."""

    rows: tuple[Row, ...]  # one for each step
    restarts: tuple[int, ...]  # steps, counted from 0, that compute the Gram matrix again
    safety_factor: float  # multiplies the norm
    preconditioning: Preconditioning  # the norm that divides
    exact_norm: bool  # whether it is that of matrices before they are rounded
    products: Products  # for matrices of that shape


def operations(shape: Sequence[int], rows: Sequence[Row], restarts: tuple[int, ...]) -> int:
    """Counts multiplications and additions in the products of :func:`iterate`, for one matrix."""
    n, m = sorted(shape[-2:])
    count = 0
    for start, stop in _segments(len(rows), restarts):
        powers = sum(len(row) - 2 for row in rows[start:stop])
        updates = 3 * (stop - start - 1)  # R P, (R P) P, and the product of the P
        count += 4 * n * n * m + 2 * n**3 * (powers + updates)
    return count


# Under jax.jit it is compiled once for each shape also if the caller is not jitted.
@functools.partial(jax.jit, static_argnames="iteration")
def iterate(
    x: Matrices, eps: ArrayLike, iteration: Iteration, largest: Scale | None = None
) -> Matrices:
    """Runs an iteration, with ``eps`` added to the norm that divides.

    The ``largest`` absolute values of matrices are found in a pass over ``x`` if not known.
    """
    rows, products = iteration.rows, iteration.products
    operand, dtype = products.operand, products.dtype
    # XLA's CPU products are 5 to 10% slower with an axis of size 1 in front (jaxlib 0.10.2).
    y = x.reshape(x.shape[-2:]) if math.prod(x.shape[:-2]) == 1 else x
    y = y.astype(dtype)
    if largest is None:
        y, magnitude = _in_range(y, operand)
    else:
        size = largest.astype(jnp.finfo(dtype).dtype)
        y, magnitude = divide_by_pow2(y, size.reshape(*y.shape[:-2], 1, 1))
    scaled_eps = as_real(eps, magnitude.dtype) / magnitude
    wide, y = y, products.pad(round_to(y, operand))
    measured = products.pad(wide) if iteration.exact_norm else y
    gram = products.gram(measured, iteration.exact_norm)
    norm = iteration.safety_factor, iteration.preconditioning, products.saves_passes
    scale = _scale(measured, gram, scaled_eps, *norm) * products.factor
    if not products.saves_passes:
        gram = round_to(gram * scale * jnp.swapaxes(scale, -1, -2), operand)
    rows = _monic(rows, iteration.restarts) if products.saves_passes else rows
    # Not a jax loop: that would copy its carry at every step, 5% of the time on a CPU.
    for start, stop in _segments(len(rows), iteration.restarts):
        if start:
            gram, scale = products.gram(y), None
        y = products.segment(y, gram, rows[start:stop], scale)
    y = part(y, x.shape[-2:]).astype(dtype) / products.factor
    return y.astype(x.dtype).reshape(x.shape)


@functools.partial(jax.jit, static_argnames="operand", inline=True)
def _in_range(x: Matrices, operand: jnp.dtype) -> tuple[Matrices, Scale]:
    """Divides ``x`` by powers of two, and returns these too.

    Neither the quotient nor its Gram matrix leaves the range of ``operand``. Float16 has so little
    of it that not the largest element is brought near 1, but the Frobenius norm near 64: elements
    of the Gram matrix are then at most 128^2, and a few large elements of ``x`` do not push the
    others below the normal numbers.
    """
    if jnp.finfo(operand).nexp >= jnp.finfo(jnp.float32).nexp:
        return scale_by_pow2(x)
    # Both are sums over the same elements, which XLA makes in one pass.
    squares = sum_of_squares(x, (-2, -1))
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
    info = jnp.finfo(squares.dtype)
    summed = (squares > info.tiny / info.eps) & (squares < info.max)
    y, magnitude = divide_by_pow2(x, jnp.where(summed, root(squares), largest))
    # Squares of very large and very small elements leave the range of float32. The norm is then
    # only known to be at most that of a matrix full of the largest element.
    full = 2.0 ** math.ceil(math.log2(math.prod(x.shape[-2:])) / 2)
    factor = jnp.where(summed, _NORM, _NORM / full)
    return y * factor, magnitude / factor


def range_factor(operand: jnp.dtype, row_length: int) -> float:
    """Returns a power of two that iterates are multiplied by, so that they are normal numbers.

    Elements of the Gram matrix R are about 1/n at first, and those off its diagonal 1/n^1.5:
    below the normal numbers of float16 (6e-5) from n = 700 on. The factor, 8 for rows of three
    coefficients, multiplies R by 64. At the other end it leaves room for singular values up to 2:
    the power of R that the last coefficient multiplies then stays below 2^16, where float16 ends.
    """
    if jnp.finfo(operand).nexp >= jnp.finfo(jnp.float32).nexp:
        return 1.0
    return 2.0 ** max(0, min(3, 8 // (row_length - 1) - 1))


def _segments(steps: int, restarts: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(itertools.pairwise((0, *restarts, steps)))


def _monic(rows: tuple[Row, ...], restarts: tuple[int, ...]) -> tuple[Row, ...]:
    r"""Returns the rows of iterates :math:`Y_i = X_i / t_i`, with 1 for last coefficients.

    :math:`X_{i+1} = (a + b R + c R^2) X_i` becomes :math:`Y_{i+1} = (a / c t_i^4 + b / c t_i^2 \; R
    + R^2) Y_i` for :math:`t_{i+1} = c t_i^5` and the Gram matrix R of :math:`Y_i`. The last t is 1.
    Only positive polynomials that are a segment of their own, not the first, are made so.
    """
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
    y: Matrices,
    gram: Square,
    eps: Scale,
    safety_factor: float,
    preconditioning: Preconditioning,
    reads_diagonal: bool,
) -> Scale:
    """Returns the factor of the short side of ``y``: one number, or under aol one for each row.

    All norms but the spectral one are computed from the Gram matrix, which saves a pass over ``y``.
    For the trace XLA reads the whole of it, unless ``reads_diagonal`` takes the diagonal out.
    """
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
        else:
            trace = jnp.trace(wide, axis1=-2, axis2=-1)
        norm = root(jnp.real(trace)[..., None, None])
    # The norm of a zero matrix, or under aol of a zero row, is 0, and eps may be 0 too.
    divisor = jnp.where(norm > 0, safety_factor * norm + eps, 1)
    return jnp.where(norm > 0, 1 / divisor, 0)
