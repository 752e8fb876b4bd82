"""One record for each leaf of a tree of parameters or updates, resolved once."""

import contextvars
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from optax_muonplus._parameters.dimension_numbers import matrix_view
from optax_muonplus._parameters.heads import PerHead
from optax_muonplus._parameters.matrix_view import (
    DimensionNumbersTree,
    MatrixView,
    is_dimension_numbers,
)
from optax_muonplus._parameters.paths import (
    Path,
    by_path,
    flatten_tree,
    is_function,
    path_name,
    without_boxes,
)
from optax_muonplus._parameters.reader import Reading, check_known, muon_dimension_numbers, read
from optax_muonplus._parameters.sharding import (
    LeafSharding,
    Placed,
    ShardingTree,
    given_shardings,
    leaf_shardings,
)

MUON, ADAM, UNKNOWN = "muon", "adam", "?"
# The rule of leaves with dimension numbers from elsewhere than rules.
GIVEN = "your dimension numbers"


class LeafInfo(NamedTuple):
    """Metadata of one leaf: path, shape, dtype, matrices, sharding.

    Attributes:
      index: its place among the leaves of the tree.
      path: as in ``('blocks', '0', 'attn', 'query', 'kernel')``.
      shape: its shape.
      dtype: its dtype, which is also that of its update.
      view: its matrices; None for a leaf that is not a matrix, which AdamW updates.
      given_sharding: its entry in the argument ``sharding``.
      sharding: how it lies on a mesh, if it is a matrix. None on one device, or where it is not
        known before the program is compiled.
      rule: the rule by which it was read, in words.
      known: False for a leaf that no rule can read, in a tree that was resolved to be shown.
    """

    index: int
    path: Path
    shape: tuple[int, ...]
    dtype: Any
    view: MatrixView | None
    given_sharding: NamedSharding | None = None
    sharding: LeafSharding | None = None
    rule: str = GIVEN
    known: bool = True

    @property
    def name(self) -> str:
        """The path as people read it: ``blocks/0/attn/query/kernel``."""
        return path_name(self.path)

    @property
    def matrix(self) -> MatrixView:
        """The view of a leaf that is known to be a matrix."""
        assert self.view is not None, self.name
        return self.view

    @property
    def label(self) -> str:
        """``"muon"`` or ``"adam"``, or ``"?"`` for a leaf that no rule can read."""
        if not self.known:
            return UNKNOWN
        return ADAM if self.view is None else MUON


class ResolvedTree(NamedTuple):
    """A tree, flattened once.

    Attributes:
      leaves: one record for each leaf, in order.
      arrays: the leaves themselves.
      unflatten: from one value for each leaf to a tree of this structure.
    """

    leaves: list[LeafInfo]
    arrays: list[Any]
    unflatten: Callable[[Iterable[Any]], Any]

    @property
    def matrices(self) -> list[LeafInfo]:
        """The records of leaves that are matrices."""
        return [leaf for leaf in self.leaves if leaf.view is not None]

    @property
    def labels(self) -> Any:
        """A tree of ``"muon"`` and ``"adam"``, each in the place of a leaf or of its box."""
        return without_boxes(self.unflatten([leaf.label for leaf in self.leaves]))

    def all_shardings(self) -> list[LeafSharding | None]:
        """How each leaf lies on a mesh, whether it is a matrix or not."""
        return leaf_shardings(
            Placed(leaf.name, x, leaf.given_sharding, leaf.view.matrix_axes if leaf.view else ())
            for leaf, x in zip(self.leaves, self.arrays, strict=True)
        )


def resolve(
    tree: Any,
    dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
    strict: bool = True,
) -> ResolvedTree:
    """Looks up each leaf of ``tree``.

    Args:
      tree: parameters or updates; arrays or anything with a shape and dtype.
      dimension_numbers: as in :func:`optax_muonplus.muonplus`.
      sharding: as in :func:`optax_muonplus.muonplus`.
      strict: raise for leaves that no rule can read, or mark them unknown.

    Raises:
      ValueError: if dimension numbers or shardings do not cover the tree or do not fit a leaf.
    """
    paths, arrays, unflatten = flatten_tree(tree)
    readings = _read(tree, paths, arrays, dimension_numbers)
    if strict:
        check_known(paths, arrays, readings)
    views = _views(paths, arrays, readings)
    given = given_shardings(tree, paths, sharding)
    matrices = [
        Placed(path_name(path), x, place, view.matrix_axes)
        for path, x, place, view in zip(paths, arrays, given, views, strict=True)
        if view is not None
    ]
    shardings = iter(leaf_shardings(matrices))
    leaves = []
    rows = zip(paths, arrays, views, given, readings, strict=True)
    for i, (path, x, view, place, (_, rule, known)) in enumerate(rows):
        shape, dtype = np.shape(x), jnp.result_type(x)
        sharding = None if view is None else next(shardings)
        leaves.append(LeafInfo(i, path, shape, dtype, view, place, sharding, rule, known))
    return ResolvedTree(leaves, arrays, unflatten)


def _read(
    tree: Any, paths: Sequence[Path], arrays: Sequence[Any], given: DimensionNumbersTree
) -> list[Reading]:
    """What each leaf is: by rules, or by a tree of dimension numbers or a function to one."""
    if isinstance(given, PerHead):
        return given.read(tree, paths, arrays)
    if given is None or given is muon_dimension_numbers:
        return read(tree, paths, arrays)
    if (
        isinstance(given, functools.partial)
        and given.func is muon_dimension_numbers
        and not given.args
    ):
        return read(tree, paths, arrays, **given.keywords)
    specs = by_path(
        given,
        tree,
        paths,
        is_dimension_numbers,
        "dimension numbers",
        "MuonDimensionNumbers, MatrixSpec, or None for AdamW",
    )
    readings = [Reading(spec, getattr(spec, "rule", "") or GIVEN) for spec in specs]
    if not is_function(given):
        return readings
    # A function may call rules, and its None cannot say by which: the default ones may agree.
    by_default = read(tree, paths, arrays)
    return [
        default if own.is_adamw and default.is_adamw else own
        for own, default in zip(readings, by_default, strict=True)
    ]


def _views(
    paths: Sequence[Path], arrays: Sequence[Any], readings: Sequence[Reading]
) -> list[MatrixView | None]:
    views, wrong = [], []
    for path, x, reading in zip(paths, arrays, readings, strict=True):
        spec = reading.dimension_numbers
        try:
            views.append(None if spec is None else matrix_view(np.shape(x), spec))
        except ValueError as error:
            wrong.append(f"{path_name(path)}: {error}")
    if wrong:
        raise ValueError("Dimension numbers do not fit. " + " ".join(wrong))
    return views


# The views of the last labels that were made with dimension numbers of the user's own, by path.
_labelled: contextvars.ContextVar[dict[Path, MatrixView | None] | None]
_labelled = contextvars.ContextVar("_labelled", default=None)


def partition_labels(
    params: Any, muon_weight_dimension_numbers: DimensionNumbersTree = None
) -> Any:
    """``"muon"`` or ``"adam"`` for every parameter: the labels for ``optax.partition``.

    Dimension numbers say here which leaves are matrices. The links that work on them need the same
    ones: give them to :func:`optax_muonplus.matrix_chain` too, which is an error to forget.

    Args:
      params: parameters or updates.
      muon_weight_dimension_numbers: as in :func:`optax_muonplus.muonplus`.
    """
    paths, arrays, unflatten = flatten_tree(params)
    readings = _read(params, paths, arrays, muon_weight_dimension_numbers)
    check_known(paths, arrays, readings)
    views = _views(paths, arrays, readings)
    by_default = muon_weight_dimension_numbers is None
    _labelled.set(None if by_default else dict(zip(paths, views, strict=True)))
    return unflatten(ADAM if view is None else MUON for view in views)


def check_labelled(resolved: ResolvedTree, tree: Any) -> None:
    """Raises ValueError if the last labels read a matrix in another way than the default rules do.

    ``optax.partition`` hands on labels, but not the dimension numbers that they were made with. Its
    group ``tree`` has masks in place of other leaves; ``resolved`` is it, by the default rules.
    """
    labelled = _labelled.get() or {}
    masks = labelled and jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    if not any(isinstance(x, optax.MaskedNode) for x in masks):
        return
    for leaf in resolved.matrices:
        view = labelled.get(leaf.path)
        if view is not None and view.shape == leaf.shape and view != leaf.view:
            raise ValueError(
                f"{leaf.name}: partition_labels was given dimension numbers, and this link reads"
                " the matrix by the default rules. Pass the same ones to the links:"
                " optax_muonplus.matrix_chain(..., weight_dimension_numbers=...)."
            )
