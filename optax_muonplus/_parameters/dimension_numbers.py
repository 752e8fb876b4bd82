"""Which axes of a parameter make a matrix, as a user says it, checked against its shape."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from optax.contrib import MuonDimensionNumbers

from optax_muonplus._parameters.matrix_view import MatrixView

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
