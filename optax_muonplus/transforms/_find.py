"""The matrices in a tree, for those who measure or treat them outside of a chain."""

import difflib
import math
import re
from collections.abc import Sequence
from typing import Any

import jax

from optax_muonplus.frame.layout import DimensionNumbersTree
from optax_muonplus.frame.record import LeafInfo
from optax_muonplus.trees.flatten import FlatTree
from optax_muonplus.trees.given import LayerAxes, Rules, refuse_keystr
from optax_muonplus.trees.reader import reader_of
from optax_muonplus.trees.resolve import resolve
from optax_muonplus.trees.sharding import ShardingTree


def find_matrices(
    tree: Any,
    only: str | Sequence[str] | None = None,
    *,
    weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
    rules: Rules = (),
    layer_axes: LayerAxes = None,
) -> list[LeafInfo]:
    """Finds the matrices among the leaves of a tree of parameters or updates.

    Args:
      tree: parameters, gradients or updates.
      only: regular expressions, searched in paths such as ``blocks/0/attn/query/kernel``; None
        means all matrices.
      weight_dimension_numbers: as in :func:`optax_muonplus.muonplus`, as are the next three.
      sharding: where the leaves lie.
      rules: in place of dimension numbers.
      layer_axes: with ``rules`` or without.

    Returns:
      One record for each matrix leaf, in the order of the tree; none for a tree without leaves.

    Raises:
      ValueError: for a tree without matrices, and for patterns that are no regular expressions, or
        match no matrix.

    Example:
      >>> import jax.numpy as jnp, optax_muonplus as omp
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> [leaf.name for leaf in omp.transforms.find_matrices(params)]
      ['dense/kernel']
    """
    patterns = _patterns(only)
    reader = reader_of(weight_dimension_numbers, rules, layer_axes)
    if not jax.tree.leaves(tree):  # optax.tree.map_params asks about such a placeholder
        return []
    leaves = resolve(tree, reader, sharding).leaves
    matrices = [leaf for leaf in leaves if leaf.layout is not None]
    if not matrices:
        shapes = ", ".join(f"{leaf.name} {leaf.shape}" for leaf in leaves)
        raise ValueError(
            f"There is no matrix, and so no rows and columns, among {shapes}. Say with dimension"
            " numbers how they are matrices, or leave this part of the tree out."
        )
    if patterns is None:
        return matrices
    for pattern in patterns:
        _check_found(pattern, leaves, tree)
    return [leaf for leaf in matrices if any(pattern.search(leaf.name) for pattern in patterns)]


def _patterns(only: Sequence[str] | None) -> tuple[re.Pattern[str], ...] | None:
    """Compiles ``only``; raises ValueError for what is no regular expression."""
    if only is None:
        return None
    given = (only,) if isinstance(only, str) else tuple(only)
    if not given:
        raise ValueError("only=() chooses no matrix. Pass regular expressions, or None for all.")
    try:
        compiled = tuple(re.compile(pattern) for pattern in given)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"only={only!r} must be regular expressions, searched in paths such as"
            f" blocks/0/attn/query/kernel: {error}."
        ) from error
    for pattern in given:
        refuse_keystr(pattern, "only")
    return compiled


def _check_found(pattern: re.Pattern[str], leaves: Sequence[LeafInfo], tree: Any) -> None:
    """Raises ValueError for a pattern that finds no matrix, and none that was left out."""
    found = [leaf for leaf in leaves if pattern.search(leaf.name)]
    if any(leaf.layout is not None for leaf in found):
        return
    if found:
        raise ValueError(
            f"only={pattern.pattern!r} matches {', '.join(leaf.name for leaf in found)}, which"
            " are not matrices and have no rows and columns to measure: AdamW updates them."
            " Leave the pattern out, or give them dimension numbers."
        )
    if FlatTree.of(tree).could_match_masked(pattern.pattern):
        return
    paths = [leaf.name for leaf in leaves if leaf.layout is not None]
    near = difflib.get_close_matches(pattern.pattern, paths, n=5, cutoff=math.ulp(0))
    raise ValueError(
        f"only={pattern.pattern!r} matches no matrix. The nearest paths are {', '.join(near)}."
        " Patterns are regular expressions, searched in the path."
    )
