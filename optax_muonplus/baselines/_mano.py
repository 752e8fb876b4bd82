r"""Mano: momentum made tangent to unit columns, or rows, of the parameters; no matrix product.

Source: Gu and Xie, arXiv:2601.23000; its code,
xie-lab-ml/Mano-Restriking-Manifold-Optimization-for-LLM-Training @b78b952, ``mano.py``.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from optax_muonplus._arguments import NOT_NEGATIVE, check_number
from optax_muonplus._optimizers.variants import optimizer_of
from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree
from optax_muonplus._parameters.leaves import LeafInfo
from optax_muonplus._parameters.matrix_view import MatrixView
from optax_muonplus._parameters.sharding import ShardingTree
from optax_muonplus.matrices._precision import (
    as_real,
    divide_by_pow2,
    sum_of_squares,
    upcast_for_sum,
)
from optax_muonplus.transforms._apply import (
    MatrixTransformation,
    for_matrices,
)
from optax_muonplus.transforms._blocks import map_blocks
from optax_muonplus.transforms._momentum import momentum

EPS = 1e-8  # of the code
RMS = 0.2  # of an update, about that of AdamW's


class ManoState(NamedTuple):
    """State of :func:`scale_by_mano`.

    Attributes:
      momentum: :class:`optax_muonplus.transforms.MomentumState`, one buffer for each matrix.
      count: number of updates so far; even ones go by columns, odd ones by rows.
    """

    momentum: Any
    count: Any


def scale_by_mano(
    beta: ArrayLike = 0.95,
    eps: ArrayLike = EPS,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = False,
    weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
) -> MatrixTransformation:
    """The matrix part of :func:`mano`: no learning rate, no weight decay, no partition.

    Arguments are those of :func:`mano`. Its ``update`` needs the parameters.
    """
    check_number("eps", eps, NOT_NEGATIVE)
    average = momentum(beta, nesterov=nesterov, mu_dtype=mu_dtype)

    def make(leaves: Sequence[LeafInfo]) -> optax.GradientTransformation:
        def init_fn(params: optax.Params) -> Any:
            return ManoState(average.init(params), jnp.zeros([], jnp.int32))

        def update_fn(
            updates: optax.Updates, state: Any, params: optax.Params | None = None
        ) -> tuple[optax.Updates, Any]:
            if params is None:
                raise ValueError(
                    "Mano needs the parameters: call update(grads, state, params) with them."
                )
            moments, mu = average.update(updates, state.momentum, params)
            # The rule's own sum is larger than the mean by 1 / (1 - beta); only eps sees that.
            guard = upcast_for_sum(eps) * (1 - upcast_for_sum(beta))

            def tangent(by_rows: bool) -> Any:
                step = functools.partial(tangent_step, by_rows, eps, guard)
                (directions,) = map_blocks(step, leaves, 1, moments, params)
                return optax.tree.cast_like(directions, updates)

            by_rows = state.count % 2 == 1
            directions = jax.lax.cond(by_rows, lambda: tangent(True), lambda: tangent(False))
            return directions, ManoState(mu, optax.safe_increment(state.count))

        return optax.GradientTransformation(init_fn, update_fn)

    return for_matrices(make, weight_dimension_numbers, sharding)


@optimizer_of(scale_by_mano)
def mano() -> None:
    r"""Mano on the matrices, AdamW on everything else.

    For each matrix W of shape (m, n) = (out, in), by columns (one for each input feature) at the
    first, third, ... update and by rows at the others, with w and t such a column or row:

    .. math::
      \hat w = w / \max(\|w\|, \epsilon), \qquad
      t = M_t - \langle M_t, \hat w \rangle \hat w, \qquad
      \text{update} = 0.2 \sqrt{d}\; t / \max(\|t\|, \epsilon)

    with d = m for columns and n for rows, so that updates have the root mean square 0.2. M is the
    sum :math:`\beta M_{t-1} + G_t`. The state is one momentum buffer for each matrix and a counter.

    Arguments are those of :func:`optax_muonplus.muonplus`; ``eps`` is the least norm that divides,
    and nothing is moved on a mesh: sums over what lies in shards are left to the compiler. The
    learning rate is of AdamW's order, 1e-3 in the code, with weight decay 0.1.

    Raises:
      ValueError: as :func:`optax_muonplus.muonplus`, and at an update without ``params``.

    Source: Gu and Xie, arXiv:2601.23000; their code @b78b952.
    """


def tangent_step(
    by_rows: bool, eps: ArrayLike, guard: ArrayLike, view: MatrixView, g: jax.Array, w: jax.Array
) -> tuple[jax.Array]:
    """The rule that :func:`mano` states; ``guard`` is ``eps`` in the size of ``g``."""
    g, w = upcast_for_sum(g), upcast_for_sum(w)
    _, m, n = view.matrix_shape(g.shape)
    axes, size = (view.reduction_axes, n) if by_rows else (view.output_axes, m)
    # The rule sees no size but that of eps; squares of large numbers would overflow.
    g, power = divide_by_pow2(g, jnp.max(jnp.abs(g), axis=axes, keepdims=True))
    unit = _over_norm(w, axes, eps)
    inner = jnp.sum(jnp.real(g * unit.conj()), axis=axes, keepdims=True)
    t = g - inner * unit
    least = as_real(guard, power.dtype) / power
    return (RMS * math.sqrt(size) * _over_norm(t, axes, least),)


def _over_norm(x: jax.Array, axes: tuple[int, ...], least: ArrayLike) -> jax.Array:
    """``x / max(norm, least)``, with norms over ``axes``; zero where both are."""
    squares = sum_of_squares(x, axes)
    size = jnp.maximum(jnp.sqrt(squares), as_real(least, squares.dtype))
    return jnp.where(size > 0, x / jnp.where(size > 0, size, 1), 0)
