"""In which dtype sums are taken: float32 at least, whatever the parameters are stored in."""

from typing import Any

import jax
import jax.numpy as jnp


def accumulation_dtype(dtype: Any) -> jnp.dtype:
    """The dtype that sums and polynomial combinations use: ``dtype``, but at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def accumulable(x: jax.Array) -> jax.Array:
    """``x`` in the dtype that its sums use."""
    return jnp.asarray(x).astype(accumulation_dtype(jnp.result_type(x)))


def sum_of_squares(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Sum of ``|x|^2`` over ``axes``, kept as axes of size 1."""
    x = accumulable(x)
    squares = jnp.real(x) ** 2 + jnp.imag(x) ** 2 if jnp.iscomplexobj(x) else x * x
    return jnp.sum(squares, axis=axes, keepdims=True)


def as_real(number: Any, dtype: Any) -> jax.Array:
    """A hyperparameter in a real dtype; inject_hyperparams makes all complex if one leaf is."""
    return jnp.real(jnp.asarray(number)).astype(dtype)
