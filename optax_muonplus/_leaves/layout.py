"""Layouts: the axes of a parameter that make a matrix ``(batch, out, in)``, and the way back.

Axes of parameters are moved here and nowhere else.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from optax.contrib import MuonDimensionNumbers

AxisNumbers = int | Sequence[int]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class MatrixSpec:
    """``MuonDimensionNumbers`` of a parameter with several matrices side by side along one axis.

    A fused QKV kernel ``(d, 3 d)`` is ``MatrixSpec(0, 1, split_sizes=(d, d, d))``; a fused gate and
    up projection ``(d, 2 f)`` is ``MatrixSpec(0, 1, split_sizes=(f, f))``. Each block is
    orthogonalized, normalized and scaled as if it were a parameter.

    Attributes:
      reduction_axis: axis or axes that the layer sums over (fan-in).
      output_axis: axis or axes of the layer's output (fan-out). All other axes are batch axes, and
        every index along them is a matrix.
      split_sizes: sizes of the blocks along ``split_axis``; None is one block.
      split_axis: the fused axis, one of those above; None means ``output_axis``, if it is one axis.

    Raises:
      ValueError: for ``split_axis`` without sizes.
    """

    reduction_axis: AxisNumbers = 0
    output_axis: AxisNumbers = 1
    split_sizes: tuple[int, ...] | None = None
    split_axis: int | None = None

    def __post_init__(self) -> None:
        if self.split_sizes is not None:
            is_flag = bool in map(type, self.split_sizes)  # refused with the shape
            sizes = tuple(self.split_sizes if is_flag else map(operator.index, self.split_sizes))
            object.__setattr__(self, "split_sizes", sizes)
        elif self.split_axis is not None:
            raise ValueError(
                f"split_axis={self.split_axis} without split_sizes cuts nothing: give the sizes of"
                " the blocks along it, as in split_sizes=(64, 64), or leave split_axis out."
            )


DimensionNumbers = MuonDimensionNumbers | MatrixSpec
# A tree, or prefix tree, of dimension numbers and None; or a function from parameters to one.
DimensionNumbersTree = Any

# Up to this many blocks, such as a fused QKV, are cut by slices. On Auto axes slices keep the
# sharding; a reshape that cuts a shard loses it. Slices of many heads would make the program long.
_FEW = 4


@dataclasses.dataclass(frozen=True)
class MatrixLayout:
    """The matrices of a parameter of a known shape.

    Attributes:
      shape: of the parameter.
      batch_axes: axes along which every index is a matrix.
      output_axes: axes that are flattened into rows.
      reduction_axes: axes that are flattened into columns.
      split_axis: the axis that is cut into blocks, or None.
      split_sizes: sizes of the blocks, if any. Consecutive blocks of one size, such as heads, are a
        *run*: one batch of matrices, which keeps programs short.
      separate: whether each block is a run of its own.
    """

    shape: Shape
    batch_axes: Shape
    output_axes: Shape
    reduction_axes: Shape
    split_axis: int | None = None
    split_sizes: Shape = ()
    separate: bool = False

    @classmethod
    def of(cls, shape: Sequence[int], spec: DimensionNumbers) -> "MatrixLayout":
        """Returns the layout of a parameter of ``shape`` with dimension numbers ``spec``.

        Raises:
          ValueError: for an axis that does not exist or is named twice, for a side without axes,
            and for split sizes that do not add up.
        """
        shape = tuple(shape)
        reduction = _axes(shape, spec.reduction_axis, "reduction_axis", spec)
        output = _axes(shape, spec.output_axis, "output_axis", spec)
        both = reduction + output
        if len(set(both)) < len(both):
            raise ValueError(
                f"{spec} names an axis of shape {shape} twice. Each axis belongs to one side, or is"
                " a batch axis."
            )
        batch = tuple(axis for axis in range(len(shape)) if axis not in both)
        if not isinstance(spec, MatrixSpec) or spec.split_sizes is None:
            return cls(shape, batch, output, reduction)
        split_axis = _split_axis(shape, both, output, spec)
        return cls(shape, batch, output, reduction, split_axis, tuple(spec.split_sizes))

    @property
    def transposed(self) -> bool:
        """Whether matrices are stored as (in, out), which is how they are read without a copy."""
        return min(self.reduction_axes) < min(self.output_axes)

    @property
    def matrix_axes(self) -> Shape:
        return tuple(axis for axis in range(len(self.shape)) if axis not in self.batch_axes)

    def dimension_numbers(self, places: Sequence[int] | None = None) -> DimensionNumbers:
        """Returns the dimension numbers, with axis ``i`` at ``places[i]`` if given."""
        places = range(len(self.shape)) if places is None else places
        reduction = tuple(places[axis] for axis in self.reduction_axes)
        output = tuple(places[axis] for axis in self.output_axes)
        if self.split_axis is None:
            return MuonDimensionNumbers(reduction, output)
        return MatrixSpec(reduction, output, self.split_sizes, places[self.split_axis])

    def stack(self, count: int) -> "MatrixLayout":
        """Returns the layout of ``count`` slices, one for each batch index, on a new first axis."""
        place: dict[int | None, int] = {axis: i for i, axis in enumerate(self.matrix_axes, 1)}
        return MatrixLayout(
            (count, *(self.shape[axis] for axis in self.matrix_axes)),
            (0,),
            tuple(place[axis] for axis in self.output_axes),
            tuple(place[axis] for axis in self.reduction_axes),
            place.get(self.split_axis),
            self.split_sizes,
        )

    def of_blocks(self, shape: Shape) -> "MatrixLayout | None":
        """Returns the layout of an array with a number for each block of elements.

        None if a block spans several matrices, or does not lie along a row or column.
        """
        if shape == self.shape:
            return self
        sizes = self.split_sizes
        for axis, (size, count) in enumerate(zip(self.shape, shape, strict=True)):
            if size == count:
                continue
            if axis not in (self.output_axes[-1], self.reduction_axes[-1]):
                return None
            if axis == self.split_axis:
                if any(block % (size // count) for block in sizes):
                    return None
                sizes = tuple(block * count // size for block in sizes)
        return dataclasses.replace(self, shape=shape, split_sizes=sizes)

    def matrix_shape(self, block: Sequence[int]) -> tuple[int, int, int]:
        """Returns ``(batch, out, in)`` of a block whose axes have these sizes."""
        sides = self.batch_axes, self.output_axes, self.reduction_axes
        batch, rows, columns = (math.prod(block[axis] for axis in axes) for axes in sides)
        return batch, rows, columns

    def block_shapes(self) -> list[tuple[int, int, int]]:
        return [run.matrix_shape(run.shape) for run in self.runs()]

    def to_matrices(self, x: jax.Array) -> list[jax.Array]:
        """Returns the runs of ``x`` as ``(batch, out, in)``, or (batch, in, out) if transposed."""
        matrices = []
        for run, part in zip(self.runs(), self.cut(x), strict=True):
            batch, rows, columns = run.matrix_shape(run.shape)
            sides = (columns, rows) if run.transposed else (rows, columns)
            matrices.append(part.transpose(run._order()).reshape(batch, *sides))
        return matrices

    def from_matrices(self, matrices: Sequence[jax.Array]) -> jax.Array:
        """Returns the array of the parameter's shape: the inverse of :meth:`to_matrices`."""
        parts = []
        for run, matrix in zip(self.runs(), matrices, strict=True):
            order = run._order()
            part = matrix.reshape([run.shape[axis] for axis in order])
            parts.append(part.transpose(np.argsort(order)))
        return self.join(parts)

    def runs(self) -> list["MatrixLayout"]:
        """Returns the layout of each run, with its blocks along the last batch axis."""
        axis = self.split_axis
        if axis is None:
            return [self]
        before, after = self.shape[:axis], self.shape[axis + 1 :]
        sides = self.batch_axes, self.output_axes, self.reduction_axes
        batch, output, reduction = (tuple(a + (a >= axis) for a in axes) for axes in sides)
        return [
            MatrixLayout((*before, size, *after), *sides)
            if count == 1
            else MatrixLayout((*before, count, size, *after), (*batch, axis), output, reduction)
            for count, size in self._run_lengths()
        ]

    def cut(self, x: jax.Array) -> list[jax.Array]:
        """Cuts ``x`` into runs; the fused axis becomes (count, size), or (size,) if count is 1."""
        axis = self.split_axis
        if axis is None:
            return [x]
        whole = x.shape[axis] == sum(self.split_sizes)
        parts, stop = [], 0
        for count, size in self._run_lengths():
            size = size if whole else 1  # ``x`` may have one number for each block
            start, stop = stop, stop + count * size
            if count <= _FEW:
                cuts = range(start, stop, size)
                blocks = [jax.lax.slice_in_dim(x, at, at + size, axis=axis) for at in cuts]
                parts.append(jnp.stack(blocks, axis) if count > 1 else blocks[0])
            else:
                part = jax.lax.slice_in_dim(x, start, stop, axis=axis)
                parts.append(part.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]))
        return parts

    def join(self, runs: Sequence[jax.Array]) -> jax.Array:
        axis = self.split_axis
        if axis is None:
            return runs[0]
        parts: list[jax.Array] = []
        for (count, _), x in zip(self._run_lengths(), runs, strict=True):
            if count == 1:
                parts.append(x)
            elif count <= _FEW:
                parts += [jax.lax.index_in_dim(x, i, axis, keepdims=False) for i in range(count)]
            else:
                parts.append(x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :]))
        return jnp.concatenate(parts, axis) if len(parts) > 1 else parts[0]

    def _run_lengths(self) -> list[tuple[int, int]]:
        if self.separate:
            return [(1, size) for size in self.split_sizes]
        return [(len(list(run)), size) for size, run in itertools.groupby(self.split_sizes)]

    def _order(self) -> Shape:
        sides = self.output_axes, self.reduction_axes
        return sum(sides[::-1] if self.transposed else sides, self.batch_axes)


def _axes(shape: Shape, axes: AxisNumbers, name: str, spec: DimensionNumbers) -> Shape:
    several = isinstance(axes, Sequence) and not isinstance(axes, str)
    given: tuple[Any, ...] = tuple(axes) if several else (axes,)
    ndim = len(shape)
    integers = [isinstance(a, int | np.integer) and type(a) is not bool for a in given]
    if not given or not all(integers) or not all(-ndim <= axis < ndim for axis in given):
        raise ValueError(
            f"{name} of {spec} must name one or more of the axes of shape {shape}. A parameter that"
            " is not a matrix gets None, which leaves it to AdamW."
        )
    return tuple(axis % ndim for axis in given)


def _split_axis(shape: Shape, matrix_axes: Shape, output: Shape, spec: MatrixSpec) -> int:
    if spec.split_axis is None and len(output) > 1:
        raise ValueError(f"{spec} has several output axes: pass the fused one as split_axis.")
    axis = output[0] if spec.split_axis is None else spec.split_axis
    in_range = type(axis) is not bool and -len(shape) <= axis < len(shape)
    if not in_range or axis % len(shape) not in matrix_axes:
        raise ValueError(
            f"split_axis of {spec} must be one of the reduction or output axes {matrix_axes} of"
            f" shape {shape}; indices along a batch axis are separate matrices already."
        )
    axis, sizes = axis % len(shape), spec.split_sizes or ()
    if not sizes or bool in map(type, sizes) or min(sizes) < 1 or sum(sizes) != shape[axis]:
        raise ValueError(
            f"split_sizes {sizes} must be positive and add up to {shape[axis]}, the size of axis"
            f" {axis} of shape {shape}; they add up to {sum(sizes)}."
        )
    return axis
