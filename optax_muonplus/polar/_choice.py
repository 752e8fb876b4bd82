"""The choice of ``polar="auto"`` between the plain and the Gram iteration, and what it costs."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optax_muonplus import coefficients
from optax_muonplus.coefficients._tables import CoefficientsLike
from optax_muonplus.matrices._precision import accumulation_dtype
from optax_muonplus.polar._newton_schulz import (
    Preconditioning,
    compiled_once,
    every_step,
    iterate,
    operations,
    product_shapes,
)
from optax_muonplus.polar._options import (
    Polar,
    PolarFunction,
    float32_is_exact,
    holds_float32,
    operand_dtype,
)


@compiled_once
def iterate_cheapest(
    x: jax.Array,
    *,
    eps: ArrayLike,
    rows: tuple[coefficients.Row, ...],
    restarts: tuple[int, ...],
    safety_factor: float,
    preconditioning: Preconditioning,
    compute_dtype: jnp.dtype | None,
    precision: jax.lax.Precision | None,
    symmetric_kernel: bool = False,
) -> jax.Array:
    """Plain or Gram Newton-Schulz: the one with fewer operations, if products are exact enough.

    Arguments are as for ``iterate``; ``restarts`` are those of the Gram iteration.
    """
    highest = jax.lax.Precision.HIGHEST
    either = functools.partial(
        iterate,
        eps=eps,
        rows=rows,
        safety_factor=safety_factor,
        preconditioning=preconditioning,
        compute_dtype=compute_dtype,
        symmetric_kernel=symmetric_kernel,
    )
    plain = functools.partial(either, restarts=every_step(rows), precision=precision)
    gram = functools.partial(either, restarts=restarts, precision=highest)
    fewer = operations(x.shape, rows, restarts) < operations(x.shape, rows, every_step(rows))
    if not fewer or not holds_float32(compute_dtype):
        return plain(x)
    if (
        precision == highest
        or float32_is_exact()
        or accumulation_dtype(x.dtype) in (jnp.float64, jnp.complex128)
    ):
        return gram(x)
    # On accelerators float32 products are TF32 or bfloat16 by default. They are several times as
    # fast as the exact ones that the Gram iteration needs, so that the plain one is faster there.
    return jax.lax.platform_dependent(x, cpu=gram, default=plain)


def matmul_shapes(
    shape: Sequence[int],
    polar: Polar | PolarFunction = "auto",
    ns_coeffs: CoefficientsLike = "jordan",
    ns_steps: int | jax.Array = 5,
    compute_dtype: DTypeLike | None = None,
) -> list[tuple[int, int, int]]:
    """The matrix products that ``polar_function`` does on one float32 matrix.

    ``"svd"`` and functions of the caller's own count as five plain steps of Newton-Schulz, which is
    their order of magnitude.

    Args:
      shape: ``(..., out, in)``; leading axes do not count.
      polar: as in :func:`optax_muonplus.polar.polar_function`. ``"auto"`` is resolved for JAX's
        default backend.
      ns_coeffs: as in :func:`optax_muonplus.polar.newton_schulz`.
      ns_steps: number of steps.
      compute_dtype: dtype of the operands of products.

    Returns:
      ``(rows, inner, columns)`` of each product, which takes ``2 * rows * inner * columns`` FLOPs.

    Raises:
      ValueError: for unknown coefficients, too few rows, ``ns_steps < 1``, or a dtype that is not
        floating-point.
    """
    if callable(polar) or polar == "svd":
        ns_coeffs, ns_steps, compute_dtype, polar = "jordan", 5, None, "newton_schulz"
    rows, _, _, restarts, needs_float32 = coefficients.resolve(ns_coeffs, ns_steps)
    exact = needs_float32 or float32_is_exact() or jax.default_backend() == "cpu"
    either = polar == "auto" and exact and holds_float32(operand_dtype(compute_dtype))
    candidates = [] if polar == "gram" else [every_step(rows)]
    if restarts is not None and (polar == "gram" or either):
        candidates.append(restarts)
    cheapest = min(candidates, key=lambda restarts: operations(tuple(shape), rows, restarts))
    return product_shapes(tuple(shape), rows, cheapest)
