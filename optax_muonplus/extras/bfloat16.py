"""Trains bfloat16 parameters with steps smaller than the spacing of bfloat16."""

import itertools
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_muonplus.frame import beside_updates
from optax_muonplus.messages import check_leaves, explain, flatten_with_names, path_name

_LOW = 0xFFFF  # the low 16 bits of a float32, which a bfloat16 lacks
_LARGEST_REMAINDER = 0x7FFF
# From the number of a parameter in bfloat16, the parameter and its float32 step to its new value.
Move = Callable[[int, jax.Array, jax.Array], jax.Array]


class RemaindersState(NamedTuple):
    """The state of :func:`param_remainders`."""

    inner_state: optax.OptState
    remainders: optax.Params
    """In int16; ``optax.MaskedNode`` for parameters that are not in bfloat16."""


class StochasticRoundingState(NamedTuple):
    """The state of :func:`stochastic_rounding`."""

    inner_state: optax.OptState
    count: jax.Array
    """Updates so far, from which the random bits follow."""


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

    def first(inner_state: Any, params: optax.Params) -> RemaindersState:
        kept = lambda x: jnp.zeros_like(x, jnp.int16) if _is_bfloat16(x) else optax.MaskedNode()  # noqa: E731
        return RemaindersState(inner_state, jax.tree.map(kept, params))

    def mover(state: RemaindersState) -> tuple[Move, Callable[[Any], RemaindersState]]:
        old, structure = jax.tree.flatten(state.remainders)
        new = []

        def move(i: int, x: jax.Array, step: jax.Array) -> jax.Array:
            value, remainder = _split(_joined(x, old[i]) + step)
            new.append(remainder)
            return value

        return move, lambda inner_state: RemaindersState(inner_state, structure.unflatten(new))

    return _moving(inner, first, mover)


def stochastic_rounding(
    inner: optax.GradientTransformation, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    r"""Rounds parameters in bfloat16 up or down at random, so that they move on average.

    With :math:`a \le w + u < b` of neighbouring values in bfloat16, the new parameter is
    :math:`b` with probability :math:`(w + u - a) / (b - a)` and :math:`a` otherwise, so that its
    mean is :math:`w + u`. No state but a counter is added, and each step adds noise of the size of
    the distance of the values (Zamirai et al., arXiv:2010.06192).

    Updates and ``inner`` are as in :func:`param_remainders`, which has no noise.

    Args:
      inner: the whole optimizer, with its learning rate.
      seed: of the random bits, with the number of the update and of the parameter. They are the
        same on every mesh and after a resumption.

    Returns:
      A transformation whose state is that of ``inner`` and a counter.

    Raises:
      ValueError: for a seed that is not a number from 0 on; at init, for parameters in float16
        or 8 bits; at update, without ``params``.

    Example:
      >>> import optax, optax_muonplus as omp
      >>> tx = omp.transforms.stochastic_rounding(omp.muonplus(0.02), seed=1)
    """
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise ValueError(f"seed must be an integer from 0 to 2**32 - 1, got {seed!r}.")

    def first(inner_state: Any, params: optax.Params) -> StochasticRoundingState:
        del params
        return StochasticRoundingState(inner_state, jnp.zeros((), jnp.int32))

    def mover(state: Any) -> tuple[Move, Callable[[Any], StochasticRoundingState]]:
        key = jax.random.fold_in(jax.random.key(seed), state.count)

        def move(i: int, x: jax.Array, step: jax.Array) -> jax.Array:
            total = x.astype(jnp.float32) + step
            noise = jax.random.bits(jax.random.fold_in(key, i), x.shape, jnp.uint16)
            return _high(_bits(total) + jnp.where(jnp.isfinite(total), noise, 0))

        count = jnp.asarray(optax.safe_increment(state.count))
        return move, lambda inner_state: StochasticRoundingState(inner_state, count)

    return _moving(inner, first, mover)


def _moving(
    inner: optax.GradientTransformation,
    first: Callable[[Any, optax.Params], Any],
    mover: Callable[[Any], tuple[Move, Callable[[Any], Any]]],
) -> optax.GradientTransformationExtraArgs:
    """Makes updates that bring parameters in bfloat16 to where a function puts them, exactly.

    Args:
      inner: the whole optimizer.
      first: from its state and the parameters to the first state.
      mover: from a state to that function, and to another one from the new state of ``inner`` to
        the new state.
    """
    inner = optax.with_extra_args_support(inner)

    def start(params: optax.Params) -> Any:
        _check_dtypes(params)
        return first(inner.init(params), params)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        if params is None:
            raise ValueError("Rounding needs the parameters: call tx.update(grads, state, params).")
        beside = beside_updates(updates, params)
        numbers = itertools.count()

        def moved(step: jax.Array, x: jax.Array) -> jax.Array:
            if not _is_bfloat16(x):
                return step
            new = move(next(numbers), x, step.astype(jnp.float32))
            return new.astype(jnp.float32) - x.astype(jnp.float32)

        check_leaves(updates, beside)
        try:
            steps, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
            move, finish = mover(state)
            return jax.tree.map(moved, steps, beside), finish(inner_state)
        except Exception as error:
            explain(error, state, updates, beside, start)
            raise

    return optax.GradientTransformationExtraArgs(start, update)


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the bfloat16 number next to a float32 one, and the difference of their bits."""
    # With integers, as XLA may leave out a conversion to bfloat16 and back.
    bits = _bits(x)
    last = bits >> 16 & 1  # a tie goes to the number whose last bit is zero
    value = jnp.where(jnp.isfinite(x), _high(bits + _LARGEST_REMAINDER + last), _high(bits))
    difference = (bits - (_bits(value) & ~jnp.uint32(_LOW))).astype(jnp.int32)
    remainder = jnp.where(jnp.isfinite(value), difference, 0)
    return value, jnp.minimum(remainder, _LARGEST_REMAINDER).astype(jnp.int16)


def _joined(value: jax.Array, remainder: jax.Array) -> jax.Array:
    """Returns the float32 number that :func:`_split` was given."""
    # A parameter that was set to zero meanwhile has no smaller size, nor has infinity a larger one.
    within = jnp.isfinite(value) & ((value != 0) | (remainder > 0))
    bits = _bits(value) + jnp.where(within, remainder, 0).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _bits(x: jax.Array) -> jax.Array:
    """Returns the 32 bits of a float32 number, or of a bfloat16 number in float32."""
    if _is_bfloat16(x):
        return jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _high(bits: jax.Array) -> jax.Array:
    """Returns the bfloat16 number whose bits are the upper half."""
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def _is_bfloat16(x: Any) -> bool:
    return jnp.result_type(x) == jnp.bfloat16


def _check_dtypes(params: optax.Params) -> None:
    """Raises ValueError for parameters of few bits that are not in bfloat16."""
    paths, leaves = flatten_with_names(params)
    for path, x in zip(paths, leaves, strict=True):
        dtype = jnp.result_type(x)
        if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2 and not _is_bfloat16(x):
            raise ValueError(
                f"{path_name(path)} is {dtype}: only the rounding of bfloat16 is known here. Use"
                " parameters in bfloat16 or float32."
            )
