"""Checks of the coefficients that a polar factor is to be computed with."""

import functools

import jax.numpy as jnp
import numpy as np

from .for_steps import Coefficients, CoefficientsLike
from .restarts import every_step
from .tables import Row

# The largest allowed intermediate singular value. Good coefficients stay near 1.
LARGEST = 100.0


def check_bounded(ns_coeffs: CoefficientsLike, chosen: Coefficients) -> None:
    """Raises ValueError if the steps send singular values to infinity, or all of them to zero.

    Published tables keep them below 2.
    """
    if isinstance(ns_coeffs, str):
        return
    # A traced number of steps may be large: ten more show whether the last row diverges.
    traced = chosen.is_traced
    largest, last = _sizes(chosen.rows + chosen.rows[-1:] * (10 if traced else 0))
    if not largest <= LARGEST:
        raise ValueError(
            f"ns_coeffs={ns_coeffs!r} diverges: in {'some' if traced else len(chosen.rows)} steps a"
            f" singular value in [0, 1] becomes {largest:.3g}, in place of about 1. Pass"
            " coefficients that converge, such as 'jordan', or fewer steps."
        )
    if last == 0:
        raise ValueError(
            f"ns_coeffs={ns_coeffs!r} sends every singular value to 0, so that nothing would move."
            " Pass coefficients that converge to 1, such as 'jordan'."
        )


@functools.lru_cache
def _sizes(rows: tuple[Row, ...]) -> tuple[float, float]:
    """Returns the largest that a singular value in [0, 1] becomes, and the largest at the end."""
    x = np.linspace(0, 1, 257)
    sizes = []
    with np.errstate(over="ignore", invalid="ignore"):
        for row in rows:
            x = x * np.polyval(row[::-1], x * x)
            sizes.append(float(np.max(np.abs(x))))
    # NaN, of infinities of both signs, counts as infinite.
    return max(np.nan_to_num(sizes, nan=np.inf)), sizes[-1]


def check_precision(
    ns_coeffs: CoefficientsLike, chosen: Coefficients, operand: jnp.dtype | None
) -> None:
    """Raises ValueError if the iteration diverges in products of that dtype."""
    if chosen.needs_float32 and not holds_float32(operand):
        raise ValueError(
            f"ns_coeffs={ns_coeffs!r} diverges in products of less than float32, got"
            f" compute_dtype={operand}. Leave that None, or pass other coefficients, such as"
            " 'polar_express'."
        )


def check_gram(
    ns_coeffs: CoefficientsLike, chosen: Coefficients, operand: jnp.dtype | None
) -> None:
    """Raises ValueError unless restarts of the Gram iteration are known for these products."""
    if chosen.is_traced:
        raise ValueError(
            f"ns_steps={chosen.steps} is traced, but polar='gram' plans its restarts for a given"
            " number of steps. Pass a Python int; under optax.inject_hyperparams add"
            " static_args=('ns_steps',). Or polar='newton_schulz'."
        )
    steps = len(chosen.rows)
    if chosen.restarts is None:
        raise ValueError(
            f"polar='gram' has no restarts for ns_coeffs={ns_coeffs!r} and {steps} steps: they are"
            " listed for published tables, up to 8 steps. Pass the name of a table, fewer steps, or"
            " polar='auto', which is the plain iteration here."
        )
    plain = every_step(steps)
    if operand == jnp.bfloat16 and steps > 1 and chosen.restarts.bfloat16 == plain:
        raise ValueError(
            f"polar='gram' is less exact than the plain iteration in products of {operand} with"
            f" ns_coeffs={ns_coeffs!r} and {steps} steps, or diverges. Pass"
            " polar='auto', which takes it where it is as exact, 'newton_schulz', or"
            " compute_dtype='float16' on a GPU."
        )


def holds_float32(operand: jnp.dtype | None) -> bool:
    """Returns whether operands of that dtype have the digits of float32 at least."""
    return operand is None or jnp.finfo(operand).nmant >= jnp.finfo(jnp.float32).nmant
