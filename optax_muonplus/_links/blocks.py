"""Elementwise rules with sums over rows or matrices, applied to each leaf as it is stored."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_muonplus._leaves.layout import MatrixLayout
from optax_muonplus._leaves.record import LeafInfo


def map_blocks(
    function: Callable[..., Any],
    leaves: Sequence[LeafInfo],
    tree: Any,
    *others: Any,
    n_results: int | None = None,
) -> Any:
    """Applies ``function`` to every block of every leaf of ``tree``, as it is stored.

    For elementwise rules that need sums over rows or matrices. Nothing is transposed, stacked or
    moved between devices, except the sums of sharded leaves.

    Args:
      function: takes the :class:`MatrixLayout` of a run of equal blocks, that run of the leaf, and
        the same run of each of ``others``. It sums over ``layout.output_axes`` and
        ``layout.reduction_axes``.
      leaves: records of the leaves of ``tree``, all matrices.
      tree: updates.
      others: trees of the same structure. Leaves have the same shapes, or are statistics of rows,
        columns or matrices, with size 1 along summed axes (one for each block along fused axes).
      n_results: how many arrays ``function`` returns in a tuple; None for one array.

    Returns:
      A tree of the results, or ``n_results`` trees.
    """
    arrays, treedef = jax.tree.flatten(tree)
    columns = [arrays, *(treedef.flatten_up_to(other) for other in others)]
    results: list[list[jax.Array]] = [[] for _ in range(n_results or 1)]
    for leaf, *inputs in zip(leaves, *columns, strict=True):
        layout = _cut_without_reshape(leaf.matrix, inputs[0])
        blocks = zip(layout.runs(), *(layout.cut(jnp.asarray(x)) for x in inputs), strict=True)
        outputs = [function(run, *block) for run, *block in blocks]
        parts = [outputs] if n_results is None else zip(*outputs, strict=True)
        for result, part in zip(results, parts, strict=True):
            result.append(_join(leaf.name, layout, part))
    trees = tuple(treedef.unflatten(result) for result in results)
    return trees[0] if n_results is None else trees


def _join(name: str, layout: MatrixLayout, results: Sequence[jax.Array]) -> jax.Array:
    """Joins the results of runs; raises ValueError if they were summed over different axes."""
    axis = layout.split_axis
    if axis is not None:
        made, blocks = [x.shape for x in results], [run.shape for run in layout.runs()]
        # A run of several blocks has one more axis, which numbers them, in front of the fused one.
        fused = [axis + len(block) - len(layout.shape) for block in blocks]
        others = {(x[:axis], x[i + 1 :]) for x, i in zip(made, fused, strict=True)}
        sums = {x[i] == 1 for x, y, i in zip(made, blocks, fused, strict=True) if y[i] > 1}
        if len(others) > 1 or len(sums) > 1:
            raise ValueError(
                f"{name}: blocks of shapes {', '.join(map(str, blocks))} have results of shapes"
                f" {', '.join(map(str, made))}, summed over different axes, which do not join."
                " A rule by the longer side needs blocks that are all tall, all wide or all square."
                ' Split the parameter, or choose a rule by rows, such as NorMuon(side="row").'
            )
    return layout.join(results)


def _cut_without_reshape(layout: MatrixLayout, x: Any) -> MatrixLayout:
    """Keeps blocks separate if an Explicit mesh axis cuts their axis, which forbids a reshape."""
    axis = layout.split_axis
    if axis is None or jax.typeof(jnp.asarray(x)).sharding.spec[axis] is None:
        return layout
    return dataclasses.replace(layout, separate=True)
