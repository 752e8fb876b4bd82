"""Which axes of a parameter make a matrix, and the way from there to ``(batch, out, in)`` and back.

This is the only place that knows about the layout of parameters.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from optax import MaskedNode
from optax.contrib import MuonDimensionNumbers

Axes = int | Sequence[int]


@dataclasses.dataclass(frozen=True)
class MatrixSpec:
    """Dimension numbers of a parameter that holds several matrices side by side on one axis.

    A fused QKV kernel ``(d, 3 d)`` is ``MatrixSpec(0, 1, split_sizes=(d, d, d))``; a fused gate and
    up projection ``(d, 2 f)`` is ``MatrixSpec(0, 1, split_sizes=(f, f))``. Each block is
    orthogonalized, normalized and scaled by itself, as if it were a parameter of its own.

    Attributes:
      reduction_axis: axis or axes that the layer sums over (fan-in), as in
        ``optax.contrib.MuonDimensionNumbers``.
      output_axis: axis or axes of the layer's output (fan-out). Axes in neither are batch axes:
        every index along them is a matrix of its own.
      split_sizes: sizes of the blocks along ``split_axis``; None means one block.
      split_axis: the fused axis, one of the axes above. None means ``output_axis``, if that is one
        axis.
    """

    reduction_axis: Axes = 0
    output_axis: Axes = 1
    split_sizes: tuple[int, ...] | None = None
    split_axis: int | None = None


DimensionNumbers = MuonDimensionNumbers | MatrixSpec
# A tree or prefix tree of dimension numbers and None, or a function from parameters to one.
DimensionNumbersTree = Any


def is_dimension_numbers(x: Any) -> bool:
    """Whether ``x`` is one of the two forms of dimension numbers."""
    return isinstance(x, MuonDimensionNumbers | MatrixSpec)


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """The way from one parameter of a known shape to its matrices.

    Attributes:
      shape: shape of the parameter.
      batch_axes: axes along which every index is a matrix of its own.
      output_axes: axes that are flattened into rows.
      reduction_axes: axes that are flattened into columns.
      split_axis: axis that is cut into blocks, or None.
      split_sizes: sizes of the blocks; empty if there is one block.
    """

    shape: tuple[int, ...]
    batch_axes: tuple[int, ...]
    output_axes: tuple[int, ...]
    reduction_axes: tuple[int, ...]
    split_axis: int | None = None
    split_sizes: tuple[int, ...] = ()

    @property
    def transposed(self) -> bool:
        """Whether matrices lie in memory as (in, out), so that reading them so copies nothing."""
        return min(self.reduction_axes) < min(self.output_axes)

    def block_shapes(self) -> list[tuple[int, int, int]]:
        """``(batch, out, in)`` of each block."""
        return [self._matrix_shape(block) for block in self._blocks()]

    def to_matrices(self, x: jax.Array) -> list[jax.Array]:
        """The blocks of ``x`` as arrays ``(batch, out, in)``, or (batch, in, out) if transposed."""
        return [
            part.transpose(self._order()).reshape(self._stored_shape(part.shape))
            for part in self._cut(x)
        ]

    def from_matrices(self, matrices: Sequence[jax.Array]) -> jax.Array:
        """The inverse of :meth:`to_matrices`."""
        order = self._order()
        inverse = tuple(order.index(axis) for axis in range(len(order)))
        parts = [
            matrix.reshape([block[axis] for axis in order]).transpose(inverse)
            for matrix, block in zip(matrices, self._blocks(), strict=True)
        ]
        return parts[0] if self.split_axis is None else jnp.concatenate(parts, self.split_axis)

    def _order(self) -> tuple[int, ...]:
        if self.transposed:
            return self.batch_axes + self.reduction_axes + self.output_axes
        return self.batch_axes + self.output_axes + self.reduction_axes

    def _stored_shape(self, block: Sequence[int]) -> tuple[int, int, int]:
        batch, rows, columns = self._matrix_shape(block)
        return (batch, columns, rows) if self.transposed else (batch, rows, columns)

    def _matrix_shape(self, block: Sequence[int]) -> tuple[int, int, int]:
        def size(axes: tuple[int, ...]) -> int:
            return math.prod(block[axis] for axis in axes)

        return size(self.batch_axes), size(self.output_axes), size(self.reduction_axes)

    def _blocks(self) -> list[tuple[int, ...]]:
        axis = self.split_axis
        if axis is None:
            return [self.shape]
        return [(*self.shape[:axis], n, *self.shape[axis + 1 :]) for n in self.split_sizes]

    def _cut(self, x: jax.Array) -> list[jax.Array]:
        axis = self.split_axis
        if axis is None:
            return [x]
        stops = [sum(self.split_sizes[: i + 1]) for i in range(len(self.split_sizes))]
        return [
            jax.lax.slice_in_dim(x, stop - size, stop, axis=axis)
            for stop, size in zip(stops, self.split_sizes, strict=True)
        ]


def matrix_view(shape: Sequence[int], spec: DimensionNumbers) -> MatrixView:
    """The view of a parameter of ``shape`` that ``spec`` describes.

    Raises:
      ValueError: if the parameter has fewer than two axes or an empty one, an axis does not exist
        or is named twice, a side has no axis, or split sizes do not add up.
    """
    shape = tuple(shape)
    if len(shape) < 2:
        raise ValueError(
            f"a parameter of shape {shape} is not a matrix, but was given {spec}. Parameters of"
            " fewer than two axes belong to the AdamW group: give None."
        )
    if 0 in shape:
        raise ValueError(f"a parameter of shape {shape} has an empty axis; leave it out.")
    reduction = _axes(shape, spec.reduction_axis, "reduction_axis", spec)
    output = _axes(shape, spec.output_axis, "output_axis", spec)
    if set(reduction) & set(output):
        raise ValueError(
            f"reduction axes {reduction} and output axes {output} of {spec} overlap for shape"
            f" {shape}. Each axis belongs to one side, or to neither (a batch axis)."
        )
    batch = tuple(axis for axis in range(len(shape)) if axis not in reduction + output)
    if not isinstance(spec, MatrixSpec) or spec.split_sizes is None:
        return MatrixView(shape, batch, output, reduction)
    split_axis = _split_axis(shape, reduction + output, output, spec)
    return MatrixView(shape, batch, output, reduction, split_axis, tuple(spec.split_sizes))


def _axes(shape: tuple[int, ...], axes: Axes, name: str, spec: DimensionNumbers) -> tuple[int, ...]:
    """``axes`` as non-negative numbers, in the given order, which is the order of flattening."""
    given = (axes,) if isinstance(axes, int) else tuple(axes)
    ndim = len(shape)
    if not given or not all(-ndim <= axis < ndim for axis in given):
        raise ValueError(f"{name} of {spec} must name one or more of the axes of shape {shape}.")
    found = tuple(axis % ndim for axis in given)
    if len(set(found)) < len(found):
        raise ValueError(f"{name} of {spec} names an axis of shape {shape} twice.")
    return found


def _split_axis(
    shape: tuple[int, ...], matrix_axes: tuple[int, ...], output: tuple[int, ...], spec: MatrixSpec
) -> int:
    """The fused axis, checked against the sizes of its blocks."""
    sizes = spec.split_sizes or ()
    if spec.split_axis is None and len(output) > 1:
        raise ValueError(
            f"{spec} has several output axes {output}: name the fused one, split_axis."
        )
    axis = output[0] if spec.split_axis is None else spec.split_axis
    if not -len(shape) <= axis < len(shape) or axis % len(shape) not in matrix_axes:
        raise ValueError(
            f"split_axis of {spec} must be one of the reduction or output axes {matrix_axes} of"
            f" shape {shape}; indices along a batch axis are separate matrices already."
        )
    axis %= len(shape)
    if not sizes or min(sizes) < 1 or sum(sizes) != shape[axis]:
        raise ValueError(
            f"split_sizes {sizes} must be positive and add up to {shape[axis]}, the size of axis"
            f" {axis} of shape {shape}; they add up to {sum(sizes)}."
        )
    return axis


def flatten_with_names(
    tree: Any, is_leaf: Callable[[Any], bool] = lambda x: False
) -> tuple[list[tuple[str, ...]], list[Any]]:
    """The leaves of ``tree``, in order, and the names on their paths.

    A path is ``('blocks', '0', 'qkv', 'kernel')``. Flax NNX variables add a last ``value`` at init
    that is gone at update: it is dropped, where nothing else stands beside it. Names with slashes
    in them, as Haiku's, count as several.
    """
    with_path, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: _is_hole(x) or is_leaf(x)
    )
    beside = collections.Counter(path[:-1] for path, _ in with_path)
    variable = jax.tree_util.GetAttrKey("value")
    names, leaves = [], []
    for path, leaf in with_path:
        if _is_hole(leaf) and not is_leaf(leaf):
            continue
        if path and path[-1] == variable and beside[path[:-1]] == 1:
            path = path[:-1]
        joined = jax.tree_util.keystr(path, simple=True, separator="/")
        names.append(tuple(name for name in joined.split("/") if name))
        leaves.append(leaf)
    return names, leaves


def _is_hole(x: Any) -> bool:
    """Where a leaf was taken out; it still counts as standing beside others."""
    return x is None or isinstance(x, MaskedNode)


def resolve(
    dimension_numbers: DimensionNumbersTree, tree: Any, default: Callable[[Any], Any]
) -> list[DimensionNumbers | None]:
    """The dimension numbers of each leaf of ``tree``, in order; None means not a matrix.

    Leaves are matched by their paths, so that dimension numbers written for one container (a dict)
    serve the same parameters in another (FrozenDict, nnx.State). An entry higher up in the tree
    holds for everything below it.

    Args:
      dimension_numbers: tree, prefix tree, function of ``tree``, or None for the default.
      tree: parameters or updates; arrays or anything with a shape.
      default: function of ``tree`` that stands for ``dimension_numbers=None``.

    Raises:
      ValueError: if a leaf is covered by no entry, or an entry covers no leaf.
    """
    if dimension_numbers is None:
        dimension_numbers = default
    # A tree may be callable itself: an Equinox module that holds dimension numbers is.
    if callable(dimension_numbers) and jax.tree_util.all_leaves([dimension_numbers]):
        dimension_numbers = dimension_numbers(tree)
    entries = _entries(dimension_numbers)
    names, _ = flatten_with_names(tree)
    used: set[tuple[str, ...]] = set()
    found, uncovered = [], []
    for path in names:
        prefixes = [path[:n] for n in range(len(path), -1, -1) if path[:n] in entries]
        if not prefixes:
            uncovered.append("/".join(path))
            continue
        used.add(prefixes[0])
        found.append(entries[prefixes[0]])
    # None beside no leaf is how Equinox and optax.masked write "nothing here".
    idle = ["/".join(p) for p, spec in entries.items() if p not in used and spec is not None]
    if uncovered or idle:
        raise ValueError(_mismatch(uncovered, idle))
    return found


def _entries(dimension_numbers: Any) -> dict[tuple[str, ...], DimensionNumbers | None]:
    names, leaves = flatten_with_names(
        dimension_numbers, is_leaf=lambda x: x is None or is_dimension_numbers(x)
    )
    entries = dict(zip(names, leaves, strict=True))
    wrong = [
        f"{'/'.join(path) or 'the root'}: {leaf!r}"
        for path, leaf in entries.items()
        if leaf is not None and not is_dimension_numbers(leaf)
    ]
    if wrong:
        raise ValueError(
            "Dimension numbers must be MuonDimensionNumbers, MatrixSpec or None, got"
            f" {'; '.join(wrong)}."
        )
    return entries


def _mismatch(uncovered: list[str], idle: list[str]) -> str:
    lines = ["The tree of dimension numbers does not match the parameters."]
    if uncovered:
        lines.append(f"Parameters without an entry: {', '.join(uncovered)}.")
    if idle:
        lines.append(f"Entries without a parameter: {', '.join(idle)}.")
    lines.append(
        "Give every parameter (or a subtree above it) dimension numbers, or None for AdamW."
    )
    return " ".join(lines)
