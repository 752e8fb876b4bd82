r"""AdaMuon: the polar factor of the momentum's signs, with each entry divided by its running size.

Source: Si et al., arXiv:2507.11005; its code, Chongjie-Si/AdaMuon @369f0b3, ``adamuon.py``.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_muonplus import matrices, transforms
from optax_muonplus.contrib._rescaled import Rescaled, RescaledState
from optax_muonplus.contrib._sizes import RMS, matrix_norm
from optax_muonplus.matrices import DECAY, NOT_NEGATIVE, Elementwise
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import MatrixLayout, Momentum


class AdaMuonState(RescaledState):
    """State of :class:`AdaMuon`: a momentum, and a number per entry, at least in float32."""


@matrices.matrix_function
class Sign(Elementwise):
    """The sign of every entry; z / |z| for complex ones."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sign(x)


@dataclasses.dataclass(frozen=True, eq=False)
class AdaMuon(Rescaled):
    r"""Momentum and the polar factor of its signs, with each entry divided by its running size.

    For each matrix of shape (m, n) = (out, in), with the polar factor :math:`O_t` of
    :math:`\mathrm{sign}(M_t)`, elementwise:

    .. math::
      V_t = \beta_2 V_{t-1} + (1 - \beta_2)\, O_t^2, \qquad
      \hat O_t = O_t / (\sqrt{V_t} + \epsilon), \qquad
      \text{update} = 0.2 \sqrt{mn}\; \hat O_t / (\|\hat O_t\|_F + \epsilon)

    Updates have the root mean square 0.2. The state is two buffers for each matrix, in the dtype of
    the momentum; V is at least in float32, because squares underflow in float16. On a mesh each
    matrix moves for its polar factor as in Muon+; the last norm is left to the compiler.

    Attributes:
      beta2: decay of the running mean; None means the momentum's decay, as in the code.
      nu_eps: :math:`\epsilon`.
      sign: False for the paper's first version, without the signs.
      momentum: the momentum, without bias correction.
      polar_factor: the polar factor of the signs.
      run: how functions are applied to matrices; set by a chain.
    """

    beta2: ArrayLike | None = None
    nu_eps: ArrayLike = 1e-8
    sign: bool = True
    momentum: Momentum = Momentum()
    polar_factor: Orthogonalize = Orthogonalize()
    run: transforms.Run = transforms.run_plain
    state = AdaMuonState

    def __post_init__(self) -> None:
        if self.beta2 is not None:
            matrices.check_number("beta2", self.beta2, DECAY)
        matrices.check_number("nu_eps", self.nu_eps, NOT_NEGATIVE)
        matrices.check_flag("sign", self.sign)

    @property
    def polar_step(self) -> transforms.FusedLink:
        functions = [Sign(), self.polar_factor] if self.sign else [self.polar_factor]
        return transforms.FusedLink(self.momentum, functions, rounds=False, run=self.run)

    def start(self, layout: MatrixLayout, w: jax.Array, mu: jax.Array) -> jax.Array:
        return jnp.zeros_like(matrices.upcast_for_sum(jnp.real(mu)))

    def rescaled(
        self, layout: MatrixLayout, o: jax.Array, nu: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        o, v = matrices.upcast_for_sum(o), matrices.upcast_for_sum(nu)
        _, m, n = layout.matrix_shape(o.shape)
        beta2 = self.momentum.beta if self.beta2 is None else self.beta2
        decay, guard = matrices.as_real(beta2, v.dtype), matrices.as_real(self.nu_eps, v.dtype)
        v = decay * v + (1 - decay) * matrices.sum_of_squares(o, ())
        scaled = o / (matrices.root(v) + guard)
        size = matrix_norm(layout, scaled) + guard
        return scaled * (RMS * math.sqrt(m * n) / size), v.astype(nu.dtype)
