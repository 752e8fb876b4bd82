"""Training of bfloat16 parameters with steps below the spacing of bfloat16."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_muonplus._chain.checks import StateCheck, mask_params_like
from optax_muonplus._leaves.paths import flatten_with_names, path_name

_LOW = 0xFFFF  # the low 16 bits of a float32, which a bfloat16 lacks
_LARGEST_REMAINDER = 0x7FFF


class RemaindersState(NamedTuple):
    """The state of :func:`param_remainders`."""

    inner_state: optax.OptState
    remainders: optax.Params  # in int16; optax.MaskedNode for parameters not in bfloat16


def param_remainders(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    r"""Trains parameters in bfloat16 with the steps of float32.

    Near 1 the values of bfloat16 are 0.008 apart, and a parameter does not change if less than half
    of this is added. Here the state keeps a remainder :math:`r` for each parameter :math:`w`, and
    the float32 number :math:`w + r` is trained:

    .. math::
      w_{t+1} = \mathrm{bfloat16}(w_t + r_t + u_t), \qquad
      r_{t+1} = (w_t + r_t + u_t) - w_{t+1}

    The remainder is the difference of the bits, a 16-bit integer. With the parameter it holds all
    bits of a float32, except that a tie loses one unit in the last place. Forward and backward
    passes read 2 bytes per element. This is ``store_param_remainders`` of NVIDIA's ``FusedAdam``.

    Updates of such parameters are float32, the difference to the new value, which
    ``optax.apply_updates`` adds without rounding. Do not cast them. Parameters in float32 and wider
    get the updates of ``inner``, without state.

    Args:
      inner: the whole optimizer, with its learning rate. If ``optax.scale`` or a clip follows,
        updates no longer fit the remainders, and nothing can detect it. Inside
        :func:`~optax_muonplus.transforms.shard_state` remainders are sharded with the rest of the
        state, and gathered updates have 4 bytes an element. Outside it remainders are sharded as
        parameters, and gathered updates have the dtype of ``inner``.

    Returns:
      A transformation with the state of ``inner``, plus 2 bytes for each element in bfloat16.

    Raises:
      ValueError: at init, for parameters in float16 or 8 bits; at update, without ``params``.

    Example:
      >>> import jax.numpy as jnp, optax, optax_muonplus as omp
      >>> tx = omp.transforms.param_remainders(optax.sgd(0.001))
      >>> params = jnp.ones((), jnp.bfloat16)
      >>> state = tx.init(params)
      >>> for _ in range(10):
      ...     updates, state = tx.update(jnp.ones((), jnp.bfloat16), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> float(params)  # sgd alone stays at 1
      0.98828125
    """
    inner = optax.with_extra_args_support(inner)
    check_state = StateCheck()

    def init(params: optax.Params) -> RemaindersState:
        _check_dtypes(params)
        return RemaindersState(inner.init(params), empty(params))

    def empty(params: optax.Params) -> optax.Params:
        kept = lambda x: jnp.zeros_like(x, jnp.int16) if _is_bfloat16(x) else optax.MaskedNode()  # noqa: E731
        return jax.tree.map(kept, params)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, RemaindersState]:
        if params is None:
            raise ValueError("Remainders need params: call tx.update(updates, state, params).")
        masked = mask_params_like(updates, params)
        check_state(getattr(state, "remainders", None), empty, masked, params)
        steps, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        leaves, structure = jax.tree.flatten(steps)
        trees = map(structure.flatten_up_to, (masked, state.remainders))
        pairs = [_move(*row) for row in zip(leaves, *trees, strict=True)]
        moves, remainders = (structure.unflatten(pair[i] for pair in pairs) for i in range(2))
        return moves, RemaindersState(inner_state, remainders)

    return optax.GradientTransformationExtraArgs(init, update)


def _move(step: jax.Array, x: jax.Array, remainder: Any) -> tuple[jax.Array, Any]:
    if not _is_bfloat16(x):
        return step, remainder
    value, remainder = _split(_join(x, remainder) + step.astype(jnp.float32))
    return value.astype(jnp.float32) - x.astype(jnp.float32), remainder


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the nearest bfloat16 number, and the difference of the bits."""
    # On integers, since XLA may skip a conversion to bfloat16 and back.
    bits = _bits(x)
    last = bits >> 16 & 1  # a tie goes to the number whose last bit is zero
    value = jnp.where(jnp.isfinite(x), _high(bits + _LARGEST_REMAINDER + last), _high(bits))
    difference = (bits - (_bits(value) & ~jnp.uint32(_LOW))).astype(jnp.int32)
    remainder = jnp.where(jnp.isfinite(value), difference, 0)
    return value, jnp.minimum(remainder, _LARGEST_REMAINDER).astype(jnp.int16)


def _join(value: jax.Array, remainder: jax.Array) -> jax.Array:
    """Inverts :func:`_split`."""
    # The bits of zero have no predecessor and those of infinity no successor.
    within = jnp.isfinite(value) & ((value != 0) | (remainder > 0))
    bits = _bits(value) + jnp.where(within, remainder, 0).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _bits(x: jax.Array) -> jax.Array:
    if _is_bfloat16(x):
        return jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _high(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def _is_bfloat16(x: Any) -> bool:
    return jnp.result_type(x) == jnp.bfloat16


def _check_dtypes(params: optax.Params) -> None:
    paths, leaves = flatten_with_names(params)
    for path, x in zip(paths, leaves, strict=True):
        dtype = jnp.result_type(x)
        if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2 and not _is_bfloat16(x):
            raise ValueError(
                f"{path_name(path)} is {dtype}, which has no remainders here. Use parameters in"
                " bfloat16 or float32."
            )
