r"""MuonEq: Muon that equalizes norms of rows or columns before the polar factor.

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
    r"""Divides rows, columns, or both at once, by their norms.

    .. math::
      r_i = \sqrt{\textstyle\sum_j |X_{ij}|^2 + \epsilon}, \qquad
      c_j = \sqrt{\textstyle\sum_i |X_{ij}|^2 + \epsilon}

    ``"row"`` is :math:`X_{ij} / r_i`, ``"col"`` is :math:`X_{ij} / c_j`, and ``"both"`` is
    :math:`X_{ij} / (r_i c_j)`. :class:`optax_muonplus.matrices.Normalize` differs from the last: it
    divides rows first and then computes the norms of columns. Each result is exact up to a positive
    factor, which has no effect on its polar factor.

    Attributes:
      sides: ``"row"``, ``"col"`` or ``"both"``; R, C and RC in the paper.
      norm_eps: :math:`\epsilon`, in units of a squared norm of the momentum, a mean of gradients.
    """

    sides: Sides = matrices.static(default="row")
    # 1e-8 in the code, whose momentum is a sum of gradients: with beta = 0.95, 20 times the mean.
    norm_eps: ArrayLike = 1e-8 * 0.05**2

    def __post_init__(self) -> None:
        matrices.check_word("sides", self.sides, get_args(Sides))
        matrices.check_number("norm_eps", self.norm_eps, NOT_NEGATIVE)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = matrices.upcast_for_sum(x)
        # Squares of large numbers overflow; small ones are negligible beside norm_eps.
        largest = jnp.max(jnp.abs(y), axis=(-2, -1), keepdims=True, initial=1)
        y, power = matrices.divide_by_pow2(y, largest)
        eps = matrices.as_real(self.norm_eps, power.dtype) / power / power
        squares = [matrices.sum_of_squares(y, (axis,)) + eps for axis in _AXES[self.sides]]
        for size in squares:
            # rsqrt(0) would be infinite for a zero row with norm_eps=0.
            y = y * jnp.where(size > 0, 1 / jnp.sqrt(jnp.where(size > 0, size, 1)), 0)
        return y.astype(x.dtype)

    def transposed(self) -> MatrixFunction:
        return self.replace(sides=_TRANSPOSED[self.sides])


def scale_by_muoneq(
    momentum: Momentum = Momentum(),
    balance: Balance = Balance(),
    polar_factor: Orthogonalize = Orthogonalize(),
    scale: ScaleByShape = ScaleByShape(consistent_rms=0.2),
) -> transforms.MatrixTransformation:
    """The matrix part of MuonEq: Muon+ with its links in another order.

    State and products are Muon's. The code can change from ``"both"`` to ``"row"`` after some
    steps; here ``sides`` is constant.
    """
    return omp.matrix_chain(momentum, balance, polar_factor, scale)
