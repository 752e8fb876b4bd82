"""Reads what each leaf is: by the user's rules, its layer's own axes, or the default rules."""

import collections
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_muonplus._parameters.dimension_numbers import (
    check_layer_axes,
    read_named_layers,
    stack_of,
    with_layers,
)
from optax_muonplus._parameters.matrix_view import (
    AxisNumbers,
    DimensionNumbers,
    Shape,
    is_dimension_numbers,
    with_rule,
)
from optax_muonplus._parameters.paths import Path, flatten_tree, listed, names_to_read
from optax_muonplus._parameters.rules import DEFAULT_RULES, Rule


class Reading(NamedTuple):
    """What one leaf was taken for.

    Attributes:
      dimension_numbers: of its matrices; None for AdamW, and where nothing is known.
      rule: the rule that said so, in words.
      known: whether a rule said so, or the leaf has fewer than two axes.
    """

    dimension_numbers: DimensionNumbers | None
    rule: str
    known: bool = True

    @property
    def is_adamw(self) -> bool:
        """Whether a rule said that the leaf is not a matrix."""
        return self.known and self.dimension_numbers is None


def muon_dimension_numbers(
    params: Any,
    rules: Iterable[Sequence[Any]] = (),
    layer_axes: Mapping[str, AxisNumbers] | None = None,
) -> Any:
    """Dimension numbers of every parameter, by rules on its path; None means the AdamW group.

    Leaves of fewer than two axes are not matrices. For the others the first rule that fits decides:
    the given ``rules`` in order, then the default ones. Those send embeddings, unembeddings, tables
    of positions and tokens, norms, scales, biases and depthwise kernels to AdamW, know the kernels
    of attention, convolutions, patches and experts, and read a 2-D ``weight`` as (out, in) and any
    other 2-D leaf as (in, out). A layer that names its own axes, as Haliax's do, comes before a
    default rule. :func:`optax_muonplus.describe` says by which rule each parameter was read.

    To use rules in an optimizer pass a function, which is asked at init and at every update::

      conv = omp.MuonDimensionNumbers(reduction_axis=(0, 1, 2), output_axis=3)
      functools.partial(omp.muon_dimension_numbers, rules=[("conv", conv)])

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
    return unflatten(numbers(paths, leaves, read(params, paths, leaves, rules, layer_axes)))


def numbers(
    paths: Sequence[Path], leaves: Sequence[Any], readings: Sequence[Reading]
) -> list[DimensionNumbers | None]:
    """The dimension numbers that leaves were read to have, if all could be read."""
    check_known(paths, leaves, readings)
    return [with_rule(x.dimension_numbers, x.rule) for x in readings]


def read(
    tree: Any,
    paths: Sequence[Path],
    leaves: Sequence[Any],
    rules: Iterable[Sequence[Any]] = (),
    layer_axes: Mapping[str, AxisNumbers] | None = None,
) -> list[Reading]:
    """Reads the leaves of ``tree`` as :func:`muon_dimension_numbers` does."""
    user_rules = [_user_rule(rule) for rule in rules]
    layers = read_named_layers(tree)
    by_layer = [layers.get(path) or layers.get(path[:-1]) for path in paths]
    axes = check_layer_axes(layer_axes or {})
    stacks = [
        () if layer else stack_of(path, np.shape(leaf), axes)
        for path, leaf, layer in zip(paths, leaves, by_layer, strict=True)
    ]
    shapes = [
        tuple(size for axis, size in enumerate(np.shape(leaf)) if axis not in stack)
        for leaf, stack in zip(leaves, stacks, strict=True)
    ]
    names = ["/".join(path) for path in paths]
    pairs = list(zip(names, shapes, strict=True))
    idle = [x.pattern for x in user_rules if not any(x.fits(*pair) for pair in pairs)]
    idle += [p for p in axes if not any(re.search(p, name) for name in names)]
    if idle:
        raise ValueError(
            f"Rules that match no parameter: {', '.join(map(repr, idle))}. The paths are:"
            f" {listed((name, None) for name in names)}."
        )
    by_default = _read_by_default(names_to_read(paths), shapes, by_layer)
    readings = []
    for path, (name, shape), stack, reading in zip(paths, pairs, stacks, by_default, strict=True):
        rule = next((rule for rule in user_rules if rule.fits(name, shape)), None)
        if rule is not None:
            kept_from_adamw = rule.dimension_numbers is not None and reading.is_adamw
            said = f", in place of: {reading.rule}" if kept_from_adamw else ""
            reading = Reading(rule.dimension_numbers, f"your rule {rule.pattern!r}{said}")
        if len(shape) < 2:
            reading = Reading(None, reading.rule if reading.known else "vector")
        if stack:
            spec = with_layers(reading.dimension_numbers, shape, stack, path)
            said = f"{reading.rule}; layers on axis {', '.join(map(str, stack))}"
            reading = reading._replace(dimension_numbers=spec, rule=said)
        readings.append(reading)
    return readings


def check_known(paths: Sequence[Path], leaves: Sequence[Any], readings: Sequence[Reading]) -> None:
    """Raises ValueError for leaves that no rule can read, with the line to write."""
    unknown = [
        ("/".join(path), np.shape(leaf))
        for path, leaf, reading in zip(paths, leaves, readings, strict=True)
        if not reading.known
    ]
    if unknown:
        raise ValueError(
            f"No rule says how these parameters are matrices: {listed(unknown)}. Pass"
            " muon_weight_dimension_numbers=functools.partial(omp.muon_dimension_numbers,"
            " rules=[(pattern, dimension numbers), ...]), where dimension numbers are"
            " optax.contrib.MuonDimensionNumbers(reduction_axis=..., output_axis=...), or None for"
            " AdamW. Axes in neither (layers, experts, separate heads) are batch axes."
            f" {line_to_write(unknown)}"
        )


def _user_rule(rule: Sequence[Any]) -> Rule:
    if isinstance(rule, str) or not 2 <= len(rule) <= 3:
        raise ValueError(
            f"A rule is (pattern, dimension numbers or None), or with a third item its number of"
            f" axes; got {rule!r}."
        )
    made = Rule(*rule)
    if made.dimension_numbers is not None and not is_dimension_numbers(made.dimension_numbers):
        raise ValueError(
            f"The rule for {made.pattern!r} must give MuonDimensionNumbers, MatrixSpec or None, got"
            f" {made.dimension_numbers!r}."
        )
    return made


def _read_by_default(
    names: Sequence[str],
    shapes: Sequence[Shape],
    by_layer: Sequence[tuple[DimensionNumbers | None, str] | None],
) -> list[Reading]:
    """Reads leaves by the default rules, and by what layers say of their own axes."""
    modules: dict[str, dict[str, Shape]] = collections.defaultdict(dict)
    parts = [name.split("/") for name in names]
    places = [("/".join(x[:-2]), "/".join(x[-2:])) for x in parts]
    for (module, own), shape in zip(places, shapes, strict=True):
        modules[module][own] = shape
    readings = []
    for name, shape, layer, (module, own) in zip(names, shapes, by_layer, places, strict=True):
        # Layers that differ in their numbers only are asked about once.
        numbered = re.sub(r"(^|[/_])\d+(?=/|$)", r"\g<1>0", name)
        fitting = _fitting_rules(numbered, shape)
        rule = next((r for r in fitting if not r.agrees or r.agrees(modules[module], own)), None)
        # The name decides whether it is a matrix; the layer's own axes decide the layout.
        if layer is not None and (rule is None or rule.dimension_numbers is not None):
            readings.append(Reading(*layer))
        elif rule is None:
            readings.append(Reading(None, "no rule", known=False))
        else:
            readings.append(Reading(rule.dimension_numbers, rule.reads))
    return readings


@functools.lru_cache(maxsize=4096)
def _fitting_rules(name: str, shape: Shape) -> tuple[Rule, ...]:
    return tuple(rule for rule in DEFAULT_RULES if rule.fits(name, shape))


def line_to_write(unknown: Sequence[tuple[str, Shape]]) -> str:
    """Suggests rules for unknown leaves, given as paths and shapes."""
    rules: dict[str, str] = {}
    for name, shape in unknown:
        last = "/".join(re.sub(r"/(0|array)$", "", name).split("/")[-2:])
        escaped = re.sub(r"([.+*?()\[\]])", r"\\\1", last)
        rules.setdefault(re.sub(r"\d+", r"\\d+", escaped), _seems_to_be(name, len(shape)))
    shown = ", ".join(f"({pattern!r}, {numbers})" for pattern, numbers in list(rules.items())[:4])
    more = f", and {len(rules) - 4} more" if len(rules) > 4 else ""
    line = f"If their last axes are what these lines say: rules=[{shown}{more}]."
    for container in unknown[0][0].split("/")[:-1]:
        if re.search(r"(?i)layer|block|stack|stage|scan|^h$", container):
            axes = f"layer_axes={{{container!r}: 0}}"
            return f"{line} If layers are stacked on axis 0 (1 in MaxText): {axes}."
    return line


def _seems_to_be(name: str, ndim: int) -> str:
    """The likely dimension numbers of an unknown leaf."""
    if re.search(r"(?i)conv|patch|stem", name):
        out_first = name.endswith("weight")
        inner = tuple(range(1, ndim)) if out_first else tuple(range(ndim - 1))
        return f"omp.MuonDimensionNumbers({inner}, {0 if out_first else ndim - 1})"
    if re.search(r"weight(/0|/array)?$", name):
        return "omp.MuonDimensionNumbers(-1, -2)"
    return "omp.MuonDimensionNumbers(-2, -1)"
