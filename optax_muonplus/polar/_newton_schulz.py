r"""The Newton-Schulz iteration in one loop, which is either plain or on the Gram matrix.

If the shorter side of X is the left one, a step multiplies X from the left by a polynomial P of the
Gram matrix R. All of these matrices commute, so that R and P alone give the next Gram matrix:

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

import functools
import itertools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optax_muonplus.coefficients._minimax import Row
from optax_muonplus.coefficients._restarts import every_step
from optax_muonplus.matrices._precision import (
    as_real,
    divide_by_pow2,
    scale_by_pow2,
    sum_of_squares,
)
from optax_muonplus.polar._products import (
    Precision,
    Product,
    ShortSide,
    product,
    product_dtype,
    range_factor,
    rounded,
)
from optax_muonplus.polar._symmetric_product import padded_sides, symmetric_product

# Of both sides of half-precision operands, in elements: 16 bytes, what cuBLAS asks for.
ALIGNMENT = 8

# Of the Frobenius norm of float16 operands: its square, an element of the Gram matrix, is at most
# four times as large, a quarter of float16's range.
_NORM = 64.0

Preconditioning = Literal["frobenius", "spectral", "aol", "aol_out", "schatten"]


def product_shapes(
    shape: tuple[int, ...], rows: tuple[Row, ...], restarts: tuple[int, ...]
) -> list[tuple[int, int, int]]:
    """The products of :func:`iterate` for one matrix, each as ``(rows, inner, columns)``.

    Args:
      shape: ``(..., out, in)``.
      rows: coefficients, one row for each step.
      restarts: steps that begin a segment, besides step 0.
    """
    n, m = sorted(shape[-2:])
    products = []
    for start, stop in _segments(len(rows), restarts):
        powers = sum(len(row) - 2 for row in rows[start:stop])
        updates = 3 * (stop - start - 1)  # R P, (R P) P, and the product of the P
        products += [(n, m, n), *[(n, n, n)] * (powers + updates), (n, n, m)]
    return products


def operations(shape: tuple[int, ...], rows: tuple[Row, ...], restarts: tuple[int, ...]) -> int:
    """Multiplications and additions in :func:`product_shapes`, for one matrix."""
    return sum(2 * math.prod(dimensions) for dimensions in product_shapes(shape, rows, restarts))


# The arguments of the iteration that are choices, for jax.jit.
STATIC = ("rows", "safety_factor", "preconditioning", "compute_dtype", "symmetric_kernel")


# Under jax.jit it is compiled once for each shape also if the caller is not jitted. Otherwise a
# loop would be compiled again at every call.
@functools.partial(jax.jit, static_argnames=("restarts", "precision", *STATIC))
def iterate(
    x: jax.Array,
    *,
    eps: ArrayLike,
    steps: jax.Array | None = None,
    rows: tuple[Row, ...],
    restarts: tuple[int, ...],
    safety_factor: float,
    preconditioning: Preconditioning,
    compute_dtype: jnp.dtype | None,
    precision: Precision = None,
    symmetric_kernel: bool = False,
) -> jax.Array:
    """The iteration of :func:`optax_muonplus.polar.newton_schulz`, with all options resolved.

    Args:
      x: matrices ``(*batch, out, in)``.
      eps: added to the norm that divides.
      steps: a traced number of steps, which needs a restart at each; the last row is then used for
        all further steps. None means one step for each row.
      rows: coefficients, one row for each step.
      restarts: steps that compute the Gram matrix again.
      safety_factor: the norm is multiplied by it.
      preconditioning: the norm that divides.
      compute_dtype: dtype of operands, or None.
      precision: of the products; None means JAX's default.
      symmetric_kernel: whether symmetric products are computed as one triangle where that is
        possible and pays.
    """
    # XLA's CPU products are 5 to 10% slower with an axis of size 1 in front (jaxlib 0.10.2).
    y = x.reshape(x.shape[-2:]) if math.prod(x.shape[:-2]) == 1 else x
    dtype = product_dtype(x.dtype, compute_dtype)
    operand = dtype if compute_dtype is None else compute_dtype
    # Of a square matrix the left side is taken, which is 8% faster on a CPU. "aol" scales one side:
    # for that it takes the right one, as optax.contrib.muon does, and "aol_out" the left one.
    height, width = x.shape[-2:]
    left = height < width or (height == width and preconditioning != "aol")
    # The kernel sums in float32.
    kernel = padded_sides(height, width) if symmetric_kernel and dtype == jnp.float32 else None
    symmetric = None if kernel is None else symmetric_product
    factor = range_factor(operand, len(rows[0]))
    matmul = product(operand, dtype, precision)
    square = _square(operand, dtype, gram_form=restarts != every_step(len(rows)))
    side = ShortSide(left, matmul, operand, dtype, factor, symmetric, square)

    y, magnitude = _in_range(y.astype(dtype), operand)
    scaled_eps = as_real(eps, magnitude.dtype) / magnitude
    y = rounded(y, operand)
    if operand != dtype:
        y = _padded(y, kernel)
    gram = side.gram(y)
    scale = _scale(y, gram.astype(dtype), safety_factor, scaled_eps, preconditioning) * factor
    gram = side.rounded(gram * scale * jnp.swapaxes(scale, -1, -2))
    if steps is None:
        # Not a jax loop: that would copy its carry at every step, 5% of the time on a CPU.
        for start, stop in _segments(len(rows), restarts):
            if start:
                gram, scale = side.gram(y), None
            y = side.segment(y, gram, rows[start:stop], scale)
    else:
        table = np.asarray(rows, magnitude.dtype)

        def step(i: jax.Array, y: jax.Array) -> jax.Array:
            gram = side.gram(y)
            row = jnp.asarray(table)[jnp.minimum(i, len(rows) - 1)]
            return side.segment(y, gram, [row])

        y = jax.lax.fori_loop(1, steps, step, side.segment(y, gram, rows[:1], scale))
    y = y[..., :height, :width].astype(dtype) / factor
    return y.astype(x.dtype).reshape(x.shape)


def _square(operand: jnp.dtype, dtype: jnp.dtype, gram_form: bool) -> Product | None:
    """The product that makes R^2, if its result is to keep more digits than ``operand`` has.

    The Gram form rounds more often than the plain one. In bfloat16 it is as near to the polynomial
    if these squares are not rounded, and up to 1.3 times as far if they are.
    """
    if gram_form and operand == jnp.bfloat16:
        return product(operand, dtype, keep_sums=True)
    return None


def _in_range(x: jax.Array, operand: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """``x`` divided by powers of two ``(*batch, 1, 1)``, which are also returned.

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
    y, magnitude = divide_by_pow2(x, jnp.where(summed, jnp.sqrt(squares), largest))
    # Squares of very large and very small elements leave the range of float32. The norm is then
    # only known to be at most that of a matrix full of the largest element.
    full = 2.0 ** math.ceil(math.log2(math.prod(x.shape[-2:])) / 2)
    factor = jnp.where(summed, _NORM, _NORM / full)
    return y * factor, magnitude / factor


def _padded(y: jax.Array, sides: tuple[int, int] | None) -> jax.Array:
    """``y`` with zeros up to sides that half-precision units like, which change no other element.

    XLA would else pad odd sides before every product, a pass over the matrices each time.
    """
    wanted = [side + -side % ALIGNMENT for side in y.shape[-2:]] if sides is None else sides
    widths = [(0, n - side) for n, side in zip(wanted, y.shape[-2:], strict=True)]
    return jnp.pad(y, [(0, 0)] * (y.ndim - 2) + widths)


def _segments(steps: int, restarts: tuple[int, ...]) -> list[tuple[int, int]]:
    """The first step of each segment, and the one after its last."""
    return list(itertools.pairwise((0, *restarts, steps)))


def _scale(
    y: jax.Array,
    gram: jax.Array,
    safety_factor: float,
    eps: jax.Array,
    preconditioning: Preconditioning,
) -> jax.Array:
    """The factor of the short side of ``y``: ``(*batch, 1, 1)``, or ``(*batch, n, 1)`` for aol.

    All norms but the spectral one are computed from the Gram matrix, which saves a pass over ``y``.
    """

    def inverse(norm: jax.Array) -> jax.Array:
        # The norm of a zero matrix, or under aol of a zero row, is 0, and eps may be 0 too.
        return jnp.where(norm > 0, 1 / jnp.where(norm > 0, safety_factor * norm + eps, 1), 0)

    if preconditioning == "spectral":
        return inverse(jnp.linalg.norm(y.astype(gram.dtype), ord=2, axis=(-2, -1), keepdims=True))
    if preconditioning == "schatten":
        return inverse(sum_of_squares(gram, (-2, -1)) ** 0.25)
    if preconditioning in ("aol", "aol_out"):
        return inverse(jnp.sqrt(jnp.sum(jnp.abs(gram), axis=-1, keepdims=True)))
    trace = jnp.real(jnp.trace(gram, axis1=-2, axis2=-1))[..., None, None]
    return inverse(jnp.sqrt(trace))
