"""What each leaf of a tree is, and by which rule: the one reader of rules, names and axes."""

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from optax_muonplus._parameters.dimension_numbers import (
    DimensionNumbers,
    MatrixSpec,
    MuonDimensionNumbers,
    matrix_view,
)
from optax_muonplus._parameters.named_axes import read_named_layers
from optax_muonplus._parameters.paths import Path, path_name
from optax_muonplus._parameters.readings import UNKNOWN, Reading
from optax_muonplus._parameters.rule import Rule, Shape
from optax_muonplus._parameters.rules import DEFAULT_RULES


def read_leaves(
    tree: Any,
    paths: Sequence[Path],
    leaves: Sequence[Any],
    user_rules: Sequence[Rule] = (),
    layer_axes: Mapping[str, tuple[int, ...]] | None = None,
) -> list[Reading]:
    """What each leaf is: by the user's rules, its layer's own axes, or the default rules.

    Args:
      tree: the leaves in their containers.
      paths: of the leaves.
      leaves: anything with a shape.
      user_rules: these come before all others, and are searched in the paths as they are.
      layer_axes: patterns of the paths of stacked parameters, and the axes that they are stacked
        along. Rules see their shapes without these axes.
    """
    layers = read_named_layers(tree)
    names = names_to_read(paths)
    shapes = [np.shape(leaf) for leaf in leaves]
    layer_readings = [layers.get(path) or layers.get(path[:-1]) for path in paths]
    stacks = [
        () if layer else _stack(path, shape, layer_axes or {})
        for path, shape, layer in zip(paths, shapes, layer_readings, strict=True)
    ]
    inner = [_without(shape, stack) for shape, stack in zip(shapes, stacks, strict=True)]
    by_default = _read_all_by_default(names, inner, layer_readings)
    readings = []
    for path, shape, stack, reading in zip(paths, inner, stacks, by_default, strict=True):
        by_user = next((r for r in user_rules if matches(r, "/".join(path), shape)), None)
        if by_user is not None:
            reading = _by_user(by_user, reading)
        if len(shape) < 2:
            reading = Reading(None, reading.rule if reading.known else "vector")
        readings.append(_stacked(reading, shape, stack, path))
    return readings


def matches(rule: Rule, name: str, shape: Shape) -> bool:
    """Whether a rule is for a parameter of this path and shape, its neighbours aside."""
    # A vector is no matrix, whatever its path; a rule without ndim may only confirm that.
    fits = len(shape) == rule.ndim
    if rule.ndim is None:
        fits = rule.dimension_numbers is None or len(shape) >= 2
    return fits and _has_sizes(shape, rule.sizes) and re.search(rule.pattern, name) is not None


def _by_user(rule: Rule, by_default: Reading) -> Reading:
    """The reading by a rule of the user's, which says what the name says if that is AdamW's."""
    said = f"your rule {rule.pattern!r}"
    if rule.dimension_numbers is not None and by_default.known:
        said += f", in place of: {by_default.rule}" * (by_default.dimension_numbers is None)
    return Reading(rule.dimension_numbers, said)


def _read_all_by_default(
    names: Sequence[str],
    shapes: Sequence[Shape],
    layers: Sequence[tuple[DimensionNumbers | None, str] | None],
) -> list[Reading]:
    """The readings by names, shapes and layers. Layers that differ in numbers are read once."""
    modules = _modules(names, shapes)
    kinds = {module: frozenset(below.items()) for module, below in modules.items()}
    seen: dict[Any, Reading] = {}
    readings = []
    for name, shape, layer in zip(names, shapes, layers, strict=True):
        module = _module(name)
        key = (re.sub(r"(^|[/_])\d+(?=/|$)", r"\g<1>0", name), shape, kinds[module], layer)
        if key not in seen:
            seen[key] = _read_by_default(name, shape, modules[module], layer)
        readings.append(seen[key])
    return readings


def _read_by_default(
    name: str,
    shape: Shape,
    module: Mapping[str, Shape],
    layer: tuple[DimensionNumbers | None, str] | None,
) -> Reading:
    own = name[len(_module(name)) :].removeprefix("/")
    fitting = (rule for rule in DEFAULT_RULES if matches(rule, name, shape))
    rule = next((r for r in fitting if r.agrees is None or r.agrees(module, own)), None)
    # Names tell heads from other layers; how a layer's axes lie the layer knows better.
    if layer is not None and (rule is None or rule.dimension_numbers is not None):
        return Reading(*layer)
    if rule is None:
        return UNKNOWN
    library = f" ({rule.library})" if rule.library else ""
    return Reading(rule.dimension_numbers, rule.reads + library)


def _has_sizes(shape: Shape, sizes: Sequence[int | str | None]) -> bool:
    if not sizes:
        return True
    letters: dict[str, int] = {}
    for size, wanted in zip(shape, sizes, strict=True):
        if isinstance(wanted, str):
            wanted = letters.setdefault(wanted, size)
        if wanted is not None and size != wanted:
            return False
    return True


# Names of an array within a parameter that is one array: Haliax's NamedArray, penzai's likewise.
_ARRAY_OF_PARAMETER = (("0",), ("array",), ("value", "data_array"))


def names_to_read(paths: Sequence[Path]) -> list[str]:
    """Paths as the default rules are searched in them.

    Haliax's arrays end in ``weight/0`` or ``weight/array``, penzai's in ``value/data_array``, and
    have no neighbours. Flattened models of PyTorch and penzai have dots for slashes.
    """
    beside = collections.Counter(path[:-1] for path in paths)
    names = []
    for path in paths:
        for ending in _ARRAY_OF_PARAMETER:
            n = len(ending)
            if path[-n:] == ending and len(path) > n and beside[path[:-1]] == 1:
                path = path[:-n]
                break
        names.append("/".join(path).replace(".", "/"))
    return names


def _module(name: str) -> str:
    """The path of the module that owns the layer that owns the parameter."""
    return name.rpartition("/")[0].rpartition("/")[0]


def _modules(names: Sequence[str], shapes: Sequence[Shape]) -> dict[str, dict[str, Shape]]:
    modules: dict[str, dict[str, Shape]] = {}
    for name, shape in zip(names, shapes, strict=True):
        module = _module(name)
        modules.setdefault(module, {})[name[len(module) :].removeprefix("/")] = shape
    return modules


def _stack(path: Path, shape: Shape, layer_axes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The axes of a leaf that number its layers."""
    for pattern, axes in layer_axes.items():
        if len(shape) >= 2 and re.search(pattern, "/".join(path)):
            if not all(-len(shape) <= axis < len(shape) for axis in axes):
                raise ValueError(
                    f"{path_name(path)} of shape {shape} has no axis {axes}, over which layers"
                    f" that match {pattern!r} are stacked. Give a pattern that leaves it out."
                )
            return tuple(sorted({axis % len(shape) for axis in axes}))
    return ()


def _without(shape: Shape, stack: tuple[int, ...]) -> Shape:
    return tuple(size for axis, size in enumerate(shape) if axis not in stack)


def _stacked(reading: Reading, shape: Shape, stack: tuple[int, ...], path: Path) -> Reading:
    """The reading of stacked leaves from that of one of them, whose shape is ``shape``."""
    if not stack:
        return reading
    rule = f"{reading.rule}; layers on axis {', '.join(map(str, stack))}"
    spec = reading.dimension_numbers
    if spec is None:
        return reading._replace(rule=rule)
    try:
        view = matrix_view(shape, spec)
    except ValueError as error:
        raise ValueError(
            f"{path_name(path)}, without the axes of its layers: {error} Rules are for the shape"
            " that one layer has."
        ) from error
    places = [axis for axis in range(len(shape) + len(stack)) if axis not in stack]
    reduction = tuple(places[axis] for axis in view.reduction_axes)
    output = tuple(places[axis] for axis in view.output_axes)
    if isinstance(spec, MatrixSpec):
        split = None if view.split_axis is None else places[view.split_axis]
        spec = dataclasses.replace(
            spec, reduction_axis=reduction, output_axis=output, split_axis=split
        )
    else:
        spec = MuonDimensionNumbers(reduction, output)
    return Reading(spec, rule)
