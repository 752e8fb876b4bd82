r"""Where the slope of a composition of Newton-Schulz steps crosses 1 or -1, by interval arithmetic.

One step maps an eigenvalue :math:`\lambda` of :math:`X X^\top` to :math:`g(\lambda) = \lambda
P(\lambda)^2`, where P is the polynomial with the coefficients of the step. The expanded composition
G of T steps is a polynomial of degree :math:`5^T`, whose coefficients float64 cannot represent.
Therefore G is never expanded. Instead intervals of :math:`\lambda` are sent through the steps one
by one, which bounds :math:`G'` and :math:`G''` on each interval:

- If the bounds of :math:`G'` contain neither 1 nor -1, there is no crossing.
- If the bounds of :math:`G''` do not contain 0, :math:`G'` is monotone. It crosses 1 and -1 once at
  most, and bisection finds the point.
- Otherwise the interval is halved, and both halves are examined.

The computations are NumPy in float64.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.polynomial import polynomial

from optax_muonplus.coefficients._minimax import Row

# The lower and the upper end of each interval.
Bounds = tuple[np.ndarray, np.ndarray]

# Eigenvalues start at 1 at most, and steps that converge keep them near there.
_DIVERGED = 1e6


def value_and_slope(rows: Sequence[Row], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``G(x)`` and ``G'(x)`` of the composition ``g_T(...g_1(x))``, by the chain rule."""
    slope = np.ones_like(x)
    for row in rows:
        p, derivative = polynomial.polyval(x, row), polynomial.polyval(x, _odd_derivative(row))
        x, slope = x * p * p, slope * p * derivative
    return x, slope


def crossings(rows: Sequence[Row], upper: float) -> np.ndarray:
    """All points of ``[0, upper]`` where ``|G'|`` crosses 1, in order.

    Points where ``|G'|`` only touches 1 may be among them. Each result is one of the two adjacent
    float64 numbers between which ``G'``, as :func:`value_and_slope` computes it, passes 1 or -1.

    Raises:
      ValueError: if eigenvalues of at most ``upper`` diverge under the steps.
    """
    steps = _steps(rows, upper)
    low, high, points = np.zeros(1), np.full(1, upper), [np.zeros(0)]
    while low.size:
        slope, bend = _enclosures(steps, low, high)
        undecided = _contains(slope, 1) | _contains(slope, -1)
        # G'' may be 0 at an end of its bounds: a linear map has G'' = 0, and no crossings either.
        monotone = (bend[0] >= 0) | (bend[1] <= 0)
        # Halving ends here where the slope touches 1 or -1 at a turning point. The width is
        # relative, because the crossings of many steps lie close together near 0.
        narrow = high - low <= 2.0**-50 * np.maximum(high, 2.0**-50 * upper)
        searched = undecided & (monotone | narrow)
        points += [_crossing(rows, level, low[searched], high[searched]) for level in (1, -1)]
        halved = undecided & ~searched
        low, high = low[halved], high[halved]
        middle = low + (high - low) / 2
        low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
    return np.unique(np.concatenate(points))


def _crossing(rows: Sequence[Row], level: int, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The points where the slope is ``level``, for intervals on which the slope is monotone."""

    def excess(x: np.ndarray) -> np.ndarray:
        return value_and_slope(rows, x)[1] - level

    at_low, at_high = excess(low), excess(high)
    inside = np.sign(at_low) * np.sign(at_high) < 0
    # A crossing at the end that two intervals share is inside neither of them.
    at_ends = [low[at_low == 0], high[at_high == 0]]
    return np.concatenate([_bisect(excess, low[inside], high[inside]), *at_ends])


def _bisect(
    function: Callable[[np.ndarray], np.ndarray], low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """Zeros between ``low`` and ``high``, whose signs differ, to adjacent float64 numbers."""
    rising = function(high) > 0
    while True:
        middle = low + (high - low) / 2
        if not np.any((low < middle) & (middle < high)):
            return middle
        beyond = (function(middle) > 0) == rising
        low, high = np.where(beyond, low, middle), np.where(beyond, middle, high)


class _Bounded(NamedTuple):
    """A polynomial that can be bounded on any interval.

    Attributes:
      polynomial: its coefficients, of the lowest power first.
      turning_points: its local extrema.
    """

    polynomial: np.ndarray
    turning_points: np.ndarray

    def on(self, low: np.ndarray, high: np.ndarray) -> Bounds:
        """The smallest and the largest value on each interval."""
        ends = [polynomial.polyval(end, self.polynomial) for end in (low, high)]
        least, most = np.minimum(*ends), np.maximum(*ends)
        for point in self.turning_points:
            inside = (low < point) & (point < high)
            value = polynomial.polyval(point, self.polynomial)
            least = np.where(inside, np.minimum(least, value), least)
            most = np.where(inside, np.maximum(most, value), most)
        return least, most


def _steps(rows: Sequence[Row], upper: float) -> list[list[_Bounded]]:
    """g, g' and g'' of each step, on the eigenvalues that reach that step."""
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
    """Zeros on ``[0, upper]`` with a change of sign, one at most between zeros of p'."""
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
        g1, g2 = first.on(low, high), second.on(low, high)
        # (g o G)'' = g''(G) G'^2 + g'(G) G''
        terms = _times(g2, _squared(slope)), _times(g1, bend)
        bend = terms[0][0] + terms[1][0], terms[0][1] + terms[1][1]
        slope = _times(g1, slope)
        low, high = g.on(low, high)
    return slope, bend


def _times(a: Bounds, b: Bounds) -> Bounds:
    """Bounds of the product."""
    products = np.stack([x * y for x in a for y in b])
    return products.min(0), products.max(0)


def _squared(a: Bounds) -> Bounds:
    """Bounds of the square."""
    squares = np.square(a)
    return np.where(_contains(a, 0), 0, squares.min(0)), squares.max(0)


def _contains(a: Bounds, number: float) -> np.ndarray:
    """Whether each interval contains the number."""
    return (a[0] <= number) & (number <= a[1])


def _odd_derivative(row: Row) -> np.ndarray:
    """Coefficients of ``P + 2 x P'``, the derivative of ``y P(y^2)`` in y at ``x = y^2``."""
    return (2 * np.arange(len(row)) + 1) * np.asarray(row)
