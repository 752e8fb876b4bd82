r"""How unevenly the norms of rows and columns of matrices ``(*batch, out, in)`` are spread.

A row holds the weights of one output unit, a column those of one input feature. Every measure is a
real number for each matrix, ``(*batch,)``, computed in float32 at least. Matrices are divided by a
power of two near their largest entry first, so that squares of small gradients do not vanish.
"""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from optax_muonplus.matrices._precision import (
    as_real,
    scale_by_pow2,
    sum_of_squares,
    upcast_for_sum,
)
from optax_muonplus.polar._methods import svd

Side = Literal["row", "col"]

_SUMMED = {"row": -1, "col": -2}


def norm_variance(x: jax.Array, side: Side = "row") -> jax.Array:
    r"""Variance of the squared l2 norms of rows or columns, the paper's imbalance.

    .. math::
      \mathrm{Var}(s(X)) = \frac1m \sum_{i=1}^m \Bigl( \|X_{i:}\|_2^2 - \frac1m \|X\|_F^2 \Bigr)^2

    for the m rows of X, and the same over its columns. It grows with the fourth power of X, so that
    it compares matrices of one scale, as polar factors are; :func:`norm_ratio` has no scale.

    Args:
      x: matrices ``(*batch, out, in)``, real or complex.
      side: ``"row"`` or ``"col"``.

    Raises:
      ValueError: for an unknown side, fewer than two axes or an empty one, as all measures.

    Source: Zhang et al., Muon+, arXiv:2602.21545, section "Update Imbalance Caused by Muon's Polar
    Iterations".
    """
    squares, power = _squared_norms(x, side)
    variance = jnp.var(squares, axis=-1)
    # One after the other: power^4 may be infinite, and times zero not a number.
    return variance * power * power * power * power


def norm_ratio(x: jax.Array, side: Side = "row") -> jax.Array:
    """Largest over smallest l2 norm of rows or columns.

    Infinite where some are zero beside others, NaN where all are.

    Args:
      x: matrices ``(*batch, out, in)``, real or complex.
      side: ``"row"`` or ``"col"``.
    """
    squares, _ = _squared_norms(x, side)
    return jnp.sqrt(jnp.max(squares, axis=-1)) / jnp.sqrt(jnp.min(squares, axis=-1))


def spearman(x: jax.Array, y: jax.Array, side: Side = "row") -> jax.Array:
    r"""Spearman rank correlation between the norms of rows, or columns, of two matrices.

    .. math::
      \rho = \mathrm{Corr}(\mathrm{rank}(\|X_{1:}\|, \dots, \|X_{m:}\|),
      \mathrm{rank}(\|Y_{1:}\|, \dots, \|Y_{m:}\|))

    Norms that are equal share the mean of their ranks. NaN means undefined: the norms of one matrix
    are all equal, as those of a single row or of zeros are, or one of them is not finite. Norms
    that differ by rounding only, such as those of rows normalized before, do have ranks, and those
    say nothing. Does m^2 comparisons, few beside the products of a polar factor.

    Args:
      x: matrices ``(*batch, out, in)``, real or complex: what went into the polar step.
      y: matrices of the same shape: what came out.
      side: ``"row"`` or ``"col"``.

    Raises:
      ValueError: if shapes differ; otherwise as :func:`norm_variance`.

    Source: Zhang et al., arXiv:2602.21545, equation "spearman_def", appendix "Positive Correlation
    Before and After the Polar Step".
    """
    _check_same_shape(x, y)
    (a, _), (b, _) = _squared_norms(x, side), _squared_norms(y, side)
    finite = jnp.all(jnp.isfinite(a) & jnp.isfinite(b), axis=-1)
    a, b = _centred_ranks(a), _centred_ranks(b)
    # Roots one by one: the product of the sums would overflow at some 10^6 rows.
    size = jnp.sqrt(jnp.sum(a * a, axis=-1)) * jnp.sqrt(jnp.sum(b * b, axis=-1))
    rho = jnp.sum(a * b, axis=-1) / size  # NaN where ranks are all the same: 0 / 0
    return jnp.where(finite, jnp.clip(rho, -1, 1), jnp.nan)  # rounding may lead beyond


def floor_share(x: jax.Array, side: Side = "row", norm_eps: Any = 1e-8) -> jax.Array:
    """Share of rows or columns at the floor of the normalization: squared norm <= ``norm_eps``.

    Those are the ones whose norm after :func:`optax_muonplus.normalization.normalize_matrix` is at
    most the root of 1/2 in place of 1: dead units that it does not blow up.

    Args:
      x: matrices ``(*batch, out, in)`` as they are when that side is normalized.
      side: ``"row"`` or ``"col"``.
      norm_eps: of the normalization.
    """
    _check(x, side)
    squares = sum_of_squares(x, (_SUMMED[side],))
    at_floor = squares <= as_real(norm_eps, squares.dtype)
    return jnp.mean(at_floor, axis=(-2, -1), dtype=squares.dtype)


def rms(x: jax.Array) -> jax.Array:
    """Root mean square of all entries.

    Args:
      x: matrices ``(*batch, out, in)``, real or complex.
    """
    _check(x, "row")
    y, power = scale_by_pow2(upcast_for_sum(x))
    size = x.shape[-2] * x.shape[-1]
    return (jnp.sqrt(sum_of_squares(y, (-2, -1)) / size) * power)[..., 0, 0]


def polar_distance(x: jax.Array, of: jax.Array) -> jax.Array:
    r"""Distance of ``x`` from the exact polar factor of ``of``, relative to that factor's size.

    .. math::
      \|X - U V^H\|_F / \|U V^H\|_F, \qquad M = U S V^H

    0 where both are zero, infinite where only the factor is. Costs a singular value decomposition.

    Args:
      x: matrices ``(*batch, out, in)``, such as Newton-Schulz makes.
      of: matrices M of the same shape, of which ``x`` approximates the polar factor.

    Raises:
      ValueError: if shapes differ; otherwise as :func:`norm_variance`.
    """
    _check_same_shape(x, of)
    _check(x, "row")
    exact = svd(upcast_for_sum(of))
    size = sum_of_squares(exact, (-2, -1))[..., 0, 0]
    error = sum_of_squares(upcast_for_sum(x) - exact, (-2, -1))[..., 0, 0]
    without = jnp.where(error > 0, jnp.inf, 0)
    return jnp.sqrt(jnp.where(size > 0, error / jnp.where(size > 0, size, 1), without))


def _squared_norms(x: jax.Array, side: Side) -> tuple[jax.Array, jax.Array]:
    """Of rows or columns ``(*batch, m)`` of ``x / power``, and that power ``(*batch,)``."""
    _check(x, side)
    y, power = scale_by_pow2(upcast_for_sum(x))
    squares = sum_of_squares(y, (_SUMMED[side],))
    return jnp.squeeze(squares, _SUMMED[side]), power[..., 0, 0]


def _centred_ranks(values: jax.Array) -> jax.Array:
    """Ranks along the last axis less their mean, which ties do not move."""
    mine, others = values[..., :, None], values[..., None, :]
    below = jnp.sum(others < mine, axis=-1, dtype=values.dtype)
    equal = jnp.sum(others == mine, axis=-1, dtype=values.dtype)
    return below + (equal + 1) / 2 - (values.shape[-1] + 1) / 2


def _check(x: jax.Array, side: str) -> None:
    if side not in get_args(Side):
        raise ValueError(f"Unknown side {side!r}. Known: {', '.join(get_args(Side))}.")
    if jnp.ndim(x) < 2 or 0 in jnp.shape(x):
        raise ValueError(
            f"Got an array of shape {jnp.shape(x)}, but rows and columns are those of matrices"
            " (*batch, out, in) that are not empty. Leave vectors out, and reshape a kernel of more"
            " axes to (out, in) first; a Flax kernel (in, out) is the transpose of that."
        )


def _check_same_shape(x: jax.Array, y: jax.Array) -> None:
    if jnp.shape(x) != jnp.shape(y):
        raise ValueError(
            f"Got shapes {jnp.shape(x)} and {jnp.shape(y)}, but a matrix is compared with one of"
            " its own shape: give what went into the polar step and what came out of it."
        )
