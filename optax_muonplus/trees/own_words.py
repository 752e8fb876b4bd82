"""What layers say of their own arrays, by the axes that they name or by their classes.

Haliax' layers name their axes. Equinox keeps its modules in the tree, filtered or not, and so do
other dataclasses: the array of an ``eqx.nn.Embedding`` is a table of vectors, whatever the model
calls it. Neither library is imported, and nobody has to import a room of this one for them: layers
are known by their fields, also in libraries that are built on Haliax, and modules by their names.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from optax_muonplus.frame import DimensionNumbers, MuonDimensionNumbers, Shape
from optax_muonplus.messages import Path, path_of_keys
from optax_muonplus.trees.flat import FlatTree

# Dimension numbers, None for AdamW, and what they rest on, in words.
Said = tuple[DimensionNumbers | None, str]

# Fields of the layers of each kind.
_FIELDS = {
    "convolution": {"In", "Out", "weight", "Spatial"},
    "linear": {"In", "Out", "weight"},
    "embedding": {"Vocab", "Embed", "weight"},
    "norm": {"axis", "weight"},
    "stack": {"stacked", "Block"},  # parameters within have the axis Block in addition
}
# Patches and times are embedded by layers, and rotary embeddings have no table.
_TABLE = re.compile(r"(?i)(?!.*(patch|time|rotary|proj|linear|mlp)).*embed")
_OF_TABLE = re.compile(r"(?i)(?!.*(proj|linear|dense|kernel|bias))")
# Equinox calls the lengths of rows g under weight normalization.
_NORM = re.compile(r".*Norm(\d[dD])?$")
_OF_NORM = re.compile("weight|g$")
_SHARED = "Shared"


def said_by_layers(tree: FlatTree) -> dict[Path, Said]:
    """Reads what layers say of their arrays, by the paths of these."""
    return _by_class(tree) | _by_axes(tree)


def _by_axes(tree: FlatTree) -> dict[Path, Said]:
    """Reads dimension numbers, and what they rest on, by the path of each weight with names.

    A weight has the axes that its layer lists as ``In`` and ``Out``, in any order; all others
    (layers under a scan, experts) are batch axes. A layer from the ``Embed`` to the ``Vocab`` of an
    embedding is a head. An array with one axis, apart from those of the stacks that it is in, is no
    matrix.
    """
    if not any(map(_layer_kind, tree.classes)):
        return {}
    leaves = jax.tree_util.tree_leaves_with_path(tree.tree, is_leaf=_is_layer)
    layers = [(path_of_keys(keys), layer) for keys, layer in leaves if _is_layer(layer)]
    tables = [
        (_axis_names(layer.Embed), _axis_names(layer.Vocab))
        for _, layer in layers
        if _layer_kind(type(layer)) == "embedding"
    ]
    found: dict[Path, Said] = {
        (*path, "weight"): reading
        for path, layer in layers
        if (reading := _read_layer(layer, tables))
    }
    stacks = frozenset(_stack_axes(tree.tree))
    is_named = lambda x: hasattr(x, "array") and bool(_names(x))  # noqa: E731
    for keys, array in jax.tree_util.tree_leaves_with_path(tree.tree, is_leaf=is_named):
        names = set(_names(array)) if stacks and is_named(array) else set()
        if names & stacks and len(names - stacks) == 1:
            found.setdefault(path_of_keys(keys), (None, "one vector for each layer (Haliax)"))
    return found


def _stack_axes(tree: Any) -> Iterable[str]:
    """Yields the axes that the stacks of a tree number their layers by, also within stacks."""
    is_stack = lambda x: _layer_kind(type(x)) == "stack"  # noqa: E731
    for stack in filter(is_stack, jax.tree.leaves(tree, is_leaf=is_stack)):
        yield from _axis_names(stack.Block)
        yield from _stack_axes(stack.stacked)


def _is_layer(x: Any) -> bool:
    return _layer_kind(type(x)) not in (None, "stack") and bool(_names(getattr(x, "weight", None)))


@functools.lru_cache
def _layer_kind(cls: type) -> str | None:
    fields = getattr(cls, "__dataclass_fields__", {}).keys()
    return next((kind for kind, needed in _FIELDS.items() if needed <= fields), None)


def _read_layer(layer: Any, tables: Sequence[Any]) -> Said | None:
    """Reads one layer; None if its weight has not the axes that it names."""
    kind = _layer_kind(type(layer))
    if kind in ("embedding", "norm"):
        return None, f"{kind} (Haliax)"
    inputs, outputs, names = _axis_names(layer.In), _axis_names(layer.Out), _names(layer.weight)
    if kind == "convolution":
        if getattr(layer, "groups", 1) != 1:
            return None, "grouped convolution (Haliax)"
        inputs += _axis_names(layer.Spatial)
    if not {*inputs, *outputs} <= set(names):
        return None
    if (inputs, outputs) in tables:
        return None, "head (Haliax)"
    if not inputs or not outputs:
        return None, "one input or output (Haliax)"
    spec = MuonDimensionNumbers(*(tuple(map(names.index, side)) for side in (inputs, outputs)))
    return spec, f"layer: {', '.join(inputs)} -> {', '.join(outputs)} (Haliax)"


def _names(array: Any) -> tuple[str, ...]:
    """Lists the names of the axes of an array; none if it has none."""
    return tuple(getattr(array, "axis_names", None) or _axis_names(getattr(array, "axes", ())))


def _axis_names(axes: Any) -> tuple[str, ...]:
    """Lists the names of an axis, of several axes or names, or of a mapping from names to sizes."""
    if isinstance(axes, str) or hasattr(axes, "name"):
        axes = (axes,)
    return tuple(getattr(axis, "name", axis) for axis in axes)


def _by_class(tree: FlatTree) -> dict[Path, Said]:
    """Reads what arrays are by the classes of their modules, by their paths."""
    if not any(map(_class_kind, tree.classes)):
        return {}
    return {path: (None, what) for path, what in _walk(tree.tree, ())}


@functools.lru_cache(maxsize=4096)
def _class_kind(cls: type) -> str | None:
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


def _walk(
    node: Any, path: Path, tied: frozenset[Shape] = frozenset()
) -> Iterator[tuple[Path, str]]:
    """Yields what is known of arrays below ``node``; ``tied`` are shapes of tables elsewhere."""
    level = jax.tree_util.default_registry.flatten_one_level_with_keys(node)
    if level is None:
        if getattr(node, "shape", ()) in tied:
            yield path, "embedding, tied"
        return
    children = [((*path, *path_of_keys((key,))), child) for key, child in level[0]]
    kind = _class_kind(type(node))
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
