r"""NAMO: Muon whose step has Adam's size, one for each matrix or for each of its columns.

Source: Zhang, Liu and Schaeffer, arXiv:2602.17080; its code, minxin-zhg/namo @344d11f,
``src/namo.py``.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_muonplus import matrices, transforms
from optax_muonplus.baselines._sizes import RMS, divided
from optax_muonplus.matrices import DECAY, NOT_NEGATIVE, Kind, ScaleByShape
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import LeafInfo, MatrixLayout, Momentum


class NamoState(NamedTuple):
    """State of :class:`Namo`; nu is one number a matrix, or a column."""

    momentum: Any
    nu: optax.Updates
    count: Any
    decay: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Namo:
    r"""The polar factor of a momentum, with a step of Adam's size.

    For each matrix W of shape (m, n) = (out, in), with gradient G, the direction M of the momentum
    and its polar factor O:

    .. math::
      v_t = \beta_2 v_{t-1} + (1 - \beta_2) \|G_t\|_F^2, \qquad
      \alpha_t = \frac{\sqrt{1 - \beta_2^t}}{1 - \beta^t} \frac{\|M_t\|_F}{\sqrt{v_t} + \epsilon},
      \qquad \text{update} = \alpha_t\, (0.2 \sqrt{\max(m, n)}\; O_t + \lambda W)

    The step is small where gradients disagree. With ``by_columns``, NAMO-D, each column has a v and
    an :math:`\alpha` of its own. The state is one momentum buffer and one number a matrix, or a
    column. On a mesh directions are moved for their polar factors; norms are left to the compiler.
    The code cuts the step at 1, which no usual rate comes near.

    Attributes:
      weight_decay: number or schedule; :math:`\alpha` multiplies it too.
      beta2: decay of the running mean, in [0, 1).
      nu_eps: added to its root.
      by_columns: NAMO-D, a size for each input feature.
      clamp: c of NAMO-D, whose :math:`\alpha` lie between c and 1 / c times their mean.
      momentum: without bias correction.
      polar_factor: of the momentum.
      run: how functions are applied to matrices, which a chain sets.
    """

    weight_decay: optax.ScalarOrSchedule = 0.0
    beta2: ArrayLike = 0.99
    nu_eps: ArrayLike = 1e-8
    by_columns: bool = False
    clamp: ArrayLike = 0.75
    momentum: Momentum = Momentum()
    polar_factor: Orthogonalize = Orthogonalize()
    run: transforms.Run | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for what is out of range."""
        if self.momentum.bias_correction:
            raise ValueError(
                "Namo corrects its momentum for the zero start itself: leave bias_correction out."
            )
        transforms.add_decayed_weights(self.weight_decay)
        matrices.check_number("beta2", self.beta2, DECAY)
        matrices.check_number("nu_eps", self.nu_eps, NOT_NEGATIVE)
        matrices.check_flag("by_columns", self.by_columns)
        matrices.check_number("clamp", self.clamp, Kind("in (0, 1]", lambda x: 0 < x <= 1))

    def init(self, params: optax.Params, leaves: Sequence[LeafInfo]) -> NamoState:
        """Returns the state before the first update."""
        self._polar_step.init(params, leaves)
        nu = transforms.map_blocks(self._squares, leaves, optax.tree.zeros_like(params))
        decay = transforms.add_decayed_weights(self.weight_decay).init(params)
        return NamoState(self.momentum.init(params), nu, jnp.zeros([], jnp.int32), decay)

    def update(
        self, updates: Any, state: Any, params: Any, leaves: Sequence[LeafInfo]
    ) -> tuple[optax.Updates, NamoState]:
        """Returns the updates and the new state."""
        moments, momentum = self.momentum.update(updates, state.momentum)
        made, _ = self._polar_step.update(moments, optax.EmptyState(), params, leaves)
        decay = transforms.add_decayed_weights(self.weight_decay)
        made, of_decay = decay.update(made, state.decay, params)
        count = optax.safe_increment(state.count)
        sized, given = functools.partial(self._sized, count), (made, moments, updates, state.nu)
        made, nu = transforms.map_blocks(sized, leaves, *given, n_results=2)
        return made, NamoState(momentum, nu, count, of_decay)

    @property
    def _polar_step(self) -> transforms.FusedLink:
        functions = [self.polar_factor, ScaleByShape(consistent_rms=RMS)]
        return transforms.FusedLink.of(None, functions, rounds=False, run=self.run)

    def _squares(self, layout: MatrixLayout, x: jax.Array) -> jax.Array:
        """Returns the sum of squares of each matrix, or of each column."""
        rows = () if self.by_columns else layout.reduction_axes
        return matrices.sum_of_squares(x, (*layout.output_axes, *rows))

    def _sized(
        self, count: Any, layout: MatrixLayout, u: jax.Array, m: jax.Array, g: jax.Array, nu: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Returns a block ``u`` with Adam's size, and the next running mean."""
        given = count, self.momentum.beta, self.beta2, self.nu_eps, self.clamp
        steps, beta, beta2, guard, share = (matrices.as_real(x, nu.dtype) for x in given)
        nu = (beta2 * nu + (1 - beta2) * self._squares(layout, g)).astype(nu.dtype)
        alpha = divided(matrices.root(self._squares(layout, m)), matrices.root(nu) + guard)
        if self.by_columns:
            mean = jnp.mean(alpha, layout.reduction_axes, keepdims=True)
            alpha = jnp.clip(alpha, share * mean, mean / share)
        alpha *= jnp.sqrt(1 - beta2**steps) / (1 - beta**steps)
        return alpha * matrices.upcast_for_sum(u), nu


@transforms.takes_options(without=("weight_decay_mask", "cautious_weight_decay"))
def namo(
    learning_rate: optax.ScalarOrSchedule,
    link: Namo = Namo(),
    weight_decay: optax.ScalarOrSchedule = 0.0,
    **where: Any,
) -> optax.GradientTransformationExtraArgs:
    """NAMO on the matrices, AdamW on everything else.

    ``link`` is the rule, which gets this decay. The learning rate is 0.01 in the code, with weight
    decay 0.1.
    """
    transforms.check_rule(link, Namo)
    if not isinstance(link, Namo):
        raise ValueError(f"namo takes its own rule, link=Namo(...), got {type(link).__name__}.")
    link = dataclasses.replace(link, weight_decay=weight_decay)
    return transforms.optimizer(link, learning_rate, **where)
