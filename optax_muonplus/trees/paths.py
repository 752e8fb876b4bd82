"""Paths as the default rules search them, and as messages and tables show them."""

import collections
import math
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

from optax_muonplus.frame import Path
from optax_muonplus.method import supported

Rest = TypeVar("Rest", bound=Hashable)

# Names of an array within a parameter that is one array: Haliax's NamedArray and penzai's.
_WITHIN_PARAMETER = (("0",), ("array",), ("value", "data_array"))


def names_to_read(paths: Sequence[Path]) -> list[str]:
    """Paths as the default rules are searched in them.

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


def check_inexact_dtypes(paths: Sequence[Path], dtypes: Sequence[Any]) -> None:
    """Raises ValueError for leaves that are not floating-point of 16 bits at least, naming them."""
    wrong = [
        f"{'/'.join(path)} ({dtype})"
        for path, dtype in zip(paths, dtypes, strict=True)
        if not supported(dtype)
    ]
    if wrong:
        raise ValueError(
            f"Parameters must be floating-point, got {', '.join(wrong)}. Keep counters, keys and"
            " what is stored in 8 bits out of the parameters, or freeze them with optax.masked or"
            " optax.partition."
        )


def without_numbers(path: str) -> str:
    """What paths that may be folded into one have in common."""
    return re.sub(r"\d+", "*", path)


def fold(paths: Sequence[str]) -> list[tuple[str, int]]:
    """``paths``, which differ in numbers only, as few names, and how many paths each stands for.

    A name stands for exactly the paths that it spells out: 1 and 3 are ``{1,3}``.
    """
    boxes = [tuple((part,) for part in re.split(r"(\d+)", path)) for path in paths]
    for i in range(len(boxes[0]) - 2, 0, -2):  # the numbers, which are every second part
        merged: dict[Any, list[str]] = {}
        for box in boxes:
            merged.setdefault((box[:i], box[i + 1 :]), []).extend(box[i])
        boxes = [
            (*left, tuple(sorted(numbers, key=lambda text: (len(text), text))), *right)
            for (left, right), numbers in merged.items()
        ]
    return [("".join(map(_ranges, box)), math.prod(map(len, box))) for box in boxes]


def fold_all(paths: Iterable[tuple[str, Rest]]) -> list[tuple[str, Rest]]:
    """Names for paths that differ in numbers only and have the same second item."""
    groups: dict[tuple[str, Rest], list[str]] = {}
    for path, rest in paths:
        groups.setdefault((without_numbers(path), rest), []).append(path)
    return [(name, rest) for (_, rest), found in groups.items() for name, _ in fold(found)]


def listed(paths: Iterable[tuple[str, Any]]) -> str:
    """Folded paths, each with its second item unless that is None, for messages."""
    return ", ".join(name if rest is None else f"{name} {rest}" for name, rest in fold_all(paths))


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of a table; the first of ``rows`` is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]]


def _ranges(values: Sequence[str]) -> str:
    """``{0..2,5}`` for 0, 1, 2 and 5."""
    runs: list[list[str]] = []
    for value in values:
        # With as many leading zeros as the number before it.
        if runs and value == str(int(runs[-1][-1]) + 1).zfill(len(runs[-1][-1])):
            runs[-1].append(value)
        else:
            runs.append([value])
    shown = ",".join(run[0] if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
    return shown if len(values) == 1 else f"{{{shown}}}"
