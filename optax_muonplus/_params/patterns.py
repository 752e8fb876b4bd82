"""A user's patterns: rules, and the axes of stacked layers."""

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from optax_muonplus._leaves.layout import AxisNumbers, DimensionNumbers
from optax_muonplus._leaves.paths import list_paths
from optax_muonplus._leaves.record import LeafInfo
from optax_muonplus._params.flatten import FlatTree
from optax_muonplus._params.language import PathRule

# A path as keystr writes it: ['a'], or [0] at the start or after names such as .a
_KEY = re.compile(r"\[['\"<]|^(\^?\.\w+)?(\.\w+)*\[\d+\]($|[.\[])")

Rules = Sequence[Sequence[Any]]
LayerAxes = Mapping[str, AxisNumbers] | None


def parse_rules(rules: Rules) -> list[PathRule]:
    if not isinstance(rules, Sequence) or not all(map(_is_rule, rules)):
        raise ValueError(  # also for an iterator, which can be read only once
            "rules must be a list of (pattern, dimension numbers or None), as in"
            f" rules=[('head', None)]; got {rules!r}. Dimension numbers are MuonDimensionNumbers or"
            " MatrixSpec, and a third item is the number of axes."
        )
    check_patterns("rules", [rule[0] for rule in rules])
    return [PathRule(*rule) for rule in rules]


def _is_rule(rule: Any) -> bool:
    is_pair = isinstance(rule, Sequence) and not isinstance(rule, str) and len(rule) in (2, 3)
    is_pair = is_pair and bool not in map(type, rule)
    return isinstance(rule, PathRule) or (is_pair and isinstance(rule[1], DimensionNumbers | None))


def parse_layer_axes(layer_axes: LayerAxes) -> dict[str, AxisNumbers]:
    found = {} if layer_axes is None else layer_axes
    values = [*found.values()] if isinstance(found, Mapping) else [None]
    axes = [axis for x in values for axis in (x if isinstance(x, tuple | list) else [x])]
    if not all(isinstance(x, int | np.integer) and type(x) is not bool for x in axes):
        shown = reprlib.repr(found)
        raise ValueError(f"layer_axes must map patterns to axes, as {{'layers': 0}}, got {shown}.")
    check_patterns("layer_axes", [*found])
    return dict(found)


def check_patterns(name: str, patterns: Sequence[Any]) -> None:
    """Raises ValueError unless each pattern is a regular expression for paths with slashes."""
    for pattern in patterns:
        try:
            is_path = _KEY.search(re.compile(pattern).pattern)
            wrong = "a path as jax.tree_util.keystr writes it: as a pattern, [...] is one"
            wrong = f"{wrong} of several characters" if is_path else ""
        except (re.error, TypeError) as error:
            wrong = f"not a regular expression: {error}"
        if wrong:
            raise ValueError(
                f"{pattern!r} in {name} is {wrong}. Patterns are searched in paths such as"
                " 'blocks/0/attn/query/kernel'."
            )


def check_matches(
    rules: Sequence[PathRule],
    layer_axes: Mapping[str, AxisNumbers],
    leaves: Sequence[LeafInfo],
    tree: FlatTree,
) -> None:
    """Raises ValueError for a user's patterns that match no leaf, present or left out."""
    names = tree.names
    named_shapes = [(name, leaf.layer_shape) for name, leaf in zip(names, leaves, strict=True)]
    idle = [p for p in layer_axes if not any(re.search(p, name) for name in names)]
    for rule in rules:
        # Rules with a reading, from the lists in optax_muonplus.rules, may match nothing.
        if not rule.reading and not any(rule.match(*pair) for pair in named_shapes):
            idle.append(rule.pattern)
    if idle := [x for x in idle if not tree.could_match_masked(x)]:
        raise ValueError(
            f"Patterns that match no parameter: {', '.join(map(repr, idle))}. A rule needs the"
            " right number of axes too, and a vector is not a matrix. The paths are:"
            f" {list_paths((x.name, x.layer_shape) for x in leaves)}."
        )
