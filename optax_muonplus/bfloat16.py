"""Trains bfloat16 parameters with steps smaller than the spacing of bfloat16."""

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
    remainders: optax.Params
    """In int16; ``optax.MaskedNode`` for parameters that are not in bfloat16."""


def param_remainders(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    r"""Gives parameters in bfloat16 the steps that float32 ones would make.

    Near 1 the values of bfloat16 are 0.008 apart, and a parameter to which less than half of this
    is added stays where it is. Here the state keeps, for each parameter :math:`w`, the remainder
    :math:`r` between it and a float32 number :math:`w + r`, which is what is trained:

    .. math::
      w_{t+1} = \mathrm{bfloat16}(w_t + r_t + u_t), \qquad
      r_{t+1} = (w_t + r_t + u_t) - w_{t+1}

    The remainder is the difference of the bits as integers, 16 of them, so that parameter and
    remainder have 4 bytes and all bits of a float32. NVIDIA's Transformer Engine has the same as
    ``store_param_remainders`` of its ``FusedAdam``. Forward and backward pass read 2 bytes. Where
    the sum lies halfway between two values, one unit in the last place of float32 is lost.

    Updates of such parameters are returned in float32, as what is left to the new value:
    ``optax.apply_updates`` adds in float32, and then rounds nothing. Do not cast them. Parameters
    in float32 and wider get the updates of ``inner``, without state.

    Args:
      inner: the whole optimizer, with its learning rate. Nothing may follow: updates that
        ``optax.scale`` or a clip changes afterwards do not fit the remainders, which nothing can
        tell. Inside of
        :func:`~optax_muonplus.transforms.shard_state` the remainders are cut with the rest of the
        state, and gathered updates have 4 bytes an element; outside of it remainders lie as the
        parameters do, and gathered updates have the dtype of ``inner``.

    Returns:
      A transformation with 2 bytes of state for each element in bfloat16 and that of ``inner``.

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
        check_state(getattr(state, "remainders", None), empty, masked)
        steps, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        leaves, structure = jax.tree.flatten(steps)
        trees = map(structure.flatten_up_to, (masked, state.remainders))
        rows = zip(leaves, *trees, strict=True)
        pairs = [_move(*row) for row in rows]
        moves, remainders = (structure.unflatten(pair[i] for pair in pairs) for i in range(2))
        return moves, RemaindersState(inner_state, remainders)

    return optax.GradientTransformationExtraArgs(init, update)


def _move(step: jax.Array, x: jax.Array, remainder: Any) -> tuple[jax.Array, Any]:
    if not _is_bfloat16(x):
        return step, remainder
    value, remainder = _split(_join(x, remainder) + step.astype(jnp.float32))
    return value.astype(jnp.float32) - x.astype(jnp.float32), remainder


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the bfloat16 number next to a float32 one, and the difference of their bits."""
    # With integers, as XLA may leave out a conversion to bfloat16 and back.
    bits = _bits(x)
    last = bits >> 16 & 1  # a tie goes to the number whose last bit is zero
    value = jnp.where(jnp.isfinite(x), _high(bits + _LARGEST_REMAINDER + last), _high(bits))
    difference = (bits - (_bits(value) & ~jnp.uint32(_LOW))).astype(jnp.int32)
    remainder = jnp.where(jnp.isfinite(value), difference, 0)
    return value, jnp.minimum(remainder, _LARGEST_REMAINDER).astype(jnp.int16)


def _join(value: jax.Array, remainder: jax.Array) -> jax.Array:
    """Returns the float32 number that :func:`_split` was given."""
    # A parameter that was set to zero meanwhile has no smaller size, nor has infinity a larger one.
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
                f"{path_name(path)} is {dtype}: only the rounding of bfloat16 is known here. Use"
                " parameters in bfloat16 or float32."
            )
