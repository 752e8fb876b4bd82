"""Trees that are given for a whole model: one entry for each leaf, found by its path.

Such a tree may have entries for leaves that ``optax.masked``, ``optax.partition`` or Equinox left
out of the tree at hand. Nothing is asked of them there.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
from optax import MaskedNode

from optax_muonplus.frame import Path, flatten_with_names, is_hole


def is_function(given: Any) -> bool:
    """Whether ``given`` is a function, and not a tree that may be called, as Equinox modules."""
    return callable(given) and jax.tree_util.all_leaves([given])


def by_path(
    given: Any,
    tree: Any,
    paths: Sequence[Path],
    kind: Any,
    what: str,
    expected: str,
) -> list[Any]:
    """The entry of ``given`` for each leaf of ``tree``, in the order of ``paths``.

    ``given`` is a tree or prefix tree of entries of a ``kind``, or a function from ``tree`` to one.
    Leaves are matched by their paths, so that entries written for one container (a dict) serve the
    same parameters in another (FrozenDict, nnx.State). An entry higher up in the tree holds for
    everything below it, and one for what was left out of ``tree`` for nothing.
    """
    if is_function(given):
        given = given(tree)
    names, leaves = flatten_with_names(given, lambda x: x is None or isinstance(x, kind))
    entries = dict(zip(names, leaves, strict=True))
    prefixes = [[p[:n] for n in range(len(p), -1, -1) if p[:n] in entries] for p in paths]
    used = {found[0] for found in prefixes if found}
    # None that covers no leaf is how Equinox and optax.masked write "nothing here".
    said = {path: entry for path, entry in entries.items() if entry is not None or path in used}
    wrong = [
        f"{'/'.join(path) or 'the root'}: {entry!r}"
        for path, entry in said.items()
        if not isinstance(entry, kind)
    ]
    if wrong:
        raise ValueError(f"{what.capitalize()} must be {expected}, got {'; '.join(wrong)}.")
    uncovered = ["/".join(p) for p, found in zip(paths, prefixes, strict=True) if not found]
    left_out = holes(tree) if len(used) < len(said) else []
    idle = ["/".join(p) for p in said if p not in used and not _is_above_or_below(p, left_out)]
    if uncovered or idle:
        raise ValueError(
            f"The tree of {what} does not match the parameters."
            + (f" Parameters without an entry: {', '.join(uncovered)}." if uncovered else "")
            + (f" Entries without a parameter: {', '.join(idle)}." if idle else "")
            + f" Give every parameter, or a subtree above it, {expected}."
        )
    return [entries[nearest] for nearest, *_ in prefixes]


def may_be_left_out(pattern: str, tree: Any) -> bool:
    """Whether ``pattern``, which is found in no path of ``tree``, may be for what was left out.

    A ``MaskedNode`` in the place of a whole subtree does not say which paths were below it.
    """
    if has_masks(tree):
        return True
    return any(re.search(pattern, "/".join(path)) for path in holes(tree))


def has_masks(tree: Any) -> bool:
    """Whether ``optax.masked`` or ``optax.partition`` left something out of ``tree``."""
    return any(isinstance(x, MaskedNode) for x in jax.tree.leaves(tree, is_leaf=is_hole))


def holes(tree: Any) -> list[Path]:
    """The paths at which leaves, or whole subtrees, were left out of ``tree``."""
    pairs = zip(*flatten_with_names(tree, is_hole), strict=True)
    return [path for path, x in pairs if is_hole(x)]


def _is_above_or_below(path: Path, others: Sequence[Path]) -> bool:
    return any(path[: len(other)] == other[: len(path)] for other in others)
