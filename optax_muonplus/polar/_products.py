"""The matrix products of the iteration: operands in one dtype, sums in float32 at least.

``compute_dtype=bfloat16`` means: round the operands to bfloat16, multiply, and sum in float32. On
accelerators that is one instruction. XLA's CPU backend needs two work-arounds:

- It has no product of bfloat16 operands with a float32 result. :func:`product` therefore rounds
  operands to bfloat16 there, casts them back and multiplies in float32, which gives the same
  products of the same rounded numbers.
- XLA may drop a cast to bfloat16 and back as if it changed nothing. :func:`rounded` therefore
  rounds by an operation of its own, ``reduce_precision``, which XLA keeps.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_muonplus.coefficients._tables import Row

Product = Callable[[jax.Array, jax.Array], jax.Array]


def product_dtype(dtype: DTypeLike, compute_dtype: jnp.dtype | None) -> jnp.dtype:
    """The dtype of sums and of linear combinations, for matrices of ``dtype``.

    Raises:
      ValueError: if one of the two is real and the other complex.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
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


class ShortSide(NamedTuple):
    """The products of an iteration, with Gram matrices on the shorter side of the matrices.

    Attributes:
      left: whether that is the left side, the rows: the Gram matrix is then ``Y Y^H``, and
        ``Y^H Y`` otherwise.
      matmul: the product of two matrices.
      operand: the dtype to which operands are rounded.
    """

    left: bool
    matmul: Product
    operand: jnp.dtype

    def gram(self, y: jax.Array) -> jax.Array:
        """The Gram matrix of ``y``."""
        return self.matmul(y, adjoint(y)) if self.left else self.matmul(adjoint(y), y)

    def multiply(self, p: jax.Array, y: jax.Array) -> jax.Array:
        """``y`` multiplied by ``p`` on its shorter side."""
        return self.matmul(p, y) if self.left else self.matmul(y, p)

    def segment(
        self,
        y: jax.Array,
        gram: jax.Array,
        rows: Sequence[Row | jax.Array],
        scale: jax.Array | None = None,
    ) -> jax.Array:
        """``y`` after one step for each of ``rows``.

        Args:
          y: matrices, not yet scaled.
          gram: the Gram matrix of the scaled ``y``.
          rows: coefficients of the steps.
          scale: what the short side of ``y`` is to be multiplied by, ``(*batch, 1 or n, 1)``.
        """
        p = _polynomial(gram, rows[0], self.matmul)
        # p is scaled instead of y, because it is the smaller of the two.
        total = p if scale is None else p * (jnp.swapaxes(scale, -1, -2) if self.left else scale)
        for row in rows[1:]:
            gram = self.matmul(self.matmul(gram, p), p)
            p = _polynomial(gram, row, self.matmul)
            total = self.multiply(p, total)
        # The result is only used as an operand again, so it is rounded once, here.
        return rounded(self.multiply(total, y), self.operand)


def _polynomial(gram: jax.Array, row: Row | jax.Array, matmul: Product) -> jax.Array:
    """``c_0 I + c_1 R + c_2 R^2 + ...`` for the Gram matrix R."""
    identity = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.shape)
    p = row[0] * identity + row[1] * gram
    power = gram
    for c in row[2:]:
        power = matmul(gram, power)
        p = p + c * power
    return p
