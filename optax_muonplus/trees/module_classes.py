"""What an array is by the class of the module that holds it, where names say nothing.

Equinox keeps its modules in the tree, filtered or not, and so do other dataclasses: the array of an
``eqx.nn.Embedding`` is a table of vectors, whatever the model calls it. Equinox is not imported,
its classes are known by their names.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

import jax

from optax_muonplus.frame import Path, Shape, path_of_keys
from optax_muonplus.trees.flat import FlatTree
from optax_muonplus.trees.named_axes import Said

# Patches and times are embedded by layers, and rotary embeddings have no table.
_TABLE = re.compile(r"(?i)(?!.*(patch|time|rotary|proj|linear|mlp)).*embed")
_OF_TABLE = re.compile(r"(?i)(?!.*(proj|linear|dense|kernel|bias))")
# Equinox calls the lengths of rows g under weight normalization.
_NORM = re.compile(r".*Norm(\d[dD])?$")
_OF_NORM = re.compile("weight|g$")
_SHARED = "Shared"

Found = Iterator[tuple[Path, str]]


def read_classes(tree: FlatTree) -> dict[Path, Said]:
    """Reads what arrays are by the classes of their modules, by their paths."""
    if not any(map(_kind, tree.classes)):
        return {}
    return {path: (None, what) for path, what in _walk(tree.tree, ())}


@functools.lru_cache(maxsize=4096)
def _kind(cls: type) -> str | None:
    """Says what the arrays of a class are, if its name tells."""
    # The optimizer gets the state of an NNX model, which has no classes.
    if any(base.__module__.startswith("flax.") for base in cls.__mro__):
        return None
    names = [base.__name__ for base in cls.__mro__]
    if _SHARED in names:
        return _SHARED
    if any(map(_TABLE.match, names)):
        return "embedding"
    return "norm" if any(map(_NORM.match, names)) else None


def _walk(node: Any, path: Path, tied: frozenset[Shape] = frozenset()) -> Found:
    """Yields what is known of arrays below ``node``; ``tied`` are shapes of tables elsewhere."""
    level = jax.tree_util.default_registry.flatten_one_level_with_keys(node)
    if level is None:
        if getattr(node, "shape", ()) in tied:
            yield path, "embedding, tied"
        return
    children = [((*path, *path_of_keys((key,))), child) for key, child in level[0]]
    kind = _kind(type(node))
    if kind == _SHARED:
        tied |= frozenset(_tables_elsewhere(node))
    has_bias = any(child is not None and below[-1:] == ("bias",) for below, child in children)
    of_kind = {"embedding": None if has_bias else _OF_TABLE, "norm": _OF_NORM}.get(kind or "")
    for below, child in children:
        if of_kind and hasattr(child, "shape") and of_kind.match(below[-1] if below else ""):
            yield below, f"{kind} (class {type(node).__name__})"
        else:
            yield from _walk(child, below, tied)


def _tables_elsewhere(shared: Any) -> Iterator[Shape]:
    """Yields shapes, also turned, of tables that ``eqx.nn.Shared`` took out of its layers."""
    is_table = lambda x: hasattr(x, "num_embeddings") and hasattr(x, "embedding_size")  # noqa: E731
    for x in filter(is_table, jax.tree.leaves(shared, is_leaf=is_table)):
        if not hasattr(x.weight, "shape"):
            yield x.num_embeddings, x.embedding_size
            yield x.embedding_size, x.num_embeddings
