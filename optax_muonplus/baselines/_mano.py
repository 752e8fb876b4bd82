r"""Mano: momentum made tangent to unit columns, or rows, of the parameters; no matrix product.

Source: Gu and Xie, arXiv:2601.23000; its code,
xie-lab-ml/Mano-Restriking-Manifold-Optimization-for-LLM-Training @b78b952, ``mano.py``.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_muonplus._optimizers import AdamW, with_adamw
from optax_muonplus._parameters.dimension_numbers import DimensionNumbersTree, MatrixView
from optax_muonplus._parameters.sharding import ShardingTree, check_sharding, settle
from optax_muonplus.matrices._precision import as_real, sum_of_squares, upcast_for_sum
from optax_muonplus.transforms._apply import apply_in_place, check_matrices
from optax_muonplus.transforms._links import momentum

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


def mano(
    learning_rate: optax.ScalarOrSchedule,
    beta: Any = 0.95,
    eps: Any = EPS,
    weight_decay: Any = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
    adam_b1: Any = 0.9,
    adam_b2: Any = 0.999,
    adam_eps: Any = 1e-8,
    adam_eps_root: Any = 0.0,
    adam_weight_decay: Any = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
) -> optax.GradientTransformationExtraArgs:
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
    matrix_part = functools.partial(scale_by_mano, beta, eps, mu_dtype, nesterov=nesterov)
    matrix_part()  # checks the arguments now rather than at init
    rest = AdamW(adam_learning_rate, adam_b1, adam_b2, adam_eps, adam_eps_root, adam_weight_decay)
    decay = optax.add_decayed_weights(weight_decay, weight_decay_mask)
    return with_adamw(
        matrix_part, decay, learning_rate, rest, muon_weight_dimension_numbers, sharding
    )


def scale_by_mano(
    beta: Any = 0.95,
    eps: Any = EPS,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
    weight_dimension_numbers: DimensionNumbersTree = None,
    sharding: ShardingTree = None,
) -> optax.GradientTransformation:
    """The matrix part of :func:`mano`: no learning rate, no weight decay, no partition.

    Arguments are those of :func:`mano`. Its ``update`` needs the parameters.
    """
    first = momentum(beta, nesterov=nesterov, mu_dtype=mu_dtype)

    def init_fn(params: optax.Params) -> Any:
        check_matrices(params, weight_dimension_numbers)
        check_sharding(params, sharding)
        mu = settle(first.init(params), params, sharding)
        return ManoState(mu, jnp.zeros([], jnp.int32))

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        if params is None:
            raise ValueError(
                "Mano needs the parameters: call update(grads, state, params) with them."
            )
        moments, mu = first.update(updates, state.momentum, params)
        # The rule's own sum is larger than the mean by 1 / (1 - beta); only eps sees that.
        guard = eps * (1 - beta)

        def tangent(by_rows: bool) -> Any:
            step = functools.partial(tangent_step, by_rows, eps, guard)
            (done,) = apply_in_place(step, weight_dimension_numbers, 1, moments, params)
            return optax.tree.cast_like(done, updates)

        done = jax.lax.cond(state.count % 2 == 1, lambda: tangent(True), lambda: tangent(False))
        return done, ManoState(mu, optax.safe_increment(state.count))

    return optax.GradientTransformation(init_fn, update_fn)


def tangent_step(
    by_rows: bool, eps: Any, guard: Any, view: MatrixView, g: jax.Array, w: jax.Array
) -> tuple[jax.Array]:
    """The rule that :func:`mano` states; ``guard`` is ``eps`` in the size of ``g``."""
    g, w = upcast_for_sum(g), upcast_for_sum(w)
    _, m, n = view.matrix_shape(g.shape)
    axes, size = (view.reduction_axes, n) if by_rows else (view.output_axes, m)
    unit = w / _at_least(sum_of_squares(w, axes), eps)
    inner = jnp.sum(jnp.real(g * unit.conj()), axis=axes, keepdims=True)
    t = g - inner * unit
    return (RMS * math.sqrt(size) * t / _at_least(sum_of_squares(t, axes), guard),)


def _at_least(squares: jax.Array, least: Any) -> jax.Array:
    """The root of sums of squares, or ``least`` if that is more."""
    return jnp.maximum(jnp.sqrt(squares), as_real(least, squares.dtype))
