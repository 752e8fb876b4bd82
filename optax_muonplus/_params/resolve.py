"""Records of all leaves of a tree."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_muonplus._chain.checks import check_inexact
from optax_muonplus._leaves.layout import DimensionNumbers, DimensionNumbersTree
from optax_muonplus._leaves.paths import VALUE
from optax_muonplus._leaves.record import LeafInfo, ResolvedTree
from optax_muonplus._params.flatten import FlatTree, broadcast_prefix
from optax_muonplus._params.reader import RuleReader, check_known, with_layouts
from optax_muonplus._params.sharding import (
    ShardingTree,
    broadcast_shardings,
    shardings_of,
)


def resolve(
    tree: Any,
    dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
    strict: bool = True,
) -> ResolvedTree:
    """Looks up each leaf of ``tree``: arrays, or anything with a shape and dtype.

    Raises ValueError if dimension numbers or shardings do not cover the tree or do not fit a leaf,
    and for leaves that no rule can read unless ``strict`` is False, which marks them unknown.
    """
    flat = FlatTree.of(tree)
    if not flat.paths:  # the placeholder for parameters by which optax.tree.map_params finds them
        return ResolvedTree([], [], flat.unflatten, flat.unflatten([]))
    leaves = _read(flat, dimension_numbers, strict)
    if sharding is not None:
        given = broadcast_shardings(flat, sharding)
        leaves = [x._replace(given_sharding=entry) for x, entry in zip(leaves, given, strict=True)]
    labels = _without_boxes(flat.unflatten(leaf.label for leaf in leaves))
    resolved = ResolvedTree(leaves, flat.arrays, flat.unflatten, labels)
    matrices = resolved.matrices
    for leaf, known in zip(matrices, shardings_of(resolved, matrices), strict=True):
        leaves[leaf.index] = leaf._replace(sharding=known)
    return resolved


def _read(tree: FlatTree, given: DimensionNumbersTree, strict: bool) -> list[LeafInfo]:
    """Makes the records of leaves, but for shardings."""
    given = RuleReader() if given is None else given
    numbers = int | float | complex
    pairs = zip(tree.paths, tree.arrays, strict=True)
    if odd := [p for p, x in pairs if not (hasattr(x, "dtype") or isinstance(x, numbers))]:
        check_inexact(odd, [np.dtype(object)] * len(odd))
    if isinstance(given, RuleReader):
        leaves = given.read(tree)
    else:
        expected = "MuonDimensionNumbers, MatrixSpec, or None for AdamW"
        kinds = DimensionNumbers | None
        specs = broadcast_prefix(given, tree, kinds, "dimension numbers", expected)
        pairs = zip(tree.records(), specs, strict=True)
        leaves = with_layouts(leaf._replace(dimension_numbers=spec) for leaf, spec in pairs)
    if strict:
        _warn_of_one_vector(leaves)
        check_known(leaves)
    dtypes = map(jnp.result_type, tree.arrays)
    return [leaf._replace(dtype=dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]


def _without_boxes(labels: Any) -> Any:
    """Replaces each Flax Variable, or box of Linen's metadata, in ``labels`` by its label.

    Where Optax leaves a parameter out, it puts a ``MaskedNode`` in the place of the label. Inside
    of a Variable it would be the value, which has no dtype or shape when the Variable is used.
    """

    def boxed(x: Any) -> Any:
        level = jax.tree_util.default_registry.flatten_one_level_with_keys(x)
        children = [] if level is None else list(level[0])
        return children[0][1] if [key for key, _ in children] == [VALUE] else None

    def is_box(x: Any) -> bool:
        return isinstance(boxed(x), str)

    return jax.tree.map(lambda x: boxed(x) or x, labels, is_leaf=is_box)


def _warn_of_one_vector(leaves: list[LeafInfo]) -> None:
    """Warns of parameters that are one vector, without any name: AdamW gets all of it."""
    if [(x.path, len(x.shape)) for x in leaves] == [((), 1)]:
        warnings.warn(
            f"The parameters are one vector of shape {leaves[0].shape}: nothing in it is a matrix,"
            " and all of it gets AdamW. optax.flatten and ravel_pytree make such vectors: leave"
            " them out, so that parameters come as a tree.",
            stacklevel=2,
        )
