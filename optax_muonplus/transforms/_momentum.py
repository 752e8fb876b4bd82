"""The momentum: the only state that Muon+ has for a matrix."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from optax_muonplus._arguments import DECAY, check_flag, check_number, floating_dtype
from optax_muonplus._parameters.gradients import check_gradients
from optax_muonplus._parameters.paths import check_inexact_dtypes, flatten_with_names
from optax_muonplus.matrices._precision import as_real, narrowed, upcast_for_sum
from optax_muonplus.transforms._state_check import wrong_state

# Of a buffer and a gradient; None where the gradient is left out.
Weights = tuple[jax.Array | float, jax.Array | float | None]


class MomentumState(NamedTuple):
    """State of :func:`momentum`.

    Attributes:
      mu: one buffer for each parameter, of its shape.
      count: number of updates so far, for bias correction; None without it.
    """

    mu: optax.Updates
    count: Any


def find_momentum(state: Any) -> MomentumState:
    """The momentum in an optimizer's state, wherever it is.

    Args:
      state: of any transformation that :func:`momentum` is a part of, such as
        ``optax_muonplus.muonplus``, alone or in a chain.

    Returns:
      The one :class:`MomentumState` in it. Its ``mu`` has ``optax.MaskedNode`` where a parameter is
      not a matrix.

    Raises:
      ValueError: unless there is exactly one.
    """

    def is_momentum(x: Any) -> bool:
        return isinstance(x, MomentumState)

    states = [x for x in jax.tree.leaves(state, is_leaf=is_momentum) if is_momentum(x)]
    if len(states) != 1:
        raise ValueError(
            f"Got a state with {len(states)} momentum states, but one is looked for. Pass the state"
            " of an optimizer made by optax_muonplus, or the part of the state that holds the one"
            " you mean."
        )
    return states[0]


def momentum(
    beta: ArrayLike = 0.95,
    *,
    nesterov: bool = False,
    bias_correction: bool = False,
    mu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    r"""Exponential moving average of the gradients.

    .. math::
      M_t = \beta M_{t-1} + (1 - \beta) G_t

    The update is :math:`M_t`, or :math:`\beta M_t + (1 - \beta) G_t` with ``nesterov``.

    Args:
      beta: decay, in [0, 1).
      nesterov: whether to look one step ahead. Off in the paper, on in its published code.
      bias_correction: divides by what the zero start left out: :math:`M_t` by
        :math:`1-\beta^t`; with ``nesterov`` :math:`M_t` by :math:`1-\beta^{t+1}` and :math:`G_t` by
        :math:`1-\beta^t` (Dozat 2016), as ``optax.contrib.muon`` does. A polar factor sees it with
        ``nesterov`` only, where it changes the mixture.
      mu_dtype: dtype of the buffer; None means the parameter's. Sums are in float32 at least.

    Returns:
      A transformation with :class:`optax_muonplus.transforms.MomentumState`. Updates have the dtype
      of the sums, at least float32.

    Raises:
      ValueError: if ``beta`` is known to be outside [0, 1), for a ``mu_dtype`` that is not
        floating-point; at init for integer parameters; at an update for gradients that do not have
        the shape of their buffer, that are integers, or of which only one of the two is complex.

    Source: Zhang et al., arXiv:2602.21545, equation 1.
    """
    return scaled_momentum(1.0, beta, nesterov, bias_correction, mu_dtype)


def scaled_momentum(
    divisor: float,
    beta: ArrayLike,
    nesterov: bool,
    bias_correction: bool,
    mu_dtype: DTypeLike | None,
) -> optax.GradientTransformation:
    """As :func:`momentum`, but updates are divided by ``divisor``, before they can overflow.

    With bias correction :func:`momentum` is up to twice as large as the largest gradient.
    """
    check_number("beta", beta, DECAY)
    check_flag("nesterov", nesterov)
    check_flag("bias_correction", bias_correction)
    mu_dtype = floating_dtype("mu_dtype", mu_dtype)

    def init_fn(params: optax.Params) -> Any:
        paths, leaves = flatten_with_names(params)
        check_inexact_dtypes(paths, [jnp.result_type(leaf) for leaf in leaves])
        _check_mu_dtype(leaves, mu_dtype)
        mu = optax.tree.zeros_like(params, dtype=mu_dtype)
        return MomentumState(mu, jnp.zeros([], jnp.int32) if bias_correction else None)

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        del params
        _check_state(state, bias_correction)
        check_gradients(updates, state.mu, "momentum")
        buffers, treedef = jax.tree.flatten(state.mu)
        grads = treedef.flatten_up_to(updates)
        mu = _mixed(buffers, grads, lambda dtype: _mean_weights(beta, dtype))
        count = optax.safe_increment(state.count) if bias_correction else None

        def weights(dtype: jnp.dtype) -> Weights:
            return _direction_weights(as_real(beta, dtype), count, nesterov, divisor)

        plain = count is None and not nesterov and divisor == 1
        direction = mu if plain else _mixed(mu, grads, weights)
        stored = [narrowed(m, old.dtype) for m, old in zip(mu, buffers, strict=True)]
        return treedef.unflatten(direction), MomentumState(treedef.unflatten(stored), count)

    return optax.GradientTransformation(init_fn, update_fn)


def _check_state(state: Any, bias_correction: bool) -> None:
    if getattr(state, "_fields", None) != MomentumState._fields:
        raise wrong_state(state, [MomentumState.__name__])
    if bias_correction and state.count is None:
        raise ValueError(
            "The momentum in this state has no count, but bias_correction=True needs one. Get a"
            " state that has: optax_muonplus.take_over(state, tx.init(params), params)."
        )


def _check_mu_dtype(leaves: Sequence[Any], mu_dtype: DTypeLike | None) -> None:
    """A real buffer would drop the imaginary parts of a complex parameter's momentum."""
    if mu_dtype is None or jnp.issubdtype(mu_dtype, jnp.complexfloating):
        return
    if any(jnp.iscomplexobj(leaf) for leaf in leaves):
        raise ValueError(
            f"mu_dtype={mu_dtype} cannot hold the momentum of complex parameters. Leave it None, or"
            " treat them in a group of their own."
        )


def _mean_weights(beta: ArrayLike, dtype: jnp.dtype) -> Weights:
    weight = as_real(beta, dtype)
    return weight, 1 - weight


def _direction_weights(beta: jax.Array, count: Any, nesterov: bool, divisor: float) -> Weights:
    """What the buffer and the gradient are multiplied by, to be added up to the update.

    Weights are divided by the corrections first: a gradient near the largest number divided by
    ``1 - beta`` would be infinite.
    """

    def corrected(weight: jax.Array | float, later: int) -> jax.Array | float:
        if count is None:
            return weight / divisor
        return weight / (1 - beta ** (count + later)) / divisor

    if nesterov:
        return corrected(beta, 1), corrected(1 - beta, 0)
    return corrected(1.0, 0), None


def _mixed(
    ms: Sequence[jax.Array], gs: Sequence[jax.Array], weights: Callable[[jnp.dtype], Weights]
) -> list[jax.Array]:
    """``a m + b g`` in the wider of their dtypes, at least float32, in which weights are made."""
    mixed = []
    for m, g in zip(ms, map(upcast_for_sum, gs), strict=True):
        dtype = jnp.promote_types(m.dtype, g.dtype)
        a, b = weights(jnp.finfo(dtype).dtype)
        old = a * m.astype(dtype)
        mixed.append(old if b is None else old + b * g.astype(dtype))
    return mixed
