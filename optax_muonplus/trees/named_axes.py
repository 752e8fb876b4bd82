"""What layers say that name their own axes, as Haliax' do: a rule by names would say less.

Haliax is not imported, and nobody has to import a room of this library for it: its layers are known
by their fields, like those of other libraries that are built on it.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from optax_muonplus.frame import DimensionNumbers, MuonDimensionNumbers, Path, path_of_keys
from optax_muonplus.trees.flat import FlatTree

# Dimension numbers, None for AdamW, and what they rest on, in words.
Said = tuple[DimensionNumbers | None, str]

# Fields of the layers of each kind.
_KINDS = {
    "convolution": {"In", "Out", "weight", "Spatial"},
    "linear": {"In", "Out", "weight"},
    "embedding": {"Vocab", "Embed", "weight"},
    "norm": {"axis", "weight"},
    "stack": {"stacked", "Block"},  # parameters within have the axis Block in addition
}


def read_named_layers(tree: FlatTree) -> dict[Path, Said]:
    """Reads dimension numbers, and what they rest on, by the path of each weight with names.

    A weight has the axes that its layer lists as ``In`` and ``Out``, in any order; all others
    (layers under a scan, experts) are batch axes. A layer from the ``Embed`` to the ``Vocab`` of an
    embedding is a head. An array with one axis, apart from those of the stacks that it is in, is no
    matrix.
    """
    if not any(map(_kind, tree.classes)):
        return {}
    leaves = jax.tree_util.tree_leaves_with_path(tree.tree, is_leaf=_is_layer)
    layers = [(path_of_keys(keys), layer) for keys, layer in leaves if _is_layer(layer)]
    tables = [
        (_axis_names(layer.Embed), _axis_names(layer.Vocab))
        for _, layer in layers
        if _kind(type(layer)) == "embedding"
    ]
    found: dict[Path, Said] = {
        (*path, "weight"): reading for path, layer in layers if (reading := _read(layer, tables))
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
    is_stack = lambda x: _kind(type(x)) == "stack"  # noqa: E731
    for stack in filter(is_stack, jax.tree.leaves(tree, is_leaf=is_stack)):
        yield from _axis_names(stack.Block)
        yield from _stack_axes(stack.stacked)


def _is_layer(x: Any) -> bool:
    return _kind(type(x)) not in (None, "stack") and bool(_names(getattr(x, "weight", None)))


@functools.lru_cache
def _kind(cls: type) -> str | None:
    fields = getattr(cls, "__dataclass_fields__", {}).keys()
    return next((kind for kind, needed in _KINDS.items() if needed <= fields), None)


def _read(layer: Any, tables: Sequence[Any]) -> Said | None:
    """Reads one layer; None if its weight has not the axes that it names."""
    kind = _kind(type(layer))
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
