r"""Turbo-Muon: Muon with four Newton-Schulz steps after a scaling that brings matrices nearer to 1.

Source: Boissin et al., arXiv:2512.04632; its code, thib-s/flash-newton-schulz @145260f.
"""

from typing import Any

import optax
from jax.typing import ArrayLike, DTypeLike

from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree
from optax_muonplus._parameters.sharding import ShardingTree
from optax_muonplus.matrices._shape_factor import ScaleByShape, ShapeScale
from optax_muonplus.polar._orthogonalize import Orthogonalize
from optax_muonplus.transforms import (
    AdamW,
    DecayedWeights,
    LearningRate,
    Momentum,
    matrix_chain,
    partition_with_adamw,
)


def turbo_muon(
    learning_rate: optax.ScalarOrSchedule,
    polar_factor: Orthogonalize | None = None,
    beta: ArrayLike = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: DTypeLike | None = None,
    *,
    shape_scale: ShapeScale = "max",
    nesterov: bool = True,
    adamw: AdamW | None = None,
    muon_weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Turbo-Muon on the matrices, AdamW on everything else.

    Before the iteration the shorter side of a matrix X is scaled, so that no singular value is
    above 1 (Gershgorin), by

    .. math:: s_i = \Big(\textstyle\sum_j |(X X^T)_{ij}|\Big)^{-1/2}

    which brings most of them nearer to 1 than a division by the Frobenius norm does; four steps
    then are enough. The result is the polar factor of the scaled matrix, which differs from that of
    X unless its rows are orthogonal. A square matrix is scaled on its output side, as in the code:
    ``preconditioning="aol_out"`` (``"aol"`` has the input side, as Optax). The state is Muon's.

    Args:
      learning_rate: number or schedule; 0.02 in the code.
      polar_factor: None means ``Orthogonalize("turbo", 4, preconditioning="aol_out")``, with the
        rows of the code, the last four of ``"dion"``.
      beta: as in :func:`optax_muonplus.muonplus`, as for the next three.
      weight_decay: of the matrices.
      weight_decay_mask: for the matrices.
      mu_dtype: dtype of the momentum buffer.
      shape_scale: as there.
      nesterov: as there.
      adamw: AdamW's arguments, :class:`optax_muonplus.transforms.AdamW`.
      muon_weight_dimension_numbers: as there.
      sharding: as there.

    Raises:
      ValueError: as :func:`optax_muonplus.muonplus`.

    Source: Boissin et al., arXiv:2512.04632; thib-s/flash-newton-schulz @145260f.
    """
    return partition_with_adamw(
        matrix_chain(
            Momentum(beta, nesterov, mu_dtype=mu_dtype),
            polar_factor or Orthogonalize("turbo", 4, preconditioning="aol_out"),
            ScaleByShape(shape_scale),
            DecayedWeights(weight_decay, weight_decay_mask),
            LearningRate(learning_rate),
        ),
        adamw,
        muon_weight_dimension_numbers,
        sharding,
    )
