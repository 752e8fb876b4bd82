"""Attention heads as matrices of their own: which parameters hold heads, and where they are cut."""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from optax_muonplus._parameters.dimension_numbers import (
    Axes,
    DimensionNumbers,
    MatrixSpec,
    MatrixView,
    MuonDimensionNumbers,
    matrix_view,
)
from optax_muonplus._parameters.folding import fold_all
from optax_muonplus._parameters.partition import readings_by_rule, settled
from optax_muonplus._parameters.paths import Path, flatten_tree
from optax_muonplus._parameters.reader import names_to_read
from optax_muonplus._parameters.readings import Reading


def _layers(names: str) -> re.Pattern[str]:
    return re.compile(rf"(?i)(?P<module>(.*/)?)({names})(/(kernel|w|weight))?$")


# Names of layers; several letters are fused projections. Last are the up-projections of latent
# attention (MLA): its down-projections (q_a_proj, wkv_a) have no heads.
_KIND = r"(_?(proj(ection)?|einsum|attn|lin|dense))?"
_QUERY = _layers(
    rf"(q|qkv|query|query_key_value){_KIND}|(w_?|to_|c_|linear_|in_proj_)(q|qkv)|c_attn"
    r"|in_proj_weight|q_proj_weight|wq_b|q_b_proj|q_up(_proj)?|w_?uq"
)
_KEY_VALUE = _layers(
    rf"(k|v|kv|key|value|key_value){_KIND}|(w_?|to_|c_|linear_)(k|v|kv)|[kv]_proj_weight"
    r"|wkv_b|kv_b_proj|(k|v|kv)_up(_proj)?|w_?u(k|v|kv)"
)
_OUTPUT = _layers(
    r"o|out|w_?o|c_o|c_proj|to_out|to_out/0|(attn_)?o(ut)?_proj|out_(lin|dense)|linear_out"
    r"|output_proj(ection)?|attention_output|attn_vec_einsum"
)


def per_head(
    head_size: int | Mapping[str, int] | None = None,
    *,
    output: bool = False,
    rules: Iterable[Sequence[Any]] = (),
    layer_axes: Mapping[str, Axes] | None = None,
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
      to cut. A fused kernel is cut likewise, whether queries, keys and values follow each other or
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
      layer_axes: likewise.

    Returns:
      A function from parameters or updates to a tree of dimension numbers.

    Raises:
      ValueError: for sizes that are not positive integers; and by the returned function, as by
        :func:`muon_dimension_numbers`, and if nothing is a projection, a size is missing, does not
        divide or is not the one in the shape, or a pattern finds no matrix.
    """
    by_name = not isinstance(head_size, Mapping)
    sizes = {"": head_size} if by_name else dict(head_size)
    for size in sizes.values():
        is_count = isinstance(size, int | np.integer) and not isinstance(size, bool) and size >= 1
        if not is_count and not (by_name and size is None):
            raise ValueError(
                "head_size must be a positive integer, the outputs of one head, or a mapping from"
                f" patterns to such; got {head_size!r}."
            )
    if not sizes:
        raise ValueError("head_size={} chooses no parameter. Give a size, or patterns and sizes.")
    return _PerHead(sizes, by_name, output, tuple(rules), layer_axes)


@dataclasses.dataclass(frozen=True, eq=False)
class _PerHead:
    """The function that :func:`per_head` returns."""

    sizes: Mapping[str, int | None]
    by_name: bool
    output: bool
    rules: tuple[Sequence[Any], ...]
    layer_axes: Mapping[str, Axes] | None

    def __call__(self, params: Any) -> Any:
        paths, leaves, unflatten = flatten_tree(params)
        read = readings_by_rule(params, paths, leaves, self.rules, self.layer_axes)
        chosen = self._chosen(paths, read)
        readings, faults = list(read), collections.defaultdict(list)
        for i, (pattern, inputs) in chosen.items():
            spec, shape = read[i].dimension_numbers, np.shape(leaves[i])
            assert spec is not None
            try:
                spec = _cut(matrix_view(shape, spec), inputs, self.sizes[pattern])
            except ValueError as error:
                faults[str(error)].append(("/".join(paths[i]), shape))
            readings[i] = Reading(spec, f"{read[i].rule}; per head")
        numbers = settled(paths, leaves, readings)
        if faults:
            shown = (
                f"{', '.join(f'{name} {shape}' for name, shape in fold_all(where))}: {fault}"
                for fault, where in faults.items()
            )
            raise ValueError(f"Heads cannot be cut. {' '.join(shown)}")
        if all(reading.known for reading in read):
            self._check_found(chosen, paths)
        return unflatten(numbers)

    def _chosen(
        self, paths: Sequence[Path], readings: Sequence[Reading]
    ) -> dict[int, tuple[str, bool]]:
        """By index the pattern that found a parameter, and whether its heads are its inputs."""
        names = names_to_read(paths)
        with_queries = {m["module"] for name in names if (m := _QUERY.match(name))}
        chosen = {}
        for i, (path, name) in enumerate(zip(paths, names, strict=True)):
            pattern = next((p for p in self.sizes if re.search(p, "/".join(path))), None)
            if readings[i].dimension_numbers is None or pattern is None:
                continue
            known = _QUERY.match(name) or _KEY_VALUE.match(name) or _OUTPUT.match(name)
            if self.by_name and not (known and known["module"] in with_queries):
                continue
            inputs = known is not None and known.re is _OUTPUT
            if self.output or not inputs:
                chosen[i] = pattern, inputs
        return chosen

    def _check_found(self, chosen: Mapping[int, tuple[str, bool]], paths: Sequence[Path]) -> None:
        """Raises ValueError if nothing was chosen of what was asked for."""
        found = {pattern for pattern, _ in chosen.values()}
        idle = [pattern for pattern in self.sizes if pattern not in found]
        if idle and not self.by_name:
            what = f"Patterns of head_size that find no matrix to cut: {', '.join(map(repr, idle))}"
        elif not any(not inputs for _, inputs in chosen.values()) and self.by_name:
            what = "No layer has the name of a query, key or value projection"
        elif self.output and not any(inputs for _, inputs in chosen.values()):
            what = "output=True, but no layer beside a query has the name of an output projection"
        else:
            return
        shown = ", ".join(name for name, _ in fold_all(("/".join(path), None) for path in paths))
        raise ValueError(
            f"{what}. The paths are: {shown}. omp.per_head({{pattern: head_size}}) chooses"
            " parameters by patterns on their paths, to be cut along their outputs; a rule with"
            " MatrixSpec or MuonDimensionNumbers says any other cut."
        )


def _cut(view: MatrixView, inputs: bool, size: int | None) -> DimensionNumbers:
    """Dimension numbers of the heads of a parameter, which are its outputs or its inputs."""
    axes = view.reduction_axes if inputs else view.output_axes
    side = "inputs" if inputs else "outputs"
    if len(axes) > 1:  # the last one is within a head, by all conventions that are known
        if size not in (None, view.shape[axes[-1]]):
            raise ValueError(
                f"the shape says that a head has {view.shape[axes[-1]]} {side}, and head_size is"
                f" {size}. Where sizes differ, give omp.per_head({{pattern: head_size, ...}})."
            )
        return _with_side(view, axes[-1:], inputs, view.split_sizes, view.split_axis)
    (axis,) = axes
    if view.split_axis not in (None, axis):
        raise ValueError(f"split along axis {view.split_axis}, and heads lie on axis {axis}.")
    if size is None:
        raise ValueError(
            f"heads lie side by side among {view.shape[axis]} {side}, and the shape does not"
            " say how long one is. Give omp.per_head(head_size), d_model / heads in most models."
        )
    blocks = view.split_sizes or (view.shape[axis],)
    if any(block % size for block in blocks):
        raise ValueError(
            f"head_size {size} does not divide {' + '.join(map(str, blocks))} {side}. Give the"
            " size of one head, or omp.per_head({pattern: head_size, ...}) where they differ."
        )
    cut = tuple(size for block in blocks for _ in range(block // size))
    return _with_side(view, axes, inputs, cut, axis)


def _with_side(
    view: MatrixView,
    axes: tuple[int, ...],
    inputs: bool,
    sizes: tuple[int, ...],
    axis: int | None,
) -> DimensionNumbers:
    """The dimension numbers of ``view`` with other axes on one side, split or not."""
    reduction = axes if inputs else view.reduction_axes
    output = view.output_axes if inputs else axes
    if axis is None or axis not in reduction + output:
        return MuonDimensionNumbers(reduction, output)
    return MatrixSpec(reduction, output, sizes, axis)
