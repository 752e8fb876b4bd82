"""Paths of leaves, which are the same in every container, and how messages write them."""

import collections
import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import jax
from optax import MaskedNode

Path = tuple[str, ...]
Rest = TypeVar("Rest", bound=Hashable)

VALUE = jax.tree_util.GetAttrKey("value")  # the key of the array in a Flax Variable


def flatten_tree(
    tree: Any, is_leaf: Callable[[Any], bool] = lambda x: False
) -> tuple[list[Path], list[Any], Callable[[Iterable[Any]], Any]]:
    """Returns the paths and leaves of ``tree``, and a function that makes a tree of new leaves.

    A path is ``('blocks', '0', 'qkv', 'kernel')``. A last ``value``, which Flax NNX variables have
    at init and not at update, is dropped unless it has siblings. Haiku's names are cut at slashes.
    """
    with_path, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    paths = [path for path, _ in with_path]
    if any(path[-1:] == (VALUE,) for path in paths):
        # A sibling that was left out counts too.
        whole = jax.tree_util.tree_leaves_with_path(tree, lambda x: is_hole(x) or is_leaf(x))
        siblings = collections.Counter(path[:-1] for path, _ in whole)
        alone = [path[-1:] == (VALUE,) and siblings[path[:-1]] == 1 for path in paths]
        paths = [path[:-1] if cut else path for path, cut in zip(paths, alone, strict=True)]
    return [path_of_keys(path) for path in paths], [x for _, x in with_path], treedef.unflatten


def flatten_with_names(
    tree: Any, is_leaf: Callable[[Any], bool] = lambda x: False
) -> tuple[list[Path], list[Any]]:
    return flatten_tree(tree, is_leaf)[:2]


def is_hole(x: Any) -> bool:
    """Returns whether ``x`` marks a part that Equinox or ``optax.masked`` left out."""
    return x is None or isinstance(x, MaskedNode)


def path_of_keys(keys: Any) -> Path:
    joined = jax.tree_util.keystr(keys, simple=True, separator="/")
    return tuple(name for name in joined.split("/") if name)


def path_name(path: Path) -> str:
    return "/".join(path) or "(root)"


def without_numbers(path: str) -> str:
    """Returns a path with a star for each number."""
    return re.sub(r"\d+", "*", path)


def fold(paths: Sequence[str]) -> list[tuple[str, int]]:
    """Writes paths that differ only in numbers as few names such as ``h/{1,3}``, with counts."""
    boxes = [tuple((part,) for part in re.split(r"(\d+)", path)) for path in paths]
    for i in range(len(boxes[0]) - 2, 0, -2):  # numbers are every second part
        merged: dict[Any, list[str]] = {}
        for box in boxes:
            merged.setdefault((box[:i], box[i + 1 :]), []).extend(box[i])
        boxes = [
            (*left, tuple(sorted(numbers, key=lambda text: (len(text), text))), *right)
            for (left, right), numbers in merged.items()
        ]
    return [("".join(map(_ranges, box)), math.prod(map(len, box))) for box in boxes]


def fold_all(paths: Iterable[tuple[str, Rest]]) -> list[tuple[str, Rest]]:
    """Folds paths that differ only in numbers and have the same second item."""
    groups: dict[tuple[str, Rest], list[str]] = {}
    for path, rest in paths:
        groups.setdefault((without_numbers(path), rest), []).append(path)
    return [(name, rest) for (_, rest), found in groups.items() for name, _ in fold(found)]


def list_paths(paths: Iterable[tuple[str, Any]]) -> str:
    """Writes folded paths for messages, each with its second item unless that is None."""
    return ", ".join(name if rest is None else f"{name} {rest}" for name, rest in fold_all(paths))


def _ranges(values: Sequence[str]) -> str:
    """Writes 0, 1, 2 and 5 as ``{0..2,5}``."""
    runs: list[list[str]] = []
    for value in values:
        # Zero-padded numbers keep their width: 09, 10.
        if runs and value == str(int(runs[-1][-1]) + 1).zfill(len(runs[-1][-1])):
            runs[-1].append(value)
        else:
            runs.append([value])
    shown = ",".join(run[0] if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
    return shown if len(values) == 1 else f"{{{shown}}}"
