r"""How much Newton-Schulz steps change the variance of squared row norms, in expectation.

For :math:`M = U \Sigma V^\top` with U uniform on the orthogonal group (Haar), the paper's Lemma 1
gives the expected change from M to :math:`Q = U \varphi(\Sigma) V^\top`. This module computes it in
closed form and as a sum over pairs. The proof of the lemma only needs that :math:`\varphi` maps
singular values, so that several steps are possible as well as one.

The paper has square matrices. Here the matrix may also have more rows than singular values: the
missing ones are zeros, and stay zeros. For the norms of columns, exchange U and V.

The computations are NumPy in float64. Coefficients are as in :func:`optax_muonplus.theory.phi`.

Source: Zhang et al., Muon+, arXiv:2602.21545, Lemma 1 and its proof.
"""

import operator
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from optax_muonplus.coefficients._minimax import Row
from optax_muonplus.coefficients._resolve import CoefficientsLike
from optax_muonplus.theory._amplification import g, static_rows

# By how much the singular values of a float32 matrix of Frobenius norm 1 can exceed 1.
_ROUNDING = 1e-6


def expected_variance_shift(
    singular_values: ArrayLike,
    ns_coeffs: CoefficientsLike = "jordan",
    ns_steps: int = 1,
    *,
    size: int | None = None,
) -> np.ndarray:
    r"""Expected change of the variance of squared row norms, in closed form.

    .. math::
      \mathbb{E}[\mathrm{Var}(s(Q)) - \mathrm{Var}(s(M))] = \frac{2}{n^2 (n + 2)} \Bigl[
      n \sum_k g(\lambda_k)^2 - \bigl(\sum_k g(\lambda_k)\bigr)^2
      - n \sum_k \lambda_k^2 + \bigl(\sum_k \lambda_k\bigr)^2 \Bigr]

    with :math:`\lambda_k = \sigma_k^2` and :math:`s(X)_i = \|X_{i:}\|^2`. Both differences are
    computed as :math:`n \sum_k (x_k - \bar x)^2`, which is equal and avoids cancellation.

    Args:
      singular_values: :math:`\sigma_k` of the normalized matrix, ``(*batch, r)``, in [0, 1].
      ns_coeffs: a table's name, one row, or several rows.
      ns_steps: number of steps; the paper's lemma has 1.
      size: number n of rows; None means r, as in a square matrix.

    Returns:
      float64 ``(*batch,)``, positive where the steps increase the variance.

    Raises:
      ValueError: for an empty spectrum, singular values outside [0, 1], or a ``size`` below r; and
        as for :func:`optax_muonplus.theory.phi`.

    Source: arXiv:2602.21545, Lemma 1, the equation before step 3 of its proof.
    """
    lam, n = spectrum(singular_values, size)
    difference = _spread(g(lam, ns_coeffs, ns_steps), n) - _spread(lam, n)
    return difference * (2 / (n**2 * (n + 2)))


def pairwise_variance_shift(
    singular_values: ArrayLike,
    ns_coeffs: CoefficientsLike = "jordan",
    ns_steps: int = 1,
    *,
    size: int | None = None,
) -> np.ndarray:
    r"""The value of :func:`expected_variance_shift` in the form of the lemma, a sum over pairs.

    .. math::
      \mathbb{E}[\mathrm{Var}(s(Q)) - \mathrm{Var}(s(M))] = \frac{2}{n^2 (n + 2)} \sum_{i < j}
      (\lambda_i - \lambda_j)^2 \bigl(g'(\xi_{ij})^2 - 1\bigr)

    Each :math:`g'(\xi_{ij})` is a :func:`mean_value_slope`, which has no cancellation even for
    close pairs. For clustered spectra this form is therefore more accurate than the closed one. It
    takes O(r^2) work and O(r) memory.

    Args:
      singular_values: as in :func:`expected_variance_shift`.
      ns_coeffs: as in :func:`expected_variance_shift`.
      ns_steps: as in :func:`expected_variance_shift`.
      size: as in :func:`expected_variance_shift`.

    Returns:
      float64 ``(*batch,)``.

    Raises:
      ValueError: as for :func:`expected_variance_shift`.

    Source: arXiv:2602.21545, Lemma 1, equation ``var_shift_mvt``.
    """
    lam, n = spectrum(singular_values, size)
    rows = static_rows(ns_coeffs, ns_steps)
    # Each of the n - r missing singular values, a zero, forms a pair with each of the others.
    total = (n - lam.shape[-1]) * np.sum(_pairs(rows, lam, np.zeros_like(lam)), -1)
    for offset in range(1, lam.shape[-1]):
        total = total + np.sum(_pairs(rows, lam[..., offset:], lam[..., :-offset]), -1)
    return 2 / (n**2 * (n + 2)) * total


def mean_value_slope(
    lam: ArrayLike, other: ArrayLike, ns_coeffs: CoefficientsLike = "jordan", ns_steps: int = 1
) -> np.ndarray:
    r"""The slope :math:`g'(\xi) = (g(\lambda) - g(\mu)) / (\lambda - \mu)` of a pair.

    A pair of eigenvalues increases the variance if its slope is above 1 or below -1. For equal
    eigenvalues the slope is :func:`optax_muonplus.theory.g_prime`.

    Args:
      lam: eigenvalues :math:`\lambda`, of any shape.
      other: eigenvalues :math:`\mu`, of a shape that broadcasts with that of ``lam``.
      ns_coeffs: as in :func:`expected_variance_shift`.
      ns_steps: as in :func:`expected_variance_shift`.

    Returns:
      A float64 array of the broadcast shape.

    Raises:
      ValueError: as for :func:`optax_muonplus.theory.phi`.

    Source: arXiv:2602.21545, Lemma 1, step 4 of its proof (the mean value theorem).
    """
    x, y = np.asarray(lam, np.float64), np.asarray(other, np.float64)
    return _slope(static_rows(ns_coeffs, ns_steps), x, y)


def spectrum(singular_values: ArrayLike, size: int | None) -> tuple[np.ndarray, int]:
    """The eigenvalues ``(*batch, r)`` of checked singular values, and the number n of rows."""
    sigma = np.asarray(singular_values, np.float64)
    if sigma.ndim == 0 or sigma.size == 0:
        raise ValueError(
            f"A spectrum is singular values (*batch, r), at least one; got shape {sigma.shape}."
        )
    if not np.all((sigma >= 0) & (sigma <= 1 + _ROUNDING)):
        raise ValueError(
            "Lemma 1 is about singular values in [0, 1], got values from"
            f" {sigma.min():.6g} to {sigma.max():.6g}. Divide them by their norm, as the"
            " Newton-Schulz iteration does with its input."
        )
    n = sigma.shape[-1] if size is None else as_integer("size", size)
    if n < sigma.shape[-1]:
        raise ValueError(
            f"size={n} rows cannot have {sigma.shape[-1]} singular values. Pass the number of rows"
            " (or columns) whose norms are counted; None means as many as singular values."
        )
    return sigma * sigma, n


def as_integer(name: str, value: SupportsIndex) -> int:
    """``value`` as an int; ValueError names the argument if it is not an integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}.") from None


def _spread(x: np.ndarray, n: int) -> np.ndarray:
    """``n sum x^2 - (sum x)^2``, where ``x`` is extended to n elements by zeros."""
    mean = np.sum(x, -1, keepdims=True) / n
    return n * (np.sum((x - mean) ** 2, -1) + (n - x.shape[-1]) * mean[..., 0] ** 2)


def _pairs(rows: Sequence[Row], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """What each pair of eigenvalues contributes to the sum of the lemma."""
    return (x - y) ** 2 * (_slope(rows, x, y) ** 2 - 1)


def _slope(rows: Sequence[Row], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The divided difference of the composition, as the product of those of its steps."""
    slope = np.ones_like(x + y)
    for row in rows:
        px, py = (np.polynomial.polynomial.polyval(z, row) for z in (x, y))
        # The divided difference of z P(z)^2, by the product rule of divided differences.
        slope = slope * (py * py + x * (px + py) * _divided_difference(row, x, y))
        x, y = x * px * px, y * py * py
    return slope


def _divided_difference(row: Row, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """``(P(x) - P(y)) / (x - y)`` by synthetic division, which has no cancellation."""
    value, quotient = np.zeros_like(x), np.zeros_like(x + y)
    for c in reversed(row):
        value, quotient = c + x * value, value + y * quotient
    return quotient
