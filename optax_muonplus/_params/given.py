"""The rules and the axes of stacked layers that users give, checked when they are given."""

import numbers
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
_ATTRIBUTES = re.compile(r"(\.\w+){2,}")

Rules = Sequence[Sequence[Any]]
LayerAxes = Mapping[str, AxisNumbers] | None


def checked_rules(rules: Rules) -> list[PathRule]:
    """Converts user rules to ``PathRule``; raises ValueError for the first malformed one."""
    if isinstance(rules, str) or not isinstance(rules, Sequence):  # an iterator is read once only
        raise ValueError(
            "rules must be a list of (pattern, dimension numbers or None), as in"
            f" rules=[('head', None)]; got {rules!r}."
        )
    return [_checked_rule(rule) for rule in rules]


def _checked_rule(rule: Sequence[Any]) -> PathRule:
    if isinstance(rule, PathRule):
        return rule
    if isinstance(rule, str) or not isinstance(rule, Sequence) or not 2 <= len(rule) <= 3:
        raise ValueError(
            f"A rule is (pattern, dimension numbers or None), or with a third item its number of"
            f" axes; got {rule!r}. rules= is a list of them."
        )
    parsed = PathRule(*rule)
    check_pattern(parsed.pattern, "The rule")
    if not isinstance(parsed.dimension_numbers, DimensionNumbers | None):
        raise ValueError(
            f"The rule for {parsed.pattern!r} must give MuonDimensionNumbers, MatrixSpec or None,"
            f" got {parsed.dimension_numbers!r}."
        )
    return parsed


def checked_layer_axes(layer_axes: LayerAxes) -> dict[str, Shape]:
    """Converts axes to tuples by their patterns; raises ValueError for what is no axis."""
    if not isinstance(layer_axes, Mapping | None):
        raise ValueError(f"layer_axes must be as in {{'layers': 0}}, got {layer_axes!r}.")
    return {pattern: _checked_axes(pattern, x) for pattern, x in (layer_axes or {}).items()}


def _checked_axes(pattern: str, axes: AxisNumbers) -> Shape:
    check_pattern(pattern, "layer_axes")
    axes = tuple(axes) if isinstance(axes, Sequence) else (axes,)
    if not axes or not all(isinstance(x, numbers.Integral) for x in axes):
        raise ValueError(
            f"layer_axes must give an axis, or several, for {pattern!r}, as in"
            f" {{'layers': 0}}; got {axes!r}."
        )
    return axes


def check_matches(
    rules: Sequence[PathRule],
    layer_axes: Mapping[str, Shape],
    leaves: Sequence[LeafInfo],
    tree: FlatTree,
) -> None:
    """Raises ValueError for a user's patterns that match no leaf, and none that was left out."""
    names = tree.names
    written = [x for x in rules if not x.reads]  # the lists in optax_muonplus.rules may be idle
    patterns = [getattr(p, "pattern", p) for p in (*(x.pattern for x in written), *layer_axes)]
    # An unescaped dot matches any character, so a keystr path could match the wrong parameter.
    dotted = [p for p in patterns if _ATTRIBUTES.fullmatch(p)]
    if dotted and not any("." in name for name in names):
        raise ValueError(
            f"{', '.join(map(repr, dotted))} is a path as jax.tree_util.keystr writes it. Write"
            f" {', '.join(repr(_as_path(p)) for p in dotted)}."
        )
    idle_rules = [
        x.pattern
        for x in written
        if not any(x.fits("/".join(leaf.path), leaf.layer_shape) for leaf in leaves)
    ]
    idle_axes = [p for p in layer_axes if not any(re.search(p, name) for name in names)]
    for what, all_idle in (("Rules", idle_rules), ("Patterns of layer_axes", idle_axes)):
        if not (idle := [x for x in all_idle if not tree.could_match_masked(x)]):
            continue
        unfit = [(name, None) for name in names if any(re.search(p, name) for p in idle)]
        why = f"They find {listed(unfit)}, which has too few axes, or others than the rule is for."
        if not unfit:
            why = f"The paths are: {listed((name, None) for name in names)}."
        raise ValueError(f"{what} that match no parameter: {', '.join(map(repr, idle))}. {why}")


def check_pattern(pattern: Any, where: str) -> None:
    """Raises ValueError for what is no regular expression, and for a path as JAX writes it."""
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"{where} for {pattern!r} has no regular expression: {error}. Any text is '.*', not"
            " '*', and a pattern is searched in the path, so that 'kernel$' finds all kernels."
        ) from error
    refuse_keystr(pattern, where)


def refuse_keystr(pattern: Any, where: str) -> None:
    """Raises ValueError for a path as ``jax.tree_util.keystr`` writes it by default."""
    text = getattr(pattern, "pattern", pattern)
    if _QUOTED.search(text) or (_KEYS.fullmatch(text) and "[" in text):
        raise ValueError(
            f"{where} for {pattern!r} has a path as jax.tree_util.keystr writes it: to a regular"
            f" expression [...] is one of several characters. Write {_as_path(text)!r}."
        )


def _as_path(text: str) -> str:
    """Writes a path of ``keystr`` as patterns are searched in it: ``blocks/0/head/kernel``."""
    names = re.sub(r"\\|\[(<flat index )?|>?\]|['\"]", "/", text)
    return "/".join(name for part in names.split("/") for name in part.split(".") if name)
