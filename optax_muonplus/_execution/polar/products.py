"""The matrix products of the iteration: operands in one dtype, sums in float32 at least.

Products have JAX's default precision or one of two others:

- Float32 in full, ``HIGHEST``. A GPU has no matrix units for it: 67 TFLOP/s of an H100, where
  bfloat16 has 989 (NVIDIA's data sheet).
- Half precision.

``compute_dtype=bfloat16`` means: products of bfloat16 matrices, summed in float32 and rounded to
bfloat16 once, inside the product. On accelerators that is one instruction. XLA's CPU backend needs
two work-arounds:

- It does not promise to sum bfloat16 products in float32. Operands of such products are therefore
  cast to float32 there, multiplied, and the result is rounded, which gives the same sums of the
  same rounded numbers.
- XLA may drop a cast to bfloat16 and back as if it changed nothing. :func:`round_to` therefore
  rounds by an operation of its own, ``reduce_precision``, which XLA keeps.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from optax_muonplus._core.coefficients import Row
from optax_muonplus._core.function import Matrices, adjoint

# Sides of half-precision operands are padded to 8 elements (16 bytes), as cuBLAS requires.
ALIGNMENT = 8
# The matrix unit of a TPU multiplies blocks of 128 x 128. A product that sums over a side of 5461
# takes 28% longer than over 5504, by libtpu's estimate for a v5e.
TPU_BLOCK = 128

# Gram matrices and polynomials of them, n the shorter side.
Square = jax.Array  # (*batch, n, n)
# One number for each matrix, or one for each row of its Gram matrix.
Scale = jax.Array  # (*batch, 1 or n, 1)

Precision = jax.lax.Precision | None


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds ``x`` to ``dtype``, in a way that XLA keeps even if the result is cast back.

    Complex arrays are only cast: ``reduce_precision`` does not take them, and no complex dtype is
    narrower than their sums.
    """
    if x.dtype == dtype or jnp.iscomplexobj(x):
        return x.astype(dtype)
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Products:
    """The products of an iteration, with Gram matrices on the shorter side of the matrices.

    Matrices are in the dtype of operands wherever they are written to memory; polynomials are
    combined in the dtype of sums, inside the operation that reads and writes them.

    Attributes:
      left: whether the shorter side is the left one, the rows: the Gram matrix is then ``Y Y^H``,
        and ``Y^H Y`` otherwise.
      operand: the dtype of operands.
      dtype: the dtype of sums and combinations.
      factor: what the iterates ``Y`` are multiplied by, so that float16 holds their Gram matrices;
        these have its square.
      precision: of float32 products.
      upcast_operands: whether operands are multiplied in ``dtype``.
      exact_squares: whether R^2 is not rounded for a row of three coefficients.
      block: longer sides are padded to multiples of it.
      saves_passes: whether passes over Gram matrices are saved. The matrix that comes with a scale
        is then that of the unscaled ``Y``: coefficients are multiplied by powers of the scale,
        which must be in the range of ``operand``. Later steps of monic rows change diagonals only.
    """

    left: bool
    operand: jnp.dtype
    dtype: jnp.dtype
    factor: float = 1.0
    precision: Precision = None
    upcast_operands: bool = False
    exact_squares: bool = False
    block: int = 1
    saves_passes: bool = False

    def pad(self, y: Matrices) -> Matrices:
        """Adds zeros up to sides that matrix units like, which change no other element.

        XLA would else pad odd sides before every product, a pass over the matrices each time.
        """
        least = ALIGNMENT if self.operand != self.dtype else 1
        blocks = [self.block if side > self.block > 1 else least for side in y.shape[-2:]]
        sides = zip(y.shape[-2:], blocks, strict=True)
        return with_zeros(y, [side + -side % block for side, block in sides])

    def matmul(self, a: Matrices, b: Matrices, exact: bool = False) -> Matrices:
        """Multiplies operands; sums are in ``dtype``.

        The result leaves in the dtype of operands: it is rounded once, inside the kernel that sums.
        In ``dtype``, for which ``exact`` asks, it would be written with twice the bytes, and
        read again to be rounded.
        """
        if self.operand == self.dtype:
            return jnp.matmul(a, b, precision=self.precision)
        result = self.dtype if exact else self.operand
        if self.upcast_operands:
            a, b = a.astype(self.dtype), b.astype(self.dtype)
            return round_to(jnp.matmul(a, b, precision=self.precision), result)
        return jnp.matmul(a, b, precision=self.precision, preferred_element_type=result)

    def gram(self, y: Matrices, exact: bool = False) -> Square:
        """Returns the Gram matrix of ``y``, or an ``exact`` one of a ``y`` that is not rounded."""
        a, b = (y, adjoint(y)) if self.left else (adjoint(y), y)
        return jnp.matmul(a, b, precision="high") if exact else self.matmul(a, b)

    # So that it is traced once for steps of the same coefficients.
    @functools.partial(jax.jit, static_argnums=(0, 2), inline=True)
    def polynomial(self, gram: Square, row: Row, scale: Scale | None = None) -> Square:
        """Returns ``c_0 I + c_1 R + c_2 R^2 + ...`` for the Gram matrix R, in the dtype of sums.

        ``scale`` multiplies the result, as in :meth:`segment`.
        """
        identity = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=self.dtype), gram.shape)
        p, power = row[0] * identity, None
        exact = self.exact_squares and len(row) == 3
        for degree, c in enumerate(row[1:], start=1):
            power = gram if power is None else self.matmul(gram, power, exact)
            c = c / self.factor ** (2 * degree)
            if scale is not None and self.saves_passes:
                c = c * scale ** (2 * degree)
            p = p + c * power.astype(self.dtype)
        return self._scale_side(p, scale)

    def segment(
        self,
        y: Matrices,
        gram: Square,
        rows: Sequence[Row],
        scale: Scale | None = None,
    ) -> Matrices:
        """Returns ``y`` after one step for each of ``rows``.

        Args:
          y: matrices, multiplied by ``factor`` once they were scaled.
          gram: the Gram matrix of the scaled ``y``, but see ``saves_passes``.
          rows: coefficients of the steps.
          scale: what the short side of ``y`` is to be multiplied by, if it is not yet scaled: one
            number for each matrix, or one for each row of its Gram matrix.
        """
        # P is scaled instead of y, because it is the smaller of the two.
        if len(rows) == 1:
            is_monic = rows[0][2:] == (1.0,) and is_positive(rows[0])
            if self.saves_passes and is_monic and scale is None:  # else gram is the unscaled one
                return self._multiply(self._complete_square(gram, rows[0]), y)
            return self._multiply(round_to(self.polynomial(gram, rows[0], scale), self.operand), y)
        # One number scales the last P, so that the first is rounded once, for R and for y.
        one = scale is not None and scale.shape[-2] == 1
        first, last = (None, scale) if one else (scale, None)
        p = self.polynomial(gram, rows[0])
        total = round_to(self._scale_side(p, first), self.operand)
        for i, row in enumerate(rows[1:], start=2):
            operand = round_to(p, self.operand)
            gram = self.matmul(self.matmul(gram, operand), operand)
            p = self.polynomial(gram, row, last if i == len(rows) else None)
            # The factors commute, but their errors do not: each P must stand next to the y that the
            # earlier ones have multiplied, or its error in large singular values of y is multiplied
            # as the small ones are.
            total = self._multiply(round_to(p, self.operand), total)
        return self._multiply(total, y)

    def _complete_square(self, gram: Square, row: Row) -> Square:
        """Returns ``c_0 I + c_1 R + R^2 = S^2 + d I`` with ``S = R + c_1/2 I``, as an operand.

        Two diagonals are changed in place, where a polynomial reads R and R^2 and writes a third.
        """
        half = row[1] / 2
        exact = diagonal(gram).astype(self.dtype) + half
        changed = round_to(exact, self.operand)
        # What rounding takes from the diagonal of S, its square gets back. Without that, the result
        # is up to twice as far from the polynomial.
        lost = 2 * (exact - changed) * changed
        # Else XLA would take the diagonal of R from a copy, after the change.
        gram, changed, lost = jax.lax.optimization_barrier((gram, changed, lost))
        s = with_diagonal(gram, changed)
        square = self.matmul(s, s)
        entries = diagonal(square).astype(self.dtype) + (row[0] - half**2 + lost)
        return with_diagonal(square, round_to(entries, self.operand))

    def _multiply(self, p: jax.Array, y: jax.Array) -> jax.Array:
        return self.matmul(p, y) if self.left else self.matmul(y, p)

    def _scale_side(self, p: jax.Array, scale: jax.Array | None) -> jax.Array:
        """Scales the side of ``p`` that multiplies the short side of ``y``."""
        if scale is None:
            return p
        return p * (jnp.swapaxes(scale, -1, -2) if self.left else scale)


def is_positive(row: Row) -> bool:
    """Whether a row of three coefficients has no negative value: it is a square and a number.

    Both are then positive, and their sum is as exact as they are.
    """
    return len(row) == 3 and row[2] > 0 and row[1] ** 2 <= 4 * row[0] * row[2]


def diagonal(x: Square) -> jax.Array:
    """Returns the diagonals as slices: XLA would read all of the matrices for ``jnp.diagonal``."""
    side = x.shape[-1]
    return x.reshape(*x.shape[:-2], side * side)[..., :: side + 1]


def with_diagonal(x: Square, values: jax.Array) -> Square:
    """Returns ``x`` with other diagonals, which XLA writes in place if ``x`` has no other use."""
    i = np.arange(x.shape[-1])
    return x.at[..., i, i].set(
        values, unique_indices=True, indices_are_sorted=True, mode="promise_in_bounds"
    )


def part(x: Matrices, shape: Sequence[int]) -> Matrices:
    """Returns the first rows and columns of matrices, as many as ``shape`` says."""
    return x[..., : shape[0], : shape[1]]


def with_zeros(x: Matrices, shape: Sequence[int]) -> Matrices:
    """Adds rows and columns of zeros behind matrices, so that they have ``shape``."""
    if x.shape[-2:] == tuple(shape):
        return x
    widths = [(0, n - side) for n, side in zip(shape, x.shape[-2:], strict=True)]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + widths)
