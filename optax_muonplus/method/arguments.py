"""Checks of arguments by their kind: the one place where a number, word or array is refused.

A hyperparameter may be a Python number, a NumPy or JAX scalar, an array without axes, or a tracer:
``optax.inject_hyperparams`` makes arrays of numbers, and ``jax.jit`` tracers of arrays. All forms
are accepted. A tracer has no value yet, so it is not checked. Messages name the argument, what was
given and what to do.
"""

import difflib
import functools
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
_SHORT = {"bf16": "bfloat16", "half": "float16"} | {
    f"{short}{bits}": f"float{bits}" for short in ("f", "fp") for bits in (16, 32, 64)
}


class Kind(NamedTuple):
    """What a number must be.

    Attributes:
      words: the kind as messages say it, after "must be".
      holds: whether a finite number is of this kind.
    """

    words: str
    holds: Callable[[float], bool]


NOT_NEGATIVE = Kind("a finite number, not negative", lambda x: x >= 0)
POSITIVE = Kind("a positive, finite number", lambda x: x > 0)
DECAY = Kind("in [0, 1)", lambda x: 0 <= x < 1)


def check_number(name: str, value: Any, kind: Kind) -> None:
    """Raises ValueError unless ``value`` is one number of that kind, or may be one, as a tracer."""
    if callable(value):
        raise ValueError(
            f"{name} must be a number, got the function {value!r}. Only learning rates and weight"
            " decay take schedules directly; optax.inject_hyperparams makes one of any other"
            " number."
        )
    number = _known(name, value, kind)
    if number is not None and not (np.isfinite(number) and kind.holds(number)):
        raise ValueError(f"{name} must be {kind.words}, got {number!r}.{_rounded(value)}")


def check_flag(name: str, value: Any) -> None:
    """Raises ValueError unless ``value`` is True or False, which 1 and 0 are to Python too."""
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"{name} is traced, but it is a choice of the program: pass True or False. Under"
            f" optax.inject_hyperparams add it to static_args=({name!r},)."
        )
    if not (isinstance(value, bool | np.bool_ | int) and value in (0, 1)):
        raise ValueError(f"{name} must be True or False, got {value!r}.")


def check_word(name: str, value: Any, known: Sequence[str], otherwise: str = "") -> None:
    """Raises ValueError, which lists the known words, unless ``value`` is one of them."""
    if not (isinstance(value, str) and value in known):
        near = did_you_mean(value, known)
        raise ValueError(f"Unknown {name} {value!r}. Known: {', '.join(known)}{otherwise}.{near}")


def did_you_mean(value: Any, known: Iterable[str], nearness: float = 0.6) -> str:
    """Asks what else was meant, for the end of a message; returns nothing if no word is near."""
    if not isinstance(value, str):
        return ""
    plain = {re.sub(r"[\W_]", "", word).lower(): word for word in known}
    near = difflib.get_close_matches(re.sub(r"[\W_]", "", value).lower(), plain, 1, nearness)
    return f" Did you mean {plain[near[0]]!r}?" if near else ""


def known_count(name: str, value: Any, at_most: int | None = None) -> int | None:
    """Returns ``value`` as a Python int from 1 to ``at_most``; None for a traced integer."""
    if isinstance(value, jax.core.Tracer):
        if value.shape or not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(f"{name} must be one integer, got a traced {jax.typeof(value)}.")
        return None
    try:
        count = 0 if isinstance(value, bool) else operator.index(value)  # True is a flag
    except TypeError:
        count = 0
    if count < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}.")
    if at_most is not None and count > at_most:
        raise ValueError(
            f"{name} must be at most {at_most}, got {count}: each one is written out in the"
            " program, which would take minutes to compile."
        )
    return count


def floating_dtype(name: str, value: Any) -> np.dtype | None:
    """Returns ``value`` as the floating-point or complex dtype of arrays; None stays None.

    JAX combines dtypes of less than 16 bits with no other, so that they are refused too.
    """
    if value is None:
        return None
    if value in (float, complex):  # Python's, which JAX takes for its default dtypes
        return jnp.dtype(jax.dtypes.canonicalize_dtype(value))
    try:
        dtype = jnp.dtype(value)
    except TypeError as error:
        near = did_you_mean(_SHORT.get(value, value) if isinstance(value, str) else value, _DTYPES)
        raise ValueError(f"{name} must be a floating-point dtype, got {value!r}.{near}") from error
    if not supported(dtype):
        raise ValueError(f"{name} must be a floating-point dtype of 16 bits at least, got {dtype}.")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"{name}={dtype} needs jax.config.update('jax_enable_x64', True): without it JAX has no"
            " arrays of that dtype, and would use half as many bits."
        )
    return dtype


def check_matrices(*arrays: Any, empty: bool = True) -> None:
    """Raises ValueError unless all are arrays ``(*batch, out, in)`` of floating-point numbers.

    With ``empty=False`` none may have an axis of length 0.
    """
    for x in arrays:
        shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
        if not isinstance(shape, tuple) or dtype is None:
            raise ValueError(
                "Matrices must be an array (*batch, out, in) of floating-point numbers, got"
                f" {type(x).__name__}. Pass jnp.asarray(x, jnp.float32)."
            )
        if not shape and jnp.issubdtype(dtype, jnp.integer):
            raise ValueError(
                "Got one number in place of matrices. optax.inject_hyperparams gives the count of"
                " updates to every function but those in static_args, as in static_args=('polar',)."
            )
        check_floating(x)
        if len(shape) < 2 or (0 in shape and not empty):
            kind = "" if empty else " that are not empty"
            raise ValueError(
                f"Got an array {dtype} of shape {shape}, but rows and columns are those of matrices"
                f" (*batch, out, in){kind}. Leave vectors out, and reshape a kernel of more axes to"
                " (out, in) first; a Flax kernel (in, out) is the transpose of that."
            )


def check_floating(x: Any) -> None:
    """Raises ValueError for an array whose dtype cannot hold what is computed of it."""
    if not supported(x.dtype):
        raise ValueError(
            f"Got an array {x.dtype} of shape {x.shape}, but results have the dtype of the array,"
            " which must be floating-point of 16 bits at least. Pass x.astype(jnp.float32)."
        )


@functools.lru_cache
def supported(dtype: Any) -> bool:
    """Decides whether the library computes in ``dtype``: floating-point of 16 bits or more."""
    return jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 16


def _known(name: str, value: Any, kind: Kind) -> float | None:
    """Returns the number that ``value`` is, or None if it is not known before the program runs."""
    numeric = (int, float, complex, np.number, np.ndarray, jax.Array)
    if isinstance(value, bool) or not isinstance(value, numeric):
        raise ValueError(f"{name} must be {kind.words}, got {value!r}.")
    dtype = getattr(value, "dtype", np.float64)  # a Python number has none
    if np.ndim(value) or not jnp.issubdtype(dtype, jnp.number):
        raise ValueError(
            f"{name} must be {kind.words}, got an array {dtype}{list(np.shape(value))}."
        )
    if isinstance(value, jax.core.Tracer):
        return None
    if isinstance(value, jax.Array) and not value.is_fully_replicated:
        return None
    # optax.inject_hyperparams makes all numbers complex where a parameter is.
    number = complex(np.asarray(value).item())
    if number.imag:
        raise ValueError(f"{name} must be {kind.words}, got the complex number {number!r}.")
    return number.real


def _rounded(value: Any) -> str:
    """Returns a remedy for a number that an array of few bits rounded."""
    if getattr(value, "dtype", None) not in (jnp.bfloat16, jnp.float16):
        return ""
    return (
        f" It is {value.dtype}, which may have rounded it: optax.inject_hyperparams gives numbers"
        " the dtype of the parameters unless hyperparam_dtype=jnp.float32 is passed."
    )
