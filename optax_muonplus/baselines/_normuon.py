r"""NorMuon: Muon whose rows are divided by a running mean of their size.

Source: Li et al., arXiv:2510.05491; its code, zichongli5/NorMuon @d45c9a4, ``normuon.py``.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_muonplus.extras.argument_names import suggest_argument_names
from optax_muonplus.frame import DimensionNumbersTree, LeafInfo, MatrixLayout
from optax_muonplus.matrices import (
    ShapeScale,
    as_real,
    check_shape_scale,
    root,
    shape_factor,
    sum_of_squares,
    upcast_for_sum,
)
from optax_muonplus.method import DECAY, NOT_NEGATIVE, check_number, check_word
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import (
    AdamW,
    Momentum,
    MomentumState,
    Steps,
    map_blocks,
    optimizer_of,
)
from optax_muonplus.trees import LayerAxes, Rules, ShardingTree, reader_of

NorMuonRule = Literal["code", "paper"]
EPS = 1e-10  # of the code, for roots and norms alike; below any row of a polar factor


class NorMuonState(NamedTuple):
    """State of :class:`NorMuon`.

    Attributes:
      momentum: :class:`optax_muonplus.transforms.MomentumState`, one buffer for each matrix.
      nu: running mean of squares, one number for each row of each matrix: a parameter's shape with
        its reduction axes of size 1, in float32 at least.
    """

    momentum: MomentumState
    nu: optax.Updates


@dataclasses.dataclass(frozen=True, eq=False)
class NorMuon:
    r"""Momentum, polar factor, and its rows over a running mean of their size.

    For each matrix of shape (m, n) = (out, in), with the polar factor :math:`O_t` of the momentum:

    .. math::
      v_t = \beta_2 v_{t-1} + (1 - \beta_2)\, \mathrm{mean}_j\, O_{t,ij}^2 \in R^m, \qquad
      \hat O_t = O_t / (\sqrt{v_t} + \epsilon)

    and the update is :math:`\sqrt{\max(1, m/n)}\, \hat O_t\, \|O_t\|_F / (\|\hat O_t\|_F +
    \epsilon)` by the published code, or :math:`0.2 \sqrt{mn}\, \hat O_t / \|\hat O_t\|_F` by the
    paper. The state is one momentum buffer and one number a row. On a mesh each matrix is moved for
    its polar factor as under Muon+; the sums that follow are left to the compiler.

    Attributes:
      beta2: decay of the running mean, in [0, 1).
      nu_eps: guards the division by its root.
      rule: ``"code"`` keeps each matrix's Frobenius norm, and ``shape_scale`` follows; ``"paper"``
        gives every update the root mean square 0.2, and ``shape_scale`` has no effect.
      shape_scale: as in :func:`optax_muonplus.muonplus`.
      momentum: without bias correction.
      polar_factor: of the momentum.
    """

    beta2: ArrayLike = 0.95
    nu_eps: ArrayLike = EPS
    rule: NorMuonRule = "code"
    shape_scale: ShapeScale = "max"
    momentum: Momentum = Momentum()
    polar_factor: Orthogonalize = Orthogonalize()

    def __post_init__(self) -> None:
        """Raises ValueError for what is out of range or unknown."""
        check_number("beta2", self.beta2, DECAY)
        check_number("nu_eps", self.nu_eps, NOT_NEGATIVE)
        check_word("rule", self.rule, get_args(NorMuonRule))
        check_shape_scale(self.shape_scale)

    def init(self, params: optax.Params, leaves: Sequence[LeafInfo]) -> NorMuonState:
        """Returns the state before the first update."""
        mu, _ = self._polar_step.init(params, leaves)
        return NorMuonState(mu, map_blocks(_row_zeros, leaves, params))

    def update(
        self, updates: Any, state: Any, params: Any, leaves: Sequence[LeafInfo]
    ) -> tuple[optax.Updates, NorMuonState]:
        """Returns the updates and the new state."""
        mu, nu = state
        old = mu, optax.EmptyState()
        factors, (mu, _) = self._polar_step.update(updates, old, params, leaves)
        updates, nu = map_blocks(self._rescaled, leaves, factors, nu, n_results=2)
        return updates, NorMuonState(mu, nu)

    @property
    def _polar_step(self) -> Steps:
        # Squares are of the polar factor before it is rounded to the dtype of the gradients.
        return Steps.of(self.momentum, [self.polar_factor], rounds=False)

    def _rescaled(
        self, layout: MatrixLayout, o: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns a block of the update and of the next running mean."""
        o = upcast_for_sum(o)
        _, m, n = layout.matrix_shape(o.shape)
        both = (*layout.output_axes, *layout.reduction_axes)
        decay, guard = as_real(self.beta2, v.dtype), as_real(self.nu_eps, v.dtype)
        v = decay * v + (1 - decay) * sum_of_squares(o, layout.reduction_axes) / n
        scaled = o / (root(v) + guard)
        size = root(sum_of_squares(scaled, both))
        if self.rule == "paper":
            return scaled * (0.2 * math.sqrt(m * n) / (size + guard)), v
        kept = root(sum_of_squares(o, both)) / (size + guard)
        return scaled * (kept * shape_factor(m, n, self.shape_scale)), v


def _row_zeros(layout: MatrixLayout, x: jax.Array) -> jax.Array:
    """Returns a zero for each row, where the row lies."""
    return jnp.zeros_like(sum_of_squares(x, layout.reduction_axes))


@suggest_argument_names(NorMuon)
def normuon(
    learning_rate: optax.ScalarOrSchedule,
    link: NorMuon = NorMuon(),
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = None,
    *,
    adamw: AdamW = AdamW(),
    muon_weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
    rules: Rules = (),
    layer_axes: LayerAxes = None,
) -> optax.GradientTransformationExtraArgs:
    """NorMuon on the matrices, AdamW on everything else.

    ``link`` is the rule for matrices with its options, and all other arguments are as in
    :func:`optax_muonplus.muonplus`. The learning rate is 0.02 in the code.
    """
    dims = reader_of(muon_weight_dimension_numbers, rules, layer_axes)
    return optimizer_of(
        link, learning_rate, weight_decay, weight_decay_mask, adamw, dims, sharding, NorMuon
    )
