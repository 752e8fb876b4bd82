"""The links of Muon+ as Optax transformations. Each computes in float32 at least."""

from typing import Unpack

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from optax_muonplus._chain.chain import MatrixTransformation
from optax_muonplus._chain.momentum import (
    NUMBERS,
    MomentumTransformation,
    PlainMomentum,
    Storage,
)
from optax_muonplus._chain.program import DualNorm
from optax_muonplus._core.arguments import check_flag
from optax_muonplus._core.coefficients import CoefficientsLike
from optax_muonplus._core.newton_schulz import Preconditioning
from optax_muonplus._core.normalize import Norm, Normalize
from optax_muonplus._core.orthogonalize import DEFAULT_EPS, Orthogonalize, Polar, PolarFunction
from optax_muonplus._core.scale import ScaleByShape, ShapeScale
from optax_muonplus._links.matrix_chain import matrix_chain
from optax_muonplus._links.where import Matrices, MatricesFields


class Momentum(PlainMomentum):
    """A part of a chain; its attributes are the arguments of :func:`optax_muonplus.momentum`."""

    other_dtype = "int8"

    @property
    def storage(self) -> Storage:
        if self.dtype != np.int8:
            return NUMBERS
        from optax_muonplus.int8 import STORAGE  # imported only when used

        return STORAGE


def momentum(
    beta: ArrayLike = 0.95,
    *,
    nesterov: bool = True,
    bias_correction: bool = False,
    mu_dtype: DTypeLike | None = None,
) -> MomentumTransformation:
    r"""Exponential moving average of the gradients.

    .. math::
      M_t = \beta M_{t-1} + (1 - \beta) G_t

    The update is :math:`\beta M_t + (1 - \beta) G_t`, or :math:`M_t` with ``nesterov=False``.

    Args:
      beta: decay, in [0, 1).
      nesterov: whether to look one step ahead. The paper's code and Optax do, not its equation.
      bias_correction: whether to correct for the start at zero: :math:`M_t` is divided by
        :math:`1-\beta^t`. With ``nesterov`` it is divided by :math:`1-\beta^{t+1}`, and :math:`G_t`
        by :math:`1-\beta^t` (Dozat 2016), as in ``optax.contrib.muon``. Without ``nesterov`` the
        polar factor is the same. The result may be twice the largest gradient: it overflows for
        gradients above half of their dtype's largest number.
      mu_dtype: dtype of the buffer; None means the parameter's. Sums are in float32 at least.
        ``"int8"`` keeps 1.02 bytes per element: integers up to 127, and a float32 scale for each
        block of up to 256. Blocks lie along the axis that allows the longest. If several
        do, it is the last of them other than the final axis. On a mesh, a shard should hold whole
        blocks: otherwise a collective for the scales is added, and Explicit axes raise an error.

    Returns:
      A transformation with :class:`optax_muonplus.transforms.MomentumState`, or
      :class:`optax_muonplus.transforms.Int8MomentumState`. Updates have the dtype of the sums.

    Raises:
      ValueError: for a ``beta`` known to be outside [0, 1), and a ``mu_dtype`` that is neither
        floating-point nor ``"int8"``. At init, for integer parameters. At an update, for gradients
        that are integers, have another shape than their buffer, or are complex where it is real.

    Source: Zhang et al., arXiv:2602.21545, equation 1, and its code, K1seki221/MuonPlus @8a9ace1;
    Gupta et al., arXiv:2509.23106, for linear codes of eight bits (there in blocks of 2048).
    """
    return MomentumTransformation(Momentum(beta, nesterov, bias_correction, mu_dtype))


def orthogonalize(
    ns_coeffs: CoefficientsLike = "jordan",
    ns_steps: int | jax.Array | None = None,
    eps: ArrayLike = DEFAULT_EPS,
    *,
    polar: Polar | PolarFunction = "auto",
    preconditioning: Preconditioning = "frobenius",
    compute_dtype: DTypeLike | None = None,
    where: Matrices | None = None,
    **fields: Unpack[MatricesFields],
) -> MatrixTransformation:
    """Replaces every matrix by its polar factor, exact or approximate.

    Arguments are those of :class:`optax_muonplus.polar.Orthogonalize`. ``where`` and ``fields`` are
    those of :func:`optax_muonplus.matrix_chain`: every leaf must be a matrix.
    """
    return matrix_chain(
        Orthogonalize(ns_coeffs, ns_steps, eps, polar, preconditioning, compute_dtype),
        where=where,
        **fields,
    )


def normalize(
    norm: Norm = "row_col",
    norm_eps: ArrayLike = 1e-8,
    *,
    match_frobenius: bool = True,
    where: Matrices | None = None,
    **fields: Unpack[MatricesFields],
) -> MatrixTransformation:
    """Divides the rows or the columns of every matrix by their norms, or both in turn.

    Arguments are those of :class:`optax_muonplus.matrices.Normalize`. ``where`` and ``fields`` are
    those of :func:`optax_muonplus.matrix_chain`: every leaf must be a matrix.
    """
    return matrix_chain(Normalize(norm, norm_eps, match_frobenius), where=where, **fields)


def scale_by_shape(
    shape_scale: ShapeScale = "max",
    consistent_rms: float | jax.Array | None = None,
    *,
    where: Matrices | None = None,
    **fields: Unpack[MatricesFields],
) -> MatrixTransformation:
    """Multiplies every matrix by a factor of its shape.

    Args:
      shape_scale: ``"spectral"`` sqrt(out/in), ``"max"`` sqrt(max(1, out/in)) or ``"none"``.
      consistent_rms: the root mean square of the updates, in place of ``shape_scale``. Behind a
        normalization in a :func:`matrix_chain` it also replaces ``match_frobenius``: the factor
        follows from the shape, and zero rows count like others. Directly behind a polar factor, the
        factor is that for an exact one, as in Optax. Elsewhere each matrix is measured.
      where: as in :func:`optax_muonplus.matrix_chain`: every leaf must be a matrix.
      **fields: as in :func:`optax_muonplus.matrix_chain`.

    Equations: :class:`optax_muonplus.matrices.ScaleByShape`.
    """
    return matrix_chain(ScaleByShape(shape_scale, consistent_rms), where=where, **fields)


def scale_by_muonplus(
    ns_coeffs: CoefficientsLike = "jordan",
    ns_steps: int | jax.Array | None = None,
    beta: ArrayLike = 0.95,
    eps: ArrayLike = DEFAULT_EPS,
    mu_dtype: DTypeLike | None = None,
    *,
    norm: Norm = "row_col",
    norm_eps: ArrayLike = 1e-8,
    match_frobenius: bool = True,
    shape_scale: ShapeScale = "max",
    consistent_rms: float | jax.Array | None = None,
    nesterov: bool = True,
    bias_correction: bool = False,
    polar: Polar | PolarFunction = "auto",
    preconditioning: Preconditioning = "frobenius",
    adaptive: bool = False,
    compute_dtype: DTypeLike | None = None,
    where: Matrices | None = None,
    **fields: Unpack[MatricesFields],
) -> MatrixTransformation:
    r"""The matrix part of Muon+: no learning rate, no weight decay, no partition.

    .. math::
      M_t = \beta M_{t-1} + (1-\beta) G_t, \qquad
      O_t = \mathrm{Norm}(\mathrm{Ortho}(\beta M_t + (1-\beta) G_t)), \qquad
      \text{update} = \sqrt{\max(1, m/n)}\, O_t

    Arguments are those of :func:`optax_muonplus.muonplus`, and ``where`` is that of
    :func:`optax_muonplus.matrix_chain`. Updates have the gradients' dtype. Each matrix is read and
    written once, and on a mesh it is sent once to the device that works on it.

    Source: Zhang et al., arXiv:2602.21545, equation 2 and Algorithm 1.
    """
    check_flag("adaptive", adaptive)
    return matrix_chain(
        Momentum(beta, nesterov, bias_correction, mu_dtype),
        Orthogonalize(ns_coeffs, ns_steps, eps, polar, preconditioning, compute_dtype),
        Normalize(norm, norm_eps, match_frobenius),
        *([DualNorm()] if adaptive else []),
        ScaleByShape(shape_scale, consistent_rms),
        where=where,
        **fields,
    )
