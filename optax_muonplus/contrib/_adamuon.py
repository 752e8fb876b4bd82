r"""AdaMuon: the polar factor of the momentum's signs over a running size of each entry.

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
    """State of :class:`AdaMuon`: a momentum, and a number for each entry in float32 at least."""


@matrices.matrix_function
class Sign(Elementwise):
    """The sign of every entry."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns 1, -1 or 0 for each entry; z / |z| for complex ones."""
        return jnp.sign(x)


@dataclasses.dataclass(frozen=True, eq=False)
class AdaMuon(Rescaled):
    r"""Momentum, the polar factor of its signs, and entries over a running mean of their size.

    For each matrix of shape (m, n) = (out, in), with the polar factor :math:`O_t` of
    :math:`\mathrm{sign}(M_t)`, all by entries but for the norm:

    .. math::
      V_t = \beta_2 V_{t-1} + (1 - \beta_2)\, O_t^2, \qquad
      \hat O_t = O_t / (\sqrt{V_t} + \epsilon), \qquad
      \text{update} = 0.2 \sqrt{mn}\; \hat O_t / (\|\hat O_t\|_F + \epsilon)

    so that updates have the root mean square 0.2. The state is two buffers for each matrix, of the
    momentum's dtype; that of V is float32 at least, as squares underflow in float16. On a mesh each
    matrix is moved for its polar factor as under Muon+; the norm that follows is left to the
    compiler.

    Attributes:
      beta2: decay of the running mean; None means that of the momentum, as in the code.
      nu_eps: added to its root, and to the norm that divides.
      sign: False for the paper's first version, without the signs.
      momentum: the momentum, without bias correction.
      polar_factor: the polar factor of the signs.
      run: how functions are applied to matrices, which a chain sets.
    """

    beta2: ArrayLike | None = None
    nu_eps: ArrayLike = 1e-8
    sign: bool = True
    momentum: Momentum = Momentum()
    polar_factor: Orthogonalize = Orthogonalize()
    run: transforms.Run = transforms.run_plain
    state = AdaMuonState

    def __post_init__(self) -> None:
        """Raises ValueError for what is out of range."""
        if self.beta2 is not None:
            matrices.check_number("beta2", self.beta2, DECAY)
        matrices.check_number("nu_eps", self.nu_eps, NOT_NEGATIVE)
        matrices.check_flag("sign", self.sign)

    @property
    def polar_step(self) -> transforms.FusedLink:
        """The momentum, and the polar factor of its signs."""
        functions = [Sign(), self.polar_factor] if self.sign else [self.polar_factor]
        return transforms.FusedLink(self.momentum, functions, rounds=False, run=self.run)

    def start(self, layout: MatrixLayout, w: jax.Array, mu: jax.Array) -> jax.Array:
        """Returns a zero for each entry."""
        return jnp.zeros_like(matrices.upcast_for_sum(jnp.real(mu)))

    def rescaled(
        self, layout: MatrixLayout, o: jax.Array, nu: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns a block of the update and of the next running mean."""
        o, v = matrices.upcast_for_sum(o), matrices.upcast_for_sum(nu)
        _, m, n = layout.matrix_shape(o.shape)
        beta2 = self.momentum.beta if self.beta2 is None else self.beta2
        decay, guard = matrices.as_real(beta2, v.dtype), matrices.as_real(self.nu_eps, v.dtype)
        v = decay * v + (1 - decay) * matrices.sum_of_squares(o, ())
        scaled = o / (matrices.root(v) + guard)
        size = matrix_norm(layout, scaled) + guard
        return scaled * (RMS * math.sqrt(m * n) / size), v.astype(nu.dtype)
