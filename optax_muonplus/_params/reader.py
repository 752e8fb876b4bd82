"""Which leaves of a tree are matrices: by a user's rules, module classes and default rules."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from optax_muonplus._leaves.layout import (
    AxisNumbers,
    DimensionNumbers,
    DimensionNumbersTree,
    MatrixLayout,
    Shape,
)
from optax_muonplus._leaves.paths import list_paths
from optax_muonplus._leaves.record import LeafInfo
from optax_muonplus._params.flatten import FlatTree, broadcast_prefix, normalize_paths
from optax_muonplus._params.language import PathRule
from optax_muonplus._params.modules import Annotation, read_annotations
from optax_muonplus._params.neighbours import Neighbours, bias_of
from optax_muonplus._params.patterns import (
    LayerAxes,
    Rules,
    check_matches,
    parse_layer_axes,
    parse_rules,
)
from optax_muonplus._params.stacks import infer_stacks, with_stacks
from optax_muonplus._params.suggestions import suggest_rules
from optax_muonplus._params.table import BIAS, DEFAULT_RULES

PER_HEAD = "; per head"  # end of the rule of a leaf that omp.per_head cuts


class Reader(Protocol):
    """What :class:`RuleReader`, :class:`GivenNumbers` and ``omp.per_head`` have in common."""

    def read(self, tree: FlatTree) -> list[LeafInfo]:
        """Returns a record of each leaf; ``known`` is False if no rule fits it."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class GivenNumbers:
    """Reads a tree by a user's dimension numbers: a tree, a prefix tree, or a function."""

    numbers: DimensionNumbersTree

    def read(self, tree: FlatTree) -> list[LeafInfo]:
        kinds, what = DimensionNumbers | None, "MuonDimensionNumbers, MatrixSpec, or None for AdamW"
        specs = broadcast_prefix(self.numbers, tree, kinds, "dimension numbers", what)
        pairs = zip(tree.records(), specs, strict=True)
        return with_layouts(leaf._replace(dimension_numbers=spec) for leaf, spec in pairs)


@dataclasses.dataclass(frozen=True, eq=False)
class RuleReader:
    """Reads a tree by rules; a call returns the tree of dimension numbers."""

    rules: Sequence[PathRule] = ()  # the user's, before the default ones
    # Axes of stacked layers, by patterns of paths.
    layer_axes: Mapping[str, AxisNumbers] = dataclasses.field(default_factory=dict)

    def __call__(self, params: Any) -> Any:
        tree = FlatTree.of(params)
        if tree.paths == [()] and not np.shape(tree.arrays[0]):
            raise ValueError(
                "Expected parameters, got a number: optax.inject_hyperparams called your function"
                " with the step count. Add static_args=('muon_weight_dimension_numbers',) to it, or"
                " pass rules=[...] to the optimizer."
            )
        leaves = self.read(tree)
        check_known(leaves)
        return tree.unflatten(leaf.dimension_numbers for leaf in leaves)

    def read(self, tree: FlatTree) -> list[LeafInfo]:
        leaves = with_stacks(tree.records(), self.layer_axes)
        check_matches(self.rules, self.layer_axes, leaves, tree)
        modules = _Modules(tree, leaves)
        annotations = read_annotations(tree)
        users = [modules.first_rule(x, self.rules) for x in leaves]
        defaults = [_by_default(x, modules, annotations.get(x.path)) for x in leaves]
        leaves = with_layouts(map(_by_rule, users, defaults))
        if self.layer_axes:
            self._check_vectors([x for x in leaves if users[x.index] is None], tree)
        # What default rules read as a matrix may be one vector per stacked layer.
        for axis, members in infer_stacks(leaves).values():
            why = f"no rule: a vector of each of {members[0].shape[axis]} layers?"
            for x in members:
                if len(x.shape) == 2 and (x.layout or x.rule == BIAS) and not users[x.index]:
                    leaves[x.index] = x._replace(
                        layout=None, dimension_numbers=None, rule=why, known=False
                    )
        return leaves

    def _check_vectors(self, leaves: Sequence[LeafInfo], tree: FlatTree) -> None:
        """Raises ValueError if ``layer_axes`` turns kernels that are not stacked into vectors."""
        is_known = tree.holes or any(x.stack and x.layout for x in leaves)
        kernels = {x.path for x in leaves if re.search(r"(?i)kernel$|^w$", x.path[-1])}
        kernels |= set() if is_known else {x.path for x in RuleReader().read(tree) if x.layout}
        wrong = [x for x in leaves if x.stack and len(x.layer_shape) < 2 and x.path in kernels]
        if wrong:
            raise ValueError(
                f"layer_axes makes vectors of {list_paths((x.name, x.shape) for x in wrong)}, which"
                " AdamW would get. Give a pattern that leaves out what is not stacked, or confirm"
                " vectors by rules=[(pattern, None)]."
            )


def muon_dimension_numbers(params: Any, rules: Rules = (), layer_axes: LayerAxes = None) -> Any:
    """Dimension numbers of every parameter, by rules on its path; None means the AdamW group.

    Leaves with fewer than two axes longer than 1 are not matrices. For all others the first rule
    that fits decides: the given ``rules`` in order, then the default ones. The default rules send
    embeddings, unembeddings, tables of positions and tokens, norms, scales, biases, LoRA factors
    and depthwise kernels to AdamW. They know the kernels of attention, convolutions, patches and
    experts. They read a 2-D ``weight`` as (out, in) and any other 2-D leaf as (in, out), unless
    the layer's bias fits the other side only. :func:`optax_muonplus.describe` shows each rule.

    Optimizers and :func:`optax_muonplus.describe` take both arguments too::

      experts = omp.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
      omp.muonplus(0.02, rules=[("moe/w", experts)], layer_axes={"layers": 0})

    Args:
      params: parameters or updates; only paths, shapes and classes of modules are read.
      rules: ``(pattern, dimension numbers or None)``; a third item restricts the number of axes.
        Patterns are regular expressions, searched in paths such as
        ``blocks/0/attn/query/kernel``. ``optax_muonplus.rules`` has lists of rules.
      layer_axes: the axis, or axes, along which layers are stacked, by patterns of paths:
        ``{"layers": 0}`` under ``nn.scan``, 1 in MaxText. The first pattern found decides. Rules
        see the shape of one layer.

    Returns:
      A tree with the structure of ``params``.

    Raises:
      ValueError: if a given pattern matches no parameter, if dimension numbers do not fit, or if
        no rule fits a leaf of three or more axes: a guessed layout could mix experts or heads.
    """
    return RuleReader(parse_rules(rules), parse_layer_axes(layer_axes))(params)


def reader_of(
    dimension_numbers: DimensionNumbersTree, rules: Rules = (), layer_axes: LayerAxes = None
) -> Reader:
    axes = parse_layer_axes(layer_axes)
    if not rules and not axes and dimension_numbers is not None:
        is_reader = isinstance(dimension_numbers, RuleReader)
        return dimension_numbers if is_reader else GivenNumbers(dimension_numbers)
    if dimension_numbers is not None:
        raise ValueError(
            "Got rules or layer_axes next to dimension numbers, which decide on every parameter."
            " Leave one of them out: rules come before the default ones. Functions such as"
            " omp.per_head take both: omp.per_head(64, rules=[...], layer_axes={...})."
        )
    return RuleReader(parse_rules(rules), axes)


def with_layouts(leaves: Iterable[LeafInfo]) -> list[LeafInfo]:
    """Adds layouts to records whose dimension numbers are for one layer."""
    complete, wrong = [], []
    for leaf in leaves:
        try:
            complete.append(_with_layout(leaf))
        except ValueError as error:
            wrong.append(f"{leaf.name}: {error}")
    if wrong:
        raise ValueError("Dimension numbers do not fit. " + " ".join(wrong))
    return complete


def _with_layout(leaf: LeafInfo) -> LeafInfo:
    spec = leaf.dimension_numbers
    if spec is None:
        return leaf
    layout = MatrixLayout.of(leaf.layer_shape, spec)
    if leaf.stack:
        spec = layout.dimension_numbers([x for x in range(len(leaf.shape)) if x not in leaf.stack])
        layout = MatrixLayout.of(leaf.shape, spec)
    return leaf._replace(layout=layout, dimension_numbers=spec)


def check_known(leaves: Sequence[LeafInfo]) -> None:
    """Raises ValueError for leaves that no rule fits, with rules to write."""
    if not all(leaf.known for leaf in leaves):
        rules = suggest_rules(leaves)
        raise ValueError(f"No rule fits these parameters:\n{rules}")


class _Modules:
    """The shapes of a tree by module and path."""

    def __init__(self, tree: FlatTree, leaves: Sequence[LeafInfo]) -> None:
        self.names = normalize_paths(tree.paths)
        self.shapes: dict[str, dict[str, Shape]] = collections.defaultdict(dict)
        shapes: dict[str, Shape] = dict.fromkeys(normalize_paths([*tree.holes]), ())
        shapes |= zip(self.names, (leaf.layer_shape for leaf in leaves), strict=True)
        for name, shape in shapes.items():
            module, path = _place(name)
            self.shapes[module][path] = shape

    def first_rule(self, leaf: LeafInfo, rules: Iterable[PathRule]) -> PathRule | None:
        """Returns the first rule that fits a leaf and its neighbours."""
        module, path = _place(self.names[leaf.index])
        given, shape = "/".join(leaf.path), leaf.layer_shape
        for rule in rules:
            is_users = not rule.reading  # its pattern is searched in the path as it is
            fits = rule.match(given if is_users else self.names[leaf.index], shape)
            if fits and (is_users or _agree(rule, self.shapes[module], path)):
                return rule
        return None


def _agree(rule: PathRule, shapes: Neighbours, path: str) -> bool:
    if rule.condition and not rule.condition(shapes, path):
        return False
    # A layer has as many outputs as its bias has entries. A bias that fits no axis is ignored.
    bias, shape = bias_of(shapes, path), shapes[path]
    if rule.dimension_numbers is None or len(bias) != 1 or bias[0] not in shape:
        return True
    axes = MatrixLayout.of(shape, rule.dimension_numbers).output_axes
    return math.prod(shape[axis] for axis in axes) == bias[0]


def _by_default(leaf: LeafInfo, modules: _Modules, annotation: Annotation | None) -> LeafInfo:
    rule = modules.first_rule(leaf, DEFAULT_RULES)
    known = rule is not None
    spec, reading = (rule.dimension_numbers, rule.reading) if rule else (None, "no rule")
    # Its name makes it a matrix or not, its class gives the layout. An embedding is never a matrix.
    is_table = annotation is not None and annotation[1].startswith("embedding")
    if annotation and (is_table or not known or spec is not None):
        (spec, reading), known = annotation, True
    if sum(size > 1 for size in leaf.layer_shape) < 2 and (spec is not None or not known):
        spec, reading, known = None, "vector", True
    return leaf._replace(dimension_numbers=spec, rule=reading, known=known)


def _by_rule(rule: PathRule | None, default: LeafInfo) -> LeafInfo:
    """Applies a user's rule, if any, to a leaf as the default rules read it."""
    spec, reading, known = default.dimension_numbers, default.rule, default.known
    if rule is not None:
        overrides = rule.dimension_numbers and known and spec is None
        reading = rule.reading or f"your rule {rule.pattern!r}"
        reading += f", in place of: {default.rule}" if overrides else ""
        spec, known = rule.dimension_numbers, True
    if len(default.layer_shape) < 2:
        spec, reading, known = None, default.rule if default.known else "vector", True
    if default.stack:
        reading = f"{reading}; layers on axis {', '.join(map(str, default.stack))}"
    return default._replace(dimension_numbers=spec, rule=reading, known=known)


def _place(name: str) -> tuple[str, str]:
    """Splits a path into its module and the last two names."""
    parts = name.split("/")
    return "/".join(parts[:-2]), "/".join(parts[-2:])
