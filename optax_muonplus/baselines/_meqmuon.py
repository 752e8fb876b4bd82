r"""MeqMuon: rows or columns of the polar factor get one size, and AdamW is replaced too.

Source: Shi, Wang and Li, arXiv:2609.35701, algorithm 1.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_muonplus import matrices, transforms
from optax_muonplus.baselines._normalized_momentum import LEAST, NormalizedMomentum, rms_along
from optax_muonplus.baselines._sizes import RMS, divided
from optax_muonplus.matrices import POSITIVE, MatrixFunction
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import AdamW, Momentum, Rule


@matrices.matrix_function
class Equilibrate(MatrixFunction):
    r"""Gives all rows, or all columns, one root mean square: the side that varies more.

    For a matrix of shape (m, n), with root mean squares :math:`r_i = \|X_{i:}\| / \sqrt n` of rows
    and :math:`c_j = \|X_{:j}\| / \sqrt m` of columns, the result is :math:`\rho X_{ij} / r_i` if
    rows vary more, and :math:`\rho X_{ij} / c_j` otherwise, by
    :func:`optax_muonplus.matrices.rows_vary_more`. Zero rows and columns stay zero. Where both vary
    alike, as in a symmetric matrix, rows get one root mean square.

    Attributes:
      rms: :math:`\rho`, the root mean square of an update.
      stored_transposed: whether matrices are stored as (in, out).
    """

    rms: ArrayLike = RMS
    stored_transposed: bool = matrices.static(default=False)

    def __post_init__(self) -> None:
        """Raises ValueError for a size that is not positive and finite."""
        matrices.check_number("rms", self.rms, POSITIVE)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Equilibrates every matrix."""
        y = matrices.upcast_for_sum(x)
        rows, columns = (-2, -1) if self.stored_transposed else (-1, -2)  # the summed axes
        by_rows = matrices.rows_vary_more(y, self.stored_transposed)
        sizes = jnp.where(by_rows, rms_along(y, rows), rms_along(y, columns))
        return (matrices.as_real(self.rms, sizes.dtype) * divided(y, sizes, LEAST)).astype(x.dtype)

    def transposed(self) -> MatrixFunction:
        """Returns the function whose rows are the columns as they are stored."""
        return self.replace(stored_transposed=not self.stored_transposed)


def scale_by_meqmuon(
    momentum: Momentum = Momentum(),
    polar_factor: Orthogonalize = Orthogonalize(),
    equilibrate: Equilibrate = Equilibrate(),
) -> transforms.MatrixTransformation:
    """The matrix part of MeqMuon. State and products are Muon's."""
    return transforms.matrix_chain(momentum, polar_factor, equilibrate)


@transforms.takes_options(without=("adamw",))
def meqmuon(
    learning_rate: optax.ScalarOrSchedule,
    link: Rule = scale_by_meqmuon(),
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = None,
    *,
    others: NormalizedMomentum | AdamW = NormalizedMomentum(),
    **where: Any,
) -> optax.GradientTransformationExtraArgs:
    """MeqMuon on the matrices, normalized momentum, or AdamW, on everything else.

    ``others`` has the place of ``adamw``. The paper has weight decay 0.1 on all parameters, and
    names no learning rate. Three things differ from it: which side of a table the rows are, see
    :class:`NormalizedMomentum`; biases of heads, which are vectors by head; and the state of the
    other parameters is labelled ``"adam"``, as in every optimizer here.
    """
    transforms.check_rule(link, scale_by_meqmuon)
    if isinstance(others, NormalizedMomentum) and others.weight_decay is None:
        others = dataclasses.replace(others, weight_decay=weight_decay)
    where |= {"weight_decay_mask": weight_decay_mask, "adamw": others}
    return transforms.optimizer(link, learning_rate, weight_decay, **where)
