"""The matrix products of the iteration: operands in one dtype, sums in float32 at least.

Products have one of three precisions, besides JAX's default one:

- Float32 in full, ``HIGHEST``. A GPU has no matrix units for it: 67 TFLOP/s of an H100, where
  bfloat16 has 989 (NVIDIA's data sheet).
- Float32 as three products of bfloat16 parts, ``BF16_BF16_F32_X3``: ``a b ~ a1 b1 + a1 b2 + a2
  b1``, where ``a1`` is ``a`` rounded to bfloat16 and ``a2`` is the rest, rounded. Its rounding unit
  is about 2^-16. It takes the place of ``HIGHEST`` on accelerators where that is enough.
- Half precision.

``compute_dtype=bfloat16`` means: products of bfloat16 matrices, summed in float32 and rounded to
bfloat16 once, inside the product. On accelerators that is one instruction. XLA's CPU backend needs
two work-arounds:

- It does not promise to sum bfloat16 products in float32. :func:`product` therefore casts operands
  to float32 there, multiplies, and rounds the result, which gives the same sums of the same rounded
  numbers.
- XLA may drop a cast to bfloat16 and back as if it changed nothing. :func:`rounded` therefore
  rounds by an operation of its own, ``reduce_precision``, which XLA keeps.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_muonplus.coefficients._minimax import Row
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


Precision = jax.lax.Precision | jax.lax.DotAlgorithmPreset | None

BFLOAT16_X3 = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3


def product(
    operand: jnp.dtype, dtype: jnp.dtype, precision: Precision = None, *, keep_sums: bool = False
) -> Product:
    """A function ``(a, b) -> a @ b`` of operands in ``operand``, which sums in ``dtype``.

    The result leaves in ``operand``: it is rounded once, inside the kernel that sums. A result in
    ``dtype`` would be written with twice the bytes, and read again to be rounded.

    Args:
      operand: dtype of the operands.
      dtype: dtype of the sums.
      precision: of float32 products.
      keep_sums: whether the result leaves in ``dtype`` nevertheless.
    """
    if operand == dtype:
        return functools.partial(jnp.matmul, precision=precision)
    result = dtype if keep_sums else operand

    def narrow(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(a, b, precision=precision, preferred_element_type=result)

    def emulated(a: jax.Array, b: jax.Array, precision: Precision = precision) -> jax.Array:
        return rounded(jnp.matmul(a.astype(dtype), b.astype(dtype), precision=precision), result)

    # The CPU sums bfloat16 products in bfloat16 in places; the accelerators never do. TPUs have no
    # unit for float16, and would round its digits to those of bfloat16.
    branches = {"cpu": emulated, "default": narrow}
    if operand == jnp.float16:
        branches["tpu"] = functools.partial(emulated, precision=jax.lax.Precision.HIGHEST)
    return functools.partial(jax.lax.platform_dependent, **branches)


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

    Matrices are in the dtype of operands wherever they are written to memory; polynomials are
    combined in the dtype of sums, inside the operation that reads and writes them.

    Attributes:
      left: whether that is the left side, the rows: the Gram matrix is then ``Y Y^H``, and
        ``Y^H Y`` otherwise.
      matmul: the product of two matrices.
      operand: the dtype of operands.
      dtype: the dtype of sums and combinations.
      factor: what the iterates ``Y`` carry besides, see :func:`range_factor`; their Gram matrices
        carry its square.
      symmetric: :func:`optax_muonplus.polar.symmetric_product`, for products whose result is
        symmetric; or None.
      square: the product that makes R^2 for a row of three coefficients, if that is another than
        ``matmul``; or None.
    """

    left: bool
    matmul: Product
    operand: jnp.dtype
    dtype: jnp.dtype
    factor: float
    symmetric: Callable[..., jax.Array] | None = None
    square: Product | None = None

    def gram(self, y: jax.Array) -> jax.Array:
        """The Gram matrix of ``y``."""
        if self.symmetric is not None:
            rows = y if self.left else adjoint(y)
            return self.symmetric(rows, rows)
        return self.matmul(y, adjoint(y)) if self.left else self.matmul(adjoint(y), y)

    def commuting(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The product of two symmetric matrices that commute, as polynomials of one matrix do."""
        return self.matmul(a, b) if self.symmetric is None else self.symmetric(a, b)

    def multiply(self, p: jax.Array, y: jax.Array) -> jax.Array:
        """``y`` multiplied by ``p`` on its shorter side."""
        return self.matmul(p, y) if self.left else self.matmul(y, p)

    def rounded(self, x: jax.Array) -> jax.Array:
        """``x`` as an operand."""
        return rounded(x, self.operand)

    def segment(
        self,
        y: jax.Array,
        gram: jax.Array,
        rows: Sequence[Row | jax.Array],
        scale: jax.Array | None = None,
    ) -> jax.Array:
        """``y`` after one step for each of ``rows``.

        Args:
          y: matrices, which carry ``factor`` once they were scaled.
          gram: the Gram matrix of the scaled ``y``.
          rows: coefficients of the steps.
          scale: what the short side of ``y`` is to be multiplied by, ``(*batch, 1 or n, 1)``, if
            it is not yet scaled.
        """
        # P is scaled instead of y, because it is the smaller of the two.
        if len(rows) == 1:
            return self.multiply(self.rounded(self.polynomial(gram, rows[0], scale)), y)
        p = self.polynomial(gram, rows[0])
        total = self.rounded(self._scaled(p, scale))
        for row in rows[1:]:
            operand = self.rounded(p)
            gram = self.commuting(self.commuting(gram, operand), operand)
            p = self.polynomial(gram, row)
            # The factors commute, but their errors do not: each P must stand next to the y that the
            # earlier ones have multiplied, or its error in large singular values of y is multiplied
            # as the small ones are. So this is no product for ``symmetric`` either.
            total = self.multiply(self.rounded(p), total)
        return self.multiply(total, y)

    def polynomial(
        self, gram: jax.Array, row: Row | jax.Array, scale: jax.Array | None = None
    ) -> jax.Array:
        """``c_0 I + c_1 R + c_2 R^2 + ...`` for the Gram matrix R, in the dtype of sums.

        With ``symmetric`` three terms are combined within the product, and rounded there.

        Args:
          gram: R.
          row: the coefficients.
          scale: multiplies the result, as in :meth:`segment`.
        """
        if self.symmetric is not None and len(row) == 3 and _one_number(scale):
            c = [row[2] / self.factor**4, row[1] / self.factor**2, row[0]]
            c = jnp.asarray(c, self.dtype)
            c = jnp.broadcast_to(c, (*gram.shape[:-2], 3))
            c = c if scale is None else c * scale[..., 0]
            return self.symmetric(gram, gram, gram, c)
        identity = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=self.dtype), gram.shape)
        p, power = row[0] * identity, None
        multiply = self.square if self.square and len(row) == 3 else self.commuting
        for degree, c in enumerate(row[1:], start=1):
            power = gram if power is None else multiply(gram, power)
            p = p + c / self.factor ** (2 * degree) * power.astype(self.dtype)
        return self._scaled(p, scale)

    def _scaled(self, p: jax.Array, scale: jax.Array | None) -> jax.Array:
        """``p`` with the side scaled that it multiplies the short side of ``y`` with."""
        if scale is None:
            return p
        return p * (jnp.swapaxes(scale, -1, -2) if self.left else scale)


def _one_number(scale: jax.Array | None) -> bool:
    """Whether ``scale`` is the same for the whole matrix, so that P stays symmetric."""
    return scale is None or scale.shape[-2] == 1


def range_factor(operand: jnp.dtype, row_length: int) -> float:
    """A power of two that iterates are multiplied by, so that their elements are normal numbers.

    Elements of the Gram matrix R are about 1/n at first, and those beside its diagonal 1/n^1.5:
    below the normal numbers of float16 (6e-5) from n = 700 on. The factor, 8 for rows of three
    coefficients, multiplies R by 64. At the other end it leaves room for singular values up to 2:
    the power of R that the last coefficient multiplies then stays below 2^16, where float16 ends.
    """
    if jnp.finfo(operand).nexp >= jnp.finfo(jnp.float32).nexp:
        return 1.0
    return 2.0 ** max(0, min(3, 8 // (row_length - 1) - 1))
