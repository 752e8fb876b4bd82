r"""Where the slope of a composition of Newton-Schulz steps crosses 1 or -1, to the last digits.

One step sends an eigenvalue :math:`\lambda` of :math:`X X^\top` to :math:`g(\lambda) = \lambda
P(\lambda)^2`, with P the row as a polynomial. Expanded, T steps are a polynomial of degree
:math:`5^T`, whose coefficients nobody can hold in float64. Here the composition is never expanded.
Intervals of :math:`\lambda` are sent through the steps one by one, which bounds the slope
:math:`G'` and the bend :math:`G''` on each of them. Where the bound of the slope leaves out 1 and
-1 there is no crossing; where that of the bend leaves out 0 there is at most one of each, and
bisection finds it; everything else is halved.

All of it is NumPy in float64.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.polynomial import polynomial

from optax_muonplus.coefficients._minimax import Row

Bounds = tuple[np.ndarray, np.ndarray]

# An eigenvalue starts at 1 at most, and converging steps leave it near there.
_DIVERGED = 1e6


def value_and_slope(rows: Sequence[Row], x: Any) -> tuple[Any, Any]:
    """``G(x)`` and ``G'(x)`` of the composition ``g_T(...g_1(x))``, by the chain rule."""
    slope = np.ones_like(x)
    for row in rows:
        p, d = polynomial.polyval(x, row), polynomial.polyval(x, _odd_derivative(row))
        x, slope = x * p * p, slope * p * d
    return x, slope


def crossings(rows: Sequence[Row], upper: float) -> np.ndarray:
    """All points of ``[0, upper]`` where ``|G'|`` goes through 1, in order.

    Points where it touches 1 may be among them. Each is one of the two neighbouring float64 numbers
    between which ``G'``, as :func:`value_and_slope` computes it, passes 1 or -1.

    Raises:
      ValueError: if eigenvalues of at most ``upper`` diverge under the steps.
    """
    steps = _steps(rows, upper)
    low, high, found = np.zeros(1), np.full(1, upper), [np.zeros(0)]
    while low.size:
        slope, bend = _enclosures(steps, low, high)
        undecided = _holds(slope, 1) | _holds(slope, -1)
        # "<=" and ">=": the slope of a linear map has no bend, and no crossing either.
        monotone = (bend[0] >= 0) | (bend[1] <= 0)
        # Left over where the slope touches 1 or -1 at a turning point. Many steps make crossings
        # crowd at 0, where numbers are finer.
        narrow = high - low <= 2.0**-50 * np.maximum(high, 2.0**-50 * upper)
        last = undecided & (monotone | narrow)
        found += [_crossing(rows, level, low[last], high[last]) for level in (1, -1)]
        halved = undecided & ~last
        low, high = low[halved], high[halved]
        middle = low + (high - low) / 2
        low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
    return np.unique(np.concatenate(found))


def _crossing(rows: Sequence[Row], level: int, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Where the slope is ``level`` on intervals on which it is monotone."""

    def excess(x: np.ndarray) -> np.ndarray:
        return value_and_slope(rows, x)[1] - level

    below, above = excess(low), excess(high)
    inside = np.sign(below) * np.sign(above) < 0
    # A crossing at an end that two intervals share is inside neither.
    at_ends = [low[below == 0], high[above == 0]]
    return np.concatenate([_bisect(excess, low[inside], high[inside]), *at_ends])


def _bisect(
    function: Callable[[np.ndarray], np.ndarray], low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """Zeros between ``low`` and ``high``, where the signs differ, down to neighbouring numbers."""
    rising = function(high) > 0
    while True:
        middle = low + (high - low) / 2
        if not np.any((low < middle) & (middle < high)):
            return middle
        beyond = (function(middle) > 0) == rising
        low, high = np.where(beyond, low, middle), np.where(beyond, middle, high)


class _Bounded(NamedTuple):
    """A polynomial, lowest power first, and its turning points, which bound it on any interval."""

    polynomial: np.ndarray
    turns: np.ndarray

    def on(self, low: np.ndarray, high: np.ndarray) -> Bounds:
        """Smallest and largest value on each interval."""
        ends = [polynomial.polyval(end, self.polynomial) for end in (low, high)]
        least, most = np.minimum(*ends), np.maximum(*ends)
        for turn in self.turns:
            inside = (low < turn) & (turn < high)
            value = polynomial.polyval(turn, self.polynomial)
            least = np.where(inside, np.minimum(least, value), least)
            most = np.where(inside, np.maximum(most, value), most)
        return least, most


def _steps(rows: Sequence[Row], upper: float) -> list[list[_Bounded]]:
    """For each step g, g' and g'' on the eigenvalues that reach it."""
    steps = []
    top = np.full(1, upper)
    for number, row in enumerate(rows, 1):
        g = polynomial.polymulx(polynomial.polymul(row, row))
        orders = [polynomial.polyder(g, order) for order in range(4)]
        steps.append(
            [_Bounded(p, _real_roots(d, top.item())) for p, d in itertools.pairwise(orders)]
        )
        _, top = steps[-1][0].on(np.zeros(1), top)
        if not top < _DIVERGED:
            raise ValueError(
                f"Eigenvalues between 0 and {upper} reach {top.item():.3g} after step {number} with"
                f" coefficients {tuple(row)}: the steps diverge there. Pass a smaller upper, or"
                " coefficients that keep [0, 1] bounded."
            )
    return steps


def _real_roots(coefficients: np.ndarray, upper: float) -> np.ndarray:
    """Zeros on ``[0, upper]`` where the sign changes: between those of the derivative."""
    trimmed = polynomial.polytrim(coefficients)
    if len(trimmed) < 2:
        return np.zeros(0)
    inner = _real_roots(polynomial.polyder(trimmed), upper)
    edges = np.concatenate([[0.0], inner, [upper]])

    def value(x: np.ndarray) -> np.ndarray:
        return polynomial.polyval(x, trimmed)

    signs = np.sign(value(edges))
    changes = signs[:-1] * signs[1:] < 0
    zeros = _bisect(value, edges[:-1][changes], edges[1:][changes])
    return np.unique(np.concatenate([zeros, edges[signs == 0]]))


def _enclosures(steps: list[list[_Bounded]], low: np.ndarray, high: np.ndarray) -> Sequence[Bounds]:
    """Bounds of ``G'`` and ``G''`` on each interval."""
    slope = np.ones_like(low), np.ones_like(low)
    bend = np.zeros_like(low), np.zeros_like(low)
    for g, first, second in steps:
        own, curved = first.on(low, high), second.on(low, high)
        # (g o G)'' = g''(G) G'^2 + g'(G) G''
        parts = _times(curved, _squared(slope)), _times(own, bend)
        bend = parts[0][0] + parts[1][0], parts[0][1] + parts[1][1]
        slope = _times(own, slope)
        low, high = g.on(low, high)
    return slope, bend


def _times(a: Bounds, b: Bounds) -> Bounds:
    products = np.stack([x * y for x in a for y in b])
    return products.min(0), products.max(0)


def _squared(a: Bounds) -> Bounds:
    squares = np.square(a)
    return np.where(_holds(a, 0), 0, squares.min(0)), squares.max(0)


def _holds(a: Bounds, number: float) -> np.ndarray:
    return (a[0] <= number) & (number <= a[1])


def _odd_derivative(row: Row) -> np.ndarray:
    """``P + 2 x P'``: the derivative of ``y P(y^2)`` in y, at ``x = y^2``."""
    return (2 * np.arange(len(row)) + 1) * np.asarray(row)
