"""The factor by shape, which multiplies an orthogonalized update."""

import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from .arguments import POSITIVE, check_floating, check_number, check_word
from .function import MatrixArray, MatrixFunction, matrix_function, static
from .normalize import Norm, normalized_sides
from .precision import as_real, root, scale_by_pow2, sum_of_squares, upcast_for_sum

ShapeScale = Literal["spectral", "max", "none"]


@matrix_function
class ScaleByShape(MatrixFunction):
    r"""Multiplies matrices ``(*batch, out, in)`` by a factor that depends on their shape (m, n).

    A semi-orthogonal matrix has Frobenius norm :math:`\sqrt{\min(m, n)}`, hence root mean square
    (RMS) :math:`1/\sqrt{\max(m, n)}`. Once rows are normalized these are :math:`\sqrt m` and
    :math:`1/\sqrt n`; once columns are, :math:`\sqrt n` and :math:`1/\sqrt m`.

    Attributes:
      shape_scale: ``"spectral"`` is :math:`\sqrt{m/n}` (the paper), ``"max"`` is
        :math:`\sqrt{\max(1, m/n)}` (Jordan's Muon and Optax), ``"none"`` is 1.
      consistent_rms: the RMS of the scaled matrix, in place of ``shape_scale``.
      norm: the normalization before it, on which ``consistent_rms`` depends; ``"none"`` means an
        exact polar factor. With None the RMS of each matrix is measured.
      match_frobenius: whether ``norm`` kept the Frobenius norm of the polar factor.

    Raises:
      ValueError: for an unknown word, or a ``consistent_rms`` that is not positive and finite.

    Source: Bernstein, arXiv:2409.20325 (spectral); Liu et al., arXiv:2502.16982 (RMS).
    """

    shape_scale: ShapeScale = static(default="max")
    consistent_rms: float | jax.Array | None = None
    norm: Norm | None = static(default=None)
    match_frobenius: bool = static(default=False)

    def __post_init__(self) -> None:
        check_word("shape_scale", self.shape_scale, get_args(ShapeScale))
        if self.consistent_rms is not None:
            check_number("consistent_rms", self.consistent_rms, POSITIVE)

    def factor(self, fan_out: int, fan_in: int) -> float | jax.Array:
        """Returns the factor; an array if ``consistent_rms`` is one."""
        if self.consistent_rms is not None:
            wanted = self.consistent_rms
            if not isinstance(wanted, float | int):
                # bfloat16 would round the product; inject_hyperparams may have made it complex.
                wanted = jnp.real(upcast_for_sum(wanted))
            return wanted / self._polar_rms(fan_out, fan_in)
        if self.shape_scale == "none":
            return 1.0
        ratio = fan_out / fan_in
        return math.sqrt(ratio if self.shape_scale == "spectral" else max(1.0, ratio))

    def update_rms(self, fan_out: int, fan_in: int) -> float | jax.Array:
        """Returns the RMS of an update at learning rate 1, if the polar factor is exact."""
        return self.factor(fan_out, fan_in) * self._polar_rms(fan_out, fan_in)

    def _polar_rms(self, fan_out: int, fan_in: int) -> float:
        """Returns the RMS of an exact polar factor after ``norm``."""
        sides = normalized_sides(self.norm or "none", fan_out, fan_in)
        if self.match_frobenius or not sides:
            return 1 / math.sqrt(max(fan_out, fan_in))
        return 1 / math.sqrt(fan_in if sides[-1] == "row" else fan_out)

    def __call__(self, x: MatrixArray) -> MatrixArray:
        check_floating(x)
        return self.times_factor(x, *x.shape[-2:])

    def times_factor(self, x: MatrixArray, fan_out: int, fan_in: int) -> MatrixArray:
        """Scales matrices of shape (fan_out, fan_in), even if they are stored transposed."""
        if self.consistent_rms is None or self.norm is not None:
            return (x * self.factor(fan_out, fan_in)).astype(x.dtype)
        y, _ = scale_by_pow2(upcast_for_sum(x))
        squares = sum_of_squares(y, (-2, -1))
        wanted = as_real(self.consistent_rms, squares.dtype) * math.sqrt(fan_out * fan_in)
        size = root(jnp.where(squares > 0, 1 / jnp.where(squares > 0, squares, 1), 0))
        return (y * (wanted * size)).astype(x.dtype)

    def transposed(self) -> MatrixFunction:
        return ScaleByTransposedShape(self)


@matrix_function
class ScaleByTransposedShape(MatrixFunction):
    """The factor by shape of matrices that are stored transposed, as (in, out)."""

    scale: ScaleByShape

    def __call__(self, x: MatrixArray) -> MatrixArray:
        return self.scale.times_factor(x, x.shape[-1], x.shape[-2])

    def transposed(self) -> MatrixFunction:
        return self.scale
