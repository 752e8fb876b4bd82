"""Paths that differ in numbers only, written as one: ``blocks/{0..11}/attn/qkv/kernel``."""

import math
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

Parts = tuple[str, ...]
Rest = TypeVar("Rest", bound=Hashable)


def without_numbers(path: str) -> str:
    """What paths that may be folded into one have in common."""
    return re.sub(r"\d+", "*", path)


def fold(paths: Sequence[str]) -> list[tuple[str, int]]:
    """``paths``, which differ in numbers only, as few names, and how many paths each stands for.

    A name stands for exactly the paths that it spells out: 1 and 3 are ``{1,3}``.
    """
    split = [tuple(re.split(r"(\d+)", path)) for path in paths]
    return [
        (_spelled(columns), math.prod(len(column) for column in columns))
        for columns in _boxes(split)
    ]


def fold_all(paths: Iterable[tuple[str, Rest]]) -> list[tuple[str, Rest]]:
    """Names for paths that differ in numbers only and have the same second item."""
    groups: dict[tuple[str, Rest], list[str]] = {}
    for path, rest in paths:
        groups.setdefault((without_numbers(path), rest), []).append(path)
    return [(name, rest) for (_, rest), found in groups.items() for name, _ in fold(found)]


def _boxes(paths: Sequence[Parts]) -> list[list[list[str]]]:
    """Sets of values for each part, whose products are the paths."""
    if not paths[0]:
        return [[]]
    rests: dict[str, dict[Parts, None]] = {}
    for first, *rest in paths:
        rests.setdefault(first, {})[tuple(rest)] = None
    # Values that are followed by the same rests share a set.
    alike: dict[frozenset[Parts], tuple[list[str], list[Parts]]] = {}
    for first, rest in rests.items():
        alike.setdefault(frozenset(rest), ([], list(rest)))[0].append(first)
    return [[values, *box] for values, rest in alike.values() for box in _boxes(rest)]


def _spelled(columns: list[list[str]]) -> str:
    return "".join(
        values[0] if len(values) == 1 else f"{{{_ranges(values)}}}" for values in columns
    )


def _ranges(values: list[str]) -> str:
    """``0..2,5`` for 0, 1, 2 and 5."""
    runs: list[list[str]] = []
    for value in sorted(values, key=lambda text: (len(text), text)):
        follows = runs and int(value) == int(runs[-1][-1]) + 1 and value == _next(runs[-1][-1])
        if follows:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


def _next(number: str) -> str:
    """The number after it, with as many leading zeros."""
    return str(int(number) + 1).zfill(len(number))
