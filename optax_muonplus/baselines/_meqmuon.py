r"""MeqMuon: rows or columns of the polar factor get one size, and AdamW is replaced too.

Source: Shi, Wang and Li, arXiv:2609.35701, algorithm 1.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_muonplus.baselines._normalized_momentum import RMS, NormalizedMomentum, over, rms_along
from optax_muonplus.extras.argument_names import suggest_argument_names
from optax_muonplus.frame import DimensionNumbersTree
from optax_muonplus.matrices import (
    MatrixFunction,
    as_real,
    matrix_function,
    rows_vary_more,
    static,
    upcast_for_sum,
)
from optax_muonplus.method import POSITIVE, check_number
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import (
    AdamW,
    MatrixTransformation,
    Momentum,
    matrix_chain,
    optimizer_of,
)
from optax_muonplus.trees import LayerAxes, Rules, ShardingTree, reader_of


@matrix_function
class Equilibrate(MatrixFunction):
    r"""Gives all rows, or all columns, one root mean square: the side that varies more.

    For a matrix of shape (m, n), with root mean squares :math:`r_i = \|X_{i:}\| / \sqrt n` of rows
    and :math:`c_j = \|X_{:j}\| / \sqrt m` of columns, the result is :math:`\rho X_{ij} / r_i` if
    rows vary more, and :math:`\rho X_{ij} / c_j` otherwise, by
    :func:`optax_muonplus.matrices.rows_vary_more`. Zero rows and columns stay zero. Where both vary
    alike, as in a symmetric matrix, rows are those of the matrix as it is stored.

    Attributes:
      rms: :math:`\rho`, the root mean square of an update.
      shape: that of the matrices as they are stored, if not that of the array.
    """

    rms: ArrayLike = RMS
    shape: tuple[int, int] | None = static(default=None)

    def __post_init__(self) -> None:
        """Raises ValueError for a size that is not positive and finite."""
        check_number("rms", self.rms, POSITIVE)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Equilibrates every matrix."""
        y = upcast_for_sum(x)
        m, n = self.shape or x.shape[-2:]
        sizes = jnp.where(rows_vary_more(y), rms_along(y, -1, n), rms_along(y, -2, m))
        return (as_real(self.rms, sizes.dtype) * over(y, sizes)).astype(x.dtype)

    def padded(self, shape: tuple[int, int]) -> MatrixFunction:
        """Returns the function with the numbers of rows and columns of ``shape``."""
        return self.replace(shape=shape)

    @property
    def transpose_equivariant(self) -> bool:
        """Whether columns of the transposed matrix are taken for its rows: always."""
        return True


def scale_by_meqmuon(
    momentum: Momentum = Momentum(),
    polar_factor: Orthogonalize = Orthogonalize(),
    equilibrate: Equilibrate = Equilibrate(),
) -> MatrixTransformation:
    """The matrix part of MeqMuon. State and products are Muon's."""
    return matrix_chain(momentum, polar_factor, equilibrate)


@suggest_argument_names(scale_by_meqmuon)
def meqmuon(
    learning_rate: optax.ScalarOrSchedule,
    link: MatrixTransformation = scale_by_meqmuon(),
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = None,
    *,
    others: NormalizedMomentum | AdamW = NormalizedMomentum(),
    muon_weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
    rules: Rules = (),
    layer_axes: LayerAxes = None,
) -> optax.GradientTransformationExtraArgs:
    """MeqMuon on the matrices, normalized momentum, or AdamW, on everything else.

    ``link`` is the rule for matrices with its options, and all other arguments are as in
    :func:`optax_muonplus.muonplus`. The paper has weight decay 0.1 on all parameters, and names no
    learning rate. Three things differ from it: which side of a table the rows are, see
    :class:`NormalizedMomentum`; biases of heads, which are vectors by head; and the state of the
    other parameters is labelled ``"adam"``, as in every optimizer here.
    """
    if isinstance(others, NormalizedMomentum) and others.weight_decay is None:
        others = dataclasses.replace(others, weight_decay=weight_decay)
    dims = reader_of(muon_weight_dimension_numbers, rules, layer_axes)
    return optimizer_of(
        link,
        learning_rate,
        weight_decay,
        weight_decay_mask,
        others,
        dims,
        sharding,
        scale_by_meqmuon,
    )
