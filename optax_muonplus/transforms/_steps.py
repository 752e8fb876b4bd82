"""The steps of Muon+ for one matrix, in order."""

import jax
import jax.numpy as jnp

from optax_muonplus.matrices._matrix_function import MatrixFunction, compose, matrix_function
from optax_muonplus.matrices._normalization import Normalize
from optax_muonplus.matrices._shape_factor import ScaleByShape
from optax_muonplus.polar._orthogonalize import Orthogonalize


def muonplus_steps(
    polar_factor: Orthogonalize, normalize: Normalize, scale: ScaleByShape, adaptive: bool
) -> list[MatrixFunction]:
    """What Muon+ does to the momentum of a matrix, in order."""
    if adaptive:
        return [ScaleByDualNorm(compose([polar_factor, normalize])), scale]
    return [polar_factor, normalize, scale]


@matrix_function
class ScaleByDualNorm(MatrixFunction):
    """``O = f(M)`` times the real part of <M, O>; for a polar factor the nuclear norm of M."""

    function: MatrixFunction

    def __call__(self, x: jax.Array) -> jax.Array:
        """``f(x)`` times the inner product of both, matrix by matrix."""
        o = self.function(x)
        inner = jnp.real(jnp.sum(x.conj() * o, axis=(-2, -1), keepdims=True))
        return o * inner.astype(o.dtype)

    @property
    def transpose_equivariant(self) -> bool:
        """If ``f`` is."""
        return self.function.transpose_equivariant

    def transposed(self) -> MatrixFunction:
        """The same with ``f`` transposed."""
        return ScaleByDualNorm(self.function.transposed())

    def flops(self, shape: tuple[int, int]) -> int:
        """Those of ``f``."""
        return self.function.flops(shape)
