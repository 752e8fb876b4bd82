"""The line that a user may write for parameters that no rule can read."""

import re
from collections.abc import Sequence

Unknown = Sequence[tuple[str, tuple[int, ...]]]


def line_to_write(unknown: Unknown) -> str:
    """What to write for unknown leaves, given as paths and shapes, if they are what they seem."""
    patterns: dict[str, str] = {}
    for name, shape in unknown:
        patterns.setdefault(_pattern(name), _dimension_numbers(name, len(shape)))
    shown = ", ".join(
        f"({pattern!r}, {numbers})" for pattern, numbers in list(patterns.items())[:4]
    )
    more = "" if len(patterns) <= 4 else f", and {len(patterns) - 4} more"
    stacked = _container_of_layers(unknown)
    return (
        f"If their last axes are what these lines say: rules=[{shown}{more}]."
        + f" If layers are stacked on axis 0 (1 in MaxText): layer_axes={{{stacked!r}: 0}}."
        * bool(stacked)
    )


def _pattern(name: str) -> str:
    """A pattern for the last two names of a path, whatever their numbers."""
    last = "/".join(re.sub(r"/(0|array)$", "", name).split("/")[-2:])
    return re.sub(r"\d+", r"\\d+", re.sub(r"([.+*?()\[\]])", r"\\\1", last))


def _dimension_numbers(name: str, ndim: int) -> str:
    if re.search(r"(?i)conv|patch|stem", name):
        out_first = name.endswith("weight")
        inner = tuple(range(1, ndim)) if out_first else tuple(range(ndim - 1))
        return f"omp.MuonDimensionNumbers({inner}, {0 if out_first else ndim - 1})"
    if re.search(r"weight(/0|/array)?$", name):
        return "omp.MuonDimensionNumbers(-1, -2)"
    return "omp.MuonDimensionNumbers(-2, -1)"


def _container_of_layers(unknown: Unknown) -> str:
    """The name on the first path that may be that of stacked layers."""
    names = unknown[0][0].split("/")[:-1]
    return next((x for x in names if re.search(r"(?i)layer|block|stack|stage|scan|^h$", x)), "")
