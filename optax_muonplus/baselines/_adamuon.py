r"""AdaMuon: the polar factor of the momentum's signs over a running size of each entry.

Source: Si et al., arXiv:2507.11005; its code, Chongjie-Si/AdaMuon @369f0b3, ``adamuon.py``.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from optax_muonplus._arguments import DECAY, NOT_NEGATIVE, check_flag, check_number
from optax_muonplus._optimizers.variants import optimizer_of
from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree
from optax_muonplus._parameters.leaves import LeafInfo
from optax_muonplus._parameters.matrix_view import MatrixView
from optax_muonplus._parameters.sharding import ShardingTree
from optax_muonplus.baselines._second_moment import Rescale, polar_then_rescale
from optax_muonplus.coefficients._resolve import CoefficientsLike
from optax_muonplus.matrices._precision import as_real, sum_of_squares, upcast_for_sum
from optax_muonplus.polar._newton_schulz import Preconditioning
from optax_muonplus.polar._options import DEFAULT_EPS, Polar, PolarFunction
from optax_muonplus.polar._orthogonalize import Orthogonalize
from optax_muonplus.transforms._apply import MatrixTransformation
from optax_muonplus.transforms._momentum import Momentum, MomentumState

EPS = 1e-8  # of the code, for roots and norms alike
RMS = 0.2  # of an update, about that of AdamW's


class AdaMuonState(NamedTuple):
    """State of :func:`scale_by_adamuon`.

    Attributes:
      momentum: :class:`optax_muonplus.transforms.MomentumState`, one buffer for each matrix.
      nu: running mean of squares, of the parameters' shapes.
    """

    momentum: MomentumState
    nu: optax.Updates


def scale_by_adamuon(
    ns_coeffs: CoefficientsLike = "jordan",
    ns_steps: int | jax.Array = 5,
    beta: ArrayLike = 0.95,
    eps: ArrayLike = DEFAULT_EPS,
    mu_dtype: DTypeLike | None = None,
    *,
    beta2: ArrayLike | None = None,
    nu_eps: ArrayLike = EPS,
    sign: bool = True,
    nesterov: bool = True,
    polar: Polar | PolarFunction = "auto",
    preconditioning: Preconditioning = "frobenius",
    compute_dtype: DTypeLike | None = None,
    symmetric_kernel: bool = False,
    weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
) -> MatrixTransformation:
    """The matrix part of :func:`adamuon`: no learning rate, no weight decay, no partition.

    Arguments are those of :func:`adamuon`. On a mesh each matrix is moved for its polar factor as
    under Muon+; the norm of each matrix that follows is left to the compiler.
    """
    average = Momentum(beta, nesterov, False, mu_dtype)
    beta2 = beta if beta2 is None else beta2
    check_number("beta2", beta2, DECAY)
    check_number("nu_eps", nu_eps, NOT_NEGATIVE)
    check_flag("sign", sign)
    rescale = entry_rule(beta2, nu_eps)
    polar_factor = Orthogonalize(
        ns_coeffs, ns_steps, eps, polar, preconditioning, compute_dtype, symmetric_kernel
    )

    def init_nu(leaves: Sequence[LeafInfo], params: Any, mu: MomentumState) -> Any:
        del leaves, params
        return jax.tree.map(lambda x: jnp.zeros_like(jnp.real(x)), mu.mu)

    return polar_then_rescale(
        average,
        jnp.sign if sign else None,
        polar_factor,
        rescale,
        init_nu,
        AdaMuonState,
        weight_dimension_numbers,
        sharding,
    )


@optimizer_of(scale_by_adamuon)
def adamuon() -> None:
    r"""AdaMuon on the matrices, AdamW on everything else.

    For each matrix of shape (m, n) = (out, in), with the polar factor :math:`O_t` of
    :math:`\mathrm{sign}(M_t)`, all by entries but for the norm:

    .. math::
      V_t = \beta_2 V_{t-1} + (1 - \beta_2)\, O_t^2, \qquad
      \hat O_t = O_t / (\sqrt{V_t} + \epsilon), \qquad
      \text{update} = 0.2 \sqrt{mn}\; \hat O_t / (\|\hat O_t\|_F + \epsilon)

    so that updates have the root mean square 0.2. The state is two buffers for each matrix.

    Arguments are those of :func:`optax_muonplus.muonplus`, and ``beta2``, the decay of the running
    mean, None for that of the momentum, as in the code; ``nu_eps``, which guards the division by
    its root; ``sign``, False for the paper's first version, without the signs. ``mu_dtype`` is for
    both buffers. The learning rate is of AdamW's order, 6e-4 in the code's GPT-2 runs.

    Raises:
      ValueError: as :func:`optax_muonplus.muonplus`.

    Source: Si et al., arXiv:2507.11005; Chongjie-Si/AdaMuon @369f0b3.
    """


def entry_rule(beta2: ArrayLike, eps: ArrayLike) -> Rescale:
    """The rule that :func:`adamuon` states, from a polar factor and its running mean to both."""

    def rescale(view: MatrixView, o: jax.Array, stored: jax.Array) -> tuple[jax.Array, jax.Array]:
        o, v = upcast_for_sum(o), upcast_for_sum(stored)
        _, m, n = view.matrix_shape(o.shape)
        decay, guard = as_real(beta2, v.dtype), as_real(eps, v.dtype)
        v = decay * v + (1 - decay) * sum_of_squares(o, ())
        scaled = o / (jnp.sqrt(v) + guard)
        size = jnp.sqrt(sum_of_squares(scaled, (*view.output_axes, *view.reduction_axes)))
        return scaled * (RMS * math.sqrt(m * n) / (size + guard)), v.astype(stored.dtype)

    return rescale
