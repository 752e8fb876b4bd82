"""Labels of a tree for ``optax.partition``, and whether a link reads it as they do."""

import contextvars
from typing import Any

from optax_muonplus._parameters.given_rules import by_rules
from optax_muonplus._parameters.given_trees import has_masks
from optax_muonplus._parameters.leaves import ResolvedTree, read_leaves
from optax_muonplus._parameters.matrix_spec import DimensionNumbersTree
from optax_muonplus._parameters.matrix_view import MatrixView
from optax_muonplus._parameters.paths import Path
from optax_muonplus._parameters.user_rules import LayerAxes, Rules

# The views of the last labels that were made with dimension numbers of the user's own, by path.
_labelled: contextvars.ContextVar[dict[Path, MatrixView | None] | None]
_labelled = contextvars.ContextVar("_labelled", default=None)


def partition_labels(
    params: Any,
    muon_weight_dimension_numbers: DimensionNumbersTree = None,
    *,
    rules: Rules = (),
    layer_axes: LayerAxes = None,
) -> Any:
    """``"muon"`` or ``"adam"`` for every parameter: the labels for ``optax.partition``.

    Dimension numbers say here which leaves are matrices. The links that work on them need the same
    ones: give them to :func:`optax_muonplus.matrix_chain` too, which is an error to forget.

    Args:
      params: parameters or updates.
      muon_weight_dimension_numbers: as in :func:`optax_muonplus.muonplus`, like the next two.
      rules: in place of dimension numbers.
      layer_axes: with ``rules`` or without.
    """
    dims = by_rules(muon_weight_dimension_numbers, rules, layer_axes)
    tree = read_leaves(params, dims)
    by_default = dims is None
    _labelled.set(None if by_default else {leaf.path: leaf.view for leaf in tree.leaves})
    return tree.unflatten(leaf.label for leaf in tree.leaves)


def check_labelled(resolved: ResolvedTree, tree: Any) -> None:
    """Raises ValueError if the last labels read a matrix in another way than the default rules do.

    ``optax.partition`` hands on labels, but not the dimension numbers that they were made with. Its
    group ``tree`` has masks in place of other leaves; ``resolved`` is it, by the default rules.
    """
    labelled = _labelled.get() or {}
    if not labelled or not has_masks(tree):
        return
    for leaf in resolved.matrices:
        view = labelled.get(leaf.path)
        if view is not None and view.shape == leaf.shape and view != leaf.view:
            raise ValueError(
                f"{leaf.name}: partition_labels was given dimension numbers, and this link reads"
                " the matrix by the default rules. Pass the same ones to the links:"
                " optax_muonplus.matrix_chain(..., weight_dimension_numbers=...)."
            )
