"""Matrix products with operands in one dtype and sums in another, float32 at least.

``compute_dtype=bfloat16`` means: round the operands to bfloat16, multiply, and sum in float32. On
accelerators that is one instruction. XLA's CPU backend needs two work-arounds:

- It has no product of bfloat16 operands with a float32 result. :func:`product` therefore rounds
  operands to bfloat16 there, casts them back and multiplies in float32, which gives the same
  products of the same rounded numbers.
- XLA may drop a cast to bfloat16 and back as if it changed nothing. :func:`rounded` therefore
  rounds by an operation of its own, ``reduce_precision``, which XLA keeps.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_muonplus.matrices._precision import accumulation_dtype

Product = Callable[[jax.Array, jax.Array], jax.Array]


def product_dtype(dtype: DTypeLike, compute_dtype: jnp.dtype | None) -> jnp.dtype:
    """The dtype of sums and of linear combinations, for matrices of ``dtype``.

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
) -> Product:
    """A function ``(a, b) -> a @ b`` with operands rounded to ``operand`` and sums in ``dtype``."""
    if operand == dtype:
        return functools.partial(jnp.matmul, precision=precision)

    def narrow(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(
            a.astype(operand), b.astype(operand), precision=precision, preferred_element_type=dtype
        )

    def emulated(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(*(rounded(c, operand).astype(dtype) for c in (a, b)), precision=precision)

    # In jaxlib 0.10 the CPU fails on the narrow product: "DotThunk BF16 x BF16 = F32".
    return functools.partial(jax.lax.platform_dependent, cpu=emulated, default=narrow)


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``x`` as ``dtype``, with a rounding that XLA keeps even if the result is cast back.

    Complex arrays are only cast: ``reduce_precision`` does not take them, and no complex dtype is
    narrower than their sums.
    """
    if x.dtype == dtype or jnp.iscomplexobj(x):
        return x.astype(dtype)
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)
