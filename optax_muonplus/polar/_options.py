"""The options of polar functions, and the checks of them."""

import functools
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from optax_muonplus._arguments import NOT_NEGATIVE, check_number, check_word, floating_dtype
from optax_muonplus.coefficients._minimax import Row
from optax_muonplus.coefficients._resolve import Coefficients, CoefficientsLike
from optax_muonplus.coefficients._restarts import every_step
from optax_muonplus.polar._newton_schulz import Preconditioning

Polar = Literal["auto", "newton_schulz", "gram", "svd"]
PolarFunction = Callable[[jax.Array], jax.Array]

# Below any sum of squares that float32 gradients can make, above float32's smallest normal number.
DEFAULT_EPS = 1e-30
# What coefficients may make of a singular value in [0, 1] at any step, in place of about 1.
LARGEST = 100.0


def check_polar(polar: str) -> None:
    """Raises ValueError, which lists the options, unless ``polar`` is one of them."""
    check_word("polar", polar, get_args(Polar), "; or a function (*batch, out, in) -> the same")


def check_preconditioning(preconditioning: str) -> None:
    """Raises ValueError, which lists the options, unless ``preconditioning`` is one of them."""
    check_word("preconditioning", preconditioning, get_args(Preconditioning))


def check_eps(eps: ArrayLike) -> None:
    """Raises ValueError unless ``eps`` is a number that is finite and not negative."""
    check_number("eps", eps, NOT_NEGATIVE)


def operand_dtype(compute_dtype: DTypeLike | None) -> jnp.dtype | None:
    """``compute_dtype`` as a dtype; raises ValueError if it is not a floating-point one."""
    return floating_dtype("compute_dtype", compute_dtype)


def check_bounded(ns_coeffs: CoefficientsLike, chosen: Coefficients) -> None:
    """Raises ValueError if the steps send singular values to infinity, or all of them to zero.

    Published tables keep them below 2.
    """
    if isinstance(ns_coeffs, str):
        return
    # A traced number of steps may be large: ten more show whether the last row diverges.
    traced = chosen.restarts is None
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
    """The largest that a singular value in [0, 1] becomes at any step, and after the last."""
    x = np.linspace(0, 1, 257)
    sizes = []
    with np.errstate(over="ignore", invalid="ignore"):
        for row in rows:
            x = x * np.polynomial.polynomial.polyval(x * x, row)
            sizes.append(float(np.max(np.abs(x))))
    # NaN, of infinities of both signs, counts as infinite.
    return max(np.nan_to_num(sizes, nan=np.inf)), sizes[-1]


def check_operand(
    polar: str, ns_coeffs: CoefficientsLike, chosen: Coefficients, operand: jnp.dtype | None
) -> None:
    """Raises ValueError if the iteration diverges in products of that dtype."""
    if holds_float32(operand):
        return
    if chosen.needs_float32:
        raise ValueError(
            f"ns_coeffs={ns_coeffs!r} diverges in products of less than float32, got"
            f" compute_dtype={operand}. Leave that None, or pass other coefficients, such as"
            " 'polar_express'."
        )
    plain = every_step(len(chosen.rows))  # of one step both forms are the same
    known = chosen.restarts is None or not plain or chosen.restarts.bfloat16 != plain
    if polar == "gram" and operand == jnp.bfloat16 and not known:
        raise ValueError(
            f"polar='gram' is less exact than the plain iteration in products of {operand} with"
            f" ns_coeffs={ns_coeffs!r} and {len(chosen.rows)} steps, or diverges. Pass"
            " polar='auto', which takes it where it is as exact, 'newton_schulz', or"
            " compute_dtype='float16' on a GPU."
        )


def holds_float32(operand: jnp.dtype | None) -> bool:
    """Whether operands of that dtype have the digits of float32 at least."""
    return operand is None or jnp.finfo(operand).nmant >= jnp.finfo(jnp.float32).nmant


def float32_is_exact() -> bool:
    """Whether JAX is told to make float32 products in full precision on every device."""
    precision = jax.config.jax_default_matmul_precision  # ty: ignore[missing-attribute]
    return precision in ("highest", "float32")
