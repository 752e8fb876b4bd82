"""Attention heads as matrices of their own: which parameters hold heads, and where they are cut."""

import collections
import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from optax_muonplus._chain.layout import DimensionNumbers, MatrixLayout
from optax_muonplus._chain.paths import listed
from optax_muonplus._chain.record import LeafInfo
from optax_muonplus._params.flatten import FlatTree, normalize_paths
from optax_muonplus._params.patterns import (
    LayerAxes,
    Rules,
    check_pattern,
    parse_layer_axes,
    parse_rules,
)
from optax_muonplus._params.reader import RuleReader, with_layouts

QUERY, FUSED, KEY, VALUE, OUTPUT = "query", "fused", "key", "value", "output"
_SUFFIX = r"(_?(proj(ection)?|einsum|attn|lin|dense))?"
# Names of layers; FUSED holds queries, keys and values, and VALUE may hold keys too. Last are the
# up-projections of latent attention (MLA): its down-projections (q_a_proj, wkv_a) have no heads.
_LAYERS = {
    QUERY: rf"(q|query){_SUFFIX}|(w_?|to_|c_|linear_|in_proj_)q|q_proj_weight"
    r"|wq_b|q_b_proj|q_up(_proj)?|w_?uq",
    FUSED: rf"(qkv|query_key_value){_SUFFIX}|(w_?|to_|c_|linear_|in_proj_)qkv|c_attn"
    r"|in_proj_weight",
    KEY: rf"(k|key){_SUFFIX}|(w_?|to_|c_|linear_)k|k_proj_weight|k_up(_proj)?|w_?uk",
    VALUE: rf"(v|kv|value|key_value){_SUFFIX}|(w_?|to_|c_|linear_)(v|kv)|v_proj_weight"
    r"|wkv_b|kv_b_proj|(v|kv)_up(_proj)?|w_?u(v|kv)",
    OUTPUT: r"o|out|w_?o|c_o|c_proj|to_out|to_out/0|(attn_)?o(ut)?_proj|out_(lin|dense)|linear_out"
    r"|output_proj(ection)?|attention_output|attn_vec_einsum",
}


def per_head(
    head_size: int | Mapping[str, int] | None = None,
    *,
    output: bool = False,
    rules: Rules = (),
    layer_axes: LayerAxes = None,
) -> Callable[[Any], Any]:
    """Dimension numbers by which each attention head is a matrix of its own: per-head Muon.

    For ``muon_weight_dimension_numbers`` of any optimizer here, and for ``describe``::

      omp.muonplus(0.02, muon_weight_dimension_numbers=omp.per_head(64))

    Parameters are read as by :func:`muon_dimension_numbers`, with the same ``rules`` and
    ``layer_axes``. Query, key and value projections are then cut along their outputs: one of n
    heads of size k on width d is n matrices of (out, in) = (k, d), each with a polar factor, norms
    and a shape factor of its own, sqrt(k/d) in place of sqrt(n k/d). They are found by the names
    of their layers (``query``, ``q_proj``, ``wq``, ``qkv``, ``c_attn``, ``kv_b_proj``, ...), in
    modules that have a query projection.

    - Where heads have an axis of their own, as in (d, n, k), all output axes but the last number
      heads, and the shape says the size. Keys and values may have fewer heads than queries.
    - Where they lie side by side on one axis, as in (d, n k) or (n k, d), ``head_size`` says where
      to cut. So it does in a fused kernel, whether queries, keys and values follow each other or
      take turns head by head: each block of ``head_size`` outputs is one head.

    Output projections stay whole unless ``output``: heads are read apart from each other, but the
    output sums over all of them, as over the inputs of one matrix. Kimi K3 (arXiv:2607.24653,
    section 2.5), DeepSpeed and Megatron-LM cut query, key and value too, and GLM-5
    (arXiv:2602.15763) the up-projections of latent attention.

    Args:
      head_size: outputs of one head, which shapes of two axes do not say. A mapping from patterns,
        searched in paths, to sizes chooses the parameters, whatever their names: the first pattern
        found decides, and parameters with none stay whole.
      output: whether output projections are cut along their inputs too, n matrices of (d, k).
      rules: as in :func:`muon_dimension_numbers`.
      layer_axes: as in :func:`muon_dimension_numbers`.

    Returns:
      A function from parameters or updates to a tree of dimension numbers.

    Raises:
      ValueError: for sizes that are not positive integers; and by the returned function, as by
        :func:`muon_dimension_numbers`, and if nothing is a projection, a size is missing, does not
        divide or is not the one in the shape, or a pattern finds no matrix.
    """
    by_name = not isinstance(head_size, Mapping)
    sizes = {"": head_size} if by_name else dict(head_size)
    entries = [size for size in sizes.values() if not (by_name and size is None)]
    counts = [x for x in entries if isinstance(x, int | np.integer) and x is not True and x >= 1]
    if not sizes or len(counts) < len(entries):
        raise ValueError(
            "head_size must be a positive integer, the outputs of one head, or a mapping from"
            f" patterns to such; got {head_size!r:.60}. As dimension numbers write omp.per_head()."
        )
    for pattern in sizes:
        check_pattern(pattern)
    return PerHead(parse_rules(rules), parse_layer_axes(layer_axes), sizes, by_name, output)


@dataclasses.dataclass(frozen=True, eq=False)
class PerHead(RuleReader):
    """The reader that :func:`per_head` returns.

    Attributes:
      sizes: outputs of one head, by patterns of paths.
      by_name: whether the names of layers choose the parameters, and not the patterns alone.
      output: whether output projections are cut too.
    """

    sizes: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    by_name: bool = True
    output: bool = False

    def read(self, tree: FlatTree) -> list[LeafInfo]:
        """Reads leaves by the rules, and cuts those that hold heads."""
        leaves = super().read(tree)
        left_out = [side_of(name) for name in normalize_paths(tree.holes)]
        chosen = self._chosen(leaves, left_out)
        faults = collections.defaultdict(list)
        for i, (pattern, inputs) in chosen.items():
            try:
                numbers = _numbers(leaves[i].matrix, inputs, self.sizes[pattern])
            except ValueError as error:
                faults[str(error)].append((leaves[i].name, leaves[i].shape))
            else:
                rule = f"{leaves[i].rule}; per head"
                leaves[i] = leaves[i]._replace(dimension_numbers=numbers, rule=rule)
        leaves = with_layouts(leaves)
        if not all(leaf.known for leaf in leaves):
            return leaves  # those that no rule can read come first
        if faults:
            shown = (f"{listed(where)}: {fault}" for fault, where in faults.items())
            raise ValueError(f"Heads cannot be cut. {' '.join(shown)}")
        if not tree.has_masks:
            found = [*chosen.values(), *(("", side == OUTPUT) for side, _ in left_out if side)]
            self._check_found(found, tree)
        return leaves

    def _chosen(
        self, leaves: Sequence[LeafInfo], left_out: Sequence[tuple[str, str]]
    ) -> dict[int, tuple[str, bool]]:
        """Finds by index the pattern of a parameter, and whether its heads are its inputs."""
        sides = [side_of(name) for name in normalize_paths([x.path for x in leaves])]
        with_queries = {module for side, module in (*sides, *left_out) if side in (QUERY, FUSED)}
        chosen = {}
        for i, (leaf, (side, module)) in enumerate(zip(leaves, sides, strict=True)):
            name = "/".join(leaf.path)
            pattern = next((p for p in self.sizes if re.search(p, name)), None)
            named = not self.by_name or (side and module in with_queries)
            whole = leaf.layout is None or (side == OUTPUT and not self.output)
            if pattern is not None and named and not whole:
                chosen[i] = pattern, side == OUTPUT
        return chosen

    def _check_found(self, chosen: Collection[tuple[str, bool]], tree: FlatTree) -> None:
        """Raises ValueError if nothing was chosen of what was asked for."""
        used, sides = {x for x, _ in chosen}, {inputs for _, inputs in chosen}
        idle = [x for x in self.sizes if x not in used and not tree.could_match_masked(x)]
        if idle and not self.by_name:
            what = f"Patterns of head_size that find no matrix to cut: {', '.join(map(repr, idle))}"
        elif self.by_name and False not in sides:
            what = "No layer has the name of a query, key or value projection"
        elif self.output and True not in sides:
            what = "output=True, but no layer next to a query has the name of an output projection"
        else:
            return
        raise ValueError(
            f"{what}. The paths are: {listed((name, None) for name in tree.names)}."
            " omp.per_head({pattern: head_size}) chooses parameters by their paths, to be cut along"
            " their outputs; a rule with MatrixSpec says any other cut."
        )


def side_of(name: str) -> tuple[str, str]:
    """Tells which heads a layer holds, if any, and the module that it is in."""
    for side, layers in _LAYERS.items():
        found = re.match(rf"(?i)(?P<module>(.*/)?)({layers})(/(kernel|w|weight))?$", name)
        if found:
            return side, found["module"]
    return "", ""


def _numbers(layout: MatrixLayout, inputs: bool, size: int | None) -> DimensionNumbers:
    """Returns dimension numbers of the heads among the outputs, or inputs, of a parameter."""
    field, side = ("reduction_axes", "inputs") if inputs else ("output_axes", "outputs")
    *numbering, axis = getattr(layout, field)
    if numbering:  # the last axis is within a head, by all conventions that are known
        if size not in (None, layout.shape[axis]):
            raise ValueError(
                f"the shape says that a head has {layout.shape[axis]} {side}, and head_size is"
                f" {size}. Where sizes differ, give omp.per_head({{pattern: head_size, ...}})."
            )
        if layout.split_axis in numbering:  # each index is a head, of whichever block
            layout = dataclasses.replace(layout, split_axis=None, split_sizes=())
        return dataclasses.replace(layout, **{field: (axis,)}).dimension_numbers()
    if layout.split_axis not in (None, axis):
        raise ValueError(f"split along axis {layout.split_axis}, and heads lie on axis {axis}.")
    if size is None:
        raise ValueError(
            f"heads lie side by side among {layout.shape[axis]} {side}, and the shape does not"
            " say how long one is. Give omp.per_head(head_size), d_model / heads in most models."
        )
    blocks = layout.split_sizes or (layout.shape[axis],)
    if any(block % size for block in blocks):
        raise ValueError(
            f"head_size {size} does not divide {' + '.join(map(str, blocks))} {side}. Give the"
            " size of one head, or omp.per_head({pattern: head_size, ...}) where they differ."
        )
    cut = tuple(size for block in blocks for _ in range(block // size))
    return dataclasses.replace(layout, split_axis=axis, split_sizes=cut).dimension_numbers()
