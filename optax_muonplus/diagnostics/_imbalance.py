r"""Measures of how unequal the norms of rows and columns of matrices ``(*batch, out, in)`` are.

A row holds the weights of one output unit, a column those of one input feature. Matrices are first
divided by a power of two near their largest entry, so that squares of small gradients do not
underflow.
"""

from typing import get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_muonplus.matrices import (
    SUMMED_AXIS,
    Side,
    as_real,
    check_floating,
    check_word,
    scale_by_pow2,
    sum_of_squares,
    upcast_for_sum,
)
from optax_muonplus.polar import svd


def norm_variance(x: jax.Array, side: Side = "row") -> jax.Array:
    r"""Computes the variance of the squared l2 norms of rows or columns, the paper's imbalance.

    .. math::
      \mathrm{Var}(s(X)) = \frac1m \sum_{i=1}^m \Bigl( \|X_{i:}\|_2^2 - \frac1m \|X\|_F^2 \Bigr)^2

    for the m rows of X; columns are the rows of its transpose. It grows with the fourth power of X,
    and so only compares matrices of one scale, such as polar factors; :func:`norm_ratio` any.

    Args:
      x: matrices ``(*batch, out, in)``, real or complex.
      side: ``"row"`` or ``"col"``.

    Returns:
      One real number for each matrix, ``(*batch,)``, in float32 at least.

    Raises:
      ValueError: for an unknown side, fewer than two axes, an empty axis, or integers.

    Source: Zhang et al., Muon+, arXiv:2602.21545, section "Update Imbalance Caused by Muon's Polar
    Iterations".
    """
    squares, power = _squared_norms(x, side)
    variance = jnp.var(squares, axis=-1)
    # Multiplied one by one: power^4 may be infinite, and 0 times infinity is NaN.
    return variance * power * power * power * power


def norm_ratio(x: jax.Array, side: Side = "row") -> jax.Array:
    r"""Divides the largest l2 norm of rows or columns by the smallest.

    .. math::
      \max_i \|X_{i:}\|_2 \, / \min_i \|X_{i:}\|_2

    The ratio is infinite if some norms are zero, and NaN if all are. Arguments, shapes and errors
    are those of :func:`norm_variance`.
    """
    squares, _ = _squared_norms(x, side)
    return jnp.sqrt(jnp.max(squares, axis=-1)) / jnp.sqrt(jnp.min(squares, axis=-1))


def spearman(x: jax.Array, y: jax.Array, side: Side = "row") -> jax.Array:
    r"""Computes Spearman's rank correlation between the norms of rows, or columns, of two matrices.

    .. math::
      \rho = \mathrm{Corr}(\mathrm{rank}(\|X_{1:}\|, \dots, \|X_{m:}\|), \\
      \mathrm{rank}(\|Y_{1:}\|, \dots, \|Y_{m:}\|))

    Equal norms share the mean of their ranks. The correlation is NaN (undefined) if the norms of
    one matrix are all equal, as they are for a single row or for zeros, or if a norm is not finite.
    Norms that differ by rounding alone, such as those of normalized rows, have ranks too, but these
    are meaningless. The cost is m^2 comparisons, little compared with the products of a polar
    factor. Shapes and errors are those of :func:`norm_variance`.

    Args:
      x: matrices ``(*batch, out, in)``, real or complex, as they enter the polar step.
      y: matrices of the same shape, as they leave it; other shapes raise ValueError.
      side: ``"row"`` or ``"col"``.

    Source: Zhang et al., arXiv:2602.21545, equation "spearman_def", appendix "Positive Correlation
    Before and After the Polar Step".
    """
    _check(x, side)
    _check(y, side)
    _check_same_shape(x, y)
    (a, _), (b, _) = _squared_norms(x, side), _squared_norms(y, side)
    finite = jnp.all(jnp.isfinite(a) & jnp.isfinite(b), axis=-1)
    a, b = _centred_ranks(a), _centred_ranks(b)
    # A root for each factor: the product of the sums would overflow from about 10^6 rows on.
    size = jnp.sqrt(jnp.sum(a * a, axis=-1)) * jnp.sqrt(jnp.sum(b * b, axis=-1))
    rho = jnp.sum(a * b, axis=-1) / size  # 0 / 0 is NaN if all ranks are equal
    return jnp.where(finite, jnp.clip(rho, -1, 1), jnp.nan)  # rounding may exceed 1


def floor_share(x: jax.Array, side: Side = "row", norm_eps: ArrayLike = 1e-8) -> jax.Array:
    """Computes the share of rows or columns with a squared norm of at most ``norm_eps``.

    :func:`optax_muonplus.matrices.normalize_matrix` gives these a norm of at most the root of 1/2
    instead of 1: they are dead units, which it does not blow up. Shapes and errors are those of
    :func:`norm_variance`.

    Args:
      x: matrices ``(*batch, out, in)``, as they are when that side is normalized.
      side: ``"row"`` or ``"col"``.
      norm_eps: as in the normalization, in units of a squared norm.
    """
    _check(x, side)
    squares = sum_of_squares(x, (SUMMED_AXIS[side],))
    at_floor = squares <= as_real(norm_eps, squares.dtype)
    return jnp.mean(at_floor, axis=(-2, -1), dtype=squares.dtype)


def rms(x: jax.Array) -> jax.Array:
    r"""Computes the root mean square of all entries of each matrix.

    .. math::
      \|X\|_F / \sqrt{m n}

    Shapes and errors are those of :func:`norm_variance`.
    """
    _check(x)
    y, power = scale_by_pow2(upcast_for_sum(x))
    size = x.shape[-2] * x.shape[-1]
    return (jnp.sqrt(sum_of_squares(y, (-2, -1)) / size) * power)[..., 0, 0]


def polar_distance(x: jax.Array, of: jax.Array) -> jax.Array:
    r"""Computes the distance of ``x`` from the exact polar factor of ``of``, relative to its norm.

    .. math::
      \|X - U V^H\|_F / \|U V^H\|_F, \qquad M = U S V^H

    The distance is 0 if both are zero, and infinite if only the factor is. It takes a singular
    value decomposition. Shapes and errors are those of :func:`norm_variance`.

    Args:
      x: matrices X, ``(*batch, out, in)``, such as the results of Newton-Schulz.
      of: matrices M, with polar factors that X approximates; other shapes raise ValueError.
    """
    _check(x)
    _check(of)
    _check_same_shape(x, of)
    exact = svd(upcast_for_sum(of))
    size = sum_of_squares(exact, (-2, -1))[..., 0, 0]
    error = sum_of_squares(upcast_for_sum(x) - exact, (-2, -1))[..., 0, 0]
    of_zero = jnp.where(error > 0, jnp.inf, 0)
    return jnp.sqrt(jnp.where(size > 0, error / jnp.where(size > 0, size, 1), of_zero))


def _squared_norms(x: jax.Array, side: Side) -> tuple[jax.Array, jax.Array]:
    """Returns squared norms ``(*batch, m)`` in ``x / power``, and the powers ``(*batch,)``."""
    _check(x, side)
    y, power = scale_by_pow2(upcast_for_sum(x))
    squares = sum_of_squares(y, (SUMMED_AXIS[side],))
    return jnp.squeeze(squares, SUMMED_AXIS[side]), power[..., 0, 0]


def _centred_ranks(values: jax.Array) -> jax.Array:
    """Ranks along the last axis, and subtracts the mean rank, which does not depend on ties."""
    each, others = values[..., :, None], values[..., None, :]
    below = jnp.sum(others < each, axis=-1, dtype=values.dtype)
    equal = jnp.sum(others == each, axis=-1, dtype=values.dtype)
    return below + (equal + 1) / 2 - (values.shape[-1] + 1) / 2


def _check(x: jax.Array, side: str = "row") -> None:
    check_word("side", side, get_args(Side))
    check_floating(x)


def _check_same_shape(x: jax.Array, y: jax.Array) -> None:
    if jnp.shape(x) != jnp.shape(y):
        raise ValueError(
            f"Got shapes {jnp.shape(x)} and {jnp.shape(y)}, but a matrix is compared with one of"
            " its own shape: give what went into the polar step and what came out of it."
        )
