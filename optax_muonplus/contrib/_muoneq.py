r"""MuonEq: Muon whose momentum gets rows, or columns, of one norm before its polar factor.

Source: Chang et al., arXiv:2603.28254; its code, MaeChd/muon-eq @99b6c8b,
``llm-opt-baseline-gpu/llm-baselines/src/optim/muoneq.py``.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

import optax_muonplus as omp
from optax_muonplus import matrices, transforms
from optax_muonplus.matrices import NOT_NEGATIVE, MatrixFunction, ScaleByShape
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import Momentum

Sides = Literal["row", "col", "both"]
_AXES: dict[Sides, tuple[int, ...]] = {"row": (-1,), "col": (-2,), "both": (-1, -2)}
_TRANSPOSED: dict[Sides, Sides] = {"row": "col", "col": "row", "both": "both"}


@matrices.matrix_function
class Balance(MatrixFunction):
    r"""Divides rows, columns, or both at once, by their norms before.

    .. math::
      r_i = \sqrt{\textstyle\sum_j |X_{ij}|^2 + \epsilon}, \qquad
      c_j = \sqrt{\textstyle\sum_i |X_{ij}|^2 + \epsilon}

    ``"row"`` is :math:`X_{ij} / r_i`, ``"col"`` :math:`X_{ij} / c_j`, and ``"both"`` is
    :math:`X_{ij} / (r_i c_j)`, where :class:`optax_muonplus.matrices.Normalize` would divide by the
    norms of columns that are left when rows have norm 1. All up to a number for each matrix, which
    its polar factor does not see.

    Attributes:
      sides: ``"row"``, ``"col"`` or ``"both"``; R, C and RC in the paper.
      norm_eps: :math:`\epsilon`, in units of a squared norm of the momentum, which is a mean here.
    """

    sides: Sides = matrices.static(default="row")
    # 1e-8 in the code, whose momentum is the sum of gradients: the mean by 0.95 has 1 / 20 of it.
    norm_eps: ArrayLike = 1e-8 * 0.05**2

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown side, or an epsilon that is negative or not finite."""
        matrices.check_word("sides", self.sides, get_args(Sides))
        matrices.check_number("norm_eps", self.norm_eps, NOT_NEGATIVE)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Balances every matrix."""
        y = matrices.upcast_for_sum(x)
        # Squares of large numbers overflow; those of small ones vanish against norm_eps.
        largest = jnp.max(jnp.abs(y), axis=(-2, -1), keepdims=True, initial=1)
        y, power = matrices.divide_by_pow2(y, largest)
        eps = matrices.as_real(self.norm_eps, power.dtype) / power / power
        squares = [matrices.sum_of_squares(y, (axis,)) + eps for axis in _AXES[self.sides]]
        for size in squares:
            # rsqrt(0) would be infinite for a zero row with norm_eps=0.
            y = y * jnp.where(size > 0, 1 / jnp.sqrt(jnp.where(size > 0, size, 1)), 0)
        return y.astype(x.dtype)

    def transposed(self) -> MatrixFunction:
        """Balances rows for columns and columns for rows."""
        return self.replace(sides=_TRANSPOSED[self.sides])


def scale_by_muoneq(
    momentum: Momentum = Momentum(),
    balance: Balance = Balance(),
    polar_factor: Orthogonalize = Orthogonalize(),
    scale: ScaleByShape = ScaleByShape(consistent_rms=0.2),
) -> transforms.MatrixTransformation:
    """The matrix part of MuonEq: Muon+ with its links in another order.

    State and products are Muon's. The code can begin with ``"both"`` and go on with ``"row"``; here
    one of them holds for all steps.
    """
    return omp.matrix_chain(momentum, balance, polar_factor, scale)
