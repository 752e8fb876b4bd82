"""Dimension numbers against shapes: the view that they describe, and likely ones to suggest."""

import re
from collections.abc import Sequence

from optax_muonplus._parameters.matrix_view import (
    AxisNumbers,
    DimensionNumbers,
    MatrixSpec,
    MatrixView,
    Shape,
)


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


def _axes(shape: Shape, axes: AxisNumbers, name: str, spec: DimensionNumbers) -> Shape:
    """``axes`` as non-negative numbers, in the given order, which is the order of flattening."""
    given = (axes,) if isinstance(axes, int) else tuple(axes)
    ndim = len(shape)
    if not given or not all(-ndim <= axis < ndim for axis in given):
        raise ValueError(f"{name} of {spec} must name one or more of the axes of shape {shape}.")
    positive = tuple(axis % ndim for axis in given)
    if len(set(positive)) < len(positive):
        raise ValueError(f"{name} of {spec} names an axis of shape {shape} twice.")
    return positive


def _split_axis(shape: Shape, matrix_axes: Shape, output: Shape, spec: MatrixSpec) -> int:
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


def line_to_write(unknown: Sequence[tuple[str, Shape]]) -> str:
    """Suggests rules for unknown leaves, given as paths and shapes."""
    rules: dict[str, str] = {}
    for name, shape in unknown:
        last = "/".join(re.sub(r"/(0|array)$", "", name).split("/")[-2:])
        escaped = re.sub(r"([.+*?()\[\]])", r"\\\1", last)
        rules.setdefault(re.sub(r"\d+", r"\\d+", escaped), _seems_to_be(name, len(shape)))
    shown = ", ".join(f"({pattern!r}, {numbers})" for pattern, numbers in list(rules.items())[:4])
    more = f", and {len(rules) - 4} more" if len(rules) > 4 else ""
    line = f"If their last axes are what these lines say: rules=[{shown}{more}]."
    for container in unknown[0][0].split("/")[:-1]:
        if re.search(r"(?i)layer|block|stack|stage|scan|^h$", container):
            axes = f"layer_axes={{{container!r}: 0}}"
            return f"{line} If layers are stacked on axis 0 (1 in MaxText): {axes}."
    return line


def _seems_to_be(name: str, ndim: int) -> str:
    """The likely dimension numbers of an unknown leaf."""
    if re.search(r"(?i)conv|patch|stem", name):
        out_first = name.endswith("weight")
        inner = tuple(range(1, ndim)) if out_first else tuple(range(ndim - 1))
        return f"omp.MuonDimensionNumbers({inner}, {0 if out_first else ndim - 1})"
    if re.search(r"weight(/0|/array)?$", name):
        return "omp.MuonDimensionNumbers(-1, -2)"
    return "omp.MuonDimensionNumbers(-2, -1)"
