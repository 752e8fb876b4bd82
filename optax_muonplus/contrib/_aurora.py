r"""Aurora: a polar factor whose rows, or columns, have nearly equal norms.

Source: Dewulf et al., arXiv:2606.27715; its code, tilde-research/aurora-release @3d79a5c,
``src/aurora.py``.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

import optax_muonplus as omp
from optax_muonplus import matrices, transforms
from optax_muonplus.contrib._sizes import divided
from optax_muonplus.matrices import NOT_NEGATIVE, Kind, MatrixFunction, ScaleByShape
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import Momentum


@matrices.matrix_function
class Aurora(MatrixFunction):
    r"""The polar factor of a matrix whose rows were scaled to make the factor's rows even.

    For a matrix X of shape (m, n) with m > n, row by row, with K = ``rounds`` polar factors:

    .. math::
      D_1 = 1 / \max(\|X_i\|, \epsilon), \qquad
      U_k = \mathrm{Ortho}(\mathrm{diag}(D_k) X), \qquad
      D_{k+1} = D_k / \max(\|U_{k,i}\|, \epsilon)^{2 \gamma}

    The result is :math:`U_K`. In a wide matrix columns take the place of rows. For a square matrix
    it is the polar factor, whose rows are already even.

    Attributes:
      polar_factor: Ortho; the code has 12 steps that converge to the exact factor.
      rounds: K, from 1 to 100, the number of polar factors to compute.
      damping: :math:`\gamma`, in (0, 1].
      norm_eps: :math:`\epsilon`, a lower bound of norms.
    """

    polar_factor: Orthogonalize = Orthogonalize((2.0, -1.5, 0.5), 12)
    rounds: int = matrices.static(default=2)
    damping: ArrayLike = 0.5
    norm_eps: ArrayLike = 1e-7

    def __post_init__(self) -> None:
        matrices.check_number("damping", self.damping, Kind("in (0, 1]", lambda x: 0 < x <= 1))
        matrices.check_number("norm_eps", self.norm_eps, NOT_NEGATIVE)
        if matrices.known_count("rounds", self.rounds, at_most=100) is None:
            raise ValueError(
                "rounds is traced, but a program has a fixed number: pass a Python int. Under"
                " optax.inject_hyperparams add it to static_args=('rounds',)."
            )

    def __call__(self, x: jax.Array) -> jax.Array:
        m, n = x.shape[-2:]
        if m == n:
            return self.polar_factor(x)
        axis = -1 if m > n else -2
        y, power = matrices.scale_by_pow2(matrices.upcast_for_sum(x))
        eps = matrices.as_real(self.norm_eps, power.dtype)
        damping = matrices.as_real(self.damping, power.dtype)
        # Matrices are scaled in place of D: rows of zeros stay zero, however large D would be.
        size = matrices.root(matrices.sum_of_squares(y, (axis,)))
        y = divided(y, jnp.maximum(size, eps / power))
        factor = self.polar_factor(y)
        for _ in range(self.rounds - 1):
            squares = jnp.maximum(matrices.sum_of_squares(factor, (axis,)), eps * eps)
            counts = squares > 0  # the root of a zero row has no derivative
            y = jnp.where(counts, y / jnp.where(counts, squares, 1) ** damping, 0)
            factor = self.polar_factor(y)
        return factor.astype(x.dtype)

    @property
    def transpose_equivariant(self) -> bool:
        return self.polar_factor.transpose_equivariant

    def flops(self, shape: tuple[int, int]) -> int:
        return self.polar_factor.flops(shape) * (1 if shape[0] == shape[1] else self.rounds)


def scale_by_aurora(
    momentum: Momentum = Momentum(),
    factor: Aurora = Aurora(),
    scale: ScaleByShape = ScaleByShape("max"),
) -> transforms.MatrixTransformation:
    """The matrix part of Aurora: a momentum, its even polar factor, and the factor by shape.

    The state is Muon's. By default it computes 2 polar factors of 12 steps (one for a square
    matrix), where Muon computes one of 5. This follows the code. The paper's algorithm 3 starts
    each round at the last factor. The paper uses it only for the up and gate matrices of the MLP.
    """
    return omp.matrix_chain(momentum, factor, scale)
