r"""Finds the singular values that Newton-Schulz steps drive apart (section 2.1 of the paper).

A step maps a singular value x to :math:`\varphi(x) = c_0 x + c_1 x^3 + c_2 x^5 + \dots` and an
eigenvalue :math:`\lambda = x^2` to :math:`g(\lambda) = \varphi(\sqrt\lambda)^2`. Where
:math:`|g'(\lambda)| > 1`, it drives apart two eigenvalues near :math:`\lambda`, and with them the
row norms of the update. Several steps are one map :math:`g_T \circ \dots \circ g_1`.

Coefficients have the form and the meaning that `optax_muonplus.polar.newton_schulz` gives them.
Singular values are those that enter the first step: of a matrix of Frobenius norm 1, or 1/1.01 if
the table has that safety factor (Polar Express). The paper prints and plots the coefficients of
Polar Express without it: the numbers of a row, but the last row's, times 1.01, 1.01^3 and 1.01^5.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.polynomial import polynomial
from numpy.typing import ArrayLike

from optax_muonplus import coefficients

# Regions of many steps lie close together near 0, where the steps grow eigenvalues most.
GRID = np.concatenate([[0.0], np.logspace(-12, -2, 200_000), np.linspace(1e-2, 1, 200_000)[1:]])

Interval = tuple[float, float]


class Regions(NamedTuple):
    """The eigenvalues from 0 to 1 in two parts, as intervals in order."""

    amplification: tuple[Interval, ...]
    """Where |g'| > 1."""
    reduction: tuple[Interval, ...]
    """Where |g'| <= 1."""


def g(lam: ArrayLike, ns_coeffs: Any = "jordan", ns_steps: int = 1) -> np.ndarray:
    """Maps eigenvalues, the squares of singular values, through the steps."""
    return value_and_slope(lam, ns_coeffs, ns_steps)[0]


def value_and_slope(lam: ArrayLike, ns_coeffs: Any, ns_steps: int) -> tuple[np.ndarray, np.ndarray]:
    r"""Computes g and g' by the chain rule.

    One step is :math:`g(\lambda) = \lambda P^2`, with :math:`P = c_0 + c_1 \lambda + \dots`, and
    :math:`g'(\lambda) = P (P + 2 \lambda P')`.
    """
    x = np.asarray(lam, np.float64)
    slope = np.ones_like(x)
    for row in coefficients.for_steps(ns_coeffs, ns_steps).rows:
        odd = (2 * np.arange(len(row)) + 1) * np.asarray(row)  # P + 2 x P'
        p, derivative = polynomial.polyval(x, row), polynomial.polyval(x, odd)
        x, slope = x * p * p, slope * p * derivative
    return x, slope


def composed_regions(ns_coeffs: Any = "jordan", ns_steps: int = 5) -> Regions:
    """Divides the eigenvalues that enter the first step by what all steps together do to them.

    End points are interpolated between points of a grid, where g' passes 1 or -1: good for a plot.
    """
    _, slope = value_and_slope(GRID, ns_coeffs, ns_steps)
    crossings = []
    for level in (1, -1):
        above = slope > level
        low = np.flatnonzero(above[1:] != above[:-1])
        share = (level - slope[low]) / (slope[low + 1] - slope[low])
        crossings += (GRID[low] + share * (GRID[low + 1] - GRID[low])).tolist()
    spans = tuple(itertools.pairwise([0.0, *sorted(crossings), 1.0]))
    first, second = spans[::2], spans[1::2]  # each crossing ends a region
    return Regions(first, second) if abs(slope[0]) > 1 else Regions(second, first)


def corollary_delta(ns_coeffs: Any = "jordan", ns_steps: int = 1) -> float:
    r"""Finds the largest :math:`\delta \le 1` of Corollary 1.

    The expected variance shift is positive whenever all eigenvalues are in :math:`[0, \delta]` and
    not all equal, which holds if :math:`|g'| > 1` on :math:`[0, \delta)`.

    Raises:
      ValueError: unless :math:`\varphi'(0) > 1`.
    """
    rows = coefficients.for_steps(ns_coeffs, ns_steps).rows
    slope = float(np.prod([row[0] for row in rows]))
    if not slope > 1:
        raise ValueError(
            f"Corollary 1 is for coefficients with phi'(0) > 1; those of {ns_coeffs!r} give"
            f" {slope:g} after {ns_steps} steps. Pass coefficients whose first numbers have a"
            " product above 1."
        )
    return composed_regions(ns_coeffs, ns_steps).amplification[0][1]
