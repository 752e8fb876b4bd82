"""Which axes of Haliax' arrays are inputs and outputs, by the names that layers give them.

``omp.muonplus(0.02, muon_weight_dimension_numbers=dimension_numbers)``. A file to copy, beside
``levanter_config.py``, which uses it. Layers are known by their fields, also in libraries that are
built on Haliax, which is not imported.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax

import optax_muonplus as omp

# Fields of the layers of each kind.
_FIELDS = {
    "convolution": {"In", "Out", "weight", "Spatial"},
    "linear": {"In", "Out", "weight"},
    "embedding": {"Vocab", "Embed", "weight"},
    "norm": {"axis", "weight"},
    "stack": {"stacked", "Block"},  # parameters within have the axis Block in addition
}


def dimension_numbers(params: Any, rules: Sequence[Any] = (), layer_axes: Any = None) -> Any:
    """Dimension numbers of every parameter: by ``rules``, then by axes, then by default rules."""
    return omp.muon_dimension_numbers(params, [*rules, *rules_of_axes(params)], layer_axes)


def rules_of_axes(params: Any) -> list[tuple[str, omp.MuonDimensionNumbers | None]]:
    """Makes a rule for each weight whose layer names its axes.

    A weight has the axes that its layer lists as ``In`` and ``Out``, in any order; all others
    (layers under a scan, experts) are batch axes. A layer from the ``Embed`` to the ``Vocab`` of an
    embedding is a head. An array with one axis, apart from those of its stacks, is no matrix.
    """
    pairs = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_layer)
    layers = [(_path(keys), layer) for keys, layer in pairs if _is_layer(layer)]
    tables = [
        (_names(layer.Embed), _names(layer.Vocab))
        for _, layer in layers
        if _kind(type(layer)) == "embedding"
    ]
    rules = []
    for path, layer in layers:
        known, numbers = _read(layer, tables)
        rules += [(f"^{re.escape(f'{path}/weight'.lstrip('/'))}(/|$)", numbers)] if known else []
    stacks = frozenset(_stack_axes(params))
    for keys, array in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_named):
        names = frozenset(_axes_of(array)) if _is_named(array) else frozenset()
        if names & stacks and len(names - stacks) == 1:
            rules.append((f"^{re.escape(_path(keys))}(/|$)", None))
    return rules


def _read(layer: Any, tables: Sequence[Any]) -> tuple[bool, omp.MuonDimensionNumbers | None]:
    """Reads one layer; False if its weight has not the axes that it names."""
    kind = _kind(type(layer))
    if kind in ("embedding", "norm"):
        return True, None
    inputs, outputs, names = _names(layer.In), _names(layer.Out), _axes_of(layer.weight)
    if kind == "convolution":
        if getattr(layer, "groups", 1) != 1:
            return True, None
        inputs += _names(layer.Spatial)
    if not {*inputs, *outputs} <= {*names}:
        return False, None
    if (inputs, outputs) in tables or not inputs or not outputs:
        return True, None
    sides = (tuple(map(names.index, side)) for side in (inputs, outputs))
    return True, omp.MuonDimensionNumbers(*sides)


def _stack_axes(params: Any) -> Iterator[str]:
    """Yields the axes that the stacks of a tree number their layers by, also within stacks."""
    is_stack = lambda x: _kind(type(x)) == "stack"  # noqa: E731
    for stack in filter(is_stack, jax.tree.leaves(params, is_leaf=is_stack)):
        yield from _names(stack.Block)
        yield from _stack_axes(stack.stacked)


@functools.lru_cache
def _kind(cls: type) -> str | None:
    fields = getattr(cls, "__dataclass_fields__", {}).keys()
    return next((kind for kind, needed in _FIELDS.items() if needed <= fields), None)


def _is_layer(x: Any) -> bool:
    return _kind(type(x)) not in (None, "stack") and _is_named(getattr(x, "weight", None))


def _is_named(x: Any) -> bool:
    return hasattr(x, "array") and bool(_axes_of(x))


def _axes_of(array: Any) -> tuple[str, ...]:
    return tuple(getattr(array, "axis_names", None) or _names(getattr(array, "axes", ())))


def _names(axes: Any) -> tuple[str, ...]:
    """Lists the names of an axis, of several axes or names, or of a mapping from names to sizes."""
    axes = (axes,) if isinstance(axes, str) or hasattr(axes, "name") else axes
    return tuple(getattr(axis, "name", axis) for axis in axes)


def _path(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")
