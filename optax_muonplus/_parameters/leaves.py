"""One record for each leaf of a tree of parameters or updates, resolved once."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from optax_muonplus._parameters.dimension_numbers import (
    DimensionNumbers,
    DimensionNumbersTree,
    MatrixView,
    is_dimension_numbers,
    matrix_view,
)
from optax_muonplus._parameters.partition import dimension_numbers_by_rule
from optax_muonplus._parameters.paths import (
    Path,
    by_path,
    check_inexact_dtypes,
    flatten_tree,
    path_name,
    without_boxes,
)
from optax_muonplus._parameters.readings import recorded
from optax_muonplus._parameters.sharding import (
    LeafSharding,
    ShardingTree,
    given_shardings,
    leaf_shardings,
)

MUON, ADAM, UNKNOWN = "muon", "adam", "?"
# The rule of leaves whose dimension numbers come in a tree, and not from rules.
GIVEN = "your dimension numbers"


class LeafInfo(NamedTuple):
    """What is known of one leaf, besides its elements.

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
        return "/".join(self.path) or "(root)"

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
        return _shardings_of(self.leaves, self.arrays)


def resolve(
    tree: Any,
    dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
    strict: bool = True,
) -> ResolvedTree:
    """What is known of each leaf of ``tree``.

    Args:
      tree: parameters or updates; arrays or anything with a shape and dtype.
      dimension_numbers: as in :func:`optax_muonplus.muonplus`.
      sharding: likewise.
      strict: whether leaves that no rule can read are an error, or to be shown as such.

    Raises:
      ValueError: if dimension numbers or shardings do not cover the tree or do not fit a leaf.
    """
    paths, arrays, unflatten = flatten_tree(tree)
    views, readings = _views(tree, paths, arrays, dimension_numbers, strict)
    given = given_shardings(tree, paths, sharding)
    leaves = [
        LeafInfo(i, path, np.shape(x), jnp.result_type(x), view, place, None, *reading)
        for i, (path, x, view, place, reading) in enumerate(
            zip(paths, arrays, views, given, readings, strict=True)
        )
    ]
    matrices = [leaf for leaf in leaves if leaf.view is not None]
    shardings = _shardings_of(matrices, arrays)
    for leaf, known in zip(matrices, shardings, strict=True):
        leaves[leaf.index] = leaf._replace(sharding=known)
    return ResolvedTree(leaves, arrays, unflatten)


def _shardings_of(leaves: Sequence[LeafInfo], arrays: Sequence[Any]) -> list[LeafSharding | None]:
    return leaf_shardings(
        [leaf.name for leaf in leaves],
        [arrays[leaf.index] for leaf in leaves],
        [leaf.given_sharding for leaf in leaves],
        [leaf.view.matrix_axes if leaf.view else () for leaf in leaves],
    )


def _views(
    tree: Any,
    paths: Sequence[Path],
    arrays: Sequence[Any],
    dimension_numbers: DimensionNumbersTree,
    strict: bool = True,
) -> tuple[list[MatrixView | None], list[tuple[str, bool]]]:
    """For each leaf its view, and by which rule it was read and whether one knew it."""
    specs: Sequence[DimensionNumbers | None]
    with recorded(strict) as readings:
        if dimension_numbers is None:
            specs = dimension_numbers_by_rule(tree, paths, arrays)
        else:
            specs = by_path(
                dimension_numbers,
                tree,
                paths,
                is_dimension_numbers,
                "dimension numbers",
                "MuonDimensionNumbers, MatrixSpec, or None for AdamW",
            )
    here = set(paths)
    elsewhere = [p for p, reading in readings.found.items() if not (reading.known or p in here)]
    if elsewhere and not strict:  # rules were asked about a part of the tree: let them say which
        return _views(tree, paths, arrays, dimension_numbers)
    views, rules, wrong = [], [], []
    for path, x, spec in zip(paths, arrays, specs, strict=True):
        reading = readings.found.get(path)
        asked = reading is not None and reading.dimension_numbers == spec
        rules.append((reading.rule, reading.known) if asked else (GIVEN, True))
        try:
            views.append(None if spec is None else matrix_view(np.shape(x), spec))
        except ValueError as error:
            wrong.append(f"{path_name(path)}: {error}")
    if wrong:
        raise ValueError("Dimension numbers do not fit. " + " ".join(wrong))
    return views, rules


def partition_labels(
    params: Any, muon_weight_dimension_numbers: DimensionNumbersTree = None
) -> Any:
    """``"muon"`` or ``"adam"`` for every parameter: the labels for ``optax.partition``.

    Args:
      params: parameters or updates.
      muon_weight_dimension_numbers: as in :func:`optax_muonplus.muonplus`.
    """
    paths, arrays, unflatten = flatten_tree(params)
    views, _ = _views(params, paths, arrays, muon_weight_dimension_numbers)
    return unflatten(ADAM if view is None else MUON for view in views)


def check_only_matrices(leaves: Sequence[LeafInfo]) -> None:
    """Raises ValueError unless all ``leaves`` are floating-point matrices."""
    check_inexact(leaves)
    others = [leaf.name for leaf in leaves if leaf.view is None]
    if others:
        raise ValueError(
            f"Not matrices: {', '.join(others)}. This transformation is for matrices only: leave"
            " the others to AdamW with optax_muonplus.muonplus, or with optax.partition and"
            " optax_muonplus.partition_labels; or give these leaves dimension numbers."
        )


def check_inexact(leaves: Sequence[LeafInfo]) -> None:
    """As :func:`check_inexact_dtypes`, for resolved leaves."""
    check_inexact_dtypes([leaf.path for leaf in leaves], [leaf.dtype for leaf in leaves])
