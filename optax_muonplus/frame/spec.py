"""Dimension numbers: which axes of a parameter make a matrix, as users and rules write it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from optax.contrib import MuonDimensionNumbers

AxisNumbers = int | Sequence[int]
Shape = tuple[int, ...]


def all_integers(values: Sequence[Any]) -> bool:
    """Tells whether all are whole numbers; True and False are not."""
    return all(isinstance(x, int | np.integer) and not isinstance(x, bool) for x in values)


@dataclasses.dataclass(frozen=True)
class MatrixSpec:
    """Dimension numbers of a parameter that holds several matrices next to each other on one axis.

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

    Raises:
      ValueError: for sizes that are no integers, and for ``split_axis`` without sizes.
    """

    reduction_axis: AxisNumbers = 0
    output_axis: AxisNumbers = 1
    split_sizes: tuple[int, ...] | None = None
    split_axis: int | None = None

    def __post_init__(self) -> None:
        sizes = self.split_sizes
        if sizes is not None:
            if isinstance(sizes, str) or not isinstance(sizes, Sequence) or not all_integers(sizes):
                raise ValueError(
                    f"split_sizes must be the sizes of the blocks, as in (64, 64); got {sizes!r}."
                )
            object.__setattr__(self, "split_sizes", tuple(map(int, sizes)))
        if self.split_axis is None:
            return
        if not all_integers([self.split_axis]):
            raise ValueError(f"split_axis must be the number of an axis, got {self.split_axis!r}.")
        if sizes is None:
            raise ValueError(
                f"split_axis={self.split_axis} without split_sizes cuts nothing: give the sizes of"
                " the blocks along it, as in split_sizes=(64, 64), or leave split_axis out."
            )


DimensionNumbers = MuonDimensionNumbers | MatrixSpec
# A tree or prefix tree of dimension numbers and None, or a function from parameters to one.
DimensionNumbersTree = Any
