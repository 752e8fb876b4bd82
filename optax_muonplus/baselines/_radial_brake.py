r"""The radial brake: any rule, of whose change of a matrix's norm a part is left out.

Source: the hook ``RadialBrakeHook`` of NVIDIA-NeMo/Emerging-Optimizers @fd77292, by the authors of
KellerJordan/modded-nanogpt #294.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_muonplus import matrices, transforms
from optax_muonplus.baselines._sizes import divided, matrix_axes, matrix_norm
from optax_muonplus.matrices import NOT_NEGATIVE
from optax_muonplus.transforms import LeafInfo, MatrixLayout, Rule


class RadialBrakeState(NamedTuple):
    """State of :class:`RadialBrake`, which has no arrays but the counts of schedules."""

    decay: Any
    rate: Any


@dataclasses.dataclass(frozen=True, eq=False)
class RadialBrake:
    r"""The last link of a chain: a step of which a part of the change of norm is left out.

    For each matrix W, the update U of the links before and decay :math:`\lambda`:

    .. math::
      D = (1 - \eta\lambda) W, \qquad V = D - \eta U, \qquad
      W \leftarrow V\, \frac{\|D\|_F + s\, (\|V\|_F - \|D\|_F)}{\|V\|_F}

    where s is ``outward`` if V has the larger norm, and ``inward`` otherwise. With 1 for both it is
    the plain step, and with 0 for both the norm is held, as by :class:`Hyperball`. There is no
    state. It costs two sums over each matrix, which on a mesh are left to the compiler. An update
    needs the parameters.

    Attributes:
      learning_rate: number or schedule.
      weight_decay: number or schedule, which is not braked.
      outward: share of a growth of the norm that is kept.
      inward: share of a loss of the norm that is kept.
    """

    learning_rate: optax.ScalarOrSchedule = 0.02
    weight_decay: optax.ScalarOrSchedule = 0.0
    outward: ArrayLike = 0.5
    inward: ArrayLike = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError for what is out of range."""
        self._links()
        matrices.check_number("outward", self.outward, NOT_NEGATIVE)
        matrices.check_number("inward", self.inward, NOT_NEGATIVE)

    def init(self, params: optax.Params, leaves: Sequence[LeafInfo]) -> RadialBrakeState:
        """Returns the states of decay and rate."""
        del leaves
        decay, rate = self._links()
        return RadialBrakeState(decay.init(params), rate.init(params))

    def update(
        self, updates: Any, state: Any, params: Any, leaves: Sequence[LeafInfo]
    ) -> tuple[optax.Updates, RadialBrakeState]:
        """Returns the updates and the new state."""
        if params is None:
            raise ValueError("RadialBrake needs the parameters: call update(grads, state, params).")
        decay, rate = self._links()
        shrunk, of_decay = decay.update(optax.tree.zeros_like(updates), state.decay, params)
        (steps, shrunk), of_rate = rate.update((updates, shrunk), state.rate)
        made = transforms.map_blocks(self._braked, leaves, steps, shrunk, params)
        return made, RadialBrakeState(of_decay, of_rate)

    def _links(self) -> tuple[Any, Any]:
        decay = transforms.add_decayed_weights(self.weight_decay)
        rate = transforms.scale_by_learning_rate(self.learning_rate)
        transforms.matrix_chain(decay, rate)  # refuses a decay that turns parameters round
        return decay, rate

    def _braked(self, layout: MatrixLayout, *block: jax.Array) -> jax.Array:
        """Returns what is added to a block, of its step, what it loses by decay, and itself."""
        step, shrunk, w = map(matrices.upcast_for_sum, block)
        w, v = w + shrunk, w + shrunk + step
        before, after = matrix_norm(layout, w), matrix_norm(layout, v)
        # The difference of the norms themselves would be one of their rounding.
        squares = jnp.sum(jnp.real((w + v).conj() * step), matrix_axes(layout), keepdims=True)
        change = divided(squares, before + after)
        outward, inward = (matrices.as_real(x, after.dtype) for x in (self.outward, self.inward))
        left_out = 1 - jnp.where(change > 0, outward, inward)
        return shrunk + step - divided(left_out * change, after) * v


@transforms.takes_options(without=("weight_decay_mask", "cautious_weight_decay"))
def radial_brake(
    learning_rate: optax.ScalarOrSchedule,
    link: Rule = transforms.scale_by_muonplus(norm="none", shape_scale="max"),
    brake: RadialBrake = RadialBrake(),
    **where: Any,
) -> optax.GradientTransformationExtraArgs:
    """A radial brake around a rule on the matrices, AdamW on everything else.

    ``link`` is the rule: Muon, ``NorMuon()``, or Muon+ by ``norm="col_row"``. ``brake`` gets this
    learning rate and decay; the decay has no mask. The learning rate is the rule's.
    """
    transforms.check_rule(link, transforms.scale_by_muonplus, needs_polar_factor=False)
    return transforms.optimizer(transforms.matrix_chain(link, brake), learning_rate, **where)
