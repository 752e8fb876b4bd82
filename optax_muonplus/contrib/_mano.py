r"""Mano: momentum projected onto the tangents of the parameters' columns or rows.

Source: Gu and Xie, arXiv:2601.23000; its code,
xie-lab-ml/Mano-Restriking-Manifold-Optimization-for-LLM-Training @b78b952, ``mano.py``.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_muonplus import matrices, transforms
from optax_muonplus.contrib._sizes import RMS, divided
from optax_muonplus.matrices import NOT_NEGATIVE
from optax_muonplus.transforms import LeafInfo, Link, MatrixLayout, Momentum


class ManoState(NamedTuple):
    """State of :class:`Mano`."""

    momentum: Any  # a MomentumState, with one buffer for each matrix
    count: Any  # number of updates so far; the next one is by columns if this is even


@dataclasses.dataclass(frozen=True, eq=False)
class Mano(Link):
    r"""Momentum projected onto the tangents of the parameters' columns or rows.

    For each matrix W of shape (m, n) = (out, in), updates 1, 3, 5, ... are by columns and the
    others by rows. With w and :math:`M_t` a column (row) of W and of the momentum, and its length
    d = m (n):

    .. math::
      \hat w = w / \max(\|w\|, \epsilon), \qquad
      t = M_t - \langle M_t, \hat w \rangle \hat w, \qquad
      \text{update} = 0.2 \sqrt{d}\; t / \max(\|t\|, \epsilon)

    Updates have the root mean square 0.2. M is the sum :math:`\beta M_{t-1} + G_t`. There is no
    matrix product. The state is one momentum buffer for each matrix and a counter. An update needs
    the parameters. On a mesh no matrix moves: sums are left to the compiler. The derivative of an
    update by a column or row of zeros is of the order of :math:`1 / \epsilon`.

    Attributes:
      eps: :math:`\epsilon`, a lower bound of norms, as in the code.
      momentum: the momentum, without bias correction; without Nesterov, as in the code.
    """

    eps: ArrayLike = 1e-8
    momentum: Momentum = Momentum(nesterov=False)

    def __post_init__(self) -> None:
        matrices.check_number("eps", self.eps, NOT_NEGATIVE)

    def init(self, params: optax.Params, leaves: Sequence[LeafInfo]) -> ManoState:
        del leaves
        return ManoState(self.momentum.init(params), jnp.zeros([], jnp.int32))

    def update(
        self, updates: Any, state: Any, params: Any, leaves: Sequence[LeafInfo]
    ) -> tuple[optax.Updates, ManoState]:
        if params is None:
            raise ValueError("Mano needs the parameters: call update(grads, state, params).")
        moments, mu = self.momentum.update(updates, state.momentum)
        # The momentum is a mean here, 1 - beta times the sum of the rule. Only eps depends on that.
        share = 1 - matrices.upcast_for_sum(self.momentum.beta)
        guard = matrices.upcast_for_sum(self.eps) * share

        def tangent(by_rows: bool) -> Any:
            step = functools.partial(_tangent_step, by_rows, (self.eps, guard))
            made = transforms.map_blocks(step, leaves, moments, params)
            # Results of a branch are written to memory: in the dtype of the gradients.
            return optax.tree.cast_like(made, updates)

        by_rows = state.count % 2 == 1
        directions = jax.lax.cond(by_rows, lambda: tangent(True), lambda: tangent(False))
        return directions, ManoState(mu, optax.safe_increment(state.count))


def _tangent_step(
    by_rows: bool, eps: Sequence[ArrayLike], layout: MatrixLayout, g: jax.Array, w: jax.Array
) -> jax.Array:
    """Returns the step of :class:`Mano`; ``eps`` are lower bounds of the norms of w and g."""
    g, w = matrices.upcast_for_sum(g), matrices.upcast_for_sum(w)
    _, m, n = layout.matrix_shape(g.shape)
    axes, size = (layout.reduction_axes, n) if by_rows else (layout.output_axes, m)
    # Apart from eps the size of g has no effect, but squares of large numbers would overflow.
    g, power = matrices.divide_by_pow2(g, jnp.max(jnp.abs(g), axis=axes, keepdims=True))
    unit = _over_norm(w, axes, eps[0])
    inner = jnp.sum(jnp.real(g * unit.conj()), axis=axes, keepdims=True)
    t = g - inner * unit
    least = matrices.as_real(eps[1], power.dtype) / power
    return RMS * math.sqrt(size) * _over_norm(t, axes, least)


def _over_norm(x: jax.Array, axes: tuple[int, ...], least: ArrayLike) -> jax.Array:
    """Returns ``x / max(norm, least)``, with norms over ``axes``; zero where both are zero."""
    squares = matrices.sum_of_squares(x, axes)
    size = jnp.maximum(matrices.root(squares), matrices.as_real(least, squares.dtype))
    return divided(x, size)
