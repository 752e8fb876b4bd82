"""The momentum: the only state that Muon+ has for a matrix."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from optax_muonplus._parameters.paths import check_inexact_dtypes, flatten_with_names
from optax_muonplus.matrices._precision import as_real, upcast_for_sum


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
      A transformation with :class:`MomentumState`. Updates have the dtype of the sums, at least
      float32.

    Raises:
      ValueError: if ``beta`` is a Python number outside [0, 1), or at init for integer parameters.

    Source: Zhang et al., arXiv:2602.21545, equation 1.
    """
    check_decay("beta", beta)
    mu_dtype = None if mu_dtype is None else jax.dtypes.canonicalize_dtype(mu_dtype)

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
        buffers, treedef = jax.tree.flatten(state.mu)
        grads = treedef.flatten_up_to(updates)
        mu = _mix(buffers, grads, beta)
        count = None if state.count is None else optax.safe_increment(state.count)
        direction, now = mu, grads
        if count is not None:
            direction = optax.tree.bias_correction(mu, beta, count + 1 if nesterov else count)
            now = optax.tree.bias_correction([upcast_for_sum(g) for g in grads], beta, count)
        if nesterov:
            direction = _mix(direction, now, beta)
        stored = [m.astype(old.dtype) for m, old in zip(mu, buffers, strict=True)]
        return treedef.unflatten(direction), MomentumState(treedef.unflatten(stored), count)

    return optax.GradientTransformation(init_fn, update_fn)


def check_decay(name: str, beta: ArrayLike) -> None:
    """Raises ValueError unless ``beta`` can be the decay of a running mean."""
    if callable(beta):
        raise ValueError(
            f"{name} must be a number, got the function {beta!r}. Only learning rates take"
            " schedules directly; optax.inject_hyperparams makes one of any other number."
        )
    if isinstance(beta, int | float) and not 0 <= beta < 1:
        raise ValueError(f"{name} must be in [0, 1), got {beta}.")


def _check_mu_dtype(leaves: Sequence[Any], mu_dtype: DTypeLike | None) -> None:
    """A real buffer would drop the imaginary parts of a complex parameter's momentum."""
    if mu_dtype is None or jnp.issubdtype(mu_dtype, jnp.complexfloating):
        return
    if any(jnp.iscomplexobj(leaf) for leaf in leaves):
        raise ValueError(
            f"mu_dtype={mu_dtype} cannot hold the momentum of complex parameters. Leave it None, or"
            " treat them in a group of their own."
        )


def _mix(ms: Sequence[jax.Array], gs: Sequence[jax.Array], beta: ArrayLike) -> list[jax.Array]:
    """``beta m + (1 - beta) g`` in the wider of their dtypes, at least float32."""
    mixed = []
    for m, g in zip(ms, map(upcast_for_sum, gs), strict=True):
        dtype = jnp.promote_types(m.dtype, g.dtype)
        weight = as_real(beta, jnp.finfo(dtype).dtype)
        mixed.append(weight * m.astype(dtype) + (1 - weight) * g.astype(dtype))
    return mixed
