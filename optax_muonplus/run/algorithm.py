"""Chooses how the iteration runs: plain or on the Gram matrix, and in which precision.

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

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_muonplus.method import Coefficients, every_step, holds_float32
from optax_muonplus.run.iteration import operations
from optax_muonplus.run.platform import Platform
from optax_muonplus.run.products import Precision

EXACT = jax.lax.Precision.HIGHEST
BFLOAT16_X3 = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3


class Algorithm(NamedTuple):
    """A way to carry out the iteration."""

    restarts: tuple[int, ...]  # steps that compute the Gram matrix again
    precision: Precision  # how products are made
    upcast_operands: bool = False  # operands are cast to the dtype of sums


def choose_algorithm(
    platform: Platform,
    shape: Sequence[int],
    polar: str,
    chosen: Coefficients,
    operand: jnp.dtype,
    dtype: jnp.dtype,
) -> Algorithm:
    """Returns the algorithm for matrices ``(..., out, in)`` of one shape.

    ``operand`` is the dtype of operands and ``dtype`` that of sums. The coefficients allow both
    ``operand`` and ``polar``, which is ``"newton_schulz"``, ``"gram"`` or ``"auto"``.
    """
    plain = every_step(len(chosen.rows))

    def cheaper(gram: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the restarts of the cheaper form, if ``polar`` leaves a choice."""
        if polar == "newton_schulz":
            return plain
        fewer = operations(shape, chosen.rows, gram) < operations(shape, chosen.rows, plain)
        return gram if polar == "gram" or fewer else plain

    # Where no restarts are known, the plain iteration is taken.
    float32, bfloat16_x3, float16, bfloat16 = chosen.restarts or [plain] * 4
    if not holds_float32(operand):
        # The CPU sums bfloat16 products in bfloat16 in places; the accelerators never do. TPUs have
        # no unit for float16, and would round its digits to those of bfloat16.
        on_tpu = platform == "tpu" and operand == jnp.float16
        restarts = cheaper(float16 if operand == jnp.float16 else bfloat16)
        return Algorithm(restarts, EXACT if on_tpu else None, on_tpu or platform == "cpu")
    upcast = operand != dtype and platform == "cpu"
    exact = Algorithm(cheaper(float32), EXACT, upcast)
    if float32_is_exact() or dtype in (jnp.float64, jnp.complex128):
        return exact
    if polar == "gram" or chosen.needs_float32:
        # Three products are defined for real numbers.
        split = platform != "cpu" and dtype == jnp.float32
        return Algorithm(cheaper(bfloat16_x3), BFLOAT16_X3) if split else exact
    default = Algorithm(plain, None, upcast)
    return exact if platform == "cpu" and exact.restarts != plain else default


def float32_is_exact() -> bool:
    """Returns whether JAX is told to make float32 products in full precision on every device."""
    precision = jax.config.jax_default_matmul_precision  # ty: ignore[missing-attribute]
    return precision in ("highest", "float32")
