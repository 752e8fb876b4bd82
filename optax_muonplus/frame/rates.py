"""Checks of learning rates and weight decays: numbers that are not negative, or schedules."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_muonplus.method import Kind, check_number

RATE = Kind("a finite number, not negative, or a schedule", lambda x: x >= 0)


def check_rate(name: str, value: Any) -> None:
    """Raises ValueError unless ``value`` is a finite number, not negative, or a schedule."""
    if callable(value):
        _check_schedule(name, value)
    else:
        check_number(name, value, RATE)


def check_decay(name: str, weight_decay: Any, learning_rate: Any) -> None:
    """Raises ValueError if a step of decay, of numbers, turns parameters round."""
    numbers = weight_decay, learning_rate
    if all(isinstance(x, int | float) for x in numbers) and weight_decay * learning_rate > 1:
        raise ValueError(
            f"{name}={weight_decay} times the learning rate {learning_rate} is more than 1, so that"
            " each update would turn the sign of every parameter. Decay is multiplied by the"
            " learning rate here; 0.1 is usual."
        )


def _check_schedule(name: str, schedule: Callable[..., Any]) -> None:
    """Raises ValueError unless a function takes one number and, if it can be traced, gives one."""
    wanted = "A schedule takes the number of updates so far and returns one number"
    try:
        inspect.signature(schedule).bind(0)
    except TypeError as error:
        raise ValueError(
            f"{name} is the function {_called(schedule)}, which cannot be called with one number"
            f" ({error}). {wanted}; what makes schedules is called first, as in"
            " optax.cosine_decay_schedule(0.02, decay_steps=1000)."
        ) from None
    except ValueError:  # a function of C has no signature
        return
    made: list[Any] = []
    try:
        # Nothing is computed, which might start JAX's backends before they are configured.
        jax.eval_shape(lambda n: made.append(schedule(n)), jax.ShapeDtypeStruct((), jnp.int32))
    except Exception:  # it cannot be traced: what it raises is for the first update to say
        return
    (rate,) = made
    if callable(rate):
        raise ValueError(
            f"{name} is the function {_called(schedule)}, which returns a function: it makes"
            f" schedules, and is called first, as in optax.constant_schedule(0.02). {wanted}."
        )
    is_number = isinstance(rate, int | float | np.number | np.ndarray | jax.Array)
    if not is_number or jnp.shape(rate):
        shown = f"an array {rate.dtype}{list(rate.shape)}" if hasattr(rate, "shape") else repr(rate)
        raise ValueError(f"{name} is a schedule that returns {shown}. {wanted}.")


def _called(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
