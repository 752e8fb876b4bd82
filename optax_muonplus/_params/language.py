"""Rules: which parameters each one is for, and which axes make their matrices.

- ``names``: a regular expression for whole names at the end of a path. ``*`` is any part of one
  name, ``**`` any part of the path: ``"(?i)*expert*/kernel"`` fits ``layers/0/Experts_1/kernel``.
- ``reading``: what the parameter is, and the axes of a matrix: ``"attention: in, (heads head)"``.
  Axes in parentheses are on one side, ``in`` or ``out`` of the layer. ``heads``, ``head``, ``rank``
  and other groups are the side that is not named. Any other axis is a batch axis. A number is an
  axis of that size, and axes of one name have one size.
- ``library``: the libraries with this convention, if it is not common to all.
- ``condition``: a function of ``neighbours.py``.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from optax_muonplus._leaves.layout import DimensionNumbers, MuonDimensionNumbers, Shape
from optax_muonplus._params.neighbours import Neighbours

Condition = Callable[[Neighbours, str], bool]


class PathRule(NamedTuple):
    """A pattern, and the dimension numbers of the parameters that match it."""

    pattern: str  # regular expression, searched in the path "blocks/0/attn/query/kernel"
    dimension_numbers: DimensionNumbers | None  # None for the AdamW group
    ndim: int | None = None  # number of axes; None means any
    reading: str = ""  # what the parameter is, as describe shows it; "" in a user's rule
    axes: Sequence[str] = ()  # names of axes; numbers and repeated names restrict the shape
    condition: Condition | None = None  # whether names and shapes in the module allow the reading

    def match(self, name: str, shape: Shape) -> bool:
        """Whether path and shape fit; ``condition`` is not checked."""
        # A vector is not a matrix under any path: a rule without ndim fits it only with None.
        right_ndim = len(shape) == self.ndim
        if self.ndim is None:
            right_ndim = self.dimension_numbers is None or len(shape) >= 2
        sizes: dict[str, int] = {}
        right_sizes = right_ndim and all(
            size == (int(axis) if axis.isdigit() else sizes.setdefault(axis, size))
            for axis, size in zip(self.axes, shape, strict=bool(self.axes))
        )
        return right_sizes and re.search(self.pattern, name) is not None


def matrix(
    names: str, reading: str, library: str = "", condition: Condition | None = None
) -> PathRule:
    """Returns a rule for matrices with the axes in ``reading``."""
    groups = _groups(reading.partition(": ")[2])
    axes = [axis for group in groups for axis in group]
    numbers = MuonDimensionNumbers(*(x[0] if len(x) == 1 else x for x in _sides(groups)))
    return PathRule(_pattern(names), numbers, len(axes), _shown(reading, library), axes, condition)


def adamw(
    names: str, reading: str, axes: str = "", library: str = "", condition: Condition | None = None
) -> PathRule:
    """Returns a rule for parameters that are not matrices."""
    found = [axis for group in _groups(axes) for axis in group] if axes else []
    ndim, reading = len(found) or None, _shown(reading, library)
    return PathRule(_pattern(names), None, ndim, reading, found, condition)


def _shown(reading: str, library: str) -> str:
    return f"{reading} ({library})" if library else reading


def _pattern(names: str) -> str:
    flags = "(?i)" if names.startswith("(?i)") else ""
    names = re.sub(r"\*\*?", lambda x: "[^/]*" if x[0] == "*" else ".*", names[len(flags) :])
    return rf"{flags}(^|/)({names})$"


def _groups(layout: str) -> list[list[str]]:
    """Splits ``"in, (heads head)"`` into ``[["in"], ["heads", "head"]]``."""
    return [item.strip("()").split() for item in layout.split(", ")]


def _sides(groups: Sequence[Sequence[str]]) -> tuple[Shape, Shape]:
    sides: dict[str, Shape] = {}
    other, start = (), 0
    for group in groups:
        axes = tuple(range(start, start := start + len(group)))
        if side := {"in", "out"}.intersection(group):
            sides[side.pop()] = axes
        elif len(group) > 1 or group[0] in ("heads", "head", "rank"):
            other += axes
    return sides.get("in", other), sides.get("out", other)
