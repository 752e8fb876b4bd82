"""Leaves of trees by their paths, so that what is written for one container serves another."""

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from optax import MaskedNode

from optax_muonplus._arguments import supported

Path = tuple[str, ...]

# Of what a Flax Variable holds, in its place in a tree.
_VALUE = jax.tree_util.GetAttrKey("value")


def flatten_with_names(
    tree: Any, is_leaf: Callable[[Any], bool] = lambda x: False
) -> tuple[list[Path], list[Any]]:
    """The leaves of ``tree``, in order, and the names on their paths.

    A path is ``('blocks', '0', 'qkv', 'kernel')``. Flax NNX variables add a last ``value`` at init
    that is gone at update: it is dropped, where nothing else stands beside it. Names with slashes
    in them, as Haiku's, count as several.
    """
    names, leaves, _ = flatten_tree(tree, is_leaf)
    return names, leaves


def flatten_tree(
    tree: Any, is_leaf: Callable[[Any], bool] = lambda x: False
) -> tuple[list[Path], list[Any], Callable[[Iterable[Any]], Any]]:
    """As :func:`flatten_with_names`, and a function from one value for each leaf to a tree."""
    with_path, treedef = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: _is_hole(x) or is_leaf(x)
    )
    siblings = collections.Counter(path[:-1] for path, _ in with_path)
    names, leaves, holes = [], [], {}
    for i, (path, leaf) in enumerate(with_path):
        if _is_hole(leaf) and not is_leaf(leaf):
            holes[i] = leaf
            continue
        if path and path[-1] == _VALUE and siblings[path[:-1]] == 1:
            path = path[:-1]
        names.append(path_of_keys(path))
        leaves.append(leaf)

    def unflatten(values: Iterable[Any]) -> Any:
        rest = iter(values)
        return treedef.unflatten(
            [holes[i] if i in holes else next(rest) for i in range(len(with_path))]
        )

    return names, leaves, unflatten


def without_boxes(labels: Any) -> Any:
    """``labels`` with each Flax Variable, or box of Linen's metadata, replaced by its label.

    Where Optax leaves a parameter out, it puts a ``MaskedNode`` in the place of the label. Inside
    of a Variable it would be the value, which has no dtype or shape when the Variable is used.
    """

    def is_box(x: Any) -> bool:
        return isinstance(_boxed(x), str)

    return jax.tree.map(lambda x: _boxed(x) if is_box(x) else x, labels, is_leaf=is_box)


def _boxed(x: Any) -> Any:
    """What stands alone in ``x`` as its value; None if that is not so."""
    level = jax.tree_util.default_registry.flatten_one_level_with_keys(x)
    children = [] if level is None else list(level[0])
    return children[0][1] if len(children) == 1 and children[0][0] == _VALUE else None


def path_of_keys(keys: Any) -> Path:
    """The names of a path as ``jax.tree_util`` gives it."""
    joined = jax.tree_util.keystr(keys, simple=True, separator="/")
    return tuple(name for name in joined.split("/") if name)


def path_name(path: Path) -> str:
    """``path`` as messages show it."""
    return "/".join(path) or "(root)"


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


def by_path(
    given: Any,
    tree: Any,
    paths: Sequence[Path],
    is_entry: Callable[[Any], bool],
    what: str,
    expected: str,
) -> list[Any]:
    """The entry of ``given`` for each leaf of ``tree``, in order.

    Leaves are matched by their paths, so that entries written for one container (a dict) serve the
    same parameters in another (FrozenDict, nnx.State). An entry higher up in the tree holds for
    everything below it.

    Args:
      given: tree or prefix tree of entries and None, or a function from ``tree`` to one.
      tree: parameters or updates; arrays or anything with a shape.
      paths: of the leaves of ``tree``.
      is_entry: whether something is an entry.
      what: what the entries are, for messages.
      expected: what an entry may be, for messages.

    Raises:
      ValueError: if a leaf is covered by no entry, an entry covers no leaf, or something is neither
        an entry nor None.
    """
    # A tree may be callable itself: an Equinox module that holds dimension numbers is.
    if callable(given) and jax.tree_util.all_leaves([given]):
        given = given(tree)
    entries = _entries(given, is_entry, what, expected)
    used: set[Path] = set()
    matched, uncovered = [], []
    for path in paths:
        prefixes = [path[:n] for n in range(len(path), -1, -1) if path[:n] in entries]
        if not prefixes:
            uncovered.append("/".join(path))
            continue
        used.add(prefixes[0])
        matched.append(entries[prefixes[0]])
    # None beside no leaf is how Equinox and optax.masked write "nothing here".
    idle = ["/".join(p) for p, entry in entries.items() if p not in used and entry is not None]
    if uncovered or idle:
        raise ValueError(_mismatch(uncovered, idle, what, expected))
    return matched


def _entries(
    given: Any, is_entry: Callable[[Any], bool], what: str, expected: str
) -> dict[Path, Any]:
    names, leaves = flatten_with_names(given, is_leaf=lambda x: x is None or is_entry(x))
    entries = dict(zip(names, leaves, strict=True))
    wrong = [
        f"{'/'.join(path) or 'the root'}: {leaf!r}"
        for path, leaf in entries.items()
        if leaf is not None and not is_entry(leaf)
    ]
    if wrong:
        raise ValueError(f"{what.capitalize()} must be {expected}, got {'; '.join(wrong)}.")
    return entries


def _mismatch(uncovered: list[str], idle: list[str], what: str, expected: str) -> str:
    lines = [f"The tree of {what} does not match the parameters."]
    if uncovered:
        lines.append(f"Parameters without an entry: {', '.join(uncovered)}.")
    if idle:
        lines.append(f"Entries without a parameter: {', '.join(idle)}.")
    lines.append(f"Give every parameter, or a subtree above it, {expected}.")
    return " ".join(lines)


def _is_hole(x: Any) -> bool:
    """Where a leaf was taken out; it still counts as standing beside others."""
    return x is None or isinstance(x, MaskedNode)
