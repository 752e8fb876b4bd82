"""Which form of the iteration runs: plain or on the Gram matrix, and in which precision.

The Gram iteration needs more exact products than the plain one, and restarts that go with their
precision:

- float32 and wider: on a CPU products are exact. On accelerators JAX's default is TF32, or
  operands rounded to bfloat16, which is enough for the plain iteration only. There ``"gram"``, and
  coefficients that need float32, use three products of bfloat16 parts, whose errors are several
  times smaller than those of plain TF32. ``"auto"`` stays plain: three products take 3/2 of the
  time of TF32, more than the Gram iteration saves. If JAX is told to make exact products
  (``jax_default_matmul_precision="highest"``), ``"auto"`` may take either form there too.
- float16: both forms, on GPUs. Errors of the Gram iteration are below those of plain bfloat16.
- bfloat16: both, for the tables that have restarts with which the Gram iteration is as exact as the
  plain one. It rounds more often than in float16, so that it restarts more often.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optax_muonplus import coefficients
from optax_muonplus.coefficients import Coefficients
from optax_muonplus.coefficients._resolve import CoefficientsLike
from optax_muonplus.coefficients._restarts import every_step
from optax_muonplus.polar._newton_schulz import (
    STATIC,
    Preconditioning,
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
from optax_muonplus.polar._products import BFLOAT16_X3, Precision, product_dtype

EXACT = jax.lax.Precision.HIGHEST


class Form(NamedTuple):
    """A way to carry out the iteration.

    Attributes:
      restarts: steps that compute the Gram matrix again.
      precision: of the products.
    """

    restarts: tuple[int, ...]
    precision: Precision


class Forms(NamedTuple):
    """The form on a CPU, and that on accelerators."""

    cpu: Form
    elsewhere: Form


def choose_forms(
    shape: tuple[int, ...],
    dtype: DTypeLike,
    polar: Polar,
    chosen: Coefficients,
    operand: jnp.dtype | None,
) -> Forms:
    """The forms for matrices of a shape and dtype.

    Args:
      shape: ``(..., out, in)``.
      dtype: of the matrices.
      polar: ``"newton_schulz"``, ``"gram"`` or ``"auto"``.
      chosen: coefficients, for which ``polar`` and ``operand`` are allowed.
      operand: dtype of operands, or None.
    """
    rows = chosen.rows
    plain = every_step(len(rows))

    def restarts(gram: tuple[int, ...]) -> tuple[int, ...]:
        """Those of the cheaper form, if ``polar`` leaves a choice."""
        if polar == "newton_schulz":
            return plain
        fewer = operations(shape, rows, gram) < operations(shape, rows, plain)
        return gram if polar == "gram" or fewer else plain

    # A traced number of steps has no plan: the plain iteration is taken.
    planned = chosen.restarts or coefficients.Restarts(plain, plain, plain, plain)
    if not holds_float32(operand):
        gram = planned.float16 if operand == jnp.float16 else planned.bfloat16
        form = Form(restarts(gram), None)
        return Forms(form, form)
    exact = Form(restarts(planned.float32), EXACT)
    wide = product_dtype(dtype, operand)
    if float32_is_exact() or wide in (jnp.float64, jnp.complex128):
        return Forms(exact, exact)
    if polar == "gram" or chosen.needs_float32:
        # Three products are defined for real numbers.
        split = Form(restarts(planned.bfloat16_x3), BFLOAT16_X3)
        return Forms(exact, split if wide == jnp.float32 else exact)
    default = Form(plain, None)
    return Forms(default if exact.restarts == plain else exact, default)


# Under jax.jit, as ``iterate``: a choice by platform would be compiled again at every call.
@functools.partial(jax.jit, static_argnames=("forms", *STATIC))
def iterate_in_form(
    x: jax.Array,
    *,
    eps: ArrayLike,
    steps: jax.Array | None,
    forms: Forms,
    rows: tuple[coefficients.Row, ...],
    safety_factor: float,
    preconditioning: Preconditioning,
    compute_dtype: jnp.dtype | None,
    symmetric_kernel: bool = False,
) -> jax.Array:
    """The iteration in the form for the device; arguments are as for ``iterate``."""
    on_cpu, elsewhere = (
        functools.partial(
            iterate,
            eps=eps,
            steps=steps,
            rows=rows,
            safety_factor=safety_factor,
            preconditioning=preconditioning,
            compute_dtype=compute_dtype,
            symmetric_kernel=symmetric_kernel,
            **form._asdict(),
        )
        for form in forms
    )
    if forms.cpu == forms.elsewhere:
        return on_cpu(x)
    return jax.lax.platform_dependent(x, cpu=on_cpu, default=elsewhere)


def matmul_shapes(
    shape: Sequence[int],
    polar: Polar | PolarFunction = "auto",
    ns_coeffs: CoefficientsLike = "jordan",
    ns_steps: int | jax.Array = 5,
    compute_dtype: DTypeLike | None = None,
) -> list[tuple[int, int, int]]:
    """The matrix products that ``polar_function`` does on one float32 matrix.

    On JAX's default backend, since the form of the iteration depends on it.

    ``"svd"`` and functions of the caller's own count as five plain steps of Newton-Schulz, which is
    their order of magnitude.

    Args:
      shape: ``(..., out, in)``; leading axes do not count.
      polar: as in :func:`optax_muonplus.polar.polar_function`.
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
    chosen = coefficients.resolve(ns_coeffs, ns_steps)
    forms = choose_forms(tuple(shape), jnp.float32, polar, chosen, operand_dtype(compute_dtype))
    form = forms.cpu if jax.default_backend() == "cpu" else forms.elsewhere
    return product_shapes(tuple(shape), chosen.rows, form.restarts)
