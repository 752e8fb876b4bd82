"""Rules written in words: which parameters one is for, and how they are matrices.

- **Names** are a regular expression for whole names at the end of a path. ``*`` stands for any part
  of one name and ``**`` for any part of the path; after a leading ``(?i)`` case does not matter.
  ``"(?i)*expert*/kernel"`` fits ``layers/0/Experts_1/kernel``.
- **What it is**, and for a matrix a colon and its axes in order: ``"attention: in, (heads head)"``.
  ``in`` and ``out`` are the inputs and outputs of the layer; all axes in one pair of parentheses
  are on one side. ``heads``, ``head``, ``rank`` and other groups in parentheses are the side that
  is not named. Any other axis, such as ``expert``, numbers matrices. A number is an axis of that
  size; axes of one name have one size.
- **Libraries** with this convention; none, if all have it in common.
- **Neighbours** may be asked too, by the functions of ``neighbours.py``.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from optax_muonplus._leaves.layout import DimensionNumbers, MuonDimensionNumbers, Shape
from optax_muonplus._params.neighbours import Neighbours

Condition = Callable[[Neighbours, str], bool]


class PathRule(NamedTuple):
    """What parameters are that fit a pattern."""

    pattern: str  # regular expression, searched in the path "blocks/0/attn/query/kernel"
    dimension_numbers: DimensionNumbers | None  # None for the AdamW group
    ndim: int | None = None  # number of axes that the rule is for; None means any
    reading: str = ""  # what the rule takes the parameter for, as describe shows it
    axes: Sequence[str] = ()  # their names; numbers and repeated names restrict the shape
    condition: Condition | None = None  # asks the neighbours of a path about this reading

    def match(self, name: str, shape: Shape) -> bool:
        """Whether path and shape fit, without a look at the neighbours."""
        # A vector is no matrix, whatever its path; a rule without ndim may only confirm that.
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
    """Makes a rule for matrices that lie as ``reading`` says."""
    groups = _groups(reading.partition(": ")[2])
    axes = [axis for group in groups for axis in group]
    numbers = MuonDimensionNumbers(*(x[0] if len(x) == 1 else x for x in _sides(groups)))
    return PathRule(_pattern(names), numbers, len(axes), _shown(reading, library), axes, condition)


def adamw(
    names: str, reading: str, axes: str = "", library: str = "", condition: Condition | None = None
) -> PathRule:
    """Makes a rule for parameters that are not matrices."""
    found = [axis for group in _groups(axes) for axis in group] if axes else []
    return PathRule(
        _pattern(names), None, len(found) or None, _shown(reading, library), found, condition
    )


def _shown(reading: str, library: str) -> str:
    return f"{reading} ({library})" if library else reading


def _pattern(names: str) -> str:
    flags = "(?i)" if names.startswith("(?i)") else ""
    names = re.sub(r"\*\*?", lambda x: "[^/]*" if x[0] == "*" else ".*", names[len(flags) :])
    return rf"{flags}(^|/)({names})$"


def _groups(layout: str) -> list[list[str]]:
    """Lists the names between commas: several in parentheses, or one."""
    return [item.strip("()").split() for item in layout.split(", ")]


def _sides(groups: Sequence[Sequence[str]]) -> tuple[Shape, Shape]:
    """Finds the axes of the inputs and those of the outputs."""
    sides: dict[str, Shape] = {}
    other: Shape = ()
    start = 0
    for group in groups:
        axes = tuple(range(start, start := start + len(group)))
        if side := {"in", "out"}.intersection(group):
            sides[side.pop()] = axes
        elif len(group) > 1 or group[0] in ("heads", "head", "rank"):
            other += axes
    return sides.get("in", other), sides.get("out", other)
