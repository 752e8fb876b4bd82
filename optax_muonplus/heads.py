"""Attention heads as separate matrices: which parameters hold heads, and where they are cut."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from optax_muonplus._core.arguments import known_count
from optax_muonplus._leaves.layout import DimensionNumbers, MatrixLayout
from optax_muonplus._leaves.paths import list_paths
from optax_muonplus._leaves.record import LeafInfo
from optax_muonplus._params.attention import attention_layer
from optax_muonplus._params.flatten import FlatTree, normalize_paths
from optax_muonplus._params.patterns import (
    LayerAxes,
    Rules,
    check_patterns,
    parse_layer_axes,
    parse_rules,
)
from optax_muonplus._params.reader import PER_HEAD, RuleReader


def per_head(
    head_size: int | Mapping[str, int] | None = None,
    *,
    rules: Rules = (),
    layer_axes: LayerAxes = None,
) -> Callable[[Any], Any]:
    """Dimension numbers that make each attention head a matrix of its own: per-head Muon.

    For ``muon_weight_dimension_numbers`` of any optimizer here, and for ``describe``::

      omp.muonplus(0.02, muon_weight_dimension_numbers=omp.per_head(64))

    Parameters are read as by :func:`muon_dimension_numbers`, with the same ``rules`` and
    ``layer_axes``. Query, key and value projections are then cut along their outputs. With n heads
    of size k on width d, one projection is n matrices of (out, in) = (k, d). Each has its own polar
    factor, norms and shape factor, sqrt(k/d) in place of sqrt(n k/d). Projections are found by the
    names of their layers (``query``, ``q_proj``, ``wq``, ``qkv``, ``c_attn``, ``kv_b_proj``, ...),
    in modules that have a query projection.

    - Heads on separate axes, as in (d, n, k): the last output axis is one head, the others number
      heads. Keys and values may have fewer heads than queries.
    - Heads side by side on one axis, as in (d, n k) or (n k, d): each block of ``head_size``
      outputs is one head. The same holds in a fused kernel, in which queries, keys and values
      follow each other or take turns head by head.

    Output projections stay whole, since they sum over all heads. Kimi K3 (arXiv:2607.24653,
    section 2.5), DeepSpeed and Megatron-LM also cut query, key and value, and GLM-5
    (arXiv:2602.15763) cuts the up-projections of latent attention.

    Args:
      head_size: outputs of one head; needed where heads lie side by side. A mapping from patterns,
        searched in paths, to sizes chooses the parameters, whatever their names. The first pattern
        found decides, and parameters without one stay whole.
      rules: as in :func:`muon_dimension_numbers`.
      layer_axes: as in :func:`muon_dimension_numbers`.

    Returns:
      A function from parameters or updates to a tree of dimension numbers. It raises the errors of
      :func:`muon_dimension_numbers`, and ValueError if no layer is a query projection, if a pattern
      matches no matrix, or if a size is missing, does not divide or differs from the shape's.

    Raises:
      ValueError: for a size below 1, malformed rules, and invalid regular expressions.
    """
    by_name = not isinstance(head_size, Mapping)
    sizes = {"": head_size} if by_name else dict(head_size)
    for size in sizes.values():
        known_count("head_size of omp.per_head(head_size)", 1 if size is None else size)
    check_patterns("omp.per_head", [*sizes])
    return PerHead(parse_rules(rules), parse_layer_axes(layer_axes), sizes, by_name)


@dataclasses.dataclass(frozen=True, eq=False)
class PerHead(RuleReader):
    """The reader that :func:`per_head` returns."""

    # Outputs of one head, by patterns of paths.
    sizes: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    by_name: bool = True  # whether the layer must also have the name of a projection

    def read(self, tree: FlatTree) -> list[LeafInfo]:
        """Reads leaves by the rules, then cuts those that hold heads."""
        leaves = super().read(tree)
        chosen = self._chosen(leaves, tree)
        faults = []
        for i, pattern in chosen.items():
            leaf = leaves[i]
            try:
                numbers = _numbers(leaf.matrix, self.sizes[pattern])
                layout = MatrixLayout.of(leaf.shape, numbers)
            except ValueError as error:
                faults.append((leaf.name, f"{leaf.shape}: {error}"))
            else:
                rule = leaf.rule + PER_HEAD
                leaves[i] = leaf._replace(layout=layout, dimension_numbers=numbers, rule=rule)
        idle = self.sizes.keys() - chosen.values()
        if idle and not tree.holes:
            what = "no matrix matches " + ", ".join(map(repr, sorted(idle)))
            what = "no layer has the name of a query projection" if self.by_name else what
            names = list_paths((name, None) for name in tree.names)
            faults.append((what, f"among {names}: choose by omp.per_head({{pattern: head_size}})"))
        if faults and all(leaf.known for leaf in leaves):  # unknown leaves are reported first
            raise ValueError(f"Heads cannot be cut. {list_paths(faults)}")
        return leaves

    def _chosen(self, leaves: Sequence[LeafInfo], tree: FlatTree) -> dict[int, str]:
        """Returns the patterns of the parameters to cut, by index."""
        layers = map(attention_layer, normalize_paths([*tree.paths, *tree.holes]))
        layers = [x or (None, "") for x in layers]  # other layers are in no module of attention
        with_queries = {module for module, outputs in layers if "query" in outputs}
        chosen = {}
        for leaf, path, (module, outputs) in zip(leaves, tree.names, layers, strict=False):
            pattern = next((p for p in self.sizes if re.search(p, path)), None)
            named = not self.by_name or (module in with_queries and outputs != "output")
            if pattern is not None and named and leaf.layout is not None:
                chosen[leaf.index] = pattern
        return chosen


def _numbers(layout: MatrixLayout, size: int | None) -> DimensionNumbers:
    *numbering, axis = layout.output_axes
    if numbering:  # in all known conventions the last axis is one head
        if size not in (None, layout.shape[axis]):
            raise ValueError(
                f"a head has {layout.shape[axis]} outputs by its shape, but head_size is {size}."
                " Where sizes differ, give omp.per_head({pattern: head_size, ...})."
            )
        if layout.split_axis in numbering:  # each index is a head, so blocks do not matter
            layout = dataclasses.replace(layout, split_axis=None, split_sizes=())
        return dataclasses.replace(layout, output_axes=(axis,)).dimension_numbers()
    blocks = layout.split_sizes or (layout.shape[axis],)
    if size is None or layout.split_axis not in (None, axis) or any(n % size for n in blocks):
        raise ValueError(
            f"heads lie side by side among {' + '.join(map(str, blocks))} outputs, which head_size"
            f" {size} does not divide. Give omp.per_head(head_size), d_model / heads in most"
            " models, or omp.per_head({pattern: head_size, ...}) where sizes differ."
        )
    cut = tuple(size for block in blocks for _ in range(block // size))
    return dataclasses.replace(layout, split_axis=axis, split_sizes=cut).dimension_numbers()
