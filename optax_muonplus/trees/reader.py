"""Reads what each leaf is: by the user's rules, by what its layer says of it, or by default."""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from optax_muonplus.frame import (
    DimensionNumbers,
    DimensionNumbersTree,
    LeafInfo,
    MatrixLayout,
    Shape,
)
from optax_muonplus.trees.flat import FlatTree, names_to_read
from optax_muonplus.trees.layer_axes import check_kernels, unsaid_stacks, with_stacks
from optax_muonplus.trees.neighbours import Neighbours
from optax_muonplus.trees.own_words import Said, said_by_layers
from optax_muonplus.trees.rule_words import PathRule
from optax_muonplus.trees.rules import DEFAULT_RULES
from optax_muonplus.trees.suggestions import what_to_write
from optax_muonplus.trees.user_rules import (
    LayerAxes,
    Rules,
    check_found,
    checked_layer_axes,
    checked_rules,
)


@dataclasses.dataclass(frozen=True, eq=False)
class RuleReader:
    """What reads a tree; called with one, it gives the dimension numbers of its leaves.

    A subclass may read leaves in another way: everything that takes dimension numbers takes it.
    """

    rules: Sequence[PathRule] = ()  # the user has given them; they come before the default ones
    # The axes along which layers are stacked, by patterns of paths.
    layer_axes: Mapping[str, Shape] = dataclasses.field(default_factory=dict)
    # How a user makes such a reader, for messages.
    call: ClassVar[str] = "omp.muon_dimension_numbers(params"

    @property
    def is_default(self) -> bool:
        """Whether it reads by the default rules alone."""
        return type(self) is RuleReader and not self.rules and not self.layer_axes

    def __call__(self, params: Any) -> Any:
        tree = FlatTree.of(params)
        if not self.is_default:
            _refuse_count(tree)
        leaves = self.read(tree)
        check_known(leaves)
        return tree.unflatten(leaf.dimension_numbers for leaf in leaves)

    def read(self, tree: FlatTree) -> list[LeafInfo]:
        """Makes a record for each leaf; ``known`` is False where no rule can read it."""
        by_layer = said_by_layers(tree)
        said = [by_layer.get(path) or by_layer.get(path[:-1]) for path in tree.paths]
        leaves = with_stacks(tree.records(), self.layer_axes, said)
        if self.rules or self.layer_axes:
            check_found(self.rules, self.layer_axes, leaves, tree)
        chosen = [next((rule for rule in self.rules if rule.fits_leaf(x)), None) for x in leaves]
        by_default = _by_default_rules(tree, leaves, said)
        leaves = laid(map(_by_rule, chosen, by_default))
        check_kernels(leaves, self.layer_axes)
        asked = [not (rule or layer) for rule, layer in zip(chosen, said, strict=True)]
        return _without_vectors_of_layers(leaves, asked)


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
      ValueError: if a given pattern matches no parameter, dimension numbers do not fit one, or no
        rule a leaf of three or more axes: guessing its layout could mix experts or heads.
    """
    return RuleReader(checked_rules(rules), checked_layer_axes(layer_axes))(params)


def reader_of(
    given: DimensionNumbersTree, rules: Rules = (), layer_axes: LayerAxes = None
) -> DimensionNumbersTree:
    """Makes a :class:`RuleReader` of what a user gave; trees, functions and None alone stay.

    Raises ValueError for rules that are none, and for rules next to ``given``, which says all.
    """
    made, axes = checked_rules(rules), checked_layer_axes(layer_axes)
    if given is muon_dimension_numbers:
        given = RuleReader()
    elif isinstance(given, functools.partial) and given.func is muon_dimension_numbers:
        given = given if given.args else reader_of(None, **given.keywords) or RuleReader()
    if not made and not axes:
        return given
    named = " and ".join(["rules"] * bool(made) + ["layer_axes"] * bool(axes))
    if isinstance(given, RuleReader) and type(given) is not RuleReader:
        call = given.call.partition("(")[0]
        raise ValueError(
            f"Got {named} next to {call}(...). Give them to {call.rpartition('.')[2]}:"
            f" {given.call}, rules=[...], layer_axes={{...}})."
        )
    if given is not None and not (isinstance(given, RuleReader) and given.is_default):
        raise ValueError(
            f"Got {named} next to dimension numbers, which say of every parameter what it is. Leave"
            " one of them out. Rules come before the default ones, so that they are enough where"
            " only some parameters differ."
        )
    return RuleReader(made, axes)


def laid(leaves: Iterable[LeafInfo]) -> list[LeafInfo]:
    """Gives records the layouts that their dimension numbers describe.

    Raises ValueError, which names all leaves that their dimension numbers do not fit.
    """
    found, wrong = [], []
    for leaf in leaves:
        spec = leaf.dimension_numbers
        try:
            layout = None if spec is None else MatrixLayout.of(leaf.shape, spec)
        except ValueError as error:
            wrong.append(f"{leaf.name}: {error}")
        else:
            found.append(leaf._replace(layout=layout))
    if wrong:
        raise ValueError("Dimension numbers do not fit. " + " ".join(wrong))
    return found


def check_known(leaves: Sequence[LeafInfo]) -> None:
    """Raises ValueError for leaves that no rule can read, with the lines to write."""
    if not all(leaf.known for leaf in leaves):
        lines = what_to_write(leaves)
        raise ValueError(f"No rule says how these parameters are matrices:\n{lines}")


def _refuse_count(tree: FlatTree) -> None:
    """Raises ValueError for a number of steps, which no tree of parameters is."""
    alone = tree.paths == [()] and not np.shape(tree.arrays[0])
    if alone and np.issubdtype(getattr(tree.arrays[0], "dtype", type(tree.arrays[0])), np.integer):
        raise ValueError(
            "Dimension numbers were asked of an integer, not of parameters."
            " optax.inject_hyperparams calls functions with the number of the step: add"
            " static_args=('muon_weight_dimension_numbers',) to it, or pass rules=[...] to the"
            " optimizer, which is no function."
        )


def _without_vectors_of_layers(
    leaves: list[LeafInfo], by_default: Sequence[bool]
) -> list[LeafInfo]:
    """Asks about matrices of default rules that seem to be one vector for each stacked layer."""
    for stack in unsaid_stacks(leaves):
        why = f"no rule: a vector of each of {stack.size} layers?"
        for x in stack.members:
            if len(x.shape) == 2 and x.layout and by_default[x.index]:
                leaves[x.index] = x._replace(
                    layout=None, dimension_numbers=None, rule=why, known=False
                )
    return leaves


def _by_rule(rule: PathRule | None, default: LeafInfo) -> LeafInfo:
    """Applies a rule of the user, and notes where it overrides AdamW's; a vector is no matrix."""
    spec, said, known = default.dimension_numbers, default.rule, default.known
    if rule is not None:
        is_over = rule.dimension_numbers and known and spec is None
        said = f"your rule {rule.pattern!r}" + (f", in place of: {said}" if is_over else "")
        spec, known = rule.dimension_numbers, True
    if len(default.layer_shape) < 2:
        spec, said, known = None, said if known else "vector", True
    if default.stack:
        spec = spec and _of_stack(default, spec)
        said = f"{said}; layers on axis {', '.join(map(str, default.stack))}"
    return default._replace(dimension_numbers=spec, rule=said, known=known)


def _of_stack(leaf: LeafInfo, spec: DimensionNumbers) -> DimensionNumbers:
    """Returns the dimension numbers of stacked layers, from those of one layer."""
    try:
        layout = MatrixLayout.of(leaf.layer_shape, spec)
    except ValueError as error:
        raise ValueError(
            f"{leaf.name}, without the axes of its layers: {error} Rules are for the shape that"
            " one layer has."
        ) from error
    return layout.dimension_numbers([x for x in range(len(leaf.shape)) if x not in leaf.stack])


def _by_default_rules(
    tree: FlatTree, leaves: Sequence[LeafInfo], said: Sequence[Said | None]
) -> list[LeafInfo]:
    """Reads leaves by the default rules, and by what layers say of their own axes."""
    places = list(map(_place, names_to_read(tree.paths)))
    modules: dict[str, dict[str, Shape]] = collections.defaultdict(dict)
    for module, own in map(_place, names_to_read(tree.holes)):
        modules[module][own] = ()
    for (module, own), leaf in zip(places, leaves, strict=True):
        modules[module][own] = leaf.layer_shape
    found = []
    for (module, own), leaf, layer in zip(places, leaves, said, strict=True):
        rule = _first_rule(module, own, modules[module])
        # The name decides whether it is a matrix; the layer's own axes decide the layout. A table
        # is one under any name.
        is_table = layer is not None and layer[1].startswith("embedding")
        if layer and (is_table or rule is None or rule.dimension_numbers is not None):
            leaf = leaf._replace(dimension_numbers=layer[0], rule=layer[1])
        elif rule is None:
            leaf = leaf._replace(rule="no rule", known=False)
        else:
            leaf = leaf._replace(dimension_numbers=rule.dimension_numbers, rule=rule.reads)
        found.append(leaf)
    return found


def _first_rule(module: str, own: str, neighbours: Neighbours) -> PathRule | None:
    """Finds the first default rule that fits, and on which the neighbours agree."""
    name = f"{module}/{own}" if module else own
    # Layers that differ in their numbers only are asked about once.
    fitting = _fitting_rules(re.sub(r"(^|[/_])\d+(?=/|$)", r"\g<1>0", name), neighbours[own])
    return next((r for r in fitting if not r.agrees or r.agrees(neighbours, own)), None)


def _place(name: str) -> tuple[str, str]:
    """Cuts a path in two: its module, and the last two names."""
    parts = name.split("/")
    return "/".join(parts[:-2]), "/".join(parts[-2:])


@functools.lru_cache(maxsize=4096)
def _fitting_rules(name: str, shape: Shape) -> tuple[PathRule, ...]:
    return tuple(rule for rule in DEFAULT_RULES if rule.fits(name, shape))
