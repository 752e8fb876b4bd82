r"""At which steps the Gram iteration computes its Gram matrix again, to stay accurate.

Rounding makes the smallest eigenvalues of ``R = X X^H`` slightly negative. The iteration assumes
that eigenvalues are squares of singular values. For a negative one the accumulated factor Q becomes
larger than for any singular value, and the error of the result grows with the condition number of
Q. A *restart* computes ``R`` again from ``X``. The functions here simulate the rounding errors to
find the fewest restarts that are enough.
"""

import functools
import itertools
import math

import numpy as np

from optax_muonplus.coefficients._minimax import Row

# By how much rounding lowers an eigenvalue. The source has 4e-4 for float16; this is the same for
# the rounding unit of float32.
_ERROR = 4e-4 * 2.0**-24 / 2.0**-11
# Largest condition number of Q that is allowed. The error of the result was about 4e-7 times the
# condition number for each table (256 x 1024, float32, singular values from 1 to 1e-3), so that
# this limit keeps it below 1e-3.
_MAX_CONDITION = 2000.0
# Sets of restarts that are compared at most, at 1 ms each. If there are more, every restart comes
# as late as the limit allows.
_MAX_SETS = 1000


def condition(rows: tuple[Row, ...], restarts: tuple[int, ...], error: float = _ERROR) -> float:
    """The largest condition number that the accumulated factor Q reaches for any spectrum.

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
def choose_restarts(rows: tuple[Row, ...]) -> tuple[int, ...]:
    """The fewest restarts that keep :func:`condition` below its limit in float32.

    Of all sets with that many restarts it is the one with the smallest condition number.

    Args:
      rows: coefficients, one row for each step.

    Returns:
      Steps, counted from 0, that compute the Gram matrix again.

    Source: the autotuner of Dao-AILab, gram-newton-schulz (2026). It makes the same choice for a
    given number of restarts, which it leaves to the user.
    """
    latest: tuple[int, ...] = ()
    for step in range(1, len(rows)):
        if condition(rows[: step + 1], latest) > _MAX_CONDITION:
            latest += (step,)
    if math.comb(len(rows) - 1, len(latest)) > _MAX_SETS:
        return latest
    candidates = itertools.combinations(range(1, len(rows)), len(latest))
    return min(candidates, key=lambda restarts: condition(rows, restarts))
