"""Odd polynomials that are closest to 1 on an interval, and their best compositions.

A row ``(c_0, c_1, ..., c_q)`` stands for the polynomial ``p(x) = c_0 x + c_1 x^3 + ... + c_q
x^(2q+1)``. The computations are NumPy in float64 and take milliseconds.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from optax_muonplus._core.arguments import known_count
from optax_muonplus._core.coefficients import Row, scaled


def polar_express(
    steps: int,
    lower: float = 1e-3,
    degree: int = 5,
    cushion: float = 0.02407327424182761,
    safety: float = 0.0,
) -> tuple[Row, ...]:
    r"""Coefficients of the Polar Express: the best composition of ``steps`` odd polynomials.

    Each ``p_t`` is the odd polynomial that is closest to 1 on the interval ``[l, u]`` which holds
    the singular values before step t. The interval after it is ``[p_t(l), 2 - p_t(l)]``. This
    greedy choice is optimal for the composition (Amsel et al., Theorem 3.1).

    Args:
      steps: number of steps.
      lower: lower bound of the singular values before the first step, in (0, 1].
      degree: odd degree of each polynomial, at least 3.
      cushion: the fit takes ``max(l, cushion * u)`` as the lower end of its interval, and is then
        centred on 1 again, so that tiny singular values grow at every step. The default gives the
        list that the paper prints; 0 gives CANS (Grishina et al., arXiv:2506.10935).
      safety: every polynomial but the last becomes ``p(x / (1 + safety))``. This leaves room for
        products in bfloat16, whose rounding pushes singular values beyond ``u``. The last
        polynomial stays as it is, so that it can be repeated for further steps.

    Returns:
      ``steps`` rows of ``(degree + 1) / 2`` Python floats.

    Raises:
      ValueError: for ``steps < 1``, a ``lower`` outside (0, 1], or an even degree or one below 3.

    Source: Amsel, Persson, Musco, Gower, arXiv:2505.16932, Algorithm 1.
    """
    known_count("steps", steps)
    if not 0 < lower <= 1:
        raise ValueError(f"lower must be in (0, 1], got {lower}.")
    rows = []
    low, high = lower, 1.0
    for step in range(steps):
        fit_low = max(low, cushion * high)
        row = np.array(minimax(fit_low, high, degree))
        if fit_low > low:
            # On [low, high] p runs from p(low) to 2 - p(fit_low), its largest value: the error of a
            # minimax fit is as large above 1 as below it. Scaling centres this range on 1.
            row *= 2 / (_evaluate(row, low) + 2 - _evaluate(row, fit_low))
        if step < steps - 1:
            row /= (1 + safety) ** (2 * np.arange(len(row)) + 1)
        rows.append(tuple(row.tolist()))
        low = float(_evaluate(row, low))
        high = 2 - low
        low = min(low, high)
    return tuple(rows)


def relaxed(
    steps: int, degree: int = 3, lower: float = 7e-3, upper: float = 1.3
) -> tuple[Row, ...]:
    r"""Coefficients of the composition whose values on ``[lower, 1]`` have the smallest ratio.

    The values end in ``[l, upper]``, with ``l`` as large as ``steps`` polynomials can make it. Each
    polynomial is fitted to the interval in which the values of the one before end:

    .. math::
      p_t = \frac{\mathrm{upper}}{1 + E_t}\, q_t, \qquad
      l_{t+1} = p_t(l_t), \qquad u_{t+1} = \mathrm{upper}

    from ``l_0 = lower`` and ``u_0 = 1``, where ``q_t`` is :func:`minimax` of ``[l_t, u_t]`` and
    ``E_t`` its error, so that ``1 + E_t`` is its largest value.

    Args:
      steps: number of steps.
      degree: odd degree of each polynomial, at least 3. One of degree 3 takes two products of
        matrices in the plain iteration, one of degree 5 three.
      lower: lower bound of the singular values before the first step, in (0, 1].
      upper: the largest value of every polynomial, positive. It scales the result, and nothing
        else: the ratio of its ends does not depend on it.

    Returns:
      ``steps`` rows of ``(degree + 1) / 2`` Python floats.

    Raises:
      ValueError: as :func:`polar_express` does, and unless ``upper`` is positive and finite.

    Source: Huang, arXiv:2606.00371, whose five cubic steps are ``relaxed(5)``.
    """
    if not 0 < upper < math.inf:
        raise ValueError(f"upper must be positive and finite, got {upper}.")
    rows: list[Row] = []
    factor, low = 1.0, lower
    for row in polar_express(steps, lower, degree, cushion=0):
        # These run from p(low) to 2 - p(low): the next one is fitted there.
        low = float(_evaluate(row, low))
        before, factor = factor, upper / (2 - low)
        rows += [tuple(factor * c for c in row) for row in scaled([row], before)]
    return tuple(rows)


def minimax(lower: float, upper: float, degree: int = 5) -> Row:
    r"""Coefficients of the odd polynomial that is closest to 1 on ``[lower, upper]``.

    The polynomial minimizes ``max |1 - p(x)|`` over the interval. It is found by Remez exchange in
    float64.

    Args:
      lower: lower end of the interval, positive.
      upper: upper end, at least ``lower``.
      degree: degree of the polynomial, odd and at least 3.

    Returns:
      The ``(degree + 1) / 2`` coefficients of x, x^3, x^5, ...

    Raises:
      ValueError: for an even degree or one below 3, or unless ``0 < lower <= upper``.
    """
    if degree < 3 or degree % 2 == 0:
        raise ValueError(f"degree must be odd and at least 3, got {degree}.")
    if not 0 < lower <= upper:
        raise ValueError(f"need 0 < lower <= upper, got lower={lower}, upper={upper}.")
    count = (degree + 1) // 2
    # The fit is made on [lower / upper, 1], and x / upper is substituted for x at the end.
    low = lower / upper
    # On a short interval the Taylor expansion about 1 is exact to rounding. Remez exchange would
    # find no extrema there, because the error of its fit is rounding alone.
    is_short = (2 * (1 - low)) ** count < 1e-14
    row = _taylor_at_one(count) if is_short else _remez(low, count)
    return scaled([tuple(row.tolist())], upper)[0]


def _remez(low: float, count: int) -> np.ndarray:
    # Chebyshev nodes are a good first guess of the points where the error is largest.
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
        # The interior extrema of the error are roots of p', which has degree count - 1 in x^2.
        squares = np.roots((row * powers)[::-1])
        extrema = np.sort(np.sqrt(squares[np.isreal(squares) & (squares.real > 0)].real))
        if len(extrema) != count - 1:  # the error is at rounding level: keep the present row
            break
        nodes = np.concatenate([[low], extrema, [1.0]])
    return row


def _taylor_at_one(count: int) -> np.ndarray:
    """Coefficients for ``low -> 1``: the Taylor series of ``x / sqrt(x^2)`` in ``1 - x^2``."""
    row = np.zeros(count)
    for order in range(count):
        weight = math.comb(2 * order, order) / 4**order
        for k in range(order + 1):
            row[k] += weight * math.comb(order, k) * (-1) ** k
    return row


def _evaluate(row: Sequence[float] | np.ndarray, x: Any) -> Any:
    """Computes ``p(x)`` by Horner's rule in ``x^2``."""
    return x * functools.reduce(lambda acc, c: acc * (x * x) + c, reversed(list(row)))


def evaluate(rows: Sequence[Row], x: Any) -> Any:
    """The composition ``p_T(...p_1(x))``: what the steps do to a singular value ``x``.

    Args:
      rows: coefficients of each polynomial, in the order of the steps.
      x: a number, or an array of any shape of NumPy or JAX.

    Returns:
      A number or an array like ``x``.
    """
    return functools.reduce(lambda value, row: _evaluate(row, value), rows, x)
