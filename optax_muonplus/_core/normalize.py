"""Row and column normalization of matrices, the step that Muon+ adds.

A row holds the weights of one output unit, a column those of one input feature.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .arguments import NOT_NEGATIVE, check_flag, check_floating, check_number, check_word
from .function import MatrixArray, MatrixFunction, matrix_function, static
from .precision import (
    as_real,
    divide_by_pow2,
    root,
    scale_by_pow2,
    sum_of_squares,
    times_pow2,
    upcast_for_sum,
)

Norm = Literal["none", "col", "row", "col_row", "row_col", "long"]

SUMMED_AXIS = {"row": -1, "col": -2}  # the norm of a side is a sum over this axis
_TRANSPOSED = {"col": "row", "row": "col", "col_row": "row_col", "row_col": "col_row"}


def normalized_sides(norm: Norm, fan_out: int, fan_in: int) -> tuple[str, ...]:
    """Returns the sides to normalize, in order: ``("col", "row")`` for ``"col_row"``."""
    if norm == "long":
        norm = "none" if fan_out == fan_in else "row" if fan_out > fan_in else "col"
    return () if norm == "none" else tuple(norm.split("_"))


def _match_frobenius(x: MatrixArray, like: MatrixArray) -> MatrixArray:
    wide, _ = scale_by_pow2(upcast_for_sum(x))
    wanted, power = scale_by_pow2(upcast_for_sum(like))
    squares, goal = sum_of_squares(wide, (-2, -1)), sum_of_squares(wanted, (-2, -1))
    matched = wide * root(jnp.where(squares > 0, goal / jnp.where(squares > 0, squares, 1), 0))
    return times_pow2(matched, power).astype(x.dtype)


@matrix_function
class Normalize(MatrixFunction):
    r"""Divides rows, columns, or both in turn by their l2 norms.

    .. math::
      \mathrm{row}(X)_{ij} = X_{ij} \Big/ \sqrt{\textstyle\sum_j |X_{ij}|^2 + \epsilon}, \qquad
      \mathrm{col}(X)_{ij} = X_{ij} \Big/ \sqrt{\textstyle\sum_i |X_{ij}|^2 + \epsilon}

    A call maps matrices ``(*batch, out, in)``, real or complex, to an array of the same shape and
    dtype. Sums are in float32 at least.

    Attributes:
      norm: the sides to normalize, in order. ``"col_row"`` is row(col(X)) and ``"row_col"`` is
        col(row(X)): the side named last ends with equal norms. ``"long"`` normalizes the longer
        side only, rows of a tall matrix and columns of a wide one: a polar factor already has equal
        norms on the shorter side. It does not change square matrices; ``"none"`` changes nothing.
      norm_eps: :math:`\epsilon`, in units of a squared norm. A row whose norm is far below
        :math:`\sqrt\epsilon` shrinks to zero, and a zero row stays zero. With ``norm_eps=0`` a row
        of rounding errors, such as an SVD leaves for a dead input, becomes a unit row.
      match_frobenius: whether to multiply the result Y by :math:`\|X\|_F / \|Y\|_F`.

    Raises:
      ValueError: for an unknown ``norm`` or a ``norm_eps`` out of range; when called, for integers.

    Source: Zhang et al., Muon+, arXiv:2602.21545, equations 3-8, Algorithm 1 and table "Matching
    Frobenius norm"; Zhang and Lin, arXiv:2609.39114 (long: NorMuon without its running mean).
    """

    norm: Norm = static(default="row_col")
    norm_eps: ArrayLike = 1e-8
    match_frobenius: bool = static(default=True)

    def __post_init__(self) -> None:
        check_word("norm", self.norm, get_args(Norm))
        check_number("norm_eps", self.norm_eps, NOT_NEGATIVE)
        check_flag("match_frobenius", self.match_frobenius)

    def __call__(self, x: MatrixArray) -> MatrixArray:
        check_floating(x)
        y = upcast_for_sum(x)
        sides = normalized_sides(self.norm, *x.shape[-2:])
        if not sides:
            return x
        for side in sides:
            y = self._divide(y, side)
        y = y.astype(x.dtype)
        return _match_frobenius(y, x) if self.match_frobenius else y

    def _divide(self, y: MatrixArray, side: str) -> MatrixArray:
        eps = as_real(self.norm_eps, jnp.finfo(y.dtype).dtype)
        # Only large numbers are scaled: squares of small ones vanish against norm_eps anyway.
        size = jnp.max(jnp.abs(y), SUMMED_AXIS[side], keepdims=True, initial=0)
        y, power = divide_by_pow2(y, jnp.maximum(size, 1))
        squares = sum_of_squares(y, (SUMMED_AXIS[side],)) + eps / power / power
        # rsqrt(0) would be infinite for a zero row with norm_eps=0.
        positive = jnp.where(squares > 0, squares, 1)
        return y * jnp.where(squares > 0, jax.lax.rsqrt(positive), 0)

    def transposed(self) -> MatrixFunction:
        return self.replace(norm=_TRANSPOSED.get(self.norm, self.norm))
