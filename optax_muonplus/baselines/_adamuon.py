r"""AdaMuon: the polar factor of the momentum's signs over a running size of each entry.

Source: Si et al., arXiv:2507.11005; its code, Chongjie-Si/AdaMuon @369f0b3, ``adamuon.py``.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_muonplus.extras.argument_names import suggest_argument_names
from optax_muonplus.frame import DimensionNumbersTree, LeafInfo, MatrixLayout
from optax_muonplus.matrices import (
    Elementwise,
    as_real,
    matrix_function,
    root,
    sum_of_squares,
    upcast_for_sum,
)
from optax_muonplus.method import DECAY, NOT_NEGATIVE, check_flag, check_number
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import (
    AdamW,
    Momentum,
    MomentumState,
    Steps,
    find_momentum,
    map_blocks,
    optimizer_of,
)
from optax_muonplus.trees import LayerAxes, Rules, ShardingTree, reader_of

EPS = 1e-8  # of the code, for roots and norms alike
RMS = 0.2  # of an update, about that of AdamW's


class AdaMuonState(NamedTuple):
    """State of :class:`AdaMuon`.

    Attributes:
      momentum: :class:`optax_muonplus.transforms.MomentumState`, one buffer for each matrix.
      nu: running mean of squares, of the parameters' shapes.
    """

    momentum: MomentumState
    nu: optax.Updates


@dataclasses.dataclass(frozen=True, eq=False)
class AdaMuon:
    r"""Momentum, the polar factor of its signs, and entries over a running mean of their size.

    For each matrix of shape (m, n) = (out, in), with the polar factor :math:`O_t` of
    :math:`\mathrm{sign}(M_t)`, all by entries but for the norm:

    .. math::
      V_t = \beta_2 V_{t-1} + (1 - \beta_2)\, O_t^2, \qquad
      \hat O_t = O_t / (\sqrt{V_t} + \epsilon), \qquad
      \text{update} = 0.2 \sqrt{mn}\; \hat O_t / (\|\hat O_t\|_F + \epsilon)

    so that updates have the root mean square 0.2. The state is two buffers for each matrix, of the
    momentum's dtype. On a mesh each matrix is moved for its polar factor as under Muon+; the norm
    that follows is left to the compiler.

    Attributes:
      beta2: decay of the running mean; None means that of the momentum, as in the code.
      nu_eps: guards the division by its root.
      sign: False for the paper's first version, without the signs.
      momentum: without bias correction.
      polar_factor: of the signs.
    """

    beta2: ArrayLike | None = None
    nu_eps: ArrayLike = EPS
    sign: bool = True
    momentum: Momentum = Momentum()
    polar_factor: Orthogonalize = Orthogonalize()

    def __post_init__(self) -> None:
        """Raises ValueError for what is out of range."""
        if self.beta2 is not None:
            check_number("beta2", self.beta2, DECAY)
        check_number("nu_eps", self.nu_eps, NOT_NEGATIVE)
        check_flag("sign", self.sign)

    def init(self, params: optax.Params, leaves: Sequence[LeafInfo]) -> AdaMuonState:
        """Returns the state before the first update."""
        mu, _ = self._polar_step.init(params, leaves)
        like = find_momentum(mu).mu
        return AdaMuonState(mu, jax.tree.map(lambda x: jnp.zeros_like(jnp.real(x)), like))

    def update(
        self, updates: Any, state: Any, params: Any, leaves: Sequence[LeafInfo]
    ) -> tuple[optax.Updates, AdaMuonState]:
        """Returns the updates and the new state."""
        mu, nu = state
        old = mu, optax.EmptyState()
        factors, (mu, _) = self._polar_step.update(updates, old, params, leaves)
        updates, nu = map_blocks(self._rescaled, leaves, factors, nu, n_results=2)
        return updates, AdaMuonState(mu, nu)

    @property
    def _polar_step(self) -> Steps:
        # Squares are of the polar factor before it is rounded to the dtype of the gradients.
        functions = [Sign(), self.polar_factor] if self.sign else [self.polar_factor]
        return Steps.of(self.momentum, functions, rounds=False)

    def _rescaled(
        self, layout: MatrixLayout, o: jax.Array, stored: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns a block of the update and of the next running mean."""
        o, v = upcast_for_sum(o), upcast_for_sum(stored)
        _, m, n = layout.matrix_shape(o.shape)
        beta2 = self.momentum.beta if self.beta2 is None else self.beta2
        decay, guard = as_real(beta2, v.dtype), as_real(self.nu_eps, v.dtype)
        v = decay * v + (1 - decay) * sum_of_squares(o, ())
        scaled = o / (root(v) + guard)
        size = root(sum_of_squares(scaled, (*layout.output_axes, *layout.reduction_axes)))
        return scaled * (RMS * math.sqrt(m * n) / (size + guard)), v.astype(stored.dtype)


@matrix_function
class Sign(Elementwise):
    """The sign of every entry."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns 1, -1 or 0 for each entry; z / |z| for complex ones."""
        return jnp.sign(x)


@suggest_argument_names(AdaMuon)
def adamuon(
    learning_rate: optax.ScalarOrSchedule,
    link: AdaMuon = AdaMuon(),
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = None,
    *,
    adamw: AdamW = AdamW(),
    muon_weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
    rules: Rules = (),
    layer_axes: LayerAxes = None,
) -> optax.GradientTransformationExtraArgs:
    """AdaMuon on the matrices, AdamW on everything else.

    ``link`` is the rule for matrices with its options, and all other arguments are as in
    :func:`optax_muonplus.muonplus`. The learning rate is 6e-4 in the
    code's GPT-2 runs, the order of AdamW's.
    """
    dims = reader_of(muon_weight_dimension_numbers, rules, layer_axes)
    return optimizer_of(
        link, learning_rate, weight_decay, weight_decay_mask, adamw, dims, sharding, AdaMuon
    )
