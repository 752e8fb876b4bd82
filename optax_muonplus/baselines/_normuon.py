r"""NorMuon: Muon whose rows are divided by a running mean of their size.

Source: Li et al., arXiv:2510.05491; its code, zichongli5/NorMuon @d45c9a4, ``normuon.py``.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_muonplus._optimizers import AdamW, with_adamw
from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree, MatrixView
from optax_muonplus._parameters.sharding import ShardingTree, settle
from optax_muonplus.matrices._precision import as_real, sum_of_squares, upcast_for_sum
from optax_muonplus.matrices._shape_factor import ShapeScale, check_shape_scale, shape_factor
from optax_muonplus.polar._methods import DEFAULT_EPS, Polar, PolarFunction, Preconditioning
from optax_muonplus.transforms._apply import apply_in_place
from optax_muonplus.transforms._links import check_decay, momentum, orthogonalize

Rule = Literal["code", "paper"]
EPS = 1e-10  # of the code, for roots and norms alike; below any row of a polar factor


class NorMuonState(NamedTuple):
    """State of :func:`scale_by_normuon`.

    Attributes:
      momentum: :class:`optax_muonplus.transforms.MomentumState`, one buffer for each matrix.
      nu: running mean of squares, one number for each row of each matrix: a parameter's shape with
        its reduction axes of size 1, in float32 at least.
    """

    momentum: Any
    nu: optax.Updates


def normuon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: str | Sequence[Any] = "jordan",
    ns_steps: Any = 5,
    beta: Any = 0.95,
    eps: Any = DEFAULT_EPS,
    weight_decay: Any = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    *,
    beta2: Any = 0.95,
    nu_eps: Any = EPS,
    rule: Rule = "code",
    shape_scale: ShapeScale = "max",
    nesterov: bool = True,
    polar: Polar | PolarFunction = "auto",
    preconditioning: Preconditioning = "frobenius",
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
    the root mean square 0.2). The code's learning rate is 0.02.

    Raises:
      ValueError: as :func:`optax_muonplus.muonplus`, and for an unknown ``rule``.

    Source: Li et al., arXiv:2510.05491; zichongli5/NorMuon @d45c9a4.
    """
    matrix_part = functools.partial(
        scale_by_normuon,
        ns_coeffs,
        ns_steps,
        beta,
        eps,
        mu_dtype,
        beta2=beta2,
        nu_eps=nu_eps,
        rule=rule,
        shape_scale=shape_scale,
        nesterov=nesterov,
        polar=polar,
        preconditioning=preconditioning,
        compute_dtype=compute_dtype,
    )
    matrix_part()  # checks the arguments now rather than at init
    rest = AdamW(adam_learning_rate, adam_b1, adam_b2, adam_eps, adam_eps_root, adam_weight_decay)
    decay = optax.add_decayed_weights(weight_decay, weight_decay_mask)
    return with_adamw(
        matrix_part, decay, learning_rate, rest, muon_weight_dimension_numbers, sharding
    )


def scale_by_normuon(
    ns_coeffs: str | Sequence[Any] = "jordan",
    ns_steps: Any = 5,
    beta: Any = 0.95,
    eps: Any = DEFAULT_EPS,
    mu_dtype: Any = None,
    *,
    beta2: Any = 0.95,
    nu_eps: Any = EPS,
    rule: Rule = "code",
    shape_scale: ShapeScale = "max",
    nesterov: bool = True,
    polar: Polar | PolarFunction = "auto",
    preconditioning: Preconditioning = "frobenius",
    compute_dtype: Any = None,
    weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
) -> optax.GradientTransformation:
    """The matrix part of :func:`normuon`: no learning rate, no weight decay, no partition.

    Arguments are those of :func:`normuon`. On a mesh each matrix is moved for its polar factor as
    under Muon+; the sums over rows and matrices that follow are left to the compiler.
    """
    check_decay("beta2", beta2)
    rescale = row_rule(rule, beta2, nu_eps, shape_scale)
    first = momentum(beta, nesterov=nesterov, mu_dtype=mu_dtype)
    then = orthogonalize(
        ns_coeffs,
        ns_steps,
        eps,
        polar=polar,
        preconditioning=preconditioning,
        compute_dtype=compute_dtype,
        weight_dimension_numbers=weight_dimension_numbers,
        sharding=sharding,
    )

    def init_fn(params: optax.Params) -> Any:
        then.init(params)
        mu = settle(first.init(params), params, sharding)
        (nu,) = apply_in_place(row_zeros, weight_dimension_numbers, 1, params)
        return NorMuonState(mu, nu)

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        moments, mu = first.update(updates, state.momentum, params)
        polar_factors, _ = then.update(moments, optax.EmptyState(), params)
        scaled, nu = apply_in_place(rescale, weight_dimension_numbers, 2, polar_factors, state.nu)
        return optax.tree.cast_like(scaled, updates), NorMuonState(mu, nu)

    return optax.GradientTransformation(init_fn, update_fn)


def row_zeros(view: MatrixView, x: jax.Array) -> tuple[jax.Array]:
    """A zero for each row, where the row lies."""
    return (jnp.zeros_like(sum_of_squares(x, view.reduction_axes)),)


def row_rule(
    rule: Rule, beta2: Any, eps: Any, shape_scale: ShapeScale
) -> Callable[[MatrixView, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """The rule that :func:`normuon` states, from a polar factor and its running mean to both."""
    if rule not in ("code", "paper"):
        raise ValueError(f"Unknown rule {rule!r}. Known: code, paper.")
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
