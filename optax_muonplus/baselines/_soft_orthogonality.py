r"""Soft orthogonality of weights for the first part of a training: what ORCA adds to Muon.

Source: Liu et al., arXiv:2610.06116, of which the term and its constants were known here, not the
place in the update, and no code.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_muonplus import matrices, transforms
from optax_muonplus.matrices import MatrixFunction
from optax_muonplus.transforms import LeafInfo


@matrices.matrix_function
class OrthogonalityGradient(MatrixFunction):
    """The gradient of a fourth of the squared norm of ``W W^H - I``, which is ``(W W^H - I) W``."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns it by two products, of which the first is as small as the shorter side."""
        y = matrices.upcast_for_sum(x)
        h = jnp.swapaxes(y, -2, -1).conj()
        wide = y.shape[-2] <= y.shape[-1]
        return ((y @ h @ y if wide else y @ (h @ y)) - y).astype(x.dtype)

    def flops(self, shape: tuple[int, int]) -> int:
        """Counts the two products."""
        n, m = sorted(shape)
        return 4 * n * n * m


@dataclasses.dataclass(frozen=True, eq=False)
class SoftOrthogonality:
    r"""A link that draws each matrix to one with orthonormal rows, or columns.

    To the update U of the links before it, for each matrix W and the number t of updates so far,

    .. math::
      U + \gamma_t\, (W W^T - I)\, W

    which is the gradient of :math:`\gamma_t \|W W^T - I\|_F^2 / 4`. ORCA has :math:`\gamma = 1`
    for the first quarter of the steps, and 0 after that, when the update is Muon's; in a mixture of
    experts from the first fifth in the first layer to three fifths in the last. Behind the factor
    by shape it acts as decoupled weight decay does, and that is where this link stands. As a part
    of the gradient it belongs into the loss. There is no state but the count of a schedule. Two
    products for each matrix are computed while the strength is not zero; on a mesh matrices are
    moved for them as for a polar factor.

    Attributes:
      strength: :math:`\gamma`, a number or schedule, such as ``lambda t: 1.0 * (t < 2_500)``.
      run: how functions are applied to matrices, which a chain sets.
    """

    strength: optax.ScalarOrSchedule = 1.0
    run: transforms.Run | None = None

    def __post_init__(self) -> None:
        """Raises ValueError unless the strength is a number, not negative, or a schedule."""
        transforms.add_decayed_weights(self.strength, name="strength")

    def init(self, params: optax.Params, leaves: Sequence[LeafInfo]) -> optax.OptState:
        """Returns the count of updates so far, for a schedule."""
        self._step.init(params, leaves)
        if not callable(self.strength):
            return optax.EmptyState()
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32))

    def update(
        self, updates: Any, state: Any, params: Any, leaves: Sequence[LeafInfo]
    ) -> tuple[optax.Updates, optax.OptState]:
        """Returns the updates and the new state."""
        if params is None:
            raise ValueError(
                "SoftOrthogonality needs the parameters: update(grads, state, params)."
            )
        strength = self.strength
        if callable(strength):
            strength = strength(state.count)
            state = optax.ScaleByScheduleState(optax.safe_increment(state.count))

        def pulled() -> Any:
            pull, _ = self._step.update(params, optax.EmptyState(), None, leaves)
            made = jax.tree.map(lambda u, x: u + jnp.asarray(strength, x.dtype) * x, updates, pull)
            return optax.tree.cast_like(made, updates)

        return jax.lax.cond(jnp.asarray(strength) != 0, pulled, lambda: updates), state

    @property
    def _step(self) -> transforms.FusedLink:
        return transforms.FusedLink.of(None, [OrthogonalityGradient()], rounds=False, run=self.run)
