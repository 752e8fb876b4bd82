"""The matrix products of the iteration: operands in one dtype, sums in float32 at least.

Float32 products have JAX's default precision, or ``HIGHEST``. A GPU has no matrix units for the
latter: 67 TFLOP/s of an H100, against 989 in bfloat16 (NVIDIA's data sheet).

``compute_dtype=bfloat16`` means products of bfloat16 matrices, summed in float32 and rounded to
bfloat16 once: one instruction of an accelerator. XLA's CPU backend may sum in bfloat16. There,
operands are cast to float32 and the result is rounded, which gives the same sums. XLA may also drop
a cast to bfloat16 and back, but not the ``reduce_precision`` of :func:`round_to`.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from optax_muonplus._core.coefficients import Row
from optax_muonplus._core.function import MatrixArray, adjoint

# Sides of half-precision operands are padded to 8 elements (16 bytes), as cuBLAS requires.
ALIGNMENT = 8
# The matrix unit of a TPU multiplies blocks of 128 x 128. A product that sums over a side of 5461
# takes 28% longer than over 5504, by libtpu's estimate for a v5e.
TPU_BLOCK = 128

Square = jax.Array  # (*batch, n, n): Gram matrices and their polynomials, n the shorter side
Scale = jax.Array  # (*batch, 1 or n, 1): for each matrix, or each row of its Gram matrix
Precision = jax.lax.Precision | None


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds ``x`` to ``dtype``, in a way that XLA keeps even if the result is cast back."""
    if x.dtype == dtype or jnp.iscomplexobj(x):
        return x.astype(dtype)  # no complex dtype is narrower than the sums
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Products:
    """The products of an iteration, with Gram matrices on the shorter side of the matrices."""

    # Matrices in memory have the dtype of operands. Polynomials are combined in the dtype of sums,
    # inside the operation that reads and writes them.
    left: bool  # whether the rows are the shorter side: the Gram matrix is Y Y^H, else Y^H Y
    operand: jnp.dtype  # of operands
    dtype: jnp.dtype  # of sums and combinations
    precision: Precision = None  # of float32 products
    upcast_operands: bool = False  # whether operands are multiplied in ``dtype``
    exact_squares: bool = False  # whether R^2 is not rounded for a row of three coefficients
    block: int = 1  # longer sides are padded to multiples of it
    # Whether passes over Gram matrices are saved. A Gram matrix with a scale is then that of the
    # unscaled Y, and powers of the scale multiply coefficients: these must be in the range of
    # ``operand``. Later steps of monic rows change diagonals only.
    saves_passes: bool = False

    def pad(self, y: MatrixArray) -> MatrixArray:
        """Pads with zeros to sides that suit matrix units; other elements do not change."""
        # XLA would otherwise pad odd sides before every product, each time in a pass.
        least = ALIGNMENT if self.operand != self.dtype else 1
        blocks = [self.block if side > self.block > 1 else least for side in y.shape[-2:]]
        sides = zip(y.shape[-2:], blocks, strict=True)
        return with_zeros(y, [side + -side % block for side, block in sides])

    def matmul(self, a: MatrixArray, b: MatrixArray, exact: bool = False) -> MatrixArray:
        """Multiplies operands and sums in ``dtype``; rounds to operands unless ``exact``."""
        if self.operand == self.dtype:
            return jnp.matmul(a, b, precision=self.precision)
        # Rounded inside the kernel that sums: the wide result would be written and read again.
        result = self.dtype if exact else self.operand
        if self.upcast_operands:
            a, b = a.astype(self.dtype), b.astype(self.dtype)
            return round_to(jnp.matmul(a, b, precision=self.precision), result)
        return jnp.matmul(a, b, precision=self.precision, preferred_element_type=result)

    def gram(self, y: MatrixArray, exact: bool = False) -> Square:
        """Returns the Gram matrix of ``y``, or an ``exact`` one of a ``y`` that is not rounded."""
        a, b = (y, adjoint(y)) if self.left else (adjoint(y), y)
        return jnp.matmul(a, b, precision="high") if exact else self.matmul(a, b)

    # jax.jit traces it once for steps of the same coefficients.
    @functools.partial(jax.jit, static_argnums=(0, 2), inline=True)
    def polynomial(self, gram: Square, row: Row, scale: Scale | None = None) -> Square:
        """Returns ``c_0 I + c_1 R + c_2 R^2 + ...``, times ``scale``, for the Gram matrix R."""
        identity = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=self.dtype), gram.shape)
        p, power = row[0] * identity, None
        exact = self.exact_squares and len(row) == 3
        for degree, c in enumerate(row[1:], start=1):
            power = gram if power is None else self.matmul(gram, power, exact)
            if scale is not None and self.saves_passes:
                c = c * scale ** (2 * degree)
            p = p + c * power.astype(self.dtype)
        return self._scale_side(p, scale)

    def segment(
        self, y: MatrixArray, gram: Square, rows: Sequence[Row], scale: Scale | None = None
    ) -> MatrixArray:
        """Returns ``y`` after one step for each of ``rows``, its short side times ``scale``."""
        # P is scaled instead of y, since it is smaller.
        if len(rows) == 1:
            is_monic = rows[0][2:] == (1.0,) and is_positive(rows[0])
            if self.saves_passes and is_monic and scale is None:  # else gram is not scaled
                return self._multiply(self._complete_square(gram, rows[0]), y)
            return self._multiply(round_to(self.polynomial(gram, rows[0], scale), self.operand), y)
        # A single number scales the last P: the first is then rounded once, for R and for y.
        one = scale is not None and scale.shape[-2] == 1
        first, last = (None, scale) if one else (scale, None)
        p = self.polynomial(gram, rows[0])
        total = round_to(self._scale_side(p, first), self.operand)
        for i, row in enumerate(rows[1:], start=2):
            operand = round_to(p, self.operand)
            gram = self.matmul(self.matmul(gram, operand), operand)
            p = self.polynomial(gram, row, last if i == len(rows) else None)
            # The factors commute, but their errors do not. Each P multiplies from the outside, or
            # its error in large singular values of y would grow like the small values.
            total = self._multiply(round_to(p, self.operand), total)
        return self._multiply(total, y)

    def _complete_square(self, gram: Square, row: Row) -> Square:
        """Returns ``c_0 I + c_1 R + R^2 = S^2 + d I`` with ``S = R + c_1/2 I``, as an operand."""
        # Two diagonals change in place, while a polynomial reads R and R^2 and writes a third.
        half = row[1] / 2
        exact = diagonal(gram).astype(self.dtype) + half
        changed = round_to(exact, self.operand)
        # The square gets back what S's diagonal loses in rounding; else the error may double.
        lost = 2 * (exact - changed) * changed
        # Otherwise XLA would read the diagonal of R from a copy, after the change.
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
    """Whether a row of three coefficients is a square plus a positive number: nothing cancels."""
    return len(row) == 3 and row[2] > 0 and row[1] ** 2 <= 4 * row[0] * row[2]


def diagonal(x: Square) -> jax.Array:
    """Returns the diagonals as slices: ``jnp.diagonal`` would read all of the matrices."""
    side = x.shape[-1]
    return x.reshape(*x.shape[:-2], side * side)[..., :: side + 1]


def with_diagonal(x: Square, values: jax.Array) -> Square:
    """Returns ``x`` with other diagonals, which XLA writes in place if ``x`` has no other use."""
    i = np.arange(x.shape[-1])
    return x.at[..., i, i].set(
        values, unique_indices=True, indices_are_sorted=True, mode="promise_in_bounds"
    )


def part(x: MatrixArray, shape: Sequence[int]) -> MatrixArray:
    """Returns the first rows and columns of matrices, as many as in ``shape``."""
    return x[..., : shape[0], : shape[1]]


def with_zeros(x: MatrixArray, shape: Sequence[int]) -> MatrixArray:
    """Appends rows and columns of zeros to matrices, up to ``shape``."""
    if x.shape[-2:] == tuple(shape):
        return x
    widths = [(0, n - side) for n, side in zip(shape, x.shape[-2:], strict=True)]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + widths)
