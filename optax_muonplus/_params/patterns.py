"""A user's patterns: rules, and the axes of stacked layers."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from optax_muonplus._chain.layout import AxisNumbers, DimensionNumbers, Shape
from optax_muonplus._chain.paths import listed
from optax_muonplus._chain.record import LeafInfo
from optax_muonplus._params.flatten import FlatTree
from optax_muonplus._params.language import PathRule

# Keys of a path as jax.tree_util.keystr writes them.
_QUOTED = re.compile(r"\[['\"]|['\"]\]")
_KEYS = re.compile(r"(\['[^']*'\]|\[\"[^\"]*\"\]|\[(<flat index )?\d+>?\]|\.\w+)+")

Rules = Sequence[Sequence[Any]]
LayerAxes = Mapping[str, AxisNumbers] | None


def parse_rules(rules: Rules) -> list[PathRule]:
    """Converts a user's rules; raises ValueError for what would be read as another rule."""
    is_list = isinstance(rules, Sequence)  # an iterator can be read once only
    parsed = [_parse_rule(rule) for rule in rules] if is_list else []
    if not is_list or None in parsed:
        raise ValueError(
            "rules must be a list of (pattern, dimension numbers or None), as in"
            f" rules=[('head', None)]; got {rules!r}. Dimension numbers are MuonDimensionNumbers or"
            " MatrixSpec, and a third item is the number of axes."
        )
    return [rule for rule in parsed if rule]


def _parse_rule(rule: Any) -> PathRule | None:
    if isinstance(rule, PathRule):
        return rule
    if isinstance(rule, str) or not isinstance(rule, Sequence) or len(rule) > 3:
        return None
    parsed = PathRule(*rule)
    check_pattern(parsed.pattern)
    return parsed if isinstance(parsed.dimension_numbers, DimensionNumbers | None) else None


def parse_layer_axes(layer_axes: LayerAxes) -> dict[str, Shape]:
    """Converts axes to tuples by their patterns."""
    axes = dict(layer_axes or {})
    for pattern in axes:
        check_pattern(pattern)
    return {k: tuple(x) if isinstance(x, Sequence) else (x,) for k, x in axes.items()}


def check_pattern(pattern: Any) -> None:
    """Raises ValueError for a path as ``jax.tree_util.keystr`` writes it by default."""
    text = re.compile(pattern).pattern
    if _QUOTED.search(text) or (_KEYS.fullmatch(text) and "[" in text):
        path = re.sub(r"\\|\[(<flat index )?|>?\]|['\"]|\.", "/", text)
        raise ValueError(
            f"{text!r} is a path as jax.tree_util.keystr writes it: to a regular expression [...]"
            f" is one of several characters. Write {'/'.join(filter(None, path.split('/')))!r}."
        )


def check_matches(
    rules: Sequence[PathRule],
    layer_axes: Mapping[str, Shape],
    leaves: Sequence[LeafInfo],
    tree: FlatTree,
) -> None:
    """Raises ValueError for a user's patterns that match no leaf, and none that was left out."""
    names = tree.names
    idle_rules = [
        rule.pattern
        for rule in rules
        if not rule.reading  # the lists in optax_muonplus.rules may be idle
        and not any(rule.match("/".join(leaf.path), leaf.layer_shape) for leaf in leaves)
    ]
    idle_axes = [p for p in layer_axes if not any(re.search(p, name) for name in names)]
    for what, patterns in (("Rules", idle_rules), ("Patterns of layer_axes", idle_axes)):
        if idle := [x for x in patterns if not tree.could_match_masked(x)]:
            raise ValueError(
                f"{what} that match no parameter: {', '.join(map(repr, idle))}. A rule needs the"
                " right number of axes too, and vectors are no matrices. The paths are:"
                f" {listed((x.name, x.layer_shape) for x in leaves)}."
            )
