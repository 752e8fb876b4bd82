r"""Turbo-Muon: Muon with four Newton-Schulz steps after a better scaling.

Source: Boissin et al., arXiv:2512.04632; its code, thib-s/flash-newton-schulz @145260f.
"""

import jax
from jax.typing import DTypeLike

import optax_muonplus as omp
from optax_muonplus import transforms
from optax_muonplus.coefficients import TABLES
from optax_muonplus.matrices import MatrixFunction, ScaleByShape, matrix_function, static
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import Momentum

ROWS = TABLES["dion"].rows[-4:]  # the code's


@matrix_function
class OutputsScaled(MatrixFunction):
    """A polar factor with ``preconditioning="aol"`` that scales squares on the output side."""

    polar_factor: MatrixFunction
    stored_transposed: bool = static(default=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        is_square = x.shape[-2] == x.shape[-1]
        transposed = is_square != self.stored_transposed
        return (self.polar_factor.transposed() if transposed else self.polar_factor)(x)

    def transposed(self) -> MatrixFunction:
        return self.replace(stored_transposed=not self.stored_transposed)

    @property
    def input_dtype(self) -> DTypeLike | None:
        return self.polar_factor.input_dtype

    @property
    def output_dtype(self) -> DTypeLike | None:
        return self.polar_factor.output_dtype

    def flops(self, shape: tuple[int, int]) -> int:
        return self.polar_factor.flops(shape)


def scale_by_turbo_muon(
    momentum: Momentum = Momentum(),
    polar_factor: Orthogonalize = Orthogonalize(ROWS, 4, preconditioning="aol"),
    scale: ScaleByShape = ScaleByShape("max"),
) -> transforms.MatrixTransformation:
    r"""The matrix part of Turbo-Muon.

    Before the iteration the shorter side of a matrix X is scaled by

    .. math:: s_i = \Big(\textstyle\sum_j |(X X^T)_{ij}|\Big)^{-1/2}

    Then no singular value is above 1 (Gershgorin), and most are nearer to 1 than after a division
    by the Frobenius norm: four steps are enough. The result is the polar factor of the scaled
    matrix. It differs from that of X unless its rows are orthogonal. A square matrix is scaled on
    its output side, as in the code; ``preconditioning="aol"`` scales the input side, as Optax does.
    The code clamps the sums at 1e-6, which disables the scaling for gradients below about 1e-3: the
    updates here then differ by 0.1 of their size at 1e-3 and 0.3 at 1e-4. The state is Muon's.
    """
    return omp.matrix_chain(momentum, OutputsScaled(polar_factor), scale)
