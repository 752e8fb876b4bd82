r"""How much Newton-Schulz steps change the variance of squared row norms, in expectation.

For :math:`M = U \Sigma V^\top` with U uniform on the orthogonal group (Haar), the paper's Lemma 1
gives the expected change from M to :math:`Q = U \varphi(\Sigma) V^\top`. Here it is in closed form,
as a sum over pairs, and by simulation; the lemma's proof asks of :math:`\varphi` nothing but that
it maps singular values, so that several steps serve as well as one.

The paper has square matrices. The side whose norms are counted may also be longer than there are
singular values: the missing ones are zeros, which stay zeros. For the columns take V for U.

NumPy in float64. Coefficients are as in :mod:`optax_muonplus.amplification`.

Source: Zhang et al., Muon+, arXiv:2602.21545, Lemma 1 and its proof.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_muonplus.coefficients._tables import Row
from optax_muonplus.theory._amplification import g, static_rows

# Singular values of a float32 matrix of Frobenius norm 1 exceed 1 by this much at most.
_ROUNDING = 1e-6
# Numbers that a simulation holds at once: 32 MiB.
_AT_ONCE = 2**22


class Estimate(NamedTuple):
    """A mean over samples, and the standard deviation of that mean."""

    mean: float
    standard_error: float


def expected_variance_shift(
    singular_values: Any,
    ns_coeffs: str | Sequence[Any] = "jordan",
    ns_steps: int = 1,
    *,
    size: int | None = None,
) -> Any:
    r"""Expected change of the variance of squared row norms, in closed form.

    .. math::
      \mathbb{E}[\mathrm{Var}(s(Q)) - \mathrm{Var}(s(M))] = \frac{2}{n^2 (n + 2)} \Bigl[
      n \sum_k g(\lambda_k)^2 - \bigl(\sum_k g(\lambda_k)\bigr)^2
      - n \sum_k \lambda_k^2 + \bigl(\sum_k \lambda_k\bigr)^2 \Bigr]

    with :math:`\lambda_k = \sigma_k^2` and :math:`s(X)_i = \|X_{i:}\|^2`. It is computed as
    :math:`n \sum_k (x_k - \bar x)^2`, the same without cancellation.

    Args:
      singular_values: :math:`\sigma_k` of the normalized matrix, ``(*batch, r)``, in [0, 1].
      ns_coeffs: a table's name, one row, or several rows.
      ns_steps: number of steps; 1 is the paper's lemma.
      size: number n of rows; None means r, as in a square matrix.

    Returns:
      float64 ``(*batch,)``. Positive where the steps enlarge the imbalance.

    Raises:
      ValueError: for an empty spectrum, singular values outside [0, 1], a ``size`` below r, and as
        :func:`optax_muonplus.amplification.phi`.

    Source: arXiv:2602.21545, Lemma 1, and in its proof the equation before step 3.
    """
    lam, n = _spectrum(singular_values, size)
    difference = _spread(g(lam, ns_coeffs, ns_steps), n) - _spread(lam, n)
    return 2 / (n**2 * (n + 2)) * difference


def pairwise_variance_shift(
    singular_values: Any,
    ns_coeffs: str | Sequence[Any] = "jordan",
    ns_steps: int = 1,
    *,
    size: int | None = None,
) -> Any:
    r"""The same as :func:`expected_variance_shift`, as the lemma states it.

    .. math::
      \mathbb{E}[\mathrm{Var}(s(Q)) - \mathrm{Var}(s(M))] = \frac{2}{n^2 (n + 2)} \sum_{i < j}
      (\lambda_i - \lambda_j)^2 \bigl(g'(\xi_{ij})^2 - 1\bigr)

    Each :math:`g'(\xi_{ij})` is :func:`mean_value_slope`, without cancellation however close the
    pair: where spectra are clustered this form keeps digits that the other loses. O(r^2) work and
    O(r) memory.

    Args:
      singular_values: as in :func:`expected_variance_shift`, like the others.
      ns_coeffs: see above.
      ns_steps: see above.
      size: see above.

    Returns:
      float64 ``(*batch,)``.

    Source: arXiv:2602.21545, Lemma 1, equation ``var_shift_mvt``.
    """
    lam, n = _spectrum(singular_values, size)
    rows = static_rows(ns_coeffs, ns_steps)
    # A row beyond the singular values makes a pair of each of these with a zero.
    total = (n - lam.shape[-1]) * np.sum(_pairs(rows, lam, np.zeros_like(lam)), -1)
    for apart in range(1, lam.shape[-1]):
        total = total + np.sum(_pairs(rows, lam[..., apart:], lam[..., :-apart]), -1)
    return 2 / (n**2 * (n + 2)) * total


def mean_value_slope(
    lam: Any, other: Any, ns_coeffs: str | Sequence[Any] = "jordan", ns_steps: int = 1
) -> Any:
    r"""The slope :math:`g'(\xi) = (g(\lambda) - g(\mu)) / (\lambda - \mu)` of a pair.

    The pair adds to the variance where the slope is above 1 or below -1. For equal eigenvalues it
    is :func:`optax_muonplus.amplification.g_prime`.

    Args:
      lam: eigenvalues :math:`\lambda`, of any shape.
      other: eigenvalues :math:`\mu`, of a shape that goes with it.
      ns_coeffs: as in :func:`expected_variance_shift`, like the last.
      ns_steps: see above.

    Returns:
      A float64 array of the common shape.

    Source: arXiv:2602.21545, Lemma 1, proof, step 4 (the mean value theorem).
    """
    x, y = np.asarray(lam, np.float64), np.asarray(other, np.float64)
    return _slope(static_rows(ns_coeffs, ns_steps), x, y)


def simulate_variance_shift(
    singular_values: Any,
    ns_coeffs: str | Sequence[Any] = "jordan",
    ns_steps: int = 1,
    *,
    size: int | None = None,
    samples: int = 1000,
    seed: int | np.random.Generator = 0,
) -> Estimate:
    r"""The shift of :func:`expected_variance_shift`, averaged over random matrices.

    Each sample draws a Haar-distributed U, makes :math:`M = U \Sigma`, runs the Newton-Schulz
    products on it and takes the variances of squared row norms. V is left out: it changes none.

    Args:
      singular_values: as in :func:`expected_variance_shift`, one spectrum ``(r,)``.
      ns_coeffs: as there, like the next two.
      ns_steps: see above.
      size: see above.
      samples: number of matrices, at least 2.
      seed: seed, or a NumPy generator.

    Returns:
      Mean and standard error.

    Raises:
      ValueError: as :func:`expected_variance_shift`, for a batch of spectra, or ``samples < 2``.
    """
    lam, n = _spectrum(singular_values, size)
    if lam.ndim != 1:
        raise ValueError(
            f"A simulation takes one spectrum (r,), got shape {lam.shape}: call it for each."
        )
    if _integer("samples", samples) < 2:
        raise ValueError(f"samples must be at least 2, to have a standard error; got {samples}.")
    rows = static_rows(ns_coeffs, ns_steps)
    rng = np.random.default_rng(seed)
    at_once = max(1, _AT_ONCE // (n * lam.size))
    counts = [min(at_once, samples - start) for start in range(0, samples, at_once)]
    shifts = np.concatenate([_shifts(rng, count, n, np.sqrt(lam), rows) for count in counts])
    return Estimate(float(shifts.mean()), float(shifts.std(ddof=1) / np.sqrt(samples)))


def _shifts(
    rng: np.random.Generator, count: int, n: int, sigma: np.ndarray, rows: Sequence[Row]
) -> np.ndarray:
    """``Var(s(Q)) - Var(s(M))`` of ``count`` random matrices."""
    # Haar but for the signs of its columns, which are LAPACK's and change no norm.
    u, _ = np.linalg.qr(rng.standard_normal((count, n, sigma.size)))
    m = u * sigma
    q = m
    for row in rows:
        gram = np.swapaxes(q, -1, -2) @ q
        power, image = q, row[0] * q
        for c in row[1:]:
            power = power @ gram
            image = image + c * power
        q = image
    return np.var(np.sum(q * q, -1), axis=-1) - np.var(np.sum(m * m, -1), axis=-1)


def _spectrum(singular_values: Any, size: int | None) -> tuple[np.ndarray, int]:
    """Eigenvalues, and how many rows share them."""
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
    n = sigma.shape[-1] if size is None else _integer("size", size)
    if n < sigma.shape[-1]:
        raise ValueError(
            f"size={n} rows cannot have {sigma.shape[-1]} singular values. Pass the number of rows"
            " (or columns) whose norms are counted; None means as many as singular values."
        )
    return sigma * sigma, n


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}.") from None


def _spread(x: np.ndarray, n: int) -> Any:
    """``n sum x^2 - (sum x)^2`` for ``x`` continued to n numbers by zeros."""
    mean = np.sum(x, -1, keepdims=True) / n
    return n * (np.sum((x - mean) ** 2, -1) + (n - x.shape[-1]) * mean[..., 0] ** 2)


def _pairs(rows: Sequence[Row], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x - y) ** 2 * (_slope(rows, x, y) ** 2 - 1)


def _slope(rows: Sequence[Row], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The divided difference of the composition: the product of those of its steps."""
    slope = np.ones_like(x + y)
    for row in rows:
        px, py = (np.polynomial.polynomial.polyval(z, row) for z in (x, y))
        # (z P^2)[x, y], by the product rule of divided differences.
        slope = slope * (py * py + x * (px + py) * _divided_difference(row, x, y))
        x, y = x * px * px, y * py * py
    return slope


def _divided_difference(row: Row, x: np.ndarray, y: np.ndarray) -> Any:
    """``(P(x) - P(y)) / (x - y)`` by synthetic division, without a difference."""
    value, quotient = np.zeros_like(x), np.zeros_like(x + y)
    for c in reversed(row):
        value, quotient = c + x * value, value + y * quotient
    return quotient
