"""Optax's weight decay and learning rate at the end of a chain, with their numbers checked."""

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
    r"""Decays entries that the update moves towards zero: :math:`U + \lambda [U W \ge 0] W`."""
    # Source: Chen et al., *Cautious Weight Decay*, arXiv:2510.12402, Algorithm 1. Complex entries
    # agree if the real part of their product is not negative.
    link = optax.add_decayed_weights(weight_decay, mask)

    def decay_entries(update: jax.Array, parameter: Any, decay: jax.Array) -> jax.Array:
        # Small values of opposite signs would multiply to -0.0, which passes for agreement.
        agree = jnp.real(jnp.sign(update) * jnp.sign(parameter).conj()) >= 0
        return jnp.where(agree, update + decay, update)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        # Optax applies mask and schedule: its result for zero updates is the decay alone.
        decay, state = link.update(optax.tree.zeros_like(updates), state, params)
        return jax.tree.map(decay_entries, updates, params, decay), state

    return optax.GradientTransformation(link.init, update)


def decay_weights(
    weight_decay: optax.ScalarOrSchedule, mask: Any = None, cautious: bool = False
) -> optax.GradientTransformation:
    """Returns Optax's decay or the cautious one; the identity if the decay is the number 0."""
    check_flag("cautious_weight_decay", cautious)
    is_function = callable(mask) and jax.tree_util.all_leaves([mask])  # not an Equinox model
    if not is_function:
        _check_mask(mask, isinstance(mask, bool | np.bool_))
    if is_zero(weight_decay):
        return Scaling(*optax.identity())

    def find(params: Any) -> Any:
        return _check_mask(mask(params) if is_function else mask)

    make = cautious_decay if cautious else optax.add_decayed_weights
    return make(real(weight_decay), None if mask is None else find)


def _check_mask(mask: Any, is_one_flag: bool = False) -> Any:
    """Returns the mask; raises ValueError for words and numbers, which would count as True."""
    wrong = [x for x in jax.tree.leaves(mask) if not isinstance(x, bool | np.bool_)]
    if wrong or is_one_flag:
        raise ValueError(
            "weight_decay_mask must be a tree of True and False, or a function from parameters to"
            f" one, got {reprlib.repr(wrong[0] if wrong else mask)}. optax.inject_hyperparams calls"
            " a function with the step count: add static_args=('weight_decay_mask',)."
        )
    return mask


def is_zero(weight_decay: Any) -> bool:
    return isinstance(weight_decay, int | float) and weight_decay == 0


def scale_by_rate(learning_rate: optax.ScalarOrSchedule | None) -> Scaling:
    """Returns ``optax.scale_by_learning_rate``, which a chain may apply inside its functions."""
    return Scaling(*optax.scale_by_learning_rate(real(learning_rate)))


def check_rate(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    prefix: str = "",
) -> None:
    """Raises ValueError for a negative or non-finite rate or decay, and for a too large decay.

    A schedule must return a number, of any size. ``prefix`` precedes both names in messages.
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
            " than 1: each update would flip the sign of every parameter. Decay is multiplied by"
            " the learning rate here; 0.1 is usual."
        )


def _check_schedule(name: str, schedule: Any, count: Any) -> None:
    try:
        value = schedule(count)
    except Exception:  # it needs a concrete count, or will also fail at an update
        return
    check_number(f"{name} of a step", value, ANSWER)


def real(number: Any) -> Any:
    """Drops the imaginary part that ``optax.inject_hyperparams`` adds if a parameter is complex."""
    return jnp.real(number) if np.iscomplexobj(number) else number
