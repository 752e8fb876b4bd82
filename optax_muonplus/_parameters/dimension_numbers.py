"""Which axes of a parameter make a matrix, and the way from there to ``(batch, out, in)`` and back.

This is the only place that knows about the layout of parameters.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
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
      shape: of the parameter.
      batch_axes: axes along which every index is a matrix of its own.
      output_axes: axes that are flattened into rows.
      reduction_axes: axes that are flattened into columns.
      split_axis: axis that is cut into blocks, or None.
      split_sizes: sizes of the blocks; empty if there is one block. Blocks of one size that follow
        each other, as heads do, are a *run*: a batch, so that a program does not grow with them.
      separate: whether each block is a run by itself.
    """

    shape: tuple[int, ...]
    batch_axes: tuple[int, ...]
    output_axes: tuple[int, ...]
    reduction_axes: tuple[int, ...]
    split_axis: int | None = None
    split_sizes: tuple[int, ...] = ()
    separate: bool = False

    @property
    def transposed(self) -> bool:
        """Whether matrices lie in memory as (in, out), so that reading them so copies nothing."""
        return min(self.reduction_axes) < min(self.output_axes)

    @property
    def matrix_axes(self) -> tuple[int, ...]:
        """Axes that are not batch axes, in the order of the parameter's."""
        return tuple(axis for axis in range(len(self.shape)) if axis not in self.batch_axes)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Sizes of the batch axes and, if there are fused blocks, how many."""
        fused = [len(self.split_sizes)] * bool(self.split_sizes)
        return (*(self.shape[axis] for axis in self.batch_axes), *fused)

    def stacked(self, count: int) -> "MatrixView":
        """The view of ``count`` slices at one index of the batch axes, along a new first axis."""
        place = {axis: i for i, axis in enumerate(self.matrix_axes, 1)}
        return MatrixView(
            (count, *(self.shape[axis] for axis in self.matrix_axes)),
            (0,),
            tuple(place[axis] for axis in self.output_axes),
            tuple(place[axis] for axis in self.reduction_axes),
            None if self.split_axis is None else place[self.split_axis],
            self.split_sizes,
        )

    def block_shapes(self) -> list[tuple[int, int, int]]:
        """``(batch, out, in)`` of each run of blocks."""
        return [part.matrix_shape(part.shape) for part in self.runs()]

    def to_matrices(self, x: jax.Array) -> list[jax.Array]:
        """The runs of ``x`` as arrays ``(batch, out, in)``, or (batch, in, out) if transposed."""
        return [run._to_matrix(part) for run, part in zip(self.runs(), self.cut(x), strict=True)]

    def from_matrices(self, matrices: Sequence[jax.Array]) -> jax.Array:
        """The inverse of :meth:`to_matrices`."""
        runs = zip(self.runs(), matrices, strict=True)
        return self.join([run._from_matrix(matrix) for run, matrix in runs])

    def runs(self) -> list["MatrixView"]:
        """The views of what :meth:`cut` gives; the blocks of a run are on its last batch axis."""
        axis = self.split_axis
        return [self] if axis is None else [self._run(axis, *run) for run in self._run_lengths()]

    def cut(self, x: jax.Array) -> list[jax.Array]:
        """The runs of ``x``, which has the parameter's shape or is a statistic of its blocks.

        The fused axis becomes two, count and size, unless count is 1. The size is 1 of a statistic
        that has one number for each block.
        """
        axis = self.split_axis
        if axis is None:
            return [x]
        whole = x.shape[axis] == sum(self.split_sizes)
        parts, stop = [], 0
        for count, size in self._run_lengths():
            size = size if whole else 1
            start, stop = stop, stop + count * size
            part = jax.lax.slice_in_dim(x, start, stop, axis=axis)
            sides = (count, size) if count > 1 else (size,)
            parts.append(part.reshape(*x.shape[:axis], *sides, *x.shape[axis + 1 :]))
        return parts

    def join(self, runs: Sequence[jax.Array]) -> jax.Array:
        """The inverse of :meth:`cut`."""
        axis = self.split_axis
        if axis is None:
            return runs[0]
        parts = [
            x.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 + (count > 1) :])
            for (count, _), x in zip(self._run_lengths(), runs, strict=True)
        ]
        return jnp.concatenate(parts, axis) if len(parts) > 1 else parts[0]

    def _run_lengths(self) -> list[tuple[int, int]]:
        """``(count, size)`` of each run."""
        if self.separate:
            return [(1, size) for size in self.split_sizes]
        return [(len(list(run)), size) for size, run in itertools.groupby(self.split_sizes)]

    def _run(self, axis: int, count: int, size: int) -> "MatrixView":
        before, after = self.shape[:axis], self.shape[axis + 1 :]
        sides = self.batch_axes, self.output_axes, self.reduction_axes
        if count == 1:
            return MatrixView((*before, size, *after), *sides)
        batch, output, reduction = (tuple(a + (a >= axis) for a in axes) for axes in sides)
        return MatrixView((*before, count, size, *after), (*batch, axis), output, reduction)

    def _order(self) -> tuple[int, ...]:
        if self.transposed:
            return self.batch_axes + self.reduction_axes + self.output_axes
        return self.batch_axes + self.output_axes + self.reduction_axes

    def _to_matrix(self, x: jax.Array) -> jax.Array:
        batch, rows, columns = self.matrix_shape(self.shape)
        sides = (columns, rows) if self.transposed else (rows, columns)
        return x.transpose(self._order()).reshape(batch, *sides)

    def _from_matrix(self, x: jax.Array) -> jax.Array:
        order = self._order()
        inverse = [order.index(axis) for axis in range(len(order))]
        return x.reshape([self.shape[axis] for axis in order]).transpose(inverse)

    def matrix_shape(self, block: Sequence[int]) -> tuple[int, int, int]:
        """``(batch, out, in)`` of a block of a given shape."""
        sides = self.batch_axes, self.output_axes, self.reduction_axes
        batch, rows, columns = (math.prod(block[axis] for axis in axes) for axes in sides)
        return batch, rows, columns


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
    positive = tuple(axis % ndim for axis in given)
    if len(set(positive)) < len(positive):
        raise ValueError(f"{name} of {spec} names an axis of shape {shape} twice.")
    return positive


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
