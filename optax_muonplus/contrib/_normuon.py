r"""NorMuon: Muon with each row divided by its running size.

Source: Li et al., arXiv:2510.05491; its code, zichongli5/NorMuon @d45c9a4, ``normuon.py``.
"""

import dataclasses
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_muonplus import matrices, transforms
from optax_muonplus.contrib._rescaled import Rescaled, RescaledState
from optax_muonplus.contrib._sizes import RMS, divided
from optax_muonplus.matrices import DECAY, NOT_NEGATIVE, ScaleByShape, ShapeScale
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import MatrixLayout, Momentum

NorMuonRule = Literal["code", "paper"]
NorMuonSide = Literal["row", "long", "long_row"]


class NorMuonState(RescaledState):
    """State of :class:`NorMuon`: a momentum, and row or column means, at least in float32."""


@dataclasses.dataclass(frozen=True, eq=False)
class NorMuon(Rescaled):
    r"""Momentum and its polar factor, with each row divided by its running size.

    For each matrix of shape (m, n) = (out, in), with the polar factor :math:`O_t` of the momentum:

    .. math::
      v_t = \beta_2 v_{t-1} + (1 - \beta_2)\, \mathrm{mean}_j\, O_{t,ij}^2 \in R^m, \qquad
      \hat O_t = O_t / (\sqrt{v_t} + \epsilon)

    and the update is :math:`\sqrt{\max(1, m/n)}\, \hat O_t\, \|O_t\|_F / (\|\hat O_t\|_F +
    \epsilon)` by the published code, or :math:`0.2 \sqrt{mn}\, \hat O_t / \|\hat O_t\|_F` by the
    paper. The state is one momentum buffer and one number per row or column. On a mesh each matrix
    moves for its polar factor as in Muon+; the sums that follow are left to the compiler.

    The rows of a wide polar factor already have equal norms, and so have the columns of a tall one.
    Others therefore divide along the longer side: ``side="long_row"`` is the rule of
    modded-nanogpt, nanochat and Emerging-Optimizers (Megatron), ``side="long"`` that of marin.

    Attributes:
      beta2: decay of the running mean, in [0, 1).
      nu_eps: :math:`\epsilon`; the code's is smaller than any row of a polar factor.
      rule: ``"code"`` keeps each Frobenius norm and then applies ``shape_scale``; ``"paper"`` sets
        the root mean square of every update to 0.2, and ``shape_scale`` has no effect.
      side: ``"row"``: each row has a running mean. ``"long"``: each row of a tall matrix and each
        column of a wide one; square matrices stay as they are. ``"long_row"``: as ``"long"``, and
        each row of a square matrix.
      shape_scale: as in :func:`optax_muonplus.muonplus`.
      momentum: the momentum, without bias correction.
      polar_factor: the polar factor of the momentum.
      run: how functions are applied to matrices; set by a chain.
    """

    beta2: ArrayLike = 0.95
    nu_eps: ArrayLike = 1e-10
    rule: NorMuonRule = "code"
    side: NorMuonSide = "row"
    shape_scale: ShapeScale = "max"
    momentum: Momentum = Momentum()
    polar_factor: Orthogonalize = Orthogonalize()
    run: transforms.Run = transforms.run_plain
    state = NorMuonState

    def __post_init__(self) -> None:
        matrices.check_number("beta2", self.beta2, DECAY)
        matrices.check_number("nu_eps", self.nu_eps, NOT_NEGATIVE)
        matrices.check_word("rule", self.rule, get_args(NorMuonRule))
        matrices.check_word("side", self.side, get_args(NorMuonSide))
        ScaleByShape(self.shape_scale)

    @property
    def polar_step(self) -> transforms.FusedLink:
        return transforms.FusedLink(self.momentum, [self.polar_factor], False, self.run)

    def start(self, layout: MatrixLayout, w: jax.Array, mu: jax.Array) -> jax.Array:
        return jnp.zeros_like(self._mean_squares(layout, w)[0])  # with its shape and sharding

    def rescaled(
        self, layout: MatrixLayout, o: jax.Array, nu: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        o = matrices.upcast_for_sum(o)
        _, m, n = layout.matrix_shape(o.shape)
        decay = matrices.as_real(self.beta2, nu.dtype)
        guard = matrices.as_real(self.nu_eps, nu.dtype)
        mean, entries = self._mean_squares(layout, o)
        nu = (decay * nu + (1 - decay) * mean).astype(nu.dtype)
        inverse = divided(jnp.ones_like(nu), matrices.root(nu) + guard)
        # Both Frobenius norms follow from the means: O is read twice and never copied.
        before, after = (
            matrices.root(entries * jnp.sum(x, layout.matrix_axes, keepdims=True))
            for x in (mean, (matrices.root(mean) * inverse) ** 2)
        )
        if self.rule == "paper":
            return o * (inverse * divided(RMS * math.sqrt(m * n), after + guard)), nu
        kept = divided(before, after + guard) * ScaleByShape(self.shape_scale).factor(m, n)
        return o * (inverse * kept), nu

    def _mean_squares(self, layout: MatrixLayout, x: jax.Array) -> tuple[jax.Array, int]:
        """Returns the mean square of each row, column or matrix, and its number of entries."""
        _, m, n = layout.matrix_shape(x.shape)
        axes, entries = layout.matrix_axes, m * n  # square: one factor, which the norm cancels
        if self.side == "row" or m > n or (m == n and self.side == "long_row"):
            axes, entries = layout.reduction_axes, n
        elif m < n:
            axes, entries = layout.output_axes, m
        return matrices.sum_of_squares(x, axes) / entries, entries
