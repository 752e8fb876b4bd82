"""Odd polynomials that are closest to 1 on an interval, and their best compositions.

A row ``(c_0, c_1, ..., c_q)`` is the polynomial ``p(x) = c_0 x + c_1 x^3 + ... + c_q x^(2q+1)``.
Everything here is NumPy in float64, run once and offline.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Row = tuple[float, ...]


def polar_express(
    steps: int,
    lower: float = 1e-3,
    degree: int = 5,
    cushion: float = 0.02407327424182761,
    safety: float = 0.0,
) -> tuple[Row, ...]:
    r"""Rows of the Polar Express: the best composition of ``steps`` odd polynomials.

    Step by step, ``p_t`` is the odd polynomial closest to 1 on the interval ``[l, u]`` that holds
    the singular values; the next interval is ``[p_t(l), 2 - p_t(l)]``. Greedy is optimal for the
    composition (Amsel et al., Theorem 3.1).

    Args:
      steps: number of rows.
      lower: lower bound of the singular values before the first step, in (0, 1].
      degree: odd degree of each polynomial, at least 3. A row has ``(degree + 1) / 2`` numbers.
      cushion: the fit uses ``max(l, cushion * u)`` as its lower end, and is re-centred, so that
        tiny singular values grow steadily. The default gives the paper's printed list; 0 gives
        CANS (Grishina et al., arXiv:2506.10935).
      safety: all rows but the last are scaled to ``p(x / (1 + safety))``, for products in bfloat16
        whose rounding pushes singular values beyond ``u``. Repeating the last row is then right.

    Returns:
      ``steps`` rows of Python floats.

    Source: Amsel, Persson, Musco, Gower, arXiv:2505.16932, Algorithm 1.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    if not 0 < lower <= 1:
        raise ValueError(f"lower must be in (0, 1], got {lower}.")
    rows = []
    low, high = lower, 1.0
    for step in range(steps):
        fit_low = max(low, cushion * high)
        row = np.array(minimax(fit_low, high, degree))
        if fit_low > low:
            # The largest value of p is 1 + E, where 1 - E = p(fit_low); at the top end only if the
            # number of terms is odd.
            row *= 2 / (_evaluate(row, low) + 2 - _evaluate(row, fit_low))
        if step < steps - 1:
            row /= (1 + safety) ** (2 * np.arange(len(row)) + 1)
        rows.append(tuple(row.tolist()))
        low = float(_evaluate(row, low))
        high = 2 - low
        low = min(low, high)
    return tuple(rows)


def minimax(lower: float, upper: float, degree: int = 5) -> Row:
    r"""The odd polynomial of a given degree that is closest to 1 on ``[lower, upper]``.

    Minimises ``max |1 - p(x)|`` over the interval by Remez exchange in float64.

    Args:
      lower: lower end of the interval, positive.
      upper: upper end, at least ``lower``.
      degree: odd, at least 3.

    Returns:
      ``(degree + 1) / 2`` coefficients, of x, x^3, x^5, ...

    Raises:
      ValueError: for an even degree or one below 3, or bounds out of order.
    """
    if degree < 3 or degree % 2 == 0:
        raise ValueError(f"degree must be odd and at least 3, got {degree}.")
    if not 0 < lower <= upper:
        raise ValueError(f"need 0 < lower <= upper, got lower={lower}, upper={upper}.")
    count = (degree + 1) // 2
    # On [l, 1]; x/u is substituted back at the end.
    low = lower / upper
    # On a short interval the error of the expansion about 1 is below rounding, and Remez has
    # nothing left to exchange.
    short = (2 * (1 - low)) ** count < 1e-14
    row = _taylor_at_one(count) if short else _remez(low, count)
    return scaled([tuple(row.tolist())], upper)[0]


def _remez(low: float, count: int) -> np.ndarray:
    """Coefficients of the minimax odd polynomial with ``count`` terms on ``[low, 1]``."""
    # Chebyshev nodes are close to the equioscillation points from the start.
    nodes = (1 + low) / 2 - (1 - low) / 2 * np.cos(np.pi * np.arange(count + 1) / count)
    signs = (-1.0) ** np.arange(count + 1)
    powers = 2 * np.arange(count) + 1
    row, error = np.zeros(count), np.inf
    for _ in range(100):
        system = np.column_stack([nodes[:, None] ** powers, signs])
        *row, new_error = np.linalg.solve(system, np.ones(count + 1))
        row = np.array(row)
        if abs(new_error - error) <= 1e-15:
            break
        error = new_error
        # The error's interior extrema: roots of p', a polynomial in x^2 of degree count - 1.
        squares = np.roots((row * powers)[::-1])
        extrema = np.sort(np.sqrt(squares[np.isreal(squares) & (squares.real > 0)].real))
        if len(extrema) != count - 1:  # rounding level reached: the last row stands
            break
        nodes = np.concatenate([[low], extrema, [1.0]])
    return row


def _taylor_at_one(count: int) -> np.ndarray:
    """The limit for ``low -> 1``: the expansion of ``x / sqrt(x^2)`` in ``1 - x^2``."""
    row = np.zeros(count)
    for order in range(count):
        weight = math.comb(2 * order, order) / 4**order
        for k in range(order + 1):
            row[k] += weight * math.comb(order, k) * (-1) ** k
    return row


def _evaluate(row: Sequence[float] | np.ndarray, x: Any) -> Any:
    """``p(x)`` by Horner's rule in ``x^2``."""
    return x * functools.reduce(lambda acc, c: acc * (x * x) + c, reversed(list(row)))


def evaluate(rows: Sequence[Row], x: Any) -> Any:
    """The composition ``p_T(...p_1(x))`` of rows: what the steps do to a singular value ``x``."""
    return functools.reduce(lambda value, row: _evaluate(row, value), rows, x)


def scaled(rows: Sequence[Row], factor: float) -> tuple[Row, ...]:
    """Rows of ``p(x / factor)``: coefficient ``c_k`` divided by ``factor^(2k+1)``."""
    return tuple(tuple(c / factor ** (2 * k + 1) for k, c in enumerate(row)) for row in rows)
