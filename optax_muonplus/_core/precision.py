"""The precision and the range of sums: float32 at least, and no overflow in squares."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from .arguments import check_floating


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype of sums of elements of ``dtype``: itself, but float32 at least."""
    return jnp.promote_types(dtype, jnp.float32)


def product_dtype(dtype: DTypeLike, compute_dtype: DTypeLike | None) -> jnp.dtype:
    """Returns the dtype of sums and of linear combinations, for matrices of ``dtype``."""
    check_floating(dtype)
    wide = accumulation_dtype(dtype)
    if compute_dtype is None:
        return wide
    is_complex = [jnp.issubdtype(d, jnp.complexfloating) for d in (wide, compute_dtype)]
    if is_complex[0] != is_complex[1]:
        raise ValueError(
            f"compute_dtype={compute_dtype} does not go with matrices of dtype {dtype}: both must"
            " be real, or both complex. Pass None for either."
        )
    return jnp.promote_types(wide, compute_dtype)


def upcast_for_sum(x: ArrayLike) -> jax.Array:
    """Casts ``x`` to the dtype of its sums, float32 at least."""
    return jnp.asarray(x).astype(accumulation_dtype(jnp.result_type(x)))


def sum_of_squares(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Sums ``|x|^2`` over ``axes``, which keep size 1."""
    x = upcast_for_sum(x)
    squares = jnp.real(x) ** 2 + jnp.imag(x) ** 2 if jnp.iscomplexobj(x) else x * x
    return jnp.sum(squares, axis=axes, keepdims=True)


def root(squares: jax.Array, degree: int = 2) -> jax.Array:
    """Returns the square or fourth root of sums of squares, with derivative 0 at 0, not NaN."""
    zero = squares == 0
    positive = jnp.where(zero, 1, squares)
    return jnp.where(zero, 0, jnp.sqrt(positive) if degree == 2 else positive**0.25)


def as_real(hyperparam: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """Returns a hyperparameter as an array of a real dtype."""
    # optax.inject_hyperparams makes all hyperparameters complex if one parameter is.
    return jnp.real(jnp.asarray(hyperparam)).astype(dtype)


def scale_by_pow2(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Divides matrices by a power of two near their largest entry.

    Squares of the quotient cannot overflow, nor all underflow. The division is exact: ``x`` may be
    rounded to a narrower dtype before or after it. Returns the quotient and the powers ``(*batch,
    1, 1)``, 1 for a matrix of zeros.
    """
    return divide_by_pow2(x, jnp.max(jnp.abs(x), (-2, -1), keepdims=True, initial=0))


def divide_by_pow2(x: jax.Array, size: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Divides ``x`` by a power of two near ``size``, 1 for 0; returns quotient and power."""
    info = jnp.finfo(size.dtype)
    # With a mantissa of 0 bits a number is a power of two. XLA may multiply by its reciprocal, and
    # treats subnormal numbers as 0: the upper bound keeps the reciprocal normal.
    power = jax.lax.reduce_precision(jnp.clip(size, max=info.max / 8), info.nexp, 0)
    power = jax.lax.stop_gradient(jnp.where(power > 0, power, 1))  # its derivative is 0
    return x / power, power


def times_pow2(x: jax.Array, power: jax.Array) -> jax.Array:
    """Multiplies by ``power``; finite numbers saturate at the largest one."""
    return _saturate(x, jnp.finfo(x.dtype).max / jnp.maximum(power, 1)) * power


def saturating_cast(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Casts ``x``; finite numbers saturate at the largest one of ``dtype``."""
    # An infinity in a momentum or a parameter would turn into NaN and stay.
    largest = jnp.finfo(dtype).max
    return (x if largest >= jnp.finfo(x.dtype).max else _saturate(x, largest)).astype(dtype)


def _saturate(x: jax.Array, largest: Any) -> jax.Array:
    if jnp.iscomplexobj(x):
        parts = _saturate(jnp.real(x), largest), _saturate(jnp.imag(x), largest)
        return jax.lax.complex(*parts)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)


def narrower_dtype(dtype: DTypeLike, other: DTypeLike | None) -> jnp.dtype:
    """Returns ``other`` if it is narrower without fewer exponent bits; ``dtype`` otherwise."""
    dtype = jnp.dtype(dtype)
    if other is None or jnp.issubdtype(dtype, jnp.complexfloating):
        return dtype
    have, want = jnp.finfo(dtype), jnp.finfo(other)
    return jnp.dtype(other) if want.bits < have.bits and want.nexp >= have.nexp else dtype
