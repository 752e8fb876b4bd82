"""The polar factor as a function on matrices, a value with every option."""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .arguments import NOT_NEGATIVE, check_number, check_word, floating_dtype
from .coefficients import Coefficients, CoefficientsLike, for_steps
from .function import MatrixArray, MatrixFunction, map_matrices, matrix_function, static
from .newton_schulz import Preconditioning, newton_schulz, svd

Polar = Literal["auto", "newton_schulz", "gram", "svd"]
PolarFunction = Callable[[jax.Array], jax.Array]

# Above float32's smallest normal number, below any sum of squares that float32 gradients can make.
DEFAULT_EPS = 1e-30


@matrix_function
class Orthogonalize(MatrixFunction):
    r"""Replaces matrices by their polar factors, exact or approximate.

    A call maps matrices ``(*batch, out, in)``, real or complex, to an array of the same shape and
    dtype, by the definition. Optimizers run the same polynomial faster. Newton-Schulz iterates

    .. math::
      X \leftarrow M / (\nu(M) + \epsilon), \qquad
      X \leftarrow c_0 X + c_1 (X X^H) X + c_2 (X X^H)^2 X + \dots

    Each singular value s of the normalized matrix becomes ``p_T(...p_1(s))``, where ``p_t(s) = c_0
    s + c_1 s^3 + c_2 s^5 + ...`` has the coefficients of step t. Singular vectors stay the same.
    The Gram matrix has the size of the shorter side.

    Attributes:
      ns_coeffs: a table's name (``optax_muonplus.coefficients.TABLES``), one row, or several rows.
        All attributes but ``polar`` are for Newton-Schulz only.
      ns_steps: number of steps, from 1 to 100: the first rows of a table; for several rows of your
        own, pass their number. None means 5; ``optax.inject_hyperparams`` does not trace it.
      eps: added to the norm. With the default the result does not depend on the scale of ``x``; a
        larger one shrinks results of matrices whose norm is comparable to it.
      polar: ``"newton_schulz"``, ``"gram"`` (the same polynomial on the Gram matrix, for tables),
        ``"svd"`` (see :func:`svd`), or a function of one matrix, ``(out, in) -> (out, in)``. In
        bfloat16 ``"gram"`` restarts at every step unless fewer restarts are as exact. ``"auto"`` is
        the one of the first two with fewer operations, if products are exact enough for both.
      preconditioning: the norm :math:`\nu`, which must bound the largest singular value by about 1:

        - ``"frobenius"``: the Frobenius norm.
        - ``"spectral"``: the largest singular value, by an SVD.
        - ``"schatten"``: the Schatten-4 norm :math:`\|X X^H\|_F^{1/2}`.
        - ``"aol"``: one number for each unit of the shorter side, :math:`(\sum_j |X
          X^H|_{ij})^{1/2}`. The result is no longer exactly the polar factor of the input, but the
          iteration starts closer to one. It scales the input side of a square matrix.
      compute_dtype: dtype of the operands and results of matrix products. Sums are in float32 at
        least; results are rounded once. None means the input's dtype, at least float32, at JAX's
        default matmul precision; on GPUs and TPUs an optimizer then multiplies matrices of float32
        and bfloat16 in bfloat16, unless that precision was set.

    Raises:
      ValueError: for an unknown option, too few rows or too many of your own, ``ns_steps`` or
        ``eps`` out of range, or a dtype that is float16 or not floating-point; when called, for
        integers.

    Source: Jordan et al. 2024 (Muon); Boissin et al., arXiv:2512.04632 (aol); Grishina et al.,
    arXiv:2506.10935 (schatten).
    """

    ns_coeffs: CoefficientsLike = static(default="jordan")
    ns_steps: int | jax.Array | None = None
    eps: ArrayLike = DEFAULT_EPS
    polar: Polar | PolarFunction = static(default="auto")
    preconditioning: Preconditioning = static(default="frobenius")
    compute_dtype: DTypeLike | None = static(default=None)

    def __post_init__(self) -> None:
        operand = floating_dtype("compute_dtype", self.compute_dtype)
        if operand == np.float16:
            raise ValueError(
                'compute_dtype="float16" has too narrow a range for Gram matrices. Pass "bfloat16".'
            )
        check_word("preconditioning", self.preconditioning, get_args(Preconditioning))
        check_number("eps", self.eps, NOT_NEGATIVE)
        if not callable(self.polar):
            otherwise = "; or a function (out, in) -> (out, in), which under"
            otherwise += " optax.inject_hyperparams needs static_args=('polar',)"
            check_word("polar", self.polar, get_args(Polar), otherwise)
        if self.is_iteration:
            chosen = for_steps(self.ns_coeffs, self.ns_steps)
            if self.polar == "gram" and chosen.restarts is None:
                raise ValueError(
                    f'polar="gram" needs restarts, which are not known for {chosen.steps} steps of'
                    f' ns_coeffs={self.ns_coeffs!r}. Pass polar="auto", or the name of a table and'
                    " ns_steps as a Python int (static_args under optax.inject_hyperparams)."
                )
            object.__setattr__(self, "ns_steps", chosen.steps)  # an int, unless traced
        object.__setattr__(self, "ns_coeffs", _hashable(self.ns_coeffs))
        object.__setattr__(self, "compute_dtype", operand)

    def __call__(self, x: MatrixArray) -> MatrixArray:
        if callable(self.polar):
            return map_matrices(self.polar, x)
        if self.polar == "svd":
            return svd(x)
        chosen = self.coefficients
        return newton_schulz(
            x,
            chosen.rows,
            steps=chosen.steps,
            safety_factor=chosen.safety_factor,
            eps=self.eps,
            preconditioning=self.preconditioning,
            compute_dtype=self.compute_dtype,
        )

    @property
    def transpose_equivariant(self) -> bool:
        """False for a user's function, which may be anything, and for one-sided scalings."""
        return not callable(self.polar) and self.preconditioning != "aol"

    def flops(self, shape: tuple[int, int]) -> int:
        """Counts the products of the definition; an SVD or a user's function counts as 5 steps."""
        rows = self.coefficients.rows if self.is_iteration else for_steps().rows
        n, m = sorted(shape)
        return sum(4 * n * n * m + 2 * n**3 * (len(row) - 2) for row in rows)

    @property
    def input_dtype(self) -> DTypeLike | None:
        """``compute_dtype`` in the plain iteration, whose first product reads the matrices."""
        early = self.polar in ("auto", "newton_schulz") and not self.exact_norm
        return self.compute_dtype if early else None

    @property
    def exact_norm(self) -> bool:
        """Whether the norm must be computed before matrices are rounded."""
        # Both norms bring equal singular values to 1. "polar_express" is so steep there that a norm
        # made 0.2% larger by noise moved results by up to 0.28.
        if not self.is_iteration or self.preconditioning not in ("aol", "spectral"):
            return False
        row = self.coefficients.rows[0]
        return abs(sum(c * (2 * k + 1) for k, c in enumerate(row))) > 10 * abs(sum(row))

    @property
    def output_dtype(self) -> DTypeLike | None:
        """``compute_dtype`` in both iterations, which round their last product to it."""
        return self.compute_dtype if self.is_iteration else None

    @property
    def is_iteration(self) -> bool:
        return self.polar in ("auto", "newton_schulz", "gram")

    @property
    def coefficients(self) -> Coefficients:
        get = _cached_coefficients if isinstance(self.ns_steps, int) else for_steps
        return get(self.ns_coeffs, self.ns_steps)


_cached_coefficients: Callable[..., Coefficients] = functools.lru_cache(for_steps)


def _hashable(ns_coeffs: CoefficientsLike) -> str | tuple[Any, ...]:
    if isinstance(ns_coeffs, str):
        return ns_coeffs
    rows = np.asarray(ns_coeffs, np.float64).tolist()
    return tuple(tuple(row) if isinstance(row, list) else row for row in rows)
