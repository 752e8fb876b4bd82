"""The rule by which the restarts of the Gram iteration were found: the fewest that are enough.

It simulates rounding errors in float64.
"""

import functools
import itertools
from typing import NamedTuple

import numpy as np


class Rounding(NamedTuple):
    """What rounding does, and how much of it is allowed.

    Attributes:
      error: by how much it lowers an eigenvalue of R.
      max_condition: the largest condition number of Q that is allowed.
    """

    error: float
    max_condition: float


# The source has an error of 4e-4 for float16. That of float32 is the same multiple of its rounding
# unit, 2^-24.
#
# The limit is from distances to the float64 polynomial, for every table and singular values of five
# kinds (Gaussian, log-spaced to 1e-3 and 1e-7, rank 10, two large ones; 96 x 256). The error of the
# result grows with the condition number. Up to this limit it was below 1e-3 (256 x 1024, log-spaced
# to 1e-3).
FLOAT32 = Rounding(4e-4 * 2.0**-24 / 2.0**-11, 2000.0)


def condition(rows, restarts, error):
    """Returns the largest condition number that the accumulated factor Q reaches for any spectrum.

    Singular values from 1 to 1e-10 are sent through the steps. Rounding is simulated by lowering
    the eigenvalue of R that belongs to each of them by ``error``.

    Args:
      rows: coefficients, one row for each step.
      restarts: steps, counted from 0, that compute the Gram matrix again.
      error: by how much rounding lowers an eigenvalue.
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
def fewest_restarts(rows):
    """Returns the fewest restarts, counted from 0, for a condition number below its limit.

    Of all sets with that many restarts it is the one with the smallest condition number.

    Source: the autotuner of Dao-AILab, gram-newton-schulz (2026). It makes the same choice for a
    given number of restarts, which it leaves to the user.
    """
    error, max_condition = FLOAT32
    of_rows = functools.partial(condition, rows, error=error)
    for size in range(len(rows)):
        best = min(itertools.combinations(range(1, len(rows)), size), key=of_rows)
        if of_rows(best) <= max_condition:
            return best
    return tuple(range(1, len(rows)))
