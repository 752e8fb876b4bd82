r"""Row and column normalization of matrices ``(*batch, out, in)``, the step that Muon+ adds.

A row holds the weights of one output unit, a column those of one input feature.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_muonplus.matrices._matrix_function import MatrixFunction, matrix_function, static
from optax_muonplus.matrices._precision import as_real, sum_of_squares, upcast_for_sum

Norm = Literal["none", "col", "row", "col_row", "row_col"]
Side = Literal["row", "col"]

# The axis over which the norm of a row, or of a column, is summed.
SUMMED_AXIS: dict[Side, int] = {"row": -1, "col": -2}


def check_norm(norm: str) -> None:
    """Raises ValueError, which lists the options, unless ``norm`` is one of them."""
    if norm not in get_args(Norm):
        raise ValueError(f"Unknown norm {norm!r}. Known: {', '.join(get_args(Norm))}.")


def normalized_sides(norm: Norm) -> tuple[Side, ...]:
    """The sides that ``norm`` normalizes, in order: ``"col_row"`` gives ``("col", "row")``."""
    sides: dict[Norm, tuple[Side, ...]] = {
        "none": (),
        "col": ("col",),
        "row": ("row",),
        "col_row": ("col", "row"),
        "row_col": ("row", "col"),
    }
    return sides[norm]


def transposed_norm(norm: Norm) -> Norm:
    """The option that normalizes the transposed matrix, whose rows are columns of the matrix."""
    swapped: dict[Norm, Norm] = {
        "col": "row",
        "row": "col",
        "col_row": "row_col",
        "row_col": "col_row",
    }
    return swapped.get(norm, norm)


def normalize_matrix(x: jax.Array, norm: Norm = "col_row", norm_eps: ArrayLike = 1e-8) -> jax.Array:
    r"""Divides rows or columns, or first one and then the other, by their l2 norms.

    .. math::
      \mathrm{row}(X)_{ij} = X_{ij} \Big/ \sqrt{\textstyle\sum_j |X_{ij}|^2 + \epsilon}, \qquad
      \mathrm{col}(X)_{ij} = X_{ij} \Big/ \sqrt{\textstyle\sum_i |X_{ij}|^2 + \epsilon}

    ``"col_row"`` is row(col(X)) and ``"row_col"`` is col(row(X)): the side that is named last has
    unit norms in the end. Sums are in float32 at least.

    Args:
      x: matrices ``(*batch, out, in)``, real or complex.
      norm: which sides are normalized, and in which order; ``"none"`` returns ``x``.
      norm_eps: :math:`\epsilon`, in units of a squared norm. A row whose norm is far below
        :math:`\sqrt\epsilon` shrinks to zero instead of being blown up. A zero row stays zero. With
        ``norm_eps=0`` a row of rounding errors, such as an SVD leaves for a dead input, becomes a
        unit row.

    Returns:
      An array of ``x``'s shape and dtype.

    Raises:
      ValueError: for an unknown ``norm``.

    Source: Zhang et al., Muon+, arXiv:2602.21545, equations 3-8 and Algorithm 1.
    """
    check_norm(norm)
    return _normalized(x, norm, norm_eps)


def _normalized(x: jax.Array, norm: Norm, norm_eps: ArrayLike) -> jax.Array:
    sides = normalized_sides(norm)
    y = upcast_for_sum(x)
    for side in sides:
        squares = sum_of_squares(y, (SUMMED_AXIS[side],))
        # rsqrt(0) would be infinite for a zero row with norm_eps=0.
        y = y * jnp.where(squares > 0, jax.lax.rsqrt(squares + as_real(norm_eps, squares.dtype)), 0)
    return y.astype(x.dtype)


def match_frobenius_norm(x: jax.Array, like: jax.Array) -> jax.Array:
    r"""Rescales each matrix to the Frobenius norm that it has in ``like``.

    .. math::
      X \, \|Y\|_F / \|X\|_F

    Args:
      x: matrices X, ``(*batch, out, in)``, real or complex. A zero matrix stays zero.
      like: matrices Y of the same shape.

    Returns:
      An array of ``x``'s shape and dtype.

    Source: Zhang et al., Muon+, arXiv:2602.21545, table "Matching Frobenius norm".
    """
    squares = sum_of_squares(x, (-2, -1))
    wanted = sum_of_squares(like, (-2, -1))
    ratio = jnp.sqrt(jnp.where(squares > 0, wanted / jnp.where(squares > 0, squares, 1), 0))
    return (x * ratio).astype(x.dtype)


@matrix_function
class Normalize(MatrixFunction):
    """Rows and columns over their norms; attributes as in ``optax_muonplus.normalize``."""

    norm: Norm = static(default="col_row")
    norm_eps: ArrayLike = 1e-8
    match_frobenius: bool = static(default=False)

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown ``norm`` or a negative ``norm_eps``."""
        check_norm(self.norm)
        if isinstance(self.norm_eps, int | float) and self.norm_eps < 0:
            raise ValueError(f"norm_eps must not be negative, got {self.norm_eps}.")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalized ``x``, rescaled to the Frobenius norm that it had if that is asked for."""
        y = _normalized(x, self.norm, self.norm_eps)
        return match_frobenius_norm(y, x) if self.match_frobenius else y

    def transposed(self) -> MatrixFunction:
        """Rows for columns and columns for rows."""
        return Normalize(transposed_norm(self.norm), self.norm_eps, self.match_frobenius)
