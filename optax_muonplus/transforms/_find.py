"""The matrices in a tree, for those who measure or treat them outside of a chain."""

from collections.abc import Sequence
from typing import Any

import jax

from optax_muonplus.frame import DimensionNumbersTree, LeafInfo
from optax_muonplus.trees import (
    LayerAxes,
    Rules,
    ShardingTree,
    check_patterns,
    reader_of,
    select,
)


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
    reader = reader_of(weight_dimension_numbers, rules, layer_axes)
    patterns = check_patterns(only)
    return select(tree, patterns, reader, sharding) if jax.tree.leaves(tree) else []
