"""Leaves of trees by their paths, so that what is written for one container serves another."""

import collections
from collections.abc import Callable, Iterable
from typing import Any

import jax
from optax import MaskedNode

Path = tuple[str, ...]

_VALUE = jax.tree_util.GetAttrKey("value")  # what a Flax Variable holds, in its place in a tree


def flatten_tree(
    tree: Any, is_leaf: Callable[[Any], bool] = lambda x: False
) -> tuple[list[Path], list[Any], Callable[[Iterable[Any]], Any]]:
    """The paths and leaves of ``tree``, and a function from one value for each leaf to a tree.

    A path is ``('blocks', '0', 'qkv', 'kernel')``. Flax NNX variables add a last ``value`` at init
    that is gone at update: it is dropped, unless it has siblings. Names with slashes in them, as
    Haiku's, count as several.
    """
    with_path, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    paths = [path for path, _ in with_path]
    if any(path[-1:] == (_VALUE,) for path in paths):
        # Siblings that were taken out here count too.
        whole = jax.tree_util.tree_leaves_with_path(tree, lambda x: is_hole(x) or is_leaf(x))
        siblings = collections.Counter(path[:-1] for path, _ in whole)
        alone = [path[-1:] == (_VALUE,) and siblings[path[:-1]] == 1 for path in paths]
        paths = [path[:-1] if cut else path for path, cut in zip(paths, alone, strict=True)]
    return [path_of_keys(path) for path in paths], [x for _, x in with_path], treedef.unflatten


def flatten_with_names(
    tree: Any, is_leaf: Callable[[Any], bool] = lambda x: False
) -> tuple[list[Path], list[Any]]:
    """The paths and leaves of :func:`flatten_tree`."""
    return flatten_tree(tree, is_leaf)[:2]


def is_hole(x: Any) -> bool:
    """Whether ``x`` is in the place of what Equinox or ``optax.masked`` left out of a tree."""
    return x is None or isinstance(x, MaskedNode)


def without_boxes(labels: Any) -> Any:
    """``labels`` with each Flax Variable, or box of Linen's metadata, replaced by its label.

    Where Optax leaves a parameter out, it puts a ``MaskedNode`` in the place of the label. Inside
    of a Variable it would be the value, which has no dtype or shape when the Variable is used.
    """

    def boxed(x: Any) -> Any:
        level = jax.tree_util.default_registry.flatten_one_level_with_keys(x)
        children = [] if level is None else list(level[0])
        return children[0][1] if [key for key, _ in children] == [_VALUE] else None

    def is_box(x: Any) -> bool:
        return isinstance(boxed(x), str)

    return jax.tree.map(lambda x: boxed(x) or x, labels, is_leaf=is_box)


def path_of_keys(keys: Any) -> Path:
    """The names of a path as ``jax.tree_util`` gives it."""
    joined = jax.tree_util.keystr(keys, simple=True, separator="/")
    return tuple(name for name in joined.split("/") if name)


def path_name(path: Path) -> str:
    """``path`` as messages show it."""
    return "/".join(path) or "(root)"
