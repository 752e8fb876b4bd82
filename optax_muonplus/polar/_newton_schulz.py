r"""The Newton-Schulz iteration, plain and on the Gram matrix: one loop, cut at different places.

For matrices whose shorter side is the left one, a step multiplies by a polynomial P of the Gram
matrix R. All of these matrices commute, so that the next Gram matrix follows from R and P alone:

.. math::
  P_i = c_0 I + c_1 R_i + c_2 R_i^2 + \dots, \qquad
  X_{i+1} = P_i X_i, \qquad R_{i+1} = X_{i+1} X_{i+1}^H = R_i P_i^2

A *segment* is a run of steps between two visits to the long side: it takes :math:`R = X X^H`,
multiplies up the :math:`P_i` on the short side and ends with the one product
:math:`(\cdots P_1 P_0) X`. Plain Newton-Schulz is segments of one step each. Gram Newton-Schulz has
as few as rounding allows, and starts the next (a *restart*) before errors in R become large.

Source of the Gram form: Dao-AILab, gram-newton-schulz (2026),
https://dao-ailab.github.io/blog/2026/gram-newton-schulz/.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from optax_muonplus.coefficients._tables import Row
from optax_muonplus.matrices._precision import as_real, scale_by_pow2, sum_of_squares
from optax_muonplus.polar._products import adjoint, product, product_dtype, rounded

Preconditioning = Literal["frobenius", "spectral", "aol", "aol_out", "schatten"]


def product_shapes(
    shape: tuple[int, ...], rows: tuple[Row, ...], restarts: tuple[int, ...]
) -> list[tuple[int, int, int]]:
    """The products of :func:`iterate` for one matrix of ``shape``: (rows, inner, columns) each.

    Args:
      shape: ``(..., out, in)``.
      rows: coefficients, one row for each step.
      restarts: steps that start a segment, besides step 0.
    """
    n, m = sorted(shape[-2:])
    done = []
    for start, stop in _segments(len(rows), restarts):
        powers = sum(len(row) - 2 for row in rows[start:stop])
        carried = 3 * (stop - start - 1)  # R P, (R P) P and the product of the P
        done += [(n, m, n), *[(n, n, n)] * (powers + carried), (n, n, m)]
    return done


def operations(shape: tuple[int, ...], rows: tuple[Row, ...], restarts: tuple[int, ...]) -> int:
    """Multiplications and additions in :func:`product_shapes`, for one matrix."""
    return sum(2 * math.prod(dimensions) for dimensions in product_shapes(shape, rows, restarts))


def every_step(rows: tuple[Row, ...]) -> tuple[int, ...]:
    """The restarts of plain Newton-Schulz: the Gram matrix is taken anew at each step."""
    return tuple(range(1, len(rows)))


# Compiled once for each shape also where the caller is not under jit: outside of one a loop, or a
# choice by platform, would be compiled anew at every call.
compiled_once = functools.partial(
    jax.jit,
    static_argnames=(
        "rows", "restarts", "safety_factor", "preconditioning", "compute_dtype", "precision"
    ),
)  # fmt: skip


@compiled_once
def iterate(
    x: jax.Array,
    *,
    eps: Any,
    steps: Any = None,
    rows: tuple[Row, ...],
    restarts: tuple[int, ...],
    safety_factor: float,
    preconditioning: Preconditioning,
    compute_dtype: jnp.dtype | None,
    precision: jax.lax.Precision | None = None,
) -> jax.Array:
    """See :func:`optax_muonplus.polar.newton_schulz`; everything but ``x`` is looked up already.

    Args:
      x: matrices ``(*batch, out, in)``.
      eps: added to the norm that divides.
      steps: a traced number of steps, with ``restarts=every_step(rows)``: the last row then serves
        all further steps. None means one step for each row.
      rows: coefficients, one row for each step.
      restarts: steps that take the Gram matrix anew.
      safety_factor: the norm is multiplied by it.
      preconditioning: which norm.
      compute_dtype: dtype of operands, or None.
      precision: of the products; None means JAX's default.
    """
    given = x
    if math.prod(x.shape[:-2]) == 1:
        # XLA's CPU products are 5 to 10% slower with an axis of size 1 in front (jaxlib 0.10.2).
        x = x.reshape(x.shape[-2:])
    dtype = product_dtype(x.dtype, compute_dtype)
    operand = compute_dtype or dtype
    matmul = product(operand, dtype, precision)
    # Which side is the shorter. The left one of a square matrix is 8% faster on a CPU; aol, which
    # scales that side, takes the right one, as optax.contrib.muon does, and aol_out the left one.
    height, width = x.shape[-2:]
    left = height < width or (height == width and preconditioning != "aol")

    def gram(y: jax.Array) -> jax.Array:
        return matmul(y, adjoint(y)) if left else matmul(adjoint(y), y)

    def on_short_side(p: jax.Array, y: jax.Array) -> jax.Array:
        return matmul(p, y) if left else matmul(y, p)

    def segment(y: jax.Array, square: jax.Array, rows: Sequence[Any], scale: Any) -> jax.Array:
        """``y`` after the steps that ``rows`` are for; ``square`` is its Gram matrix."""
        p = _polynomial(square, rows[0], matmul)
        # Scaling the short side of y is scaling p, which is the smaller of the two.
        q = p if scale is None else p * (jnp.swapaxes(scale, -1, -2) if left else scale)
        for row in rows[1:]:
            square = matmul(matmul(square, p), p)
            p = _polynomial(square, row, matmul)
            q = on_short_side(p, q)
        # Rounded here, since it is only ever an operand again.
        return rounded(on_short_side(q, y), operand)

    y, magnitude = scale_by_pow2(x.astype(dtype))
    y = rounded(y, operand)
    floor = as_real(eps, magnitude.dtype) / magnitude
    square = gram(y)
    scale = _scale(y, square, safety_factor, floor, preconditioning)
    square = square * scale * jnp.swapaxes(scale, -1, -2)
    if steps is not None:
        table = np.asarray(rows, magnitude.dtype)

        def step(i: Any, y: jax.Array) -> jax.Array:
            return segment(y, gram(y), [jnp.asarray(table)[jnp.minimum(i, len(rows) - 1)]], None)

        y = jax.lax.fori_loop(1, steps, step, segment(y, square, rows[:1], scale))
    else:
        # Not a loop, which would copy what it carries at every step: 5% of the time on a CPU.
        for start, stop in _segments(len(rows), restarts):
            if start:
                square, scale = gram(y), None
            y = segment(y, square, rows[start:stop], scale)
    return y.astype(given.dtype).reshape(given.shape)


def _segments(steps: int, restarts: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(itertools.pairwise((0, *restarts, steps)))


def _polynomial(square: jax.Array, row: Any, matmul: Any) -> jax.Array:
    """``c_0 I + c_1 R + c_2 R^2 + ...``, combined in one pass after the products."""
    identity = jnp.broadcast_to(jnp.eye(square.shape[-1], dtype=square.dtype), square.shape)
    p = row[0] * identity + row[1] * square
    power = square
    for c in row[2:]:
        power = matmul(square, power)
        p = p + c * power
    return p


def _scale(
    y: jax.Array,
    square: jax.Array,
    safety_factor: float,
    eps: jax.Array,
    preconditioning: Preconditioning,
) -> jax.Array:
    """What the short side of ``y`` is multiplied by: ``(*batch, 1, 1)``, or ``(*batch, n, 1)``.

    Three of the norms are read off the Gram matrix, without another visit to the long side.
    """

    def over(norm: jax.Array) -> jax.Array:
        # The norm is 0 for a zero matrix, and for a zero row under aol, whatever eps is.
        return jnp.where(norm > 0, 1 / jnp.where(norm > 0, safety_factor * norm + eps, 1), 0)

    if preconditioning == "spectral":
        return over(jnp.linalg.norm(y.astype(square.dtype), ord=2, axis=(-2, -1), keepdims=True))
    if preconditioning == "schatten":
        return over(sum_of_squares(square, (-2, -1)) ** 0.25)
    if preconditioning in ("aol", "aol_out"):
        return over(jnp.sqrt(jnp.sum(jnp.abs(square), axis=-1, keepdims=True)))
    trace = jnp.real(jnp.trace(square, axis1=-2, axis2=-1))[..., None, None]
    return over(jnp.sqrt(trace))
