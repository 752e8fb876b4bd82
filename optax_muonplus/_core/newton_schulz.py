r"""The definition of the polar factor: the Newton-Schulz iteration, and the exact factor by an SVD.

With rows of coefficients ``(c_0, c_1, ..., c_q)``, one for each step, the iteration is

.. math::
  X \leftarrow M / (s\, \nu(M) + \epsilon), \qquad
  X \leftarrow c_0 X + c_1 (X X^H) X + c_2 (X X^H)^2 X + \dots

where the Gram matrix is taken over the shorter side, :math:`\nu` is a norm that bounds the largest
singular value, and s is the table's safety factor. This module says what is computed. The library
runs the same polynomial faster: in fewer operations, passes and roundings.
"""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .arguments import check_floating
from .coefficients import Row
from .function import Matrices, adjoint
from .precision import as_real, product_dtype, root, scale_by_pow2, sum_of_squares, upcast_for_sum

Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]


def newton_schulz(
    x: Matrices,
    rows: Sequence[Row],
    *,
    steps: int | jax.Array | None = None,
    safety_factor: float = 1.0,
    eps: ArrayLike = 0.0,
    preconditioning: Preconditioning = "frobenius",
    compute_dtype: DTypeLike | None = None,
) -> Matrices:
    """Returns approximate polar factors of ``x``, by the definition.

    Args:
      x: matrices, real or complex.
      rows: coefficients.
      steps: number of steps, which may be traced; the last row is used for steps beyond ``rows``.
        None is one step for each row.
      safety_factor: the norm is multiplied by it.
      eps: added to the norm.
      preconditioning: the norm, see :class:`Orthogonalize`.
      compute_dtype: dtype whose digits operands and results of products are rounded to. Sums are in
        float32 at least, and the range is that of the sums. None rounds nothing.

    Returns:
      An array of ``x``'s shape and dtype.
    """
    dtype = product_dtype(x.dtype, compute_dtype)
    height, width = x.shape[-2:]
    swapped = height > width or (height == width and preconditioning == "aol")
    y, power = scale_by_pow2(x.astype(dtype))
    y = jnp.swapaxes(y, -1, -2) if swapped else y
    norm = _norm(y, preconditioning)
    # A zero matrix has the norm 0, and under aol a zero row; eps may be 0 too.
    divisor = jnp.where(norm > 0, safety_factor * norm + as_real(eps, norm.dtype) / power, 1)
    y = jnp.where(norm > 0, y / divisor, 0)
    if steps is None or isinstance(steps, int):
        count = len(rows) if steps is None else steps
        for i in range(count):
            y = step(y, rows[min(i, len(rows) - 1)], compute_dtype)
    else:
        table = jnp.asarray(np.asarray(rows, norm.dtype))
        each = lambda i, y: step(y, table[jnp.minimum(i, len(rows) - 1)], compute_dtype)  # noqa: E731
        y = jax.lax.fori_loop(0, steps, each, y)
    return (jnp.swapaxes(y, -1, -2) if swapped else y).astype(x.dtype)


def step(x: Matrices, row: Row | jax.Array, compute_dtype: DTypeLike | None = None) -> Matrices:
    """Returns ``c_0 X + c_1 (X X^H) X + c_2 (X X^H)^2 X + ...`` for one row of coefficients."""

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = _digits(a, compute_dtype), _digits(b, compute_dtype)
        return _digits(jnp.matmul(a, b, precision="highest"), compute_dtype)

    gram = product(x, adjoint(x))
    identity = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.shape)
    power, p = gram, row[0] * identity + row[1] * gram
    for c in row[2:]:
        power = product(gram, power)
        p = p + c * power
    return product(p, x)


def svd(x: Matrices) -> Matrices:
    """Returns exact polar factors ``U V^H`` from the singular value decomposition ``U S V^H``.

    Singular values at rounding level count as zero and stay zero, as under Newton-Schulz. A matrix
    of lower rank therefore gives the partial isometry, not an arbitrary completion of it. Its
    derivatives are those of ``jnp.linalg.svd``: NaN where singular values are equal, as those of a
    zero matrix are. Newton-Schulz has the derivative 0 at a zero matrix.

    Args:
      x: matrices, real or complex.

    Returns:
      An array of ``x``'s shape and dtype, computed in float32 at least.

    Raises:
      ValueError: for ``x`` that is not floating-point.
    """
    check_floating(x)
    y, _ = scale_by_pow2(upcast_for_sum(x))
    u, s, vh = jnp.linalg.svd(y, full_matrices=False)
    tolerance = max(x.shape[-2:]) * jnp.finfo(s.dtype).eps
    kept = (s > tolerance * s[..., :1]).astype(u.dtype)
    return jnp.matmul(u * kept[..., None, :], vh).astype(x.dtype)


def _norm(y: Matrices, preconditioning: Preconditioning) -> jax.Array:
    """Returns the norm of each matrix, or under aol one number for each of its rows."""
    if preconditioning == "frobenius":
        return root(sum_of_squares(y, (-2, -1)))
    if preconditioning == "spectral":
        return jnp.linalg.norm(y, ord=2, axis=(-2, -1), keepdims=True)
    gram = jnp.matmul(y, adjoint(y), precision="highest")
    if preconditioning == "schatten":
        return root(sum_of_squares(gram, (-2, -1)), degree=4)
    return root(jnp.sum(jnp.abs(gram), axis=-1, keepdims=True))


def _digits(x: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    """Rounds ``x`` to the digits of a narrower dtype, and keeps its own range."""
    if dtype is None or jnp.iscomplexobj(x):
        return x if dtype is None else x.astype(dtype).astype(x.dtype)
    digits = min(jnp.finfo(dtype).nmant, jnp.finfo(x.dtype).nmant)
    return jax.lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, digits)
