"""Which matrices of a tree are meant by patterns on their paths."""

import difflib
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import NamedSharding

from optax_muonplus._parameters.dimension_numbers import (
    DimensionNumbers,
    DimensionNumbersTree,
    MatrixView,
    resolve,
)
from optax_muonplus._parameters.partition import muon_dimension_numbers, plan
from optax_muonplus._parameters.paths import flatten_with_names
from optax_muonplus._parameters.sharding import ShardingTree, given_shardings


class Target(NamedTuple):
    """A parameter that is a matrix, or several.

    Attributes:
      path: as in ``blocks/0/attn/query/kernel``.
      index: its place among the leaves of the tree.
      spec: its dimension numbers.
      view: its matrices.
      sharding: its entry in the argument ``sharding``.
    """

    path: str
    index: int
    spec: DimensionNumbers
    view: MatrixView
    sharding: NamedSharding | None

    @property
    def batch(self) -> tuple[int, ...]:
        """Sizes of the batch axes and, if there are several, the number of fused blocks."""
        blocks = len(self.view.split_sizes)
        sizes = tuple(self.view.shape[axis] for axis in self.view.batch_axes)
        return (*sizes, blocks) if blocks else sizes


def check_patterns(only: Sequence[str] | None) -> tuple[re.Pattern[str], ...] | None:
    """``only``, compiled."""
    if only is None:
        return None
    given = (only,) if isinstance(only, str) else tuple(only)
    if not given:
        raise ValueError("only=() chooses no matrix. Pass regular expressions, or None for all.")
    try:
        return tuple(re.compile(pattern) for pattern in given)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"only={only!r} must be regular expressions, searched in paths such as"
            f" blocks/0/attn/query/kernel: {error}."
        ) from error


def select(
    tree: Any,
    only: Sequence[re.Pattern[str]] | None = None,
    dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
) -> list[Target]:
    """The matrices of ``tree`` whose path one of the patterns is found in, in order.

    Args:
      tree: parameters or updates.
      only: None means all.
      dimension_numbers: as in :func:`optax_muonplus.muonplus`.
      sharding: likewise.

    Raises:
      ValueError: for a pattern that is found in no matrix's path, and if nothing is a matrix.
    """
    specs = resolve(dimension_numbers, tree, muon_dimension_numbers)
    known = given_shardings(tree, sharding)
    plans = plan(tree, dimension_numbers)
    targets = [
        Target(own.path, i, spec, own.view, place)
        for i, (own, spec, place) in enumerate(zip(plans, specs, known, strict=True))
        if own.view is not None and spec is not None
    ]
    if not plans:  # the placeholder that optax.tree.map_params asks about has no leaves
        return []
    if not targets:
        shapes = ", ".join(f"{own.path} {np.shape(own.leaf)}" for own in plans)
        raise ValueError(
            f"There is no matrix, and so no rows and columns, among {shapes}. Say with dimension"
            " numbers how they are matrices, or leave this part of the tree out."
        )
    others = [own.path for own in plans if own.view is None]
    for pattern in only or ():
        if not any(pattern.search(target.path) for target in targets):
            raise ValueError(_unmatched(pattern, [target.path for target in targets], others))
    if only is None:
        return targets
    return [t for t in targets if any(pattern.search(t.path) for pattern in only)]


def by_target(targets: Sequence[Target], tree: Any) -> dict[str, Any]:
    """The leaves of ``tree`` that are targets, by path."""
    leaves = flatten_with_names(tree)[1]
    return {target.path: leaves[target.index] for target in targets}


def _unmatched(pattern: re.Pattern[str], paths: list[str], others: list[str]) -> str:
    hit = [path for path in others if pattern.search(path)]
    if hit:
        return (
            f"only={pattern.pattern!r} matches {', '.join(hit)}, which are not matrices and have no"
            " rows and columns to measure: AdamW updates them. Leave the pattern out, or give them"
            " dimension numbers."
        )
    near = difflib.get_close_matches(pattern.pattern, paths, n=5, cutoff=math.ulp(0))
    return (
        f"only={pattern.pattern!r} matches no matrix. The nearest paths are {', '.join(near)}."
        " Patterns are regular expressions, searched in the path."
    )
