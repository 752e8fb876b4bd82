"""Reads what each leaf is: by the user's rules, its layer's own axes, or the default rules."""

import collections
import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_muonplus.frame import (
    DimensionNumbers,
    MatrixLayout,
    Path,
    Shape,
    flatten_tree,
    path_name,
    with_rule,
)
from optax_muonplus.trees.dimension_numbers import read_named_layers
from optax_muonplus.trees.given_trees import holes
from optax_muonplus.trees.layer_axes import check_kernels, check_one_count, stack_of
from optax_muonplus.trees.module_classes import read_classes
from optax_muonplus.trees.paths import names_to_read
from optax_muonplus.trees.rule_words import Rule
from optax_muonplus.trees.rules import DEFAULT_RULES
from optax_muonplus.trees.suggestions import what_to_write
from optax_muonplus.trees.unsaid_stacks import unsaid_stacks
from optax_muonplus.trees.user_rules import (
    LayerAxes,
    Rules,
    check_found,
    checked_layer_axes,
    checked_rules,
)


class Reading(NamedTuple):
    """What one leaf was taken for."""

    path: Path
    shape: Shape
    dimension_numbers: DimensionNumbers | None  # None for AdamW, and where nothing is known
    rule: str  # that said so, in words
    known: bool = True  # a rule said so, or the leaf has fewer than two axes
    stack: Shape = ()  # axes that number its layers

    @property
    def batch_axes(self) -> Shape:
        """Axes that number matrices, or may do so where nothing is known."""
        spec = self.dimension_numbers
        if not self.known:
            return tuple(range(len(self.shape)))
        return () if spec is None else MatrixLayout.of(self.shape, spec).batch_axes

    @property
    def is_adamw(self) -> bool:
        """Whether a rule said that the leaf is not a matrix."""
        return self.known and self.dimension_numbers is None


def muon_dimension_numbers(
    params: Any,
    rules: Rules = (),
    layer_axes: LayerAxes = None,
) -> Any:
    """Dimension numbers of every parameter, by rules on its path; None means the AdamW group.

    Leaves of fewer than two axes are not matrices. For the others the first rule that fits decides:
    the given ``rules`` in order, then the default ones. Those send embeddings, unembeddings, tables
    of positions and tokens, norms, scales, biases and depthwise kernels to AdamW, know the kernels
    of attention, convolutions, patches and experts, and read a 2-D ``weight`` as (out, in) and any
    other 2-D leaf as (in, out). A layer that names its own axes, as Haliax's do, comes before a
    default rule. :func:`optax_muonplus.describe` says by which rule each parameter was read.

    Optimizers and :func:`optax_muonplus.describe` take both arguments themselves::

      experts = omp.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
      omp.muonplus(0.02, rules=[("moe/w", experts)], layer_axes={"layers": 0})

    Args:
      params: parameters or updates; only paths, shapes and the names of axes are read.
      rules: ``(pattern, dimension numbers or None)``, or with a third item, the number of axes that
        the rule is for. Patterns are regular expressions, searched in paths such as
        ``blocks/0/attn/query/kernel``.
      layer_axes: patterns of the paths of stacked parameters, and the axis (or axes) along which
        they are stacked: ``{"layers": 0}`` under ``nn.scan``, 1 in MaxText. The first that matches
        holds, and rules see the shapes without these axes.

    Returns:
      A tree with the structure of ``params``.

    Raises:
      ValueError: if a given pattern matches no parameter, or no rule a leaf of three or more axes:
        guessing its layout could mix experts or heads.
    """
    paths, leaves, unflatten = flatten_tree(params)
    if rules != () or layer_axes:
        refuse_count(leaves, paths)
    return unflatten(numbers(read(params, paths, leaves, rules, layer_axes)))


def refuse_count(leaves: Sequence[Any], paths: Sequence[Path]) -> None:
    """Raises ValueError for a number of steps, which no tree of parameters is."""
    alone = list(paths) == [()] and not np.shape(leaves[0])
    if alone and np.issubdtype(getattr(leaves[0], "dtype", type(leaves[0])), np.integer):
        raise ValueError(
            "Dimension numbers were asked of an integer, not of parameters."
            " optax.inject_hyperparams calls functions with the number of the step: add"
            " static_args=('muon_weight_dimension_numbers',) to it, or pass rules=[...] to the"
            " optimizer, which is no function."
        )


def numbers(readings: Sequence[Reading]) -> list[DimensionNumbers | None]:
    """The dimension numbers that leaves were read to have, if all could be read."""
    check_known(readings)
    return [with_rule(x.dimension_numbers, x.rule) for x in readings]


def read(
    tree: Any,
    paths: Sequence[Path],
    leaves: Sequence[Any],
    rules: Rules = (),
    layer_axes: LayerAxes = None,
) -> list[Reading]:
    """Reads the leaves of ``tree`` as :func:`muon_dimension_numbers` does."""
    user_rules = checked_rules(rules)
    axes = checked_layer_axes(layer_axes)
    by_class = {path: (None, what) for path, what in read_classes(tree).items()}
    named = by_class | read_named_layers(tree)
    by_layer = [named.get(path) or named.get(path[:-1]) for path in paths]
    whole = [np.shape(leaf) for leaf in leaves]
    stacks = [
        () if layer else stack_of(path, shape, axes)
        for path, shape, layer in zip(paths, whole, by_layer, strict=True)
    ]
    check_one_count(paths, whole, stacks, axes)
    shapes = [
        tuple(size for axis, size in enumerate(shape) if axis not in stack)
        for shape, stack in zip(whole, stacks, strict=True)
    ]
    names = ["/".join(path) for path in paths]
    pairs = list(zip(names, shapes, strict=True))
    check_found(user_rules, axes, pairs, tree)
    chosen = [next((rule for rule in user_rules if rule.fits(*pair)), None) for pair in pairs]
    by_default = _read_by_default(paths, shapes, by_layer, holes(tree))
    readings = [
        _stacked(_by_rule(rule, default), shape, stack)
        for rule, default, shape, stack in zip(chosen, by_default, whole, stacks, strict=True)
    ]
    check_kernels(readings, axes)
    said = [rule or layer for rule, layer in zip(chosen, by_layer, strict=True)]
    return _without_vectors_of_layers(readings, said)


def _without_vectors_of_layers(readings: list[Reading], said: Sequence[Any]) -> list[Reading]:
    """Asks about matrices of default rules that seem to be one vector for each stacked layer."""
    for stack in unsaid_stacks(readings):
        for i in stack.members:
            reading = readings[i]
            if len(reading.shape) == 2 and reading.dimension_numbers and not said[i]:
                why = f"no rule: a vector of each of {stack.size} layers?"
                readings[i] = reading._replace(dimension_numbers=None, rule=why, known=False)
    return readings


def _by_rule(rule: Rule | None, default: Reading) -> Reading:
    """Applies a rule of the user, and notes where it overrides AdamW's; a vector is no matrix."""
    reading = default
    if rule is not None:
        kept_from_adamw = rule.dimension_numbers is not None and default.is_adamw
        said = f", in place of: {default.rule}" if kept_from_adamw else ""
        said = f"your rule {rule.pattern!r}{said}"
        reading = default._replace(dimension_numbers=rule.dimension_numbers, rule=said, known=True)
    if len(reading.shape) >= 2:
        return reading
    said = reading.rule if reading.known else "vector"
    return reading._replace(dimension_numbers=None, rule=said, known=True)


def _stacked(layer: Reading, shape: Shape, stack: Shape) -> Reading:
    """Reads layers that are stacked along the axes ``stack``, from one of them."""
    if not stack:
        return layer
    spec = layer.dimension_numbers
    if spec is not None:
        try:
            layout = MatrixLayout.of(layer.shape, spec)
        except ValueError as error:
            raise ValueError(
                f"{path_name(layer.path)}, without the axes of its layers: {error} Rules are for"
                " the shape that one layer has."
            ) from error
        spec = layout.dimension_numbers([axis for axis in range(len(shape)) if axis not in stack])
    said = f"{layer.rule}; layers on axis {', '.join(map(str, stack))}"
    return layer._replace(shape=shape, dimension_numbers=spec, rule=said, stack=stack)


def check_known(readings: Sequence[Reading]) -> None:
    """Raises ValueError for leaves that no rule can read, with the lines to write."""
    if not all(reading.known for reading in readings):
        raise ValueError(
            f"No rule says how these parameters are matrices:\n{what_to_write(readings)}"
        )


def _read_by_default(
    paths: Sequence[Path],
    shapes: Sequence[Shape],
    by_layer: Sequence[tuple[DimensionNumbers | None, str] | None],
    left_out: Sequence[Path],
) -> list[Reading]:
    """Reads leaves by the default rules, and by what layers say of their own axes."""
    names = names_to_read(paths)
    places = [_place(name) for name in names]
    modules: dict[str, dict[str, Shape]] = collections.defaultdict(dict)
    for module, own in map(_place, names_to_read(left_out)):
        modules[module][own] = ()
    for (module, own), shape in zip(places, shapes, strict=True):
        modules[module][own] = shape
    readings = []
    rows = zip(names, paths, shapes, by_layer, places, strict=True)
    for name, path, shape, layer, (module, own) in rows:
        # Layers that differ in their numbers only are asked about once.
        fitting = _fitting_rules(re.sub(r"(^|[/_])\d+(?=/|$)", r"\g<1>0", name), shape)
        rule = next((r for r in fitting if not r.agrees or r.agrees(modules[module], own)), None)
        # The name decides whether it is a matrix; the layer's own axes decide the layout. A table
        # is one under any name.
        is_table = layer is not None and layer[1].startswith("embedding")
        if layer and (is_table or rule is None or rule.dimension_numbers is not None):
            readings.append(Reading(path, shape, *layer))
        elif rule is None:
            readings.append(Reading(path, shape, None, "no rule", known=False))
        else:
            readings.append(Reading(path, shape, rule.dimension_numbers, rule.reads))
    return readings


def _place(name: str) -> tuple[str, str]:
    """A path in two: its module, and the last two names."""
    parts = name.split("/")
    return "/".join(parts[:-2]), "/".join(parts[-2:])


@functools.lru_cache(maxsize=4096)
def _fitting_rules(name: str, shape: Shape) -> tuple[Rule, ...]:
    return tuple(rule for rule in DEFAULT_RULES if rule.fits(name, shape))
