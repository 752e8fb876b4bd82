"""The arguments ``rules`` and ``layer_axes`` of optimizers, links and ``describe``."""

import functools

from optax_muonplus.frame import DimensionNumbersTree, Shape
from optax_muonplus.trees.heads import PerHead
from optax_muonplus.trees.reader import muon_dimension_numbers
from optax_muonplus.trees.rule_words import Rule
from optax_muonplus.trees.user_rules import (
    LayerAxes,
    Rules,
    checked_layer_axes,
    checked_rules,
)


def by_rules(
    given: DimensionNumbersTree, rules: Rules = (), layer_axes: LayerAxes = None
) -> DimensionNumbersTree:
    """Dimension numbers as :func:`resolve` takes them, from what a transformation was given.

    Raises ValueError for rules that are none, and for rules next to ``given``, which says all.
    """
    made = tuple(checked_rules(rules))
    axes = checked_layer_axes(layer_axes)
    if not made and not axes:
        return given
    named = " and ".join(["rules"] * bool(made) + ["layer_axes"] * bool(axes))
    if isinstance(given, PerHead):
        raise ValueError(
            f"Got {named} next to omp.per_head(...). Give them to per_head:"
            " omp.per_head(head_size, rules=[...], layer_axes={...})."
        )
    if given is not None and given is not muon_dimension_numbers:
        raise ValueError(
            f"Got {named} next to dimension numbers, which say of every parameter what it is. Leave"
            " one of them out. Rules come before the default ones, so that they are enough where"
            " only some parameters differ."
        )
    return functools.partial(muon_dimension_numbers, rules=made, layer_axes=axes)


def rules_of(given: DimensionNumbersTree) -> tuple[list[Rule], dict[str, Shape]]:
    """The rules, and the axes of layers, that a user gave with dimension numbers, if any."""
    if isinstance(given, PerHead):
        return checked_rules(given.rules), checked_layer_axes(given.layer_axes)
    if not isinstance(given, functools.partial) or given.func is not muon_dimension_numbers:
        return [], {}
    said = given.keywords
    return checked_rules(said.get("rules", ())), checked_layer_axes(said.get("layer_axes"))
