"""The polar factor as it runs, by the fastest products of a platform.

Without ``compute_dtype``, matrices of float32 and bfloat16 are multiplied in bfloat16 on GPUs and
TPUs, as in other implementations of Muon, unless JAX's matmul precision was set. The Gram form
needs more exact products than the plain iteration, or more restarts. By dtype of the products:

- float32: ``"gram"`` has exact products on all platforms. JAX's default on accelerators (TF32, or
  operands rounded to bfloat16) is enough for the plain iteration only. There ``"auto"`` is plain,
  unless ``jax_default_matmul_precision`` is ``"highest"`` or ``"float32"``.
- float64: either form, always exact.
- bfloat16: either form, for tables whose restarts make the Gram form as exact as the plain one.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_muonplus._core.function import MatrixArray, MatrixFunction, matrix_function, static
from optax_muonplus._core.orthogonalize import Orthogonalize
from optax_muonplus._core.precision import product_dtype
from optax_muonplus._execution.platforms import Platform, platform_of
from optax_muonplus._execution.polar import products
from optax_muonplus._execution.polar.iteration import Iteration, iterate, operations
from optax_muonplus._execution.polar.products import Precision, Products

DEFAULT = Orthogonalize()
EXACT = jax.lax.Precision.HIGHEST


@matrix_function
class FastPolar(MatrixFunction):
    """Computes the Newton-Schulz iteration that ``options`` defines, up to rounding errors.

    Attributes:
      options: the definition.
      platform: the platform of the products; None means that of JAX's default backend.
      largest: the largest absolute values of the matrices, ``(batch, 1, 1)``; None if unknown.
    """

    options: Orthogonalize
    platform: Platform | None = static(default=None)
    largest: jax.Array | None = None

    @classmethod
    def of(cls, options: Orthogonalize, platform: Platform, dtype: DTypeLike) -> "FastPolar":
        """Chooses ``compute_dtype`` for matrices of ``dtype``, if it is None."""
        # A matmul precision that was set for all of JAX is kept.
        told = jax.config.jax_default_matmul_precision  # ty: ignore[missing-attribute]
        free = options.compute_dtype is None and told in (None, "default", "bfloat16")
        if free and platform != "cpu" and dtype in (jnp.float32, jnp.bfloat16):
            options = options.replace(compute_dtype=jnp.dtype(jnp.bfloat16))
        return cls(options, platform)

    def __call__(self, x: MatrixArray) -> MatrixArray:
        if not isinstance(self.options.ns_steps, int):  # the definition loops over traced steps
            return self.options(x)
        iteration = self.iteration(self._platform, x.shape, x.dtype)
        return iterate(x, self.options.eps, iteration, self.largest)

    @property
    def takes_largest(self) -> bool:
        """Whether ``largest`` saves a pass."""
        return self.options.compute_dtype == jnp.bfloat16 and self.transpose_equivariant

    @property
    def transpose_equivariant(self) -> bool:
        return self.options.transpose_equivariant

    @property
    def input_dtype(self) -> DTypeLike | None:
        return self.options.input_dtype

    @property
    def output_dtype(self) -> DTypeLike | None:
        return self.options.output_dtype

    def flops(self, shape: Sequence[int]) -> int:
        is_complex = jnp.issubdtype(self.output_dtype or jnp.float32, jnp.complexfloating)
        dtype = jnp.complex64 if is_complex else jnp.float32
        chosen = self.iteration(self._platform, shape, dtype)
        return operations(shape, chosen.rows, chosen.restarts)

    @property
    def _platform(self) -> Platform:
        return self.platform or platform_of(jax.default_backend())

    def iteration(self, platform: Platform, shape: Sequence[int], dtype: DTypeLike) -> Iteration:
        """Resolves all choices for matrices of this shape and dtype on this platform."""
        options = self.options
        rows, _, safety_factor, _ = options.coefficients
        sums = product_dtype(dtype, options.compute_dtype)
        operand = sums if options.compute_dtype is None else jnp.dtype(options.compute_dtype)
        restarts, precision, upcast = choose_algorithm(options, platform, shape, operand, sums)
        height, width = shape[-2:]
        # On a CPU, multiplying a square matrix from the left is 8% faster. But "aol" scales one
        # side: the right one of a square matrix, as in optax.contrib.muon.
        left = height < width or (height == width and options.preconditioning != "aol")
        # In bfloat16 the Gram form is as near to the polynomial as the plain one if squares are not
        # rounded. If they are, its error is up to 1.3 times as large.
        exact_squares = operand == jnp.bfloat16 and restarts != tuple(range(1, len(rows)))
        exact_norm = options.exact_norm and operand != sums
        block = products.TPU_BLOCK if platform == "tpu" else 1
        # Entries of y are at most 2: the third power of its Gram matrix stays far below the largest
        # number of bfloat16. Only the first segment has a scale, and must be a single step. Under
        # "aol" each row has its own scale.
        saves_passes = (
            (platform, operand) == ("gpu", jnp.bfloat16)
            and len(rows[0]) <= 4
            and (len(rows) == 1 or restarts[:1] == (1,))
            and options.preconditioning != "aol"
            and not exact_norm
        )
        made = Products(left, operand, sums, precision, upcast, exact_squares, block, saves_passes)
        return Iteration(rows, restarts, safety_factor, options.preconditioning, exact_norm, made)


def choose_algorithm(
    options: Orthogonalize,
    platform: Platform,
    shape: Sequence[int],
    operand: jnp.dtype,
    sums: jnp.dtype,
) -> tuple[tuple[int, ...], Precision, bool]:
    """Returns restarts, the precision of products, and whether operands are cast to ``sums``."""
    rows, polar = options.coefficients.rows, options.polar
    plain = tuple(range(1, len(rows)))  # restarts at every step

    def cheaper(gram: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the restarts of the cheaper form, if ``polar`` allows both."""
        if polar == "newton_schulz":
            return plain
        fewer = operations(shape, rows, gram) < operations(shape, rows, plain)
        return gram if polar == "gram" or fewer else plain

    # Where no restarts are known, "auto" is the plain iteration.
    float32, bfloat16 = options.coefficients.restarts or [plain] * 2
    on_cpu = platform == "cpu"
    if jnp.finfo(operand).nmant < jnp.finfo(jnp.float32).nmant:
        # A CPU sums some bfloat16 products in bfloat16; accelerators never do.
        return cheaper(bfloat16), None, on_cpu
    upcast = operand != sums and on_cpu
    exact = cheaper(float32), EXACT, upcast
    told = jax.config.jax_default_matmul_precision  # ty: ignore[missing-attribute]
    if polar == "gram" or told in ("highest", "float32") or sums in (jnp.float64, jnp.complex128):
        return exact
    return exact if on_cpu and exact[0] != plain else (plain, None, upcast)


def polar_factor(x: MatrixArray, options: Orthogonalize = DEFAULT) -> MatrixArray:
    r"""Returns the polar factors of ``x``, exact or approximate, as optimizers compute them.

    ``"newton_schulz"`` is the iteration as :class:`Orthogonalize` defines it. ``"gram"`` is the
    same polynomial, iterated on the Gram matrix. With :math:`R_0 = X X^H` for the shorter side n,

    .. math::
      P_i = c_0 I + c_1 R_i + c_2 R_i^2 + \dots, \qquad R_{i+1} = R_i P_i^2, \qquad
      \text{result} = (P_{T-1} \cdots P_0) X

    This multiplies with the longer side m twice instead of 2 T times: 4 n^2 m + 2 n^3 (4T - 3)
    operations in place of T (4 n^2 m + 2 n^3), fewer if m > 1.5 n. Before rounding errors in R grow
    large, R is computed again from X. Float32 products of the Gram form are exact on accelerators
    too: it may diverge in TF32. In bfloat16 it is as near to the polynomial as the plain iteration,
    for tables with restarts for that dtype.

    Args:
      x: matrices ``(*batch, out, in)``, real or complex.
      options: the method and its hyperparameters.

    Returns:
      An array of ``x``'s shape and dtype.

    Raises:
      ValueError: if only one of ``x`` and ``options.compute_dtype`` is complex, or if ``x`` is not
        floating-point.

    Source: Dao-AILab, gram-newton-schulz (2026).
    """
    if not options.is_iteration:
        return options(x)
    return FastPolar.of(options, platform_of(jax.default_backend()), x.dtype)(x)
