r"""Turbo-Muon: Muon with four Newton-Schulz steps after a scaling that brings matrices nearer to 1.

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

ROWS = TABLES["dion"].rows[-4:]  # those of the code


@matrix_function
class OutputsScaled(MatrixFunction):
    """A polar factor under ``preconditioning="aol"`` that scales squares on their output side.

    That is the input side of the transpose.
    """

    polar_factor: MatrixFunction
    stored_transposed: bool = static(default=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        is_square = x.shape[-2] == x.shape[-1]
        turned = is_square != self.stored_transposed
        return (self.polar_factor.transposed() if turned else self.polar_factor)(x)

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

    Before the iteration the shorter side of a matrix X is scaled, so that no singular value is
    above 1 (Gershgorin), by

    .. math:: s_i = \Big(\textstyle\sum_j |(X X^T)_{ij}|\Big)^{-1/2}

    which brings most of them nearer to 1 than a division by the Frobenius norm does; four steps
    then are enough. The result is the polar factor of the scaled matrix, which differs from that of
    X unless its rows are orthogonal. A square matrix is scaled on its output side, as in the code;
    ``preconditioning="aol"`` of the library has the input side, as Optax. The code clamps the sums
    at 1e-6, so that it scales nothing where gradients are below about 1e-3: updates then differ, by
    0.1 of their size at 1e-3 and 0.3 at 1e-4. Here they do not depend on the size of gradients. The
    state is Muon's.

    Args:
      momentum: of the gradients.
      polar_factor: the rows of the code are the last four of ``"dion"``.
      scale: the factor by shape.
    """
    return omp.matrix_chain(momentum, OutputsScaled(polar_factor), scale)
