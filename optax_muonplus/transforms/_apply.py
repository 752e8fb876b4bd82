"""The one place where functions on matrices become functions on a tree of parameters.

Views, blocks and precision are dealt with here, groups of equal shapes in ``grouping``, meshes in
``sharded``. What is lifted sees stacks of whole matrices and nothing else.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_muonplus._mesh.sharded import Layout, apply_sharded
from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree, MatrixView
from optax_muonplus._parameters.partition import plan
from optax_muonplus._parameters.paths import flatten_with_names, path_name
from optax_muonplus._parameters.sharding import ShardingTree, homes
from optax_muonplus.matrices._batching import Stored, apply_grouped, where_they_were
from optax_muonplus.matrices._matrix_function import MatrixFunction, in_turn


def apply_to_matrices(
    functions: Sequence[MatrixFunction],
    tree: Any,
    dimension_numbers: DimensionNumbersTree = None,
    *,
    sharding: ShardingTree = None,
    moved_as: Any = None,
    like: Any = None,
) -> Any:
    """Applies ``functions``, one after the other, to every matrix of every leaf of ``tree``.

    Args:
      functions: shape-preserving functions of matrices.
      tree: updates; every leaf must be a matrix.
      dimension_numbers: as in :func:`optax_muonplus.muonplus`.
      sharding: likewise.
      moved_as: dtype in which sharded matrices travel to where they are worked on, if it is
        narrower than theirs and has its exponents.
      like: tree whose dtypes the results have; None means ``tree``.

    Returns:
      A tree of ``tree``'s structure, shapes and shardings.
    """
    views = check_matrices(tree, dimension_numbers)
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    dtypes = [jnp.result_type(x) for x in jax.tree.leaves(tree if like is None else like)]
    known = homes(tree, sharding)
    here = [i for i, home in enumerate(known) if home is None]
    there = {i: home for i, home in enumerate(known) if home is not None}
    done = _apply_here(functions, [arrays[i] for i in here], [views[i] for i in here])
    results = dict(zip(here, done, strict=True))
    layouts = [Layout(views[i], home, arrays[i].dtype, dtypes[i]) for i, home in there.items()]
    done = apply_sharded(functions, [arrays[i] for i in there], layouts, moved_as)
    results |= zip(there, done, strict=True)
    return treedef.unflatten([results[i].astype(dtype) for i, dtype in enumerate(dtypes)])


def _apply_here(
    functions: Sequence[MatrixFunction], arrays: Sequence[jax.Array], views: Sequence[MatrixView]
) -> list[jax.Array]:
    """On one device, or as the compiler distributes it."""
    parts = [view.to_matrices(x) for x, view in zip(arrays, views, strict=True)]
    blocks = [
        Stored(x, view.transposed) for part, view in zip(parts, views, strict=True) for x in part
    ]
    done = iter(where_they_were(blocks, apply_grouped(functions, blocks)))
    return [
        view.from_matrices([next(done) for _ in part])
        for part, view in zip(parts, views, strict=True)
    ]


def apply_in_place(
    function: Callable[..., tuple[jax.Array, ...]],
    dimension_numbers: DimensionNumbersTree,
    results: int,
    tree: Any,
    *others: Any,
) -> tuple[Any, ...]:
    """Applies ``function`` to every block of every leaf of ``tree`` as it lies.

    For rules that work number by number and need sums over rows or matrices: nothing is turned,
    stacked or moved, and of what lies in shards only the sums are.

    Args:
      function: of the leaf's :class:`MatrixView`, a block of the leaf, and those of ``others``. It
        sums over ``view.output_axes`` and ``view.reduction_axes``.
      dimension_numbers: as in :func:`optax_muonplus.muonplus`.
      results: the number of arrays that ``function`` returns.
      tree: updates; every leaf must be a matrix.
      others: trees of the same structure, with leaves of the same shapes or statistics of their
        rows or matrices, whose summed axes have size 1 (one for each block, where blocks are fused
        along them).

    Returns:
      As many trees as ``results``.
    """
    views = check_matrices(tree, dimension_numbers)
    treedef = jax.tree_util.tree_structure(tree)
    columns = [treedef.flatten_up_to(each) for each in (tree, *others)]
    done: list[list[jax.Array]] = [[] for _ in range(results)]
    for view, *leaves in zip(views, *columns, strict=True):
        blocks = zip(*(view.cut(jnp.asarray(leaf)) for leaf in leaves), strict=True)
        parts = zip(*(function(view, *block) for block in blocks), strict=True)
        for into, part in zip(done, parts, strict=True):
            into.append(view.join(part))
    return tuple(treedef.unflatten(leaves) for leaves in done)


def check_matrices(tree: Any, dimension_numbers: DimensionNumbersTree = None) -> list[MatrixView]:
    """The view of each leaf of ``tree``; an error unless all are floating-point matrices."""
    plans = plan(tree, dimension_numbers)
    check_inexact(tree)
    vectors = [p.path for p in plans if p.view is None]
    if vectors:
        raise ValueError(
            f"Not matrices: {', '.join(vectors)}. This transformation is for matrices only: leave"
            " the others to AdamW with optax_muonplus.muonplus, or with optax.partition and"
            " optax_muonplus.partition_labels; or give these leaves dimension numbers."
        )
    return [p.view for p in plans if p.view is not None]


def check_function(
    functions: Sequence[MatrixFunction], tree: Any, dimension_numbers: DimensionNumbersTree = None
) -> None:
    """Raises ValueError unless ``functions`` are defined, and keep the shape, on all matrices.

    Nothing is computed: each distinct shape is traced once.
    """
    function = in_turn(functions).of(False)
    shapes: dict[jax.ShapeDtypeStruct, str] = {}
    names, leaves = flatten_with_names(tree)
    views = check_matrices(tree, dimension_numbers)
    for path, leaf, view in zip(names, leaves, views, strict=True):
        for shape in view.block_shapes():
            probe = jax.ShapeDtypeStruct(shape, jnp.result_type(leaf))
            shapes.setdefault(probe, path_name(path))
    for probe, path in shapes.items():
        try:
            result = jax.eval_shape(function, probe)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if getattr(result, "shape", None) != probe.shape:
            raise ValueError(
                f"{path}: a function on matrices must map arrays (*batch, out, in) to arrays of the"
                f" same shape; for {probe.shape} it gave {getattr(result, 'shape', result)}."
            )


def check_inexact(tree: Any) -> None:
    """Raises ValueError for leaves that are not floating-point or complex, naming them."""
    names, leaves = flatten_with_names(tree)
    wrong = [
        f"{'/'.join(path)} ({jnp.result_type(leaf)})"
        for path, leaf in zip(names, leaves, strict=True)
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    ]
    if wrong:
        raise ValueError(
            f"Parameters must be floating-point, got {', '.join(wrong)}. Keep counters and keys out"
            " of the parameters, or freeze them with optax.masked or optax.partition."
        )
