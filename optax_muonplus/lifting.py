"""The one place where a function on matrices becomes a function on a tree of parameters.

Views, blocks and precision are dealt with here; grouping by shape and placement on a mesh belong
here too. What is lifted sees arrays ``(*batch, out, in)`` and nothing else.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_muonplus.dimension_numbers import DimensionNumbersTree, flatten_with_names
from optax_muonplus.partition import LeafPlan, plan

MatrixFunction = Callable[[jax.Array], jax.Array]


def apply_to_matrices(
    function: MatrixFunction, tree: Any, dimension_numbers: DimensionNumbersTree = None
) -> Any:
    """Applies ``function`` to every matrix of every leaf of ``tree``.

    Args:
      function: shape-preserving function of arrays ``(batch, out, in)``.
      tree: updates; every leaf must be a matrix.
      dimension_numbers: as in :func:`optax_muonplus.muonplus`.

    Returns:
      A tree of ``tree``'s structure, shapes and dtypes.
    """
    plans = check_matrices(tree, dimension_numbers)
    results = [_apply_to_leaf(function, leaf_plan) for leaf_plan in plans]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), results)


def _apply_to_leaf(function: MatrixFunction, leaf_plan: LeafPlan) -> jax.Array:
    view = leaf_plan.view
    assert view is not None  # check_matrices
    leaf = jnp.asarray(leaf_plan.leaf)
    matrices = [function(matrix) for matrix in view.to_matrices(leaf)]
    return view.from_matrices(matrices).astype(leaf.dtype)


def check_matrices(tree: Any, dimension_numbers: DimensionNumbersTree = None) -> list[LeafPlan]:
    """The plan of each leaf of ``tree``; an error unless all are floating-point matrices."""
    plans = plan(tree, dimension_numbers)
    check_inexact(tree)
    vectors = [p.path for p in plans if p.view is None]
    if vectors:
        raise ValueError(
            f"Not matrices: {', '.join(vectors)}. This transformation is for matrices only: leave"
            " the others to AdamW with optax_muonplus.muonplus, or with optax.partition and"
            " optax_muonplus.partition_labels; or give these leaves dimension numbers."
        )
    return plans


def check_function(
    function: MatrixFunction, tree: Any, dimension_numbers: DimensionNumbersTree = None
) -> None:
    """Raises ValueError unless ``function`` is defined, and keeps the shape, on all matrices.

    Nothing is computed: each distinct shape is traced once.
    """
    shapes: dict[jax.ShapeDtypeStruct, str] = {}
    for path, leaf, view in check_matrices(tree, dimension_numbers):
        for shape in view.block_shapes() if view else ():
            shapes.setdefault(jax.ShapeDtypeStruct(shape, jnp.result_type(leaf)), path)
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
