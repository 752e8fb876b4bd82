r"""Turbo-Muon: Muon with four Newton-Schulz steps after a scaling that brings matrices nearer to 1.

Source: Boissin et al., arXiv:2512.04632; its code, thib-s/flash-newton-schulz @145260f.
"""

from collections.abc import Sequence
from typing import Any, Literal

import optax

from optax_muonplus._optimizers import muonplus
from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree
from optax_muonplus._parameters.sharding import ShardingTree
from optax_muonplus.matrices._shape_factor import ShapeScale
from optax_muonplus.polar._methods import DEFAULT_EPS


def turbo_muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: str | Sequence[Any] = "turbo",
    ns_steps: Any = 4,
    beta: Any = 0.95,
    eps: Any = DEFAULT_EPS,
    weight_decay: Any = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    *,
    shape_scale: ShapeScale = "max",
    nesterov: bool = True,
    polar: Literal["auto", "newton_schulz", "gram"] = "auto",
    compute_dtype: Any = None,
    adam_b1: Any = 0.9,
    adam_b2: Any = 0.999,
    adam_eps: Any = 1e-8,
    adam_eps_root: Any = 0.0,
    adam_weight_decay: Any = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
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

    Arguments are those of :func:`optax_muonplus.muonplus`; ``"turbo"`` are the rows of the
    code, the last four of ``"dion"``. Its learning rate is 0.02.

    Raises:
      ValueError: as :func:`optax_muonplus.muonplus`.

    Source: Boissin et al., arXiv:2512.04632; thib-s/flash-newton-schulz @145260f.
    """
    return muonplus(
        learning_rate,
        ns_coeffs,
        ns_steps,
        beta,
        eps,
        weight_decay,
        weight_decay_mask,
        mu_dtype,
        norm="none",
        shape_scale=shape_scale,
        nesterov=nesterov,
        polar=polar,
        preconditioning="aol_out",
        compute_dtype=compute_dtype,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps=adam_eps,
        adam_eps_root=adam_eps_root,
        adam_weight_decay=adam_weight_decay,
        adam_learning_rate=adam_learning_rate,
        muon_weight_dimension_numbers=muon_weight_dimension_numbers,
        sharding=sharding,
    )
