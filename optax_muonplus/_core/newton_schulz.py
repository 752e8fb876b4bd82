r"""The definition of the polar factor: the Newton-Schulz iteration, and the SVD.

With rows of coefficients ``(c_0, c_1, ..., c_q)``, one for each step, the iteration is

.. math::
  X \leftarrow M / (s\, \nu(M) + \epsilon), \qquad
  X \leftarrow c_0 X + c_1 (X X^H) X + c_2 (X X^H)^2 X + \dots

where the Gram matrix has the size of the shorter side, :math:`\nu` is a norm that bounds the
largest singular value, and s is the table's safety factor. Optimizers run the same polynomial in
fewer operations, passes and roundings.
"""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .arguments import check_floating
from .coefficients import Row
from .function import MatrixArray, adjoint
from .precision import as_real, product_dtype, root, scale_by_pow2, sum_of_squares, upcast_for_sum

Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]


def newton_schulz(
    x: MatrixArray,
    rows: Sequence[Row],
    *,
    steps: int | jax.Array | None = None,
    safety_factor: float = 1.0,
    eps: ArrayLike = 0.0,
    preconditioning: Preconditioning = "frobenius",
    compute_dtype: DTypeLike | None = None,
) -> MatrixArray:
    """Returns approximate polar factors of ``x``; for the arguments see :class:`Orthogonalize`.

    ``steps`` may be traced; steps beyond ``rows`` repeat the last row. None means one step per row.
    Operands and results of products have the digits of ``compute_dtype`` and the range of sums.
    """
    dtype = product_dtype(x.dtype, compute_dtype)
    m, n = x.shape[-2:]
    transposed = m > n or (m == n and preconditioning == "aol")
    y, power = scale_by_pow2(x.astype(dtype))
    y = jnp.swapaxes(y, -1, -2) if transposed else y
    norm = _norm(y, preconditioning)
    # A zero matrix has norm 0, as has a zero row under aol; eps may be 0 too.
    divisor = jnp.where(norm > 0, safety_factor * norm + as_real(eps, norm.dtype) / power, 1)
    y = jnp.where(norm > 0, y / divisor, 0)
    steps = len(rows) if steps is None else steps
    if isinstance(steps, int):
        for i in range(steps):
            y = step(y, rows[min(i, len(rows) - 1)], compute_dtype)
    else:
        table = jnp.asarray(np.asarray(rows, norm.dtype))
        each = lambda i, y: step(y, table[jnp.minimum(i, len(rows) - 1)], compute_dtype)  # noqa: E731
        y = jax.lax.fori_loop(0, steps, each, y)
    return (jnp.swapaxes(y, -1, -2) if transposed else y).astype(x.dtype)


def step(
    x: MatrixArray, row: Row | jax.Array, compute_dtype: DTypeLike | None = None
) -> MatrixArray:
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


def svd(x: MatrixArray) -> MatrixArray:
    """Returns exact polar factors ``U V^H`` from the singular value decomposition ``U S V^H``.

    Singular values at rounding level stay zero, as under Newton-Schulz: a matrix of lower rank
    gives the partial isometry, not an arbitrary completion. Derivatives are NaN where singular
    values are equal, as in a zero matrix, at which Newton-Schulz has derivative 0.

    The result has the shape and dtype of ``x``, which is real or complex, and is computed in
    float32 at least. Raises ValueError for integers.
    """
    check_floating(x)
    y, _ = scale_by_pow2(upcast_for_sum(x))
    u, s, vh = jnp.linalg.svd(y, full_matrices=False)
    tolerance = max(x.shape[-2:]) * jnp.finfo(s.dtype).eps
    kept = (s > tolerance * s[..., :1]).astype(u.dtype)
    return jnp.matmul(u * kept[..., None, :], vh).astype(x.dtype)


def _norm(y: MatrixArray, preconditioning: Preconditioning) -> jax.Array:
    """Returns the norm of each matrix; under aol, one number for each of its rows."""
    if preconditioning == "frobenius":
        return root(sum_of_squares(y, (-2, -1)))
    if preconditioning == "spectral":
        return jnp.linalg.norm(y, ord=2, axis=(-2, -1), keepdims=True)
    gram = jnp.matmul(y, adjoint(y), precision="highest")
    if preconditioning == "schatten":
        return root(sum_of_squares(gram, (-2, -1)), degree=4)
    return root(jnp.sum(jnp.abs(gram), axis=-1, keepdims=True))


def _digits(x: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    """Rounds ``x`` to the digits of a narrower dtype, but keeps its range."""
    if dtype is None or jnp.iscomplexobj(x):
        return x if dtype is None else x.astype(dtype).astype(x.dtype)
    digits = min(jnp.finfo(dtype).nmant, jnp.finfo(x.dtype).nmant)
    return jax.lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, digits)
