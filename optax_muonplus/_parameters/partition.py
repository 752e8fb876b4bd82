"""Which parameters are matrices: dimension numbers by rules on paths and shapes."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from optax_muonplus._parameters.dimension_numbers import (
    Axes,
    DimensionNumbers,
    MatrixSpec,
    MuonDimensionNumbers,
    is_dimension_numbers,
)
from optax_muonplus._parameters.folding import fold_all
from optax_muonplus._parameters.paths import Path, flatten_tree
from optax_muonplus._parameters.reader import matches, read_leaves
from optax_muonplus._parameters.readings import Reading, record
from optax_muonplus._parameters.rule import Rule
from optax_muonplus._parameters.suggestion import line_to_write


def muon_dimension_numbers(
    params: Any, rules: Iterable[Sequence[Any]] = (), layer_axes: Mapping[str, Axes] | None = None
) -> Any:
    """Dimension numbers of every parameter, by rules on its path; None means the AdamW group.

    Leaves of fewer than two axes are not matrices. For the others the first rule whose pattern is
    found in the path decides: the given ``rules`` in order, then the default ones. Those send
    embeddings, unembeddings, tables of positions and tokens, norms, scales, biases and depthwise
    kernels to AdamW, know the attention kernels of Flax, kernels of convolutions, patches and
    experts, and read a 2-D ``weight`` as (out, in) and any other 2-D leaf as (in, out). Where a
    layer names its own axes, as Haliax's do, these are taken in place of a rule's.
    :func:`optax_muonplus.describe` says by which rule each parameter was read.

    To use rules in an optimizer pass a function, which is asked at init and at every update::

      conv = omp.MuonDimensionNumbers(reduction_axis=(0, 1, 2), output_axis=3)
      functools.partial(omp.muon_dimension_numbers, rules=[("conv", conv)])

    Layers that are stacked, as by ``flax.linen.scan``, are read like one of them by
    ``layer_axes={"layers": 0}``: all rules then see the shapes without that axis.

    Args:
      params: parameters or updates; only paths, shapes and the names of axes are read.
      rules: ``(pattern, dimension numbers or None)``, or with a third item, the number of axes that
        the rule is for. Patterns are regular expressions, searched in paths such as
        ``blocks/0/attn/query/kernel``.
      layer_axes: patterns of the paths of stacked parameters, and the axis (or axes) along which
        they are stacked: 0 under ``nn.scan``, 1 in MaxText. The first that matches holds.

    Returns:
      A tree with the structure of ``params``.

    Raises:
      ValueError: if a given pattern matches no parameter, or no rule a leaf of three or more axes:
        guessing its layout could mix experts or heads.
    """
    paths, leaves, unflatten = flatten_tree(params)
    return unflatten(dimension_numbers_by_rule(params, paths, leaves, rules, layer_axes))


def dimension_numbers_by_rule(
    tree: Any,
    paths: Sequence[Path],
    leaves: Sequence[Any],
    rules: Iterable[Sequence[Any]] = (),
    layer_axes: Mapping[str, Axes] | None = None,
) -> list[DimensionNumbers | None]:
    """As :func:`muon_dimension_numbers`, for the leaves of a tree at their paths."""
    readings = readings_by_rule(tree, paths, leaves, rules, layer_axes)
    return settled(paths, leaves, readings)


def readings_by_rule(
    tree: Any,
    paths: Sequence[Path],
    leaves: Sequence[Any],
    rules: Iterable[Sequence[Any]] = (),
    layer_axes: Mapping[str, Axes] | None = None,
) -> list[Reading]:
    """What each leaf is by the rules, and by which one."""
    user_rules = [_rule(rule) for rule in rules]
    axes = {pattern: _axes(pattern, axis) for pattern, axis in (layer_axes or {}).items()}
    names = ["/".join(path) for path in paths]
    idle = [
        rule.pattern
        for rule in user_rules
        if not any(
            matches(rule, name, np.shape(leaf)) for name, leaf in zip(names, leaves, strict=True)
        )
    ]
    idle += [p for p in axes if not any(re.search(p, name) for name in names)]
    if idle:
        shown = ", ".join(name for name, _ in fold_all((name, None) for name in names))
        raise ValueError(
            f"Rules that match no parameter: {', '.join(map(repr, idle))}. The paths are: {shown}."
        )
    return read_leaves(tree, paths, leaves, user_rules, axes)


def settled(
    paths: Sequence[Path], leaves: Sequence[Any], readings: Sequence[Reading]
) -> list[DimensionNumbers | None]:
    """The dimension numbers of leaves that were read, which `describe` is told of.

    Raises:
      ValueError: for leaves that no rule knows.
    """
    must_be_known = record(paths, readings)
    unknown = [
        ("/".join(path), np.shape(leaf))
        for path, leaf, reading in zip(paths, leaves, readings, strict=True)
        if not reading.known
    ]
    if unknown and must_be_known:
        raise ValueError(_no_rule(unknown))
    return [reading.dimension_numbers for reading in readings]


def _no_rule(unknown: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    shown = ", ".join(f"{name} {shape}" for name, shape in fold_all(unknown))
    return (
        f"No rule says how these parameters are matrices: {shown}. Pass"
        " muon_weight_dimension_numbers=functools.partial(omp.muon_dimension_numbers,"
        " rules=[(pattern, dimension numbers), ...]), where dimension numbers are"
        " optax.contrib.MuonDimensionNumbers(reduction_axis=..., output_axis=...), or None for"
        " AdamW. Axes in neither (layers, experts, separate heads) are batch axes."
        f" {line_to_write(unknown)}"
    )


def _axes(pattern: str, axis: Axes) -> tuple[int, ...]:
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    if not axes or not all(isinstance(a, int) and not isinstance(a, bool) for a in axes):
        raise ValueError(
            f"layer_axes must give an axis, or several, for {pattern!r}, as in"
            f" {{'layers': 0}}; got {axis!r}."
        )
    return axes


def _rule(rule: Sequence[Any]) -> Rule:
    if isinstance(rule, str) or not 2 <= len(rule) <= 3:
        raise ValueError(
            f"A rule is (pattern, dimension numbers or None), or with a third item its number of"
            f" axes; got {rule!r}."
        )
    made = Rule(*rule)
    if made.dimension_numbers is not None and not is_dimension_numbers(made.dimension_numbers):
        raise ValueError(
            f"The rule for {made.pattern!r} must give {MuonDimensionNumbers.__name__},"
            f" {MatrixSpec.__name__} or None, got {made.dimension_numbers!r}."
        )
    return made
