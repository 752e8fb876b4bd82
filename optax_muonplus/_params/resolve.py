"""The records of all leaves of a tree."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from optax_muonplus._leaves.paths import VALUE, list_paths
from optax_muonplus._leaves.record import LeafInfo, ResolvedTree
from optax_muonplus._params.flatten import FlatTree
from optax_muonplus._params.reader import Reader, check_known
from optax_muonplus._params.sharding import ShardingTree, broadcast_shardings, shardings_of


def resolve(
    tree: Any, reader: Reader, sharding: ShardingTree = None, strict: bool = True
) -> ResolvedTree:
    """Reads all leaves of ``tree``; with ``strict``, one that no rule fits is an error."""
    flat = FlatTree.of(tree)
    if not flat.paths:  # a placeholder of optax.tree.map_params
        return ResolvedTree([], [], flat.unflatten, flat.unflatten([]))
    dtypes = _dtypes(flat)
    leaves = reader.read(flat)
    if strict:
        _warn_of_one_vector(leaves)
        check_known(leaves)
    leaves = [leaf._replace(dtype=dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
    if sharding is not None:
        given = broadcast_shardings(flat, sharding)
        leaves = [x._replace(given_sharding=entry) for x, entry in zip(leaves, given, strict=True)]
    labels = _without_boxes(flat.unflatten(leaf.label for leaf in leaves))
    resolved = ResolvedTree(leaves, flat.arrays, flat.unflatten, labels)
    matrices = resolved.matrices
    for leaf, known in zip(matrices, shardings_of(resolved, matrices), strict=True):
        leaves[leaf.index] = leaf._replace(sharding=known)
    return resolved


def _dtypes(tree: FlatTree) -> list[Any]:
    """Returns the dtype of each leaf; raises ValueError if one has none, such as a function."""
    dtypes = [_dtype_or_none(x) for x in tree.arrays]
    rows = zip(tree.names, tree.arrays, dtypes, strict=True)
    wrong = [(name, f"({x!r})") for name, x, dtype in rows if dtype is None]
    if wrong:
        raise ValueError(
            f"Parameters must be arrays, got {list_paths(wrong)}. In Equinox pass"
            " eqx.filter(model, eqx.is_inexact_array)."
        )
    return dtypes


def _dtype_or_none(x: Any) -> Any:
    """Returns the dtype of an array or a number; None for anything else."""
    try:
        return None if isinstance(x, str | type) else jnp.result_type(x)  # "f4" names a dtype
    except TypeError:
        return None


def _without_boxes(labels: Any) -> Any:
    """Replaces each Flax Variable, or box of Linen's metadata, in ``labels`` by its label."""
    # Optax replaces the label of an omitted parameter by a MaskedNode. Inside a Variable it would
    # be a value without dtype or shape.

    def boxed(x: Any) -> Any:
        level = jax.tree_util.default_registry.flatten_one_level_with_keys(x)
        children = [] if level is None else list(level[0])
        return children[0][1] if [key for key, _ in children] == [VALUE] else None

    def is_box(x: Any) -> bool:
        return isinstance(boxed(x), str)

    return jax.tree.map(lambda x: boxed(x) or x, labels, is_leaf=is_box)


def _warn_of_one_vector(leaves: list[LeafInfo]) -> None:
    """Warns if the parameters are one flat vector, which AdamW gets whole."""
    if [(x.path, len(x.shape)) for x in leaves] == [((), 1)]:
        warnings.warn(
            f"The parameters are one vector of shape {leaves[0].shape}: nothing in it is a matrix,"
            " and all of it gets AdamW. Pass a tree of parameters, without optax.flatten or"
            " ravel_pytree.",
            stacklevel=2,
        )
