"""The options of polar functions, and the checks of them."""

from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optax_muonplus.coefficients._resolve import CoefficientsLike
from optax_muonplus.polar._newton_schulz import Preconditioning

Polar = Literal["auto", "newton_schulz", "gram", "svd"]
PolarFunction = Callable[[jax.Array], jax.Array]

# Below any sum of squares that float32 gradients can make, above float32's smallest normal number.
DEFAULT_EPS = 1e-30


def check_polar(polar: str) -> None:
    """Raises ValueError, which lists the options, unless ``polar`` is one of them."""
    if polar not in get_args(Polar):
        raise ValueError(
            f"Unknown polar {polar!r}. Known: {', '.join(get_args(Polar))}; or a function"
            " (*batch, out, in) -> (*batch, out, in)."
        )


def check_preconditioning(preconditioning: str) -> None:
    """Raises ValueError, which lists the options, unless ``preconditioning`` is one of them."""
    if preconditioning not in get_args(Preconditioning):
        raise ValueError(
            f"Unknown preconditioning {preconditioning!r}."
            f" Known: {', '.join(get_args(Preconditioning))}."
        )


def check_eps(eps: ArrayLike) -> None:
    """Raises ValueError for a negative number. Arrays pass, because they may be traced."""
    if isinstance(eps, int | float) and eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}.")


def operand_dtype(compute_dtype: DTypeLike | None) -> jnp.dtype | None:
    """``compute_dtype`` as a dtype.

    Raises:
      ValueError: if it is not a floating-point dtype.
    """
    operand = None if compute_dtype is None else jnp.dtype(compute_dtype)
    if operand is not None and not jnp.issubdtype(operand, jnp.inexact):
        raise ValueError(f"compute_dtype must be a floating-point dtype, got {operand}.")
    return operand


def check_operand(
    polar: str, ns_coeffs: CoefficientsLike, needs_float32: bool, operand: jnp.dtype | None
) -> None:
    """Raises ValueError if the iteration diverges in products of that dtype."""
    if holds_float32(operand):
        return
    if needs_float32:
        raise ValueError(
            f"ns_coeffs={ns_coeffs!r} diverges in products of less than float32, got"
            f" compute_dtype={operand}. Leave that None, or pass other coefficients, such as"
            " 'polar_express'."
        )
    if polar == "gram" and operand != jnp.float16:
        raise ValueError(
            f"polar='gram' diverges in products of {operand}. Leave compute_dtype None, or pass"
            " 'float16' on a GPU, or polar='newton_schulz'."
        )


def holds_float32(operand: jnp.dtype | None) -> bool:
    """Whether operands of that dtype have the digits of float32 at least."""
    return operand is None or jnp.finfo(operand).nmant >= jnp.finfo(jnp.float32).nmant


def float32_is_exact() -> bool:
    """Whether JAX is told to make float32 products in full precision on every device."""
    precision = jax.config.jax_default_matmul_precision  # ty: ignore[missing-attribute]
    return precision in ("highest", "float32")
