r"""Computes how much Newton-Schulz steps change the variance of squared row norms (Lemma 1).

For :math:`M = U \Sigma V^\top` with U uniform on the orthogonal group (Haar), the lemma gives the
expected change from M to :math:`Q = U \varphi(\Sigma) V^\top`. Here it is computed in closed form,
as a sum over pairs, and by simulation. The proof of the lemma only needs that :math:`\varphi` maps
singular values, so that several steps are possible as well as one.

The paper has square matrices. Here the matrix may also have more rows than singular values: the
missing ones are zeros, and stay zeros. For the norms of columns, exchange U and V.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.polynomial import polynomial
from numpy.typing import ArrayLike

from lab.paper.regions import g
from optax_muonplus import coefficients

# By how much the singular values of a float32 matrix of Frobenius norm 1 can exceed 1.
ROUNDING = 1e-6


class Estimate(NamedTuple):
    """A mean over random samples, and its standard deviation."""

    mean: float
    standard_error: float


def expected_variance_shift(
    singular_values: ArrayLike,
    ns_coeffs: Any = "jordan",
    ns_steps: int = 1,
    *,
    size: int | None = None,
) -> np.ndarray:
    r"""Computes the expected change in closed form.

    .. math::
      \mathbb{E}[\mathrm{Var}(s(Q)) - \mathrm{Var}(s(M))] = \frac{2}{n^2 (n + 2)} \Bigl[
      n \sum_k g(\lambda_k)^2 - \bigl(\sum_k g(\lambda_k)\bigr)^2
      - n \sum_k \lambda_k^2 + \bigl(\sum_k \lambda_k\bigr)^2 \Bigr]

    with :math:`\lambda_k = \sigma_k^2` and :math:`s(X)_i = \|X_{i:}\|^2`.

    Singular values of the normalized matrix are ``(*batch, r)``, in [0, 1]; ``size`` is the number
    n of rows, None for r as in a square matrix. The result is float64 ``(*batch,)``, positive where
    the steps increase the variance.

    Raises:
      ValueError: for an empty spectrum, singular values outside [0, 1], or a ``size`` below r.
    """
    lam, n = spectrum(singular_values, size)
    difference = spread(g(lam, ns_coeffs, ns_steps), n) - spread(lam, n)
    return difference * (2 / (n**2 * (n + 2)))


def pairwise_variance_shift(
    singular_values: ArrayLike,
    ns_coeffs: Any = "jordan",
    ns_steps: int = 1,
    *,
    size: int | None = None,
) -> np.ndarray:
    r"""Computes :func:`expected_variance_shift` in the form of the lemma, as a sum over pairs.

    .. math::
      \mathbb{E}[\mathrm{Var}(s(Q)) - \mathrm{Var}(s(M))] = \frac{2}{n^2 (n + 2)} \sum_{i < j}
      (\lambda_i - \lambda_j)^2 \bigl(g'(\xi_{ij})^2 - 1\bigr)

    Each :math:`g'(\xi_{ij})` is a divided difference, computed without cancellation: for clustered
    spectra this form is more accurate than the closed one.
    """
    lam, n = spectrum(singular_values, size)
    rows = coefficients.for_steps(ns_coeffs, ns_steps).rows

    def pairs(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.sum((x - y) ** 2 * (mean_value_slope(rows, x, y) ** 2 - 1), -1)

    # Each of the n - r missing singular values, a zero, forms a pair with each of the others.
    total = (n - lam.shape[-1]) * pairs(lam, np.zeros_like(lam))
    for offset in range(1, lam.shape[-1]):
        total = total + pairs(lam[..., offset:], lam[..., :-offset])
    return 2 / (n**2 * (n + 2)) * total


def simulate_variance_shift(
    singular_values: ArrayLike,
    ns_coeffs: Any = "jordan",
    ns_steps: int = 1,
    *,
    size: int | None = None,
    samples: int = 1000,
    seed: int | np.random.Generator = 0,
) -> Estimate:
    """Averages the change over random matrices, for one spectrum ``(r,)``.

    The factor V is left out, because row norms do not depend on it.
    """
    lam, n = spectrum(singular_values, size)
    rng = np.random.default_rng(seed)
    # U is Haar-distributed but for the signs of its columns, which do not change norms.
    u, _ = np.linalg.qr(rng.standard_normal((samples, n, lam.size)))
    m = u * np.sqrt(lam)
    q = m
    for row in coefficients.for_steps(ns_coeffs, ns_steps).rows:
        gram = np.swapaxes(q, -1, -2) @ q
        power, image = q, row[0] * q
        for c in row[1:]:
            power = power @ gram
            image = image + c * power
        q = image
    shifts = np.var(np.sum(q * q, -1), axis=-1) - np.var(np.sum(m * m, -1), axis=-1)
    return Estimate(float(shifts.mean()), float(shifts.std(ddof=1) / np.sqrt(samples)))


def spectrum(singular_values: ArrayLike, size: int | None) -> tuple[np.ndarray, int]:
    """Returns eigenvalues ``(*batch, r)`` of checked singular values, and the number of rows."""
    sigma = np.asarray(singular_values, np.float64)
    if sigma.ndim == 0 or sigma.size == 0:
        raise ValueError(f"A spectrum is singular values (*batch, r), not {sigma.shape}.")
    if not np.all((sigma >= 0) & (sigma <= 1 + ROUNDING)):
        raise ValueError(
            "Lemma 1 is about singular values in [0, 1], got values from"
            f" {sigma.min():.6g} to {sigma.max():.6g}. Divide them by their norm, as the"
            " Newton-Schulz iteration does with its input."
        )
    n = sigma.shape[-1] if size is None else size
    if n < sigma.shape[-1]:
        raise ValueError(f"size={n} rows cannot have {sigma.shape[-1]} singular values.")
    return sigma * sigma, n


def spread(x: np.ndarray, n: int) -> np.ndarray:
    """Computes ``n sum x^2 - (sum x)^2`` without cancellation, for x and zeros, n in all."""
    mean = np.sum(x, -1, keepdims=True) / n
    return n * (np.sum((x - mean) ** 2, -1) + (n - x.shape[-1]) * mean[..., 0] ** 2)


def mean_value_slope(rows: Sequence[tuple[float, ...]], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Computes ``(g(x) - g(y)) / (x - y)`` as the product of the divided differences of steps."""
    slope = np.ones_like(x + y)
    for row in rows:
        px, py = polynomial.polyval(x, row), polynomial.polyval(y, row)
        # (P(x) - P(y)) / (x - y) by synthetic division.
        value, quotient = np.zeros_like(x), np.zeros_like(x + y)
        for c in reversed(row):
            value, quotient = c + x * value, value + y * quotient
        slope = slope * (py * py + x * (px + py) * quotient)
        x, y = x * px * px, y * py * py
    return slope
