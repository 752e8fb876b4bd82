"""Weight decay and learning rate behind a chain: Optax's links, with checks of their numbers."""

import functools
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_muonplus._chain.chain import Scaling
from optax_muonplus._core.arguments import Kind, check_flag, check_number

RATE = Kind("a finite number, not negative, or a schedule", lambda x: x >= 0)

ANSWER = Kind("a number (a mask goes to weight_decay_mask)", lambda x: True)


def cautious_decay(
    weight_decay: optax.ScalarOrSchedule = 0.0, mask: Any = None
) -> optax.GradientTransformation:
    r"""Weight decay of those entries that the update moves towards zero anyway.

    For an update U, which is subtracted, and a parameter W, by entries:

    .. math::
      U + \lambda\, [U W \ge 0]\, W

    Args:
      weight_decay: number or schedule, as in ``optax.add_decayed_weights``.
      mask: tree or function of the parameters, as there.

    Returns:
      A transformation with the state of ``optax.add_decayed_weights``. Complex entries agree if the
      real part of :math:`U \bar W` is not negative.

    Source: Chen et al., *Cautious Weight Decay*, arXiv:2510.12402, Algorithm 1.
    """
    link = optax.add_decayed_weights(weight_decay, mask)

    def decay_entries(update: jax.Array, parameter: Any, decay: jax.Array) -> jax.Array:
        # Signs are multiplied, not sizes: the product of small numbers of two signs would be -0.
        agree = jnp.real(jnp.sign(update) * jnp.sign(parameter).conj()) >= 0
        return jnp.where(agree, update + decay, update)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        # Mask and schedule are Optax's: its link makes the decay of updates that are zero.
        decay, state = link.update(optax.tree.zeros_like(updates), state, params)
        return jax.tree.map(decay_entries, updates, params, decay), state

    return optax.GradientTransformation(link.init, update)


def decay_weights(
    weight_decay: optax.ScalarOrSchedule, mask: Any = None, cautious: bool = False
) -> optax.GradientTransformation:
    """Optax's decay or the cautious one; without parameters, where it is zero as a number."""
    check_flag("cautious_weight_decay", cautious)
    is_function = callable(mask) and jax.tree_util.all_leaves([mask])  # Equinox models have a call
    if not is_function:
        _check_mask(mask, isinstance(mask, bool | np.bool_))
    if isinstance(weight_decay, int | float) and weight_decay == 0:
        return Scaling(*optax.identity())

    def find(params: Any) -> Any:
        return _check_mask(mask(params) if is_function else mask)

    make = cautious_decay if cautious else optax.add_decayed_weights
    return make(real(weight_decay), None if mask is None else find)


def _check_mask(mask: Any, is_one_flag: bool = False) -> Any:
    """Returns a tree of flags; raises ValueError for words and numbers, which count as True."""
    wrong = [x for x in jax.tree.leaves(mask) if not isinstance(x, bool | np.bool_)]
    if wrong or is_one_flag:
        raise ValueError(
            "weight_decay_mask must be a tree of True and False, or a function from parameters to"
            f" one, got {reprlib.repr(wrong[0] if wrong else mask)}. optax.inject_hyperparams calls"
            " a function with the number of the step: add static_args=('weight_decay_mask',)."
        )
    return mask


def scale_by_rate(learning_rate: optax.ScalarOrSchedule | None) -> Scaling:
    """``optax.scale_by_learning_rate``, which a chain may move into its functions on matrices."""
    return Scaling(*optax.scale_by_learning_rate(real(learning_rate)))


def check_rate(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    prefix: str = "",
) -> None:
    """Raises ValueError for a rate or decay that is negative or not finite, and for large decay.

    A schedule must return a number, of any size. ``prefix`` stands before both names in messages.
    """
    for name, value in (("learning_rate", learning_rate), ("weight_decay", weight_decay)):
        if callable(value):
            jax.eval_shape(functools.partial(_check_schedule, prefix + name, value), np.int32(0))
        else:
            check_number(prefix + name, value, RATE)
    are_numbers = isinstance(learning_rate, int | float) and isinstance(weight_decay, int | float)
    if are_numbers and learning_rate * weight_decay > 1:
        raise ValueError(
            f"{prefix}weight_decay={weight_decay} times the learning rate {learning_rate} is more"
            " than 1, so that each update would turn the sign of every parameter. Decay is"
            " multiplied by the learning rate here; 0.1 is usual."
        )


def _check_schedule(name: str, schedule: Any, count: Any) -> None:
    try:
        value = schedule(count)
    except Exception:  # it needs a known count, or fails at an update too
        return
    check_number(f"{name} of a step", value, ANSWER)


def real(number: Any) -> Any:
    """Returns a real number: ``optax.inject_hyperparams`` makes all complex where one array is."""
    return jnp.real(number) if np.iscomplexobj(number) else number
