"""What leaves were taken for and by which rule, kept while a tree is resolved."""

import contextlib
import contextvars
from collections.abc import Generator, Sequence
from typing import NamedTuple

from optax_muonplus._parameters.dimension_numbers import DimensionNumbers
from optax_muonplus._parameters.paths import Path


class Reading(NamedTuple):
    """What one leaf was taken for.

    Attributes:
      dimension_numbers: of its matrices; None for AdamW, and where nothing is known.
      rule: the rule that said so, in words.
      known: whether a rule said so, or the leaf has fewer than two axes.
    """

    dimension_numbers: DimensionNumbers | None
    rule: str
    known: bool = True


UNKNOWN = Reading(None, "no rule", known=False)


class Readings(NamedTuple):
    """The readings made while a tree was resolved, by path.

    Attributes:
      strict: whether leaves that no rule knows are an error.
      found: by path.
    """

    strict: bool
    found: dict[Path, Reading]


_ACTIVE: contextvars.ContextVar[Readings | None] = contextvars.ContextVar("readings", default=None)


@contextlib.contextmanager
def recorded(strict: bool) -> Generator[Readings]:
    """Keeps the readings of rules that a function of the user's asks for on the way."""
    readings = Readings(strict, {})
    token = _ACTIVE.set(readings)
    try:
        yield readings
    finally:
        _ACTIVE.reset(token)


def record(paths: Sequence[Path], readings: Sequence[Reading]) -> bool:
    """Adds to the readings that are kept now. Returns whether unknown leaves are an error."""
    active = _ACTIVE.get()
    if active is None:
        return True
    active.found.update(zip(paths, readings, strict=True))
    return active.strict
