r"""At which steps the Gram iteration computes its Gram matrix again, to stay accurate.

Rounding makes the smallest eigenvalues of ``R = X X^H`` slightly negative. The iteration assumes
that eigenvalues are squares of singular values. For a negative one the accumulated factor Q becomes
larger than for any singular value, and the error of the result grows with the condition number of
Q. A *restart* computes ``R`` again from ``X``. How many are enough depends on the precision of
products.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Restarts(NamedTuple):
    """Steps, counted from 0, at which the Gram iteration computes its Gram matrix again.

    Attributes:
      float32: if products are made in float32.
      bfloat16_x3: if they are made of three products of bfloat16 parts.
      float16: if operands and results of products are float16.
      bfloat16: if they are bfloat16. Every step, which is the plain iteration, unless others were
        found to be as exact as that.
    """

    float32: tuple[int, ...]
    bfloat16_x3: tuple[int, ...]
    float16: tuple[int, ...]
    bfloat16: tuple[int, ...]


def every_step(steps: int) -> tuple[int, ...]:
    """Returns the restarts of plain Newton-Schulz, which computes the Gram matrix at each step."""
    return tuple(range(1, steps))


def by_steps(
    float32: Sequence[tuple[int, ...]],
    bfloat16_x3: Sequence[tuple[int, ...]],
    float16: Sequence[tuple[int, ...]],
    bfloat16: Mapping[int, tuple[int, ...]] | None = None,
) -> tuple[Restarts, ...]:
    """Returns restarts for one step, for two steps and so on, from the lists for each precision.

    ``bfloat16`` has those numbers of steps only for which the Gram iteration is as exact as the
    plain one.
    """
    columns = zip(float32, bfloat16_x3, float16, strict=True)
    return tuple(
        Restarts(*column, (bfloat16 or {}).get(steps, every_step(steps)))
        for steps, column in enumerate(columns, start=1)
    )
