r"""Where the iteration on the Gram matrix has to start anew, by simulating its rounding errors.

Rounding makes the smallest eigenvalues of ``R = X X^H`` slightly negative. The iteration assumes
that they are squares: on negative ones the accumulated factor Q is larger than on any singular
value, and its error grows with its condition number. A restart takes ``R`` anew from ``X``.
"""

import functools
import itertools
import math

import numpy as np

from optax_muonplus.coefficients._minimax import Row

# How far below zero: 4e-4 in the source, for float16, taken down to float32's rounding unit.
_ERROR = 4e-4 * 2.0**-24 / 2.0**-11
# The error of the result was about 4e-7 times the condition number of Q for each of the tables, on
# spectra from 1 to 1e-3 (256 x 1024, float32): below 1e-3 then.
_LIMIT = 2000.0
# Tried for the best one, at 1 ms each; beyond, restarts come as late as the limit allows.
_MOST_SETS = 1000


def condition(rows: tuple[Row, ...], restarts: tuple[int, ...], error: float = _ERROR) -> float:
    """The largest condition number that the accumulated factor Q reaches, for any spectrum.

    Singular values from 1 to 1e-10 are followed through the steps, each as if rounding had lowered
    the eigenvalue of R that belongs to it by ``error``.
    """
    x = np.logspace(0, -10, 10_000)
    q, r = np.ones_like(x), x**2 - error
    worst = 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        for i, row in enumerate(rows):
            if i in restarts:
                x = x * q
                q, r = np.ones_like(x), x**2 - error
            p = np.polynomial.polynomial.polyval(r, row)
            q, r = q * p, r * p**2
            smallest, largest = np.min(np.abs(q)), np.max(np.abs(q))
            if not (np.isfinite(largest) and smallest > 0):
                return np.inf
            worst = max(worst, float(largest / smallest))
    return worst


@functools.lru_cache
def choose_restarts(rows: tuple[Row, ...]) -> tuple[int, ...]:
    """The fewest restarts that keep :func:`condition` low in float32, and the best such set.

    Args:
      rows: coefficients, one row for each step.

    Returns:
      Steps, counted from 0, that start with a new Gram matrix.

    Source: the autotuner of Dao-AILab, gram-newton-schulz (2026), whose choice for a given number
    of restarts this is; how many, it leaves to the user.
    """
    latest: tuple[int, ...] = ()
    for step in range(1, len(rows)):
        if condition(rows[: step + 1], latest) > _LIMIT:
            latest += (step,)
    if math.comb(len(rows) - 1, len(latest)) > _MOST_SETS:
        return latest
    sets = itertools.combinations(range(1, len(rows)), len(latest))
    return min(sets, key=lambda chosen: condition(rows, chosen))
