"""A tree of parameters, flattened once, and trees that are given for it, matched by their paths.

A tree that is given for a whole model may have entries for leaves that ``optax.masked``,
``optax.partition`` or Equinox left out of the tree at hand. Such entries are ignored.
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

from optax_muonplus._leaves.paths import (
    Path,
    flatten_tree,
    flatten_with_names,
    is_hole,
    list_paths,
    path_name,
)
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
        """Flattens ``tree``."""
        return cls(tree, *flatten_tree(tree))

    @property
    def names(self) -> list[str]:
        """The paths as patterns are searched in them: ``blocks/0/attn/query/kernel``."""
        return ["/".join(path) for path in self.paths]

    def records(self) -> list[LeafInfo]:
        """Makes a record of each leaf, with its path and shape alone."""
        rows = enumerate(zip(self.paths, self.arrays, strict=True))
        return [LeafInfo(i, path, np.shape(x), None, None) for i, (path, x) in rows]

    @functools.cached_property
    def holes(self) -> dict[Path, Any]:
        """None and ``MaskedNode``, by the paths at which leaves or subtrees were left out."""
        pairs = zip(*flatten_with_names(self.tree, is_hole), strict=True)
        return {path: x for path, x in pairs if is_hole(x)}

    def could_match_masked(self, pattern: str) -> bool:
        """Whether ``pattern``, which matches no path, may be for what was left out.

        A ``MaskedNode`` in the place of a whole subtree does not say which paths were below it.
        """
        return any(
            isinstance(hole, MaskedNode) or re.search(pattern, "/".join(path))
            for path, hole in self.holes.items()
        )


def broadcast_prefix(given: Any, tree: FlatTree, kind: Any, what: str, expected: str) -> list[Any]:
    """Returns the entry of ``given`` for each leaf of ``tree``, in order.

    ``given`` is a tree or prefix tree of entries of a ``kind``, or a function from a tree to one.
    Leaves are matched by their paths, so that entries written for one container (a dict) serve the
    same parameters in another (FrozenDict, nnx.State). An entry higher up in the tree holds for
    everything below it, and one for what is not in ``tree`` for nothing.

    Raises ValueError for parameters without an entry, and for entries of another kind.
    """
    # An Equinox module may have a call, and is no function.
    if callable(given) and jax.tree_util.all_leaves([given]):
        given = given(tree.tree)
    names, leaves = flatten_with_names(given, lambda x: x is None or isinstance(x, kind))
    entries, missing = dict(zip(names, leaves, strict=True)), "nothing"
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


# Names of an array within a parameter that is one array: Haliax's NamedArray and penzai's.
_WITHIN_PARAMETER = (("0",), ("array",), ("value", "data_array"))


def normalize_paths(paths: Sequence[Path]) -> list[str]:
    """Writes paths as the rules of tables are searched in them.

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
