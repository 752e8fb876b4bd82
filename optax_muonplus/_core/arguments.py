"""Checks of numbers, words and dtypes that a user passes.

``optax.inject_hyperparams`` turns numbers into arrays, and ``jax.jit`` turns arrays into tracers.
"""

import functools
import operator
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np


class Kind(NamedTuple):
    """A condition on a finite number: the words after "must be", and the test."""

    words: str
    holds: Callable[[float], bool]


NOT_NEGATIVE = Kind("a finite number, not negative", lambda x: x >= 0)
POSITIVE = Kind("a positive, finite number", lambda x: x > 0)
DECAY = Kind("in [0, 1)", lambda x: 0 <= x < 1)


def check_number(name: str, value: Any, kind: Kind) -> None:
    """Raises ValueError unless ``value`` is one number of this kind; a traced number passes."""
    numeric = (int, float, complex, np.number, np.ndarray, jax.Array)
    is_one = isinstance(value, numeric) and not isinstance(value, bool) and not np.ndim(value)
    is_one = is_one and jnp.issubdtype(getattr(value, "dtype", np.float64), jnp.number)
    if is_one and isinstance(value, jax.core.Tracer):
        return
    # Injection makes every number complex if one parameter is.
    number = complex(np.asarray(value).item()) if is_one else complex(np.nan)
    if number.imag or not (np.isfinite(number.real) and kind.holds(number.real)):
        shown, advice = number.real if is_one else value, ""
        if callable(value) or isinstance(value, jax.Array):
            advice = (
                " Only learning rates and weight decay take schedules. For other numbers use"
                " optax.inject_hyperparams, with hyperparam_dtype=jnp.float32: otherwise it rounds"
                " them to the dtype of the parameters."
            )
        raise ValueError(f"{name} must be {kind.words}, got {shown!r}.{advice}")


def check_flag(name: str, value: Any) -> None:
    """Raises ValueError unless ``value`` is True or False; the word "no" would count as True."""
    if not (isinstance(value, bool | np.bool_ | int) and value in (0, 1)):
        raise ValueError(f"{name} must be True or False, got {value!r}.{_static(name, value)}")


def _static(name: str, value: Any) -> str:
    """Returns advice for an array, which ``optax.inject_hyperparams`` may have made."""
    is_array = isinstance(value, jax.Array)
    return f" Under optax.inject_hyperparams add static_args=({name!r},)." if is_array else ""


def check_word(name: str, value: Any, known: Sequence[str], otherwise: str = "") -> None:
    """Raises ValueError unless ``value`` is one of the known words."""
    if not (isinstance(value, str) and value in known):
        hint = f' Write {name}="none".' if value is None and "none" in known else ""
        raise ValueError(f"Unknown {name} {value!r}. Known: {', '.join(known)}{otherwise}.{hint}")


def known_count(name: str, value: Any, at_most: int = 2**31 - 1) -> int | None:
    """Returns ``value`` as an int from 1 to ``at_most``, or None if traced; raises ValueError."""
    if isinstance(value, jax.core.Tracer):
        return None
    try:
        count = 0 if isinstance(value, bool) else operator.index(value)  # True is a flag
    except TypeError:
        count = 0
    if not 1 <= count <= at_most:
        shown = reprlib.repr(value)
        raise ValueError(f"{name} must be an integer from 1 to {at_most}, got {shown}.")
    return count


def floating_dtype(name: str, value: Any, other: str = "") -> np.dtype | None:
    """Returns ``value`` as a dtype: floating-point, complex or ``other``. None stays None."""
    if value is None:
        return None
    try:
        dtype = np.dtype(object) if isinstance(value, jax.Array) else jnp.dtype(value)
    except TypeError:
        dtype = np.dtype(object)
    if dtype != other and not is_supported(dtype):
        words = f"a floating-point dtype of at least 16 bits{other and f', or {other}'}"
        raise ValueError(f"{name} must be {words}, got {value!r}.{_static(name, value)}")
    return dtype


def check_floating(*arrays: Any) -> None:
    """Raises ValueError for integer arrays or dtypes, in which results would round to zero."""
    for x in arrays:
        dtype = jnp.dtype(getattr(x, "dtype", x))
        if not is_supported(dtype):
            raise ValueError(
                f"Got matrices of dtype {dtype}, which would be the dtype of the results too: it"
                " must be floating-point of at least 16 bits. Pass x.astype(jnp.float32). Under"
                " optax.inject_hyperparams, a function as polar= needs static_args=('polar',)."
            )


@functools.lru_cache
def is_supported(dtype: Any) -> bool:
    """Returns whether ``dtype`` is floating-point or complex, with at least 16 bits."""
    # JAX has no type promotion for floats of 8 bits.
    return jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 16
