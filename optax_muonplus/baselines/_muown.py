r"""Muown: the size of each row and its direction, one by Adam and the other by Muon.

Source: Lion et al., arXiv:2605.10797; its code, kcc-lion/muown @3bd0c05, ``muown.py``, and
NVIDIA-NeMo/Emerging-Optimizers @fd77292, ``contrib/muown.py``.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_muonplus import matrices, transforms
from optax_muonplus.baselines._sizes import RMS
from optax_muonplus.matrices import ScaleByShape
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import LeafInfo, MatrixLayout, Momentum

# Decays and epsilon, of all codes. What stands within the root changes no number beside them, and
# makes the derivative by a row of zeros a number.
ADAM = (0.9, 0.95, 1e-8, 1e-36)
LEAST = 1e-12  # the least size of a row, and of its direction, as in Emerging-Optimizers


class MuownState(NamedTuple):
    """State of :class:`Muown`; a number for each row has a parameter's shape with columns of 1."""

    momentum: Any  # MomentumState for the directions' gradients, one buffer for each matrix
    magnitude: optax.Updates  # g, one number for each row
    length: optax.Updates  # the norms of the rows of V, one number for each row
    adam: Any  # Adam's and the decay's state for g, two numbers for each row
    rate: Any  # the state of the learning rate


@dataclasses.dataclass(frozen=True, eq=False)
class Muown:
    r"""The last link of a chain: Adam on the sizes of rows, Muon on their directions.

    Each matrix of shape (m, n) = (out, in) is :math:`W_i = g_i \hat V_i` by rows, with
    :math:`\hat V_i = V_i / \|V_i\|`; at first V is W. From the gradient G of W follow
    :math:`\gamma` of g and :math:`\Gamma` of V, with the momentum M:

    .. math::
      \gamma_i = \langle G_i, \hat V_i \rangle, \qquad
      \Gamma_i = (g_i / \|V_i\|)\, (G_i - \gamma_i \hat V_i), \\
      g \leftarrow g - \eta\, (\mathrm{Adam}(\gamma) + \lambda g), \qquad
      V \leftarrow V - 0.2\, \eta \sqrt{\max(m, n)}\; \mathrm{Ortho}(M(\Gamma))

    The state is one momentum buffer and four numbers a row, 4 (mn + 4 m) bytes in float32: V is W
    with rows of other norms. It costs two readings of W and two sums over rows more than Muon,
    which on a mesh are left to the compiler. An update needs the parameters. Its derivative by a
    row of zeros is of the order of 1 over Adam's epsilon.

    Decay is AdamW's. That of Emerging-Optimizers is of the new g, and the authors' subtracts
    :math:`\eta\lambda W` from the new W and sets g to its rows: both differ by terms of
    :math:`\eta^2\lambda`. The authors have Nesterov, Emerging-Optimizers has not. The authors cut a
    fused QKV by its shape, here dimension numbers do.

    Attributes:
      learning_rate: number or schedule, of g and V; it takes the place of a link.
      weight_decay: number or schedule, of g.
      momentum: the momentum, without bias correction.
      polar_factor: the polar factor of the momentum.
      run: how functions are applied to matrices, which a chain sets.
    """

    learning_rate: optax.ScalarOrSchedule = 1e-3
    weight_decay: optax.ScalarOrSchedule = 0.0
    momentum: Momentum = Momentum()
    polar_factor: Orthogonalize = Orthogonalize()
    run: transforms.Run | None = None

    def __post_init__(self) -> None:
        """Raises ValueError unless rate and decay are numbers, not negative, or schedules."""
        decay = transforms.add_decayed_weights(self.weight_decay)
        transforms.matrix_chain(decay, transforms.scale_by_learning_rate(self.learning_rate))

    def init(self, params: optax.Params, leaves: Sequence[LeafInfo]) -> MuownState:
        """Returns the state before the first update."""
        polar_step, adam, rate = self._links()
        size = transforms.map_blocks(_row_norms, leaves, params)
        length = jax.tree.map(jnp.copy, size)  # one array in two places could not be donated
        momentum, _ = polar_step.init(params, leaves)
        return MuownState(momentum, size, length, adam.init(size), rate.init(size))

    def update(
        self, updates: Any, state: Any, params: Any, leaves: Sequence[LeafInfo]
    ) -> tuple[optax.Updates, MuownState]:
        """Returns the updates and the new state."""
        if params is None:
            raise ValueError("Muown needs the parameters: call update(grads, state, params).")
        polar_step, adam, rate = self._links()
        rows = state.magnitude, state.length
        given = updates, params, *rows
        slopes, grads = transforms.map_blocks(_gradients, leaves, *given, n_results=2)
        old = state.momentum, optax.EmptyState()
        turns, (momentum, _) = polar_step.update(grads, old, params, leaves)
        gains, of_adam = adam.update(slopes, state.adam, state.magnitude)
        (turns, gains), of_rate = rate.update((turns, gains), state.rate)
        made, *rows = transforms.map_blocks(_step, leaves, params, turns, gains, *rows, n_results=3)
        return made, MuownState(momentum, *rows, of_adam, of_rate)

    def _links(self) -> tuple[transforms.FusedLink, Any, Any]:
        """Returns the step of V and that of g at a learning rate of 1, and the rate."""
        decay = transforms.add_decayed_weights(self.weight_decay)
        adam = optax.chain(optax.scale_by_adam(*ADAM), decay)
        functions = [self.polar_factor, ScaleByShape(consistent_rms=RMS)]
        polar_step = transforms.FusedLink.of(self.momentum, functions, rounds=False, run=self.run)
        return polar_step, adam, transforms.scale_by_learning_rate(self.learning_rate)


def _row_norms(layout: MatrixLayout, x: jax.Array) -> jax.Array:
    return jnp.maximum(matrices.root(matrices.sum_of_squares(x, layout.reduction_axes)), LEAST)


def _gradients(
    layout: MatrixLayout, x: jax.Array, w: jax.Array, g: jax.Array, length: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of a block's sizes and directions; ``x`` is that of ``w``."""
    x, unit = matrices.upcast_for_sum(x), matrices.upcast_for_sum(w) / g
    slope = jnp.sum(jnp.real(x * unit.conj()), axis=layout.reduction_axes, keepdims=True)
    return slope.astype(g.dtype), g / length * (x - slope * unit)


def _step(
    layout: MatrixLayout, w: jax.Array, turn: jax.Array, gain: jax.Array, *rows: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what is added to a block ``w``, and its new sizes and lengths of directions."""
    (g, length), w = rows, matrices.upcast_for_sum(w)
    v = w / g * length + turn
    length, g = _row_norms(layout, v), g + gain
    g = jnp.where(jnp.abs(g) < LEAST, LEAST, g)  # Adam may take it through zero
    return v * (g / length) - w, g.astype(rows[0].dtype), length.astype(rows[1].dtype)


@transforms.takes_options(without=("weight_decay_mask", "cautious_weight_decay"))
def muown(
    learning_rate: optax.ScalarOrSchedule, link: Muown = Muown(), **where: Any
) -> optax.GradientTransformationExtraArgs:
    """Muown on the matrices, AdamW on everything else.

    ``link`` is the rule, which gets this learning rate and decay; the decay has no mask. The
    learning rate is of the order of AdamW's, 1e-3 in the code.
    """
    if not isinstance(link, Muown):
        transforms.check_rule(link, Muown)
        raise ValueError(
            "muown takes its own rule only, link=Muown(...), which it gives its learning rate and"
            f" decay; got {type(link).__name__}."
        )
    return transforms.optimizer(link, learning_rate, **where)
