"""Matrix products with operands in one dtype and sums in another, float32 at least."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_muonplus.matrices._precision import accumulation_dtype


def product_dtype(dtype: Any, compute_dtype: jnp.dtype | None) -> jnp.dtype:
    """The dtype of sums and combinations, for matrices of ``dtype``.

    Raises:
      ValueError: if one of the two is real and the other complex.
    """
    wide = accumulation_dtype(dtype)
    if compute_dtype is None:
        return wide
    if jnp.issubdtype(wide, jnp.complexfloating) != jnp.issubdtype(
        compute_dtype, jnp.complexfloating
    ):
        raise ValueError(
            f"compute_dtype={compute_dtype} does not go with matrices of dtype {dtype}: real"
            " products for real parameters, complex ones for complex. None serves both."
        )
    return jnp.promote_types(wide, compute_dtype)


def adjoint(x: jax.Array) -> jax.Array:
    """The conjugate transpose of the last two axes."""
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def product(
    operand: jnp.dtype, dtype: jnp.dtype, precision: jax.lax.Precision | None = None
) -> Callable[..., jax.Array]:
    """A function ``(a, b) -> a @ b`` with operands rounded to ``operand`` and sums in ``dtype``."""
    if operand == dtype:
        return functools.partial(jnp.matmul, precision=precision)

    def narrow(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(
            a.astype(operand), b.astype(operand), precision=precision, preferred_element_type=dtype
        )

    def emulated(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(*(rounded(c, operand).astype(dtype) for c in (a, b)), precision=precision)

    # XLA's CPU runtime has no product of narrow operands with a wide result (jaxlib 0.10: "DotThunk
    # BF16 x BF16 = F32"); the same product of the same rounded numbers in the wide dtype it has.
    return functools.partial(jax.lax.platform_dependent, cpu=emulated, default=narrow)


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``x`` as ``dtype``, rounded even where a later cast back would let the compiler skip it."""
    if x.dtype == dtype or jnp.iscomplexobj(x):
        return x.astype(dtype)
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)
