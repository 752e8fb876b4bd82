"""Which matrices of a tree are chosen by patterns on their paths."""

import difflib
import math
import re
from collections.abc import Sequence
from typing import Any

from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree
from optax_muonplus._parameters.leaves import LeafInfo, resolve
from optax_muonplus._parameters.paths import flatten_with_names
from optax_muonplus._parameters.sharding import ShardingTree


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
) -> list[LeafInfo]:
    """The matrices of ``tree`` whose path matches one of the patterns, in order.

    Args:
      tree: parameters or updates.
      only: searched in paths; None means all matrices.
      dimension_numbers: as in :func:`optax_muonplus.muonplus`.
      sharding: likewise.

    Raises:
      ValueError: for a pattern that matches no matrix's path, and if nothing is a matrix.
    """
    resolved = resolve(tree, dimension_numbers, sharding)
    matrices = resolved.matrices
    if not resolved.leaves:  # the placeholder that optax.tree.map_params asks about has no leaves
        return []
    if not matrices:
        shapes = ", ".join(f"{leaf.name} {leaf.shape}" for leaf in resolved.leaves)
        raise ValueError(
            f"There is no matrix, and so no rows and columns, among {shapes}. Say with dimension"
            " numbers how they are matrices, or leave this part of the tree out."
        )
    others = [leaf.name for leaf in resolved.leaves if leaf.view is None]
    for pattern in only or ():
        if not any(pattern.search(leaf.name) for leaf in matrices):
            raise ValueError(_unmatched(pattern, [leaf.name for leaf in matrices], others))
    if only is None:
        return matrices
    return [leaf for leaf in matrices if any(pattern.search(leaf.name) for pattern in only)]


def by_name(leaves: Sequence[LeafInfo], tree: Any) -> dict[str, Any]:
    """The arrays of ``tree`` that ``leaves`` are the records of, by path."""
    _, arrays = flatten_with_names(tree)
    return {leaf.name: arrays[leaf.index] for leaf in leaves}


def _unmatched(pattern: re.Pattern[str], paths: list[str], others: list[str]) -> str:
    vectors = [path for path in others if pattern.search(path)]
    if vectors:
        return (
            f"only={pattern.pattern!r} matches {', '.join(vectors)}, which are not matrices"
            " and have no rows and columns to measure: AdamW updates them. Leave the pattern out,"
            " or give them dimension numbers."
        )
    near = difflib.get_close_matches(pattern.pattern, paths, n=5, cutoff=math.ulp(0))
    return (
        f"only={pattern.pattern!r} matches no matrix. The nearest paths are {', '.join(near)}."
        " Patterns are regular expressions, searched in the path."
    )
