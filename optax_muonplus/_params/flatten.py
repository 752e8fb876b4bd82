"""A flattened tree of parameters, and other trees that are matched to it by their paths.

A tree for a whole model may have entries for leaves that ``optax.masked``, ``optax.partition`` or
Equinox left out of the tree at hand. Such entries are ignored.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from optax import MaskedNode

from optax_muonplus._leaves.paths import Path, flatten_tree, is_hole, list_paths, path_name
from optax_muonplus._leaves.record import LeafInfo


@dataclasses.dataclass(frozen=True, eq=False)
class FlatTree:
    """A tree of parameters or updates and its leaves."""

    tree: Any
    paths: list[Path]  # ('blocks', '0', 'attn', 'query', 'kernel')
    arrays: list[Any]  # the leaves, or anything with a shape
    unflatten: Callable[[Iterable[Any]], Any]  # from one value for each leaf to a tree

    @classmethod
    def of(cls, tree: Any) -> "FlatTree":
        return cls(tree, *flatten_tree(tree))

    @property
    def names(self) -> list[str]:
        """The paths as strings, which patterns are searched in: ``blocks/0/attn/query/kernel``."""
        return ["/".join(path) for path in self.paths]

    def records(self) -> list[LeafInfo]:
        """Returns a record of each leaf that has only its path and shape."""
        rows = enumerate(zip(self.paths, self.arrays, strict=True))
        return [LeafInfo(i, path, np.shape(x), None, None) for i, (path, x) in rows]

    @functools.cached_property
    def holes(self) -> dict[Path, Any]:
        """None or ``MaskedNode`` by path, for each leaf or subtree that was left out."""
        paths, leaves, _ = flatten_tree(self.tree, is_hole)
        return {path: x for path, x in zip(paths, leaves, strict=True) if is_hole(x)}

    def could_match_masked(self, pattern: str) -> bool:
        """Whether ``pattern`` could match a leaf that was left out."""
        # A MaskedNode in place of a subtree hides the paths below it.
        return any(
            isinstance(hole, MaskedNode) or re.search(pattern, "/".join(path))
            for path, hole in self.holes.items()
        )


def broadcast_prefix(given: Any, tree: FlatTree, kind: Any, what: str, expected: str) -> list[Any]:
    """Returns the entry of ``given``, a (prefix) tree or function, for each leaf of ``tree``."""
    # An Equinox module may be callable, but it is a tree; a mesh is callable, as a decorator.
    is_mesh = isinstance(given, jax.sharding.Mesh)
    if callable(given) and jax.tree_util.all_leaves([given]) and not is_mesh:
        given = given(tree.tree)
    # Paths are the same in all containers: entries in a dict serve a FrozenDict or an nnx.State.
    paths, leaves, _ = flatten_tree(given, lambda x: x is None or isinstance(x, kind))
    entries, missing = dict(zip(paths, leaves, strict=True)), "nothing"
    nearest = [
        next((entries[p[:n]] for n in range(len(p), -1, -1) if p[:n] in entries), missing)
        for p in tree.paths
    ]
    pairs = zip(tree.paths, nearest, strict=True)
    if wrong := [(path_name(path), f"has {x}") for path, x in pairs if not isinstance(x, kind)]:
        raise ValueError(
            f"The {what} do not match the parameters: {list_paths(wrong)}. Give every parameter, or"
            f" a subtree above it, {expected}."
        )
    return nearest


# Ends of paths below a parameter that holds one array: Haliax's NamedArray and penzai's parameter.
_WITHIN_PARAMETER = (("0",), ("array",), ("value", "data_array"))


def normalize_paths(paths: Sequence[Path]) -> list[str]:
    """Returns each path as the string that default rules are matched against."""
    siblings = collections.Counter(path[:-1] for path in paths)
    names = []
    for path in paths:
        ends = [end for end in _WITHIN_PARAMETER if path[-len(end) :] == end and path != end]
        length = len(ends[0]) if ends and siblings[path[:-1]] == 1 else 0
        # Flattened models of PyTorch and penzai have dots for slashes.
        names.append("/".join(path[: len(path) - length]).replace(".", "/"))
    return names
