"""The rules and the axes of stacked layers that users give, checked when they are given."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optax_muonplus._parameters.matrix_view import AxisNumbers, DimensionNumbers, Shape
from optax_muonplus._parameters.rule_words import Rule

Rules = Iterable[Sequence[Any]]
LayerAxes = Mapping[str, AxisNumbers] | None


def checked_rules(rules: Rules) -> list[Rule]:
    """Rules of the table's kind; raises ValueError, naming the first that is none."""
    if isinstance(rules, str | Mapping) or not isinstance(rules, Iterable):
        raise ValueError(
            "rules must be a list of (pattern, dimension numbers or None), as in"
            f" rules=[('head', None)]; got {rules!r}."
        )
    return [_checked_rule(rule) for rule in rules]


def checked_layer_axes(layer_axes: LayerAxes) -> dict[str, Shape]:
    """Axes by their patterns; raises ValueError for what is none."""
    if not isinstance(layer_axes, Mapping | None):
        raise ValueError(f"layer_axes must be as in {{'layers': 0}}, got {layer_axes!r}.")
    return {pattern: _checked_axes(pattern, x) for pattern, x in (layer_axes or {}).items()}


def _checked_rule(rule: Sequence[Any]) -> Rule:
    if isinstance(rule, Rule):
        return rule
    if isinstance(rule, str) or not isinstance(rule, Sequence) or not 2 <= len(rule) <= 3:
        raise ValueError(
            f"A rule is (pattern, dimension numbers or None), or with a third item its number of"
            f" axes; got {rule!r}. rules= is a list of them."
        )
    made = Rule(*rule)
    _check_pattern(made.pattern, "The rule")
    if not isinstance(made.dimension_numbers, DimensionNumbers | None):
        raise ValueError(
            f"The rule for {made.pattern!r} must give MuonDimensionNumbers, MatrixSpec or None, got"
            f" {made.dimension_numbers!r}."
        )
    return made


def _checked_axes(pattern: str, given: AxisNumbers) -> Shape:
    _check_pattern(pattern, "layer_axes")
    axes = tuple(given) if isinstance(given, Sequence) else (given,)
    if not axes or not all(isinstance(a, int) and not isinstance(a, bool) for a in axes):
        raise ValueError(
            f"layer_axes must give an axis, or several, for {pattern!r}, as in"
            f" {{'layers': 0}}; got {given!r}."
        )
    return axes


def _check_pattern(pattern: Any, where: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"{where} for {pattern!r} has no regular expression: {error}. Any text is '.*', not"
            " '*', and a pattern is searched in the path, so that 'kernel$' finds all kernels."
        ) from error
