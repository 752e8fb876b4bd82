"""The polar factor as a function on matrices."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from optax_muonplus.coefficients._resolve import CoefficientsLike
from optax_muonplus.matrices._matrix_function import MatrixFunction, matrix_function, static
from optax_muonplus.polar._choice import matmul_shapes
from optax_muonplus.polar._methods import polar_function
from optax_muonplus.polar._newton_schulz import Preconditioning
from optax_muonplus.polar._options import DEFAULT_EPS, Polar, PolarFunction


@matrix_function
class Orthogonalize(MatrixFunction):
    """The polar factor; the attributes are the arguments of ``optax_muonplus.orthogonalize``."""

    ns_coeffs: CoefficientsLike = static(default="jordan")
    ns_steps: int | jax.Array = 5
    eps: ArrayLike = DEFAULT_EPS
    polar: Polar | PolarFunction = static(default="auto")
    preconditioning: Preconditioning = static(default="frobenius")
    compute_dtype: DTypeLike | None = static(default=None)
    symmetric_kernel: bool = static(default=False)

    def __post_init__(self) -> None:
        """Raises ValueError as :func:`optax_muonplus.polar.polar_function`."""
        _ = self._function
        object.__setattr__(self, "ns_coeffs", _hashable(self.ns_coeffs))

    @functools.cached_property
    def _function(self) -> PolarFunction:
        return polar_function(
            self.polar,
            self.ns_coeffs,
            self.ns_steps,
            self.eps,
            self.preconditioning,
            self.compute_dtype,
            self.symmetric_kernel,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """The polar factors of ``x``."""
        return self._function(x)

    def padded(self, shape: tuple[int, int]) -> MatrixFunction:
        """Itself if it is made of products, in which zeros change nothing.

        One-sided scalings are not: zeros may make a side the longer one.
        """
        products = self.polar in ("auto", "newton_schulz", "gram")
        one_sided = self.preconditioning in ("aol", "aol_out")
        return self if products and not one_sided else super().padded(shape)

    @property
    def transpose_equivariant(self) -> bool:
        """Not for a caller's function, of which nothing is known, nor for one-sided scalings."""
        return not callable(self.polar) and self.preconditioning not in ("aol", "aol_out")

    def flops(self, shape: tuple[int, int]) -> int:
        """Those of the products in :func:`optax_muonplus.polar.matmul_shapes`."""
        products = matmul_shapes(
            shape, self.polar, self.ns_coeffs, self.ns_steps, self.compute_dtype
        )
        return sum(2 * math.prod(product) for product in products)

    @property
    def input_dtype(self) -> jnp.dtype | None:
        """``compute_dtype`` in the plain iteration, whose first product has the matrices in it."""
        rounds = self.polar in ("auto", "newton_schulz") and self.compute_dtype is not None
        return jnp.dtype(self.compute_dtype) if rounds else None

    @property
    def output_dtype(self) -> jnp.dtype | None:
        """``compute_dtype`` in both iterations, whose last product is rounded to it."""
        rounds = self.polar in ("auto", "newton_schulz", "gram") and self.compute_dtype is not None
        return jnp.dtype(self.compute_dtype) if rounds else None


def _hashable(ns_coeffs: CoefficientsLike) -> str | tuple[Any, ...]:
    if isinstance(ns_coeffs, str):
        return ns_coeffs
    rows = np.asarray(ns_coeffs, np.float64).tolist()
    return tuple(tuple(row) if isinstance(row, list) else row for row in rows)
