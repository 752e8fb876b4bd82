"""One record for each leaf of a tree of parameters or updates, resolved once."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from optax_muonplus.frame import (
    GIVEN,
    DimensionNumbers,
    DimensionNumbersTree,
    LeafInfo,
    LeafSharding,
    MatrixLayout,
    Path,
    ResolvedTree,
    flatten_tree,
    path_name,
)
from optax_muonplus.trees.given_trees import by_path, is_function
from optax_muonplus.trees.heads import PerHead
from optax_muonplus.trees.models import check_parameters
from optax_muonplus.trees.reader import Reading, check_known, muon_dimension_numbers, read
from optax_muonplus.trees.sharding import ShardingTree, given_shardings, leaf_sharding


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
    leaves, arrays, unflatten = read_leaves(tree, dimension_numbers, strict)
    if sharding is not None:
        given = given_shardings(tree, [leaf.path for leaf in leaves], sharding)
        leaves = [x._replace(given_sharding=entry) for x, entry in zip(leaves, given, strict=True)]
    resolved = ResolvedTree(leaves, arrays, unflatten)
    matrices = resolved.matrices
    for leaf, known in zip(matrices, shardings_of(resolved, matrices), strict=True):
        leaves[leaf.index] = leaf._replace(sharding=known)
    return resolved


def all_shardings(tree: ResolvedTree) -> list[LeafSharding | None]:
    """How each leaf lies on a mesh, whether it is a matrix or not."""
    return shardings_of(tree, tree.leaves)


def shardings_of(tree: ResolvedTree, leaves: Sequence[LeafInfo]) -> list[LeafSharding | None]:
    """How some of the leaves lie on a mesh; ValueError names all for which that cannot be."""
    shardings, wrong = [], []
    meshes: dict[Any, str] = {}
    for leaf in leaves:
        try:
            known = leaf_sharding(tree.arrays[leaf.index], leaf.given_sharding, leaf.layout)
        except ValueError as error:
            wrong.append(f"{leaf.name}: {error}")
            continue
        shardings.append(known)
        if known is not None:
            sizes = tuple(known.mesh.shape.items())
            meshes.setdefault(sizes, f"{leaf.name} is on {known.mesh}")
    if len(meshes) > 1:
        wrong.append(f"all parameters must be on one mesh, but {' and '.join(meshes.values())}")
    if wrong:
        raise ValueError(f"Shardings do not fit. {'; '.join(wrong)}.")
    return shardings


def read_leaves(tree: Any, given: DimensionNumbersTree, strict: bool = True) -> ResolvedTree:
    """Resolves ``tree``, but for shardings."""
    paths, arrays, unflatten = flatten_tree(tree)
    check_parameters(tree, paths, arrays)
    readings = _read(tree, paths, arrays, given)
    if strict:
        _check_not_flat(readings)
        check_known(readings)
    leaves, wrong = [], []
    for i, (found, x) in enumerate(zip(readings, arrays, strict=True)):
        path, shape, spec, rule, known, stack = found
        try:
            layout = None if spec is None else MatrixLayout.of(shape, spec)
        except ValueError as error:
            wrong.append(f"{path_name(path)}: {error}")
        else:
            dtype = jnp.result_type(x)
            own = LeafInfo(i, path, shape, dtype, layout, rule=rule, known=known, stack=stack)
            leaves.append(own)
    if wrong:
        raise ValueError("Dimension numbers do not fit. " + " ".join(wrong))
    return ResolvedTree(leaves, arrays, unflatten)


def _check_not_flat(readings: Sequence[Reading]) -> None:
    """Raises ValueError for parameters that are one vector, without any name."""
    if [(x.path, len(x.shape)) for x in readings] == [((), 1)]:
        raise ValueError(
            f"The parameters are one vector of shape {readings[0].shape}: nothing in it is a"
            " matrix, and all of it would get AdamW. optax.flatten and ravel_pytree make such"
            " vectors: leave them out, so that parameters come as a tree. A vector that is meant"
            " needs a name, as in {'bias': ...}."
        )


def _read(
    tree: Any, paths: Sequence[Path], arrays: Sequence[Any], given: DimensionNumbersTree
) -> list[Reading]:
    """What each leaf is: by rules, or by a tree of dimension numbers or a function to one."""
    read_by = functools.partial(read, tree, paths, arrays)
    if isinstance(given, PerHead):
        return given.read(tree, paths, arrays)
    if given is None or given is muon_dimension_numbers:
        return read_by()
    is_partial = isinstance(given, functools.partial) and not given.args
    if is_partial and given.func is muon_dimension_numbers:
        return read_by(**given.keywords)
    expected = "MuonDimensionNumbers, MatrixSpec, or None for AdamW"
    specs = by_path(given, tree, paths, DimensionNumbers | None, "dimension numbers", expected)
    own = [
        Reading(path, jnp.shape(x), spec, getattr(spec, "rule", "") or GIVEN)
        for path, x, spec in zip(paths, arrays, specs, strict=True)
    ]
    if not is_function(given):
        return own
    # A function may call rules, and its None cannot say by which: the default ones may agree.
    pairs = zip(own, read_by(), strict=True)
    return [default if x.is_adamw and default.is_adamw else x for x, default in pairs]
