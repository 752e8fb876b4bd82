r"""NorMuon: Muon whose rows are divided by a running mean of their size.

Source: Li et al., arXiv:2510.05491; its code, zichongli5/NorMuon @d45c9a4, ``normuon.py``.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from optax_muonplus._arguments import DECAY, NOT_NEGATIVE, check_number, check_word
from optax_muonplus._optimizers.variants import optimizer_of
from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree
from optax_muonplus._parameters.leaves import LeafInfo
from optax_muonplus._parameters.matrix_view import MatrixView
from optax_muonplus._parameters.sharding import ShardingTree
from optax_muonplus.baselines._second_moment import Rescale, polar_then_rescale
from optax_muonplus.coefficients._resolve import CoefficientsLike
from optax_muonplus.matrices._precision import as_real, sum_of_squares, upcast_for_sum
from optax_muonplus.matrices._shape_factor import ShapeScale, check_shape_scale, shape_factor
from optax_muonplus.polar._newton_schulz import Preconditioning
from optax_muonplus.polar._options import DEFAULT_EPS, Polar, PolarFunction
from optax_muonplus.polar._orthogonalize import Orthogonalize
from optax_muonplus.transforms._apply import MatrixTransformation
from optax_muonplus.transforms._blocks import map_blocks
from optax_muonplus.transforms._momentum import Momentum, MomentumState

Rule = Literal["code", "paper"]
EPS = 1e-10  # of the code, for roots and norms alike; below any row of a polar factor


class NorMuonState(NamedTuple):
    """State of :func:`scale_by_normuon`.

    Attributes:
      momentum: :class:`optax_muonplus.transforms.MomentumState`, one buffer for each matrix.
      nu: running mean of squares, one number for each row of each matrix: a parameter's shape with
        its reduction axes of size 1, in float32 at least.
    """

    momentum: MomentumState
    nu: optax.Updates


def scale_by_normuon(
    ns_coeffs: CoefficientsLike = "jordan",
    ns_steps: int | jax.Array = 5,
    beta: ArrayLike = 0.95,
    eps: ArrayLike = DEFAULT_EPS,
    mu_dtype: DTypeLike | None = None,
    *,
    beta2: ArrayLike = 0.95,
    nu_eps: ArrayLike = EPS,
    rule: Rule = "code",
    shape_scale: ShapeScale = "max",
    nesterov: bool = True,
    polar: Polar | PolarFunction = "auto",
    preconditioning: Preconditioning = "frobenius",
    compute_dtype: DTypeLike | None = None,
    symmetric_kernel: bool = False,
    weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
) -> MatrixTransformation:
    """The matrix part of :func:`normuon`: no learning rate, no weight decay, no partition.

    Arguments are those of :func:`normuon`. On a mesh each matrix is moved for its polar factor as
    under Muon+; the sums over rows and matrices that follow are left to the compiler.
    """
    check_number("beta2", beta2, DECAY)
    check_number("nu_eps", nu_eps, NOT_NEGATIVE)
    rescale = row_rule(rule, beta2, nu_eps, shape_scale)
    average = Momentum(beta, nesterov, False, mu_dtype)
    polar_factor = Orthogonalize(
        ns_coeffs, ns_steps, eps, polar, preconditioning, compute_dtype, symmetric_kernel
    )

    def init_nu(leaves: Sequence[LeafInfo], params: Any, mu: Any) -> Any:
        del mu
        return map_blocks(row_zeros, leaves, 1, params)[0]

    return polar_then_rescale(
        average,
        None,
        polar_factor,
        rescale,
        init_nu,
        NorMuonState,
        weight_dimension_numbers,
        sharding,
    )


@optimizer_of(scale_by_normuon)
def normuon() -> None:
    r"""NorMuon on the matrices, AdamW on everything else.

    For each matrix of shape (m, n) = (out, in), with the polar factor :math:`O_t` of the momentum:

    .. math::
      v_t = \beta_2 v_{t-1} + (1 - \beta_2)\, \mathrm{mean}_j\, O_{t,ij}^2 \in R^m, \qquad
      \hat O_t = O_t / (\sqrt{v_t} + \epsilon)

    and the update is :math:`\sqrt{\max(1, m/n)}\, \hat O_t\, \|O_t\|_F / (\|\hat O_t\|_F +
    \epsilon)` by the published code, or :math:`0.2 \sqrt{mn}\, \hat O_t / \|\hat O_t\|_F` by the
    paper. The state is one momentum buffer and one number a row.

    Arguments are those of :func:`optax_muonplus.muonplus`, and ``beta2``, the decay of the running
    mean, in [0, 1); ``nu_eps``, which guards the division by its root; ``rule``, ``"code"`` (keeps
    each matrix's Frobenius norm, and ``shape_scale`` follows) or ``"paper"`` (gives every update
    the root mean square 0.2; ``shape_scale`` then has no effect). The code's learning rate is 0.02.

    Raises:
      ValueError: as :func:`optax_muonplus.muonplus`, and for an unknown ``rule``.

    Source: Li et al., arXiv:2510.05491; zichongli5/NorMuon @d45c9a4.
    """


def row_zeros(view: MatrixView, x: jax.Array) -> tuple[jax.Array]:
    """A zero for each row, where the row lies."""
    return (jnp.zeros_like(sum_of_squares(x, view.reduction_axes)),)


def row_rule(rule: Rule, beta2: ArrayLike, eps: ArrayLike, shape_scale: ShapeScale) -> Rescale:
    """The rule that :func:`normuon` states, from a polar factor and its running mean to both."""
    check_word("rule", rule, get_args(Rule))
    check_shape_scale(shape_scale)

    def rescale(view: MatrixView, o: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        o = upcast_for_sum(o)
        _, m, n = view.matrix_shape(o.shape)
        both = (*view.output_axes, *view.reduction_axes)
        decay, guard = as_real(beta2, v.dtype), as_real(eps, v.dtype)
        v = decay * v + (1 - decay) * sum_of_squares(o, view.reduction_axes) / n
        scaled = o / (jnp.sqrt(v) + guard)
        size = jnp.sqrt(sum_of_squares(scaled, both))
        if rule == "paper":
            return scaled * (0.2 * math.sqrt(m * n) / (size + guard)), v
        kept = jnp.sqrt(sum_of_squares(o, both)) / (size + guard)
        return scaled * (kept * shape_factor(m, n, shape_scale)), v

    return rescale
