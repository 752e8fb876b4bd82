"""The steps of Muon+ for one matrix, in order."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_muonplus._arguments import check_flag
from optax_muonplus.matrices._matrix_function import (
    MatrixFunction,
    compose,
    matrix_function,
    static,
)
from optax_muonplus.matrices._normalization import Normalize
from optax_muonplus.matrices._precision import as_real, scale_by_pow2, times_pow2
from optax_muonplus.matrices._shape_factor import ScaleByShape
from optax_muonplus.polar._options import Polar, PolarFunction
from optax_muonplus.polar._orthogonalize import Orthogonalize


def momentum_divisor(polar: Polar | PolarFunction, bias_correction: bool) -> float:
    """By what the momentum is divided, so that it cannot overflow: the polar factor is the same.

    A caller's function may see the size, and gets the momentum itself.
    """
    check_flag("bias_correction", bias_correction)
    return 2.0 if bias_correction and not callable(polar) else 1.0


def muonplus_steps(
    polar_factor: Orthogonalize,
    normalize: Normalize,
    scale: ScaleByShape,
    adaptive: bool,
    divisor: float = 1.0,
) -> list[MatrixFunction]:
    """What Muon+ does to the momentum of a matrix, in order.

    Args:
      polar_factor: of the momentum.
      normalize: of the polar factor.
      scale: of what results.
      adaptive: as in :func:`optax_muonplus.muonplus`.
      divisor: by what the momentum is divided that the steps get, :func:`momentum_divisor`.
    """
    check_flag("adaptive", adaptive)
    if divisor != 1:
        polar_factor = dataclasses.replace(polar_factor, eps=polar_factor.eps / divisor)
    if not callable(polar_factor.polar):
        normalize = dataclasses.replace(normalize, bounded=True)
    if adaptive:
        return [ScaleByDualNorm(compose([polar_factor, normalize]), scale, divisor)]
    return [polar_factor, normalize, scale]


@matrix_function
class Times(MatrixFunction):
    """Multiplies each matrix by a number, such as the learning rate.

    Attributes:
      factor: the number.
    """

    factor: ArrayLike

    def __call__(self, x: jax.Array) -> jax.Array:
        """``factor * x``."""
        return as_real(self.factor, jnp.finfo(x.dtype).dtype) * x

    @property
    def transpose_equivariant(self) -> bool:
        """Always."""
        return True

    def padded(self, shape: tuple[int, int]) -> MatrixFunction:
        """Itself: zeros stay zeros."""
        del shape
        return self


@matrix_function
class ScaleByDualNorm(MatrixFunction):
    """``s(O)``, ``O = f(M)``, times the real part of <M, O>; if polar, the nuclear norm of M.

    Attributes:
      function: f.
      scale: s, which multiplies each matrix by a number.
      divisor: M is this times the argument.
    """

    function: MatrixFunction
    scale: MatrixFunction
    divisor: float = static(default=1.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``s(f(x))`` times the inner product, matrix by matrix; at most the largest number."""
        o = self.function(x)
        # The inner product may be beyond the largest number where the update is not.
        y, power = scale_by_pow2(x)
        inner = jnp.real(jnp.sum(y.conj() * o, axis=(-2, -1), keepdims=True))
        return times_pow2(self.scale(o) * inner.astype(o.dtype), power * self.divisor)

    @property
    def transpose_equivariant(self) -> bool:
        """If ``f`` and ``s`` are."""
        return self.function.transpose_equivariant and self.scale.transpose_equivariant

    def transposed(self) -> MatrixFunction:
        """The same with ``f`` and ``s`` transposed."""
        return ScaleByDualNorm(self.function.transposed(), self.scale.transposed(), self.divisor)

    def padded(self, shape: tuple[int, int]) -> MatrixFunction:
        """The same with ``f`` and ``s`` of such matrices."""
        function, scale = self.function.padded(shape), self.scale.padded(shape)
        return ScaleByDualNorm(function, scale, self.divisor)

    def flops(self, shape: tuple[int, int]) -> int:
        """Those of ``f``."""
        return self.function.flops(shape)
