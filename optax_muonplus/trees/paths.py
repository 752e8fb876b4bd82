"""Paths as the default rules search them, and as messages and tables show them."""

import collections
from collections.abc import Sequence

from optax_muonplus.frame import Path

# Names of an array within a parameter that is one array: Haliax's NamedArray and penzai's.
_WITHIN_PARAMETER = (("0",), ("array",), ("value", "data_array"))


def names_to_read(paths: Sequence[Path]) -> list[str]:
    """Writes paths as the default rules are searched in them.

    Haliax's arrays end in ``weight/0`` or ``weight/array``, penzai's in ``value/data_array``, and
    have no neighbours. Flattened models of PyTorch and penzai have dots for slashes.
    """
    siblings = collections.Counter(path[:-1] for path in paths)
    names = []
    for path in paths:
        ends = [end for end in _WITHIN_PARAMETER if path[-len(end) :] == end and path != end]
        length = len(ends[0]) if ends and siblings[path[:-1]] == 1 else 0
        names.append("/".join(path[: len(path) - length]).replace(".", "/"))
    return names


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Makes the lines of a table; the first of ``rows`` is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]]
