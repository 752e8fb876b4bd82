r"""At which steps the Gram form of the iteration restarts.

The Gram form multiplies polynomials of ``R = X X^H`` and applies their product Q to X at the end.
Rounding makes the smallest eigenvalues of R slightly negative. The iteration assumes that
eigenvalues are squares of singular values: for a negative one Q becomes larger than for any
singular value, and the error of the result grows with the condition number of Q. A *restart*
multiplies Q out and computes R again from X. The plain iteration restarts at every step. How many
restarts are enough depends on the coefficients and on the precision of products.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from .coefficients import CoefficientsLike


class Restarts(NamedTuple):
    """Steps, counted from 0, that compute the Gram matrix again, by the precision of products."""

    float32: tuple[int, ...]
    float16: tuple[int, ...]  # operands and results
    bfloat16: tuple[int, ...]  # every step, unless others were found to be as exact as that


def restarts_for(ns_coeffs: CoefficientsLike, steps: Any) -> Restarts | None:
    """Returns the restarts of a table; None for rows, for longer runs and for traced steps."""
    listed = _TABLES.get(ns_coeffs) if isinstance(ns_coeffs, str) else None
    if listed is None or not isinstance(steps, int) or steps > len(listed[0]):
        return None
    *columns, bfloat16 = listed
    return Restarts(*(x[steps - 1] for x in columns), bfloat16.get(steps, every_step(steps)))


def every_step(steps: int) -> tuple[int, ...]:
    return tuple(range(1, steps))


# For each table three columns: restarts of one step, of two and so on in float32 and in float16,
# which were found by simulating the rounding of products; and restarts in bfloat16 by the number of
# steps. The last were found by trying: with them the result was as near to the float64 polynomial
# as that of the plain iteration, for singular values of five kinds.
_Column = Sequence[tuple[int, ...]]
_TABLES: dict[str, tuple[_Column, _Column, dict[int, tuple[int, ...]]]] = {
    "jordan": (
        (*[()] * 5, (3,), (4,), (4,)),
        (*[()] * 3, (2,), (2,), (2, 4), (2, 4), (2, 4, 6)),
        {5: (1, 3), 6: (1, 2, 4)},
    ),
    "you": ([()] * 6, (*[()] * 3, (2,), (2,), (2,)), {5: (1, 3)}),
    "dion": ([()] * 5, (*[()] * 3, (2,), (2,)), {5: (1, 2, 4)}),
    "polar_express": (
        (*[()] * 6, (2,), (2,)),
        ((), (), (1,), (2,), (1, 2), (1, 3), (1, 3), (1, 3)),
        {},
    ),
    "cubic": (
        [()] * 8,
        (*[()] * 4, (1,), (1,), (2,), (2,)),
        {4: (2, 3), 5: (2, 3), 6: (2, 3, 5), 7: (2, 3, 5), 8: (2, 3, 5)},
    ),
}
_TABLES["standard"] = _TABLES["jordan"]
