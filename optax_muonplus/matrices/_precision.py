"""Numbers that sums and squares can hold: float32 at least, and of moderate size."""

from typing import Any

import jax
import jax.numpy as jnp


def accumulation_dtype(dtype: Any) -> jnp.dtype:
    """The dtype that sums and polynomial combinations use: ``dtype``, but at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def upcast_for_sum(x: jax.Array) -> jax.Array:
    """``x`` in the dtype that its sums use."""
    return jnp.asarray(x).astype(accumulation_dtype(jnp.result_type(x)))


def sum_of_squares(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Sum of ``|x|^2`` over ``axes``, kept as axes of size 1."""
    x = upcast_for_sum(x)
    squares = jnp.real(x) ** 2 + jnp.imag(x) ** 2 if jnp.iscomplexobj(x) else x * x
    return jnp.sum(squares, axis=axes, keepdims=True)


def as_real(number: Any, dtype: Any) -> jax.Array:
    """A hyperparameter in a real dtype; inject_hyperparams makes all complex if one leaf is."""
    return jnp.real(jnp.asarray(number)).astype(dtype)


def scale_by_pow2(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``x`` over a power of two near its largest entry, and that power ``(*batch, 1, 1)``.

    Squares of what is left neither overflow nor vanish as a whole; and since the division is exact,
    it does not matter whether ``x`` was rounded to fewer digits before or is rounded afterwards.
    The power is 1 for a matrix of zeros.
    """
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
    info = jnp.finfo(largest.dtype)
    # XLA may multiply by the reciprocal, which must not be a subnormal number: those count as 0.
    power = jax.lax.reduce_precision(jnp.clip(largest, max=info.max / 8), info.nexp, 0)
    power = jnp.where(power > 0, power, 1)
    return x / power, power
