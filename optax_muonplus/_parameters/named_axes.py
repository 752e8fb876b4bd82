"""Layers that say themselves which of their axes are which, as Haliax's do.

Haliax is not imported: its layers are known by their fields.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from optax_muonplus._parameters.dimension_numbers import DimensionNumbers, MuonDimensionNumbers
from optax_muonplus._parameters.paths import Path, path_of_keys

# Fields of a layer and what its weight is: of axes In, Out and Spatial, or for AdamW.
LINEAR, CONVOLUTION, EMBEDDING, NORM = (
    frozenset({"In", "Out", "weight"}),
    frozenset({"In", "Out", "weight", "Spatial"}),
    frozenset({"Vocab", "Embed", "weight"}),
    frozenset({"axis", "weight"}),
)
_KINDS = (CONVOLUTION, LINEAR, EMBEDDING, NORM)
# A module whose parameters have the axis Block in addition.
_STACK = frozenset({"stacked", "Block"})


def read_named_layers(tree: Any) -> dict[Path, tuple[DimensionNumbers | None, str]]:
    """Dimension numbers, and what they rest on, of the weights of layers that name their axes.

    A weight has the axes that its layer lists as ``In`` and ``Out``; all others (layers under a
    scan, experts) are batch axes. Which of them come first does not matter. A layer from the
    ``Embed`` to the ``Vocab`` of an embedding is a head, and what has one axis beside those of the
    stacks that it is in, no matrix.

    Args:
      tree: parameters or updates.

    Returns:
      By the path of each weight. Layers whose weights were taken out, or have no names, are left
      out.
    """
    found = {}
    layers = [
        (path_of_keys(keys), layer)
        for keys, layer in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_layer)
        if _is_layer(layer)
    ]
    tables = [
        (tuple(_axis_names(layer.Embed)), tuple(_axis_names(layer.Vocab)))
        for _, layer in layers
        if _kind(type(layer)) == EMBEDDING
    ]
    for path, layer in layers:
        reading = _read(layer, tables)
        if reading is not None:
            found[*path, "weight"] = reading
    stacks = frozenset(_stack_axes(tree))
    for keys, array in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_named_array):
        if stacks and _is_named_array(array):
            names = set(_names(array) or ())
            if names & stacks and len(names - stacks) == 1:
                found.setdefault(path_of_keys(keys), (None, "one vector for each layer (Haliax)"))
    return found


def _stack_axes(tree: Any) -> Iterable[str]:
    """Names of the axes that the stacks of a tree number their layers by, also within stacks."""
    is_stack = lambda x: getattr(type(x), "__dataclass_fields__", {}).keys() >= _STACK  # noqa: E731
    for stack in filter(is_stack, jax.tree_util.tree_leaves(tree, is_leaf=is_stack)):
        yield from _axis_names(stack.Block)
        yield from _stack_axes(stack.stacked)


def _is_named_array(x: Any) -> bool:
    return hasattr(x, "array") and _names(x) is not None


def _is_layer(x: Any) -> bool:
    kind = _kind(type(x))
    return kind is not None and _names(getattr(x, "weight", None)) is not None


@functools.lru_cache
def _kind(cls: type) -> frozenset[str] | None:
    fields = getattr(cls, "__dataclass_fields__", {}).keys()
    return next((kind for kind in _KINDS if kind <= fields), None)


def _read(layer: Any, tables: Sequence[Any]) -> tuple[DimensionNumbers | None, str] | None:
    kind = _kind(type(layer))
    if kind == EMBEDDING:
        return None, "embedding (Haliax)"
    if kind == NORM:
        return None, "norm (Haliax)"
    names = _names(layer.weight) or ()
    inputs, outputs = list(_axis_names(layer.In)), list(_axis_names(layer.Out))
    if kind == CONVOLUTION:
        if getattr(layer, "groups", 1) != 1:
            return None, "grouped convolution (Haliax)"
        inputs += [str(name) for name in _axis_names(layer.Spatial)]
    if not set(inputs + outputs) <= set(names):
        return None
    if (tuple(inputs), tuple(outputs)) in tables:
        return None, "head (Haliax)"
    if not inputs or not outputs:
        return None, "one input or output (Haliax)"
    spec = MuonDimensionNumbers(_places(names, inputs), _places(names, outputs))
    return spec, f"layer: {', '.join(inputs)} -> {', '.join(outputs)} (Haliax)"


def _places(names: tuple[str, ...], chosen: list[str]) -> tuple[int, ...]:
    return tuple(names.index(name) for name in chosen)


def _names(weight: Any) -> tuple[str, ...] | None:
    """Names of the axes of an array that has some."""
    names = getattr(weight, "axis_names", None)
    if names is None:
        names = _axis_names(getattr(weight, "axes", ()))
    return tuple(names) or None


def _axis_names(axes: Any) -> Iterable[str]:
    """Of an axis, its name, a sequence of either, or a mapping from names to sizes."""
    if isinstance(axes, str):
        return (axes,)
    if hasattr(axes, "name"):
        return (axes.name,)
    return tuple(axes) if isinstance(axes, Mapping) else tuple(getattr(a, "name", a) for a in axes)
