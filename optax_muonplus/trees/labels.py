"""Labels of a tree for ``optax.partition``."""

from typing import Any

from optax_muonplus.frame import DimensionNumbersTree
from optax_muonplus.trees.given_rules import by_rules
from optax_muonplus.trees.leaves import read_leaves
from optax_muonplus.trees.user_rules import LayerAxes, Rules


def partition_labels(
    params: Any,
    muon_weight_dimension_numbers: DimensionNumbersTree = None,
    *,
    rules: Rules = (),
    layer_axes: LayerAxes = None,
) -> Any:
    """``"muon"`` or ``"adam"`` for every parameter: the labels for ``optax.partition``.

    Labels say which leaves are matrices, and not how they lie. Give the links that work on them the
    same dimension numbers, ``omp.matrix_chain(..., weight_dimension_numbers=...)``: a link without
    them reads each matrix by the default rules, and nothing compares the two.

    Args:
      params: parameters or updates.
      muon_weight_dimension_numbers: as in :func:`optax_muonplus.muonplus`, like the next two.
      rules: in place of dimension numbers.
      layer_axes: with ``rules`` or without.
    """
    tree = read_leaves(params, by_rules(muon_weight_dimension_numbers, rules, layer_axes))
    return tree.unflatten(leaf.label for leaf in tree.leaves)
