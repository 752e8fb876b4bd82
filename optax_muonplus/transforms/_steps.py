"""The steps of Muon and Muon+ as functions on matrices, made from the words that choose them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_muonplus.matrices._matrix_function import (
    MatrixFunction,
    either_way,
    in_turn,
    upright_only,
)
from optax_muonplus.matrices._normalization import (
    Norm,
    check_norm,
    match_frobenius_norm,
    normalize_matrix,
    transposed_norm,
)
from optax_muonplus.matrices._shape_factor import ShapeScale, check_shape_scale, shape_factor
from optax_muonplus.polar._methods import (
    Polar,
    PolarFunction,
    Preconditioning,
    polar_flops,
    polar_function,
)


def _step(make: Callable[..., MatrixFunction]) -> Callable[..., MatrixFunction]:
    """``make``, giving the same object for the same arguments, and handing arrays among them on.

    Outside of ``jax.jit`` programs are kept by the functions in them, and optimizers are built anew
    for each tree. Arrays, which ``optax.inject_hyperparams`` makes of hyperparameters, become the
    numbers of the function.
    """
    kept = functools.lru_cache(maxsize=128, typed=True)(make)

    @functools.wraps(make)
    def made(*args: Any) -> MatrixFunction:
        if any(isinstance(arg, jax.Array) for arg in args):
            return _with_numbers(make, args)
        try:
            hash(args)
        except TypeError:  # lists
            return make(*args)
        return kept(*args)

    return made


def _with_numbers(make: Callable[..., MatrixFunction], args: Sequence[Any]) -> MatrixFunction:
    """``make(*args)`` with the arrays in ``args`` as its numbers."""
    places = [i for i, arg in enumerate(args) if isinstance(arg, jax.Array)]

    def function(transposed: bool, x: jax.Array, *numbers: jax.Array) -> jax.Array:
        now = dict(zip(places, numbers, strict=True))
        return make(*(now.get(i, arg) for i, arg in enumerate(args))).of(transposed)(x)

    upright = functools.partial(function, False)
    example = make(*args)
    indifferent = example.upright is example.transposed
    transposed = upright if indifferent else functools.partial(function, True)
    return MatrixFunction(upright, transposed, example.operations, tuple(args[i] for i in places))


@_step
def orthogonalize_step(
    polar: Polar | PolarFunction,
    ns_coeffs: str | Sequence[Any],
    ns_steps: Any,
    eps: Any,
    preconditioning: Preconditioning,
    compute_dtype: Any,
) -> MatrixFunction:
    """The polar factor."""
    function = polar_function(polar, ns_coeffs, ns_steps, eps, preconditioning, compute_dtype)
    # Nothing is known of a caller's function, and aol scales one side of a square matrix.
    indifferent = not callable(polar) and preconditioning not in ("aol", "aol_out")
    options = (polar, ns_coeffs, ns_steps, compute_dtype)

    def operations(shape: tuple[int, int]) -> int:
        return polar_flops(shape, *options)

    return (either_way if indifferent else upright_only)(function, operations)


def rounded_on_arrival(polar: Polar | PolarFunction, compute_dtype: Any) -> Any:
    """The dtype that :func:`orthogonalize_step` rounds matrices to first, or None."""
    rounded = polar in ("auto", "newton_schulz") and compute_dtype is not None
    return jnp.dtype(compute_dtype) if rounded else None


@_step
def normalize_step(norm: Norm, norm_eps: Any, match_frobenius: bool) -> MatrixFunction:
    """Rows and columns over their norms."""
    check_norm(norm)
    if isinstance(norm_eps, int | float) and norm_eps < 0:
        raise ValueError(f"norm_eps must not be negative, got {norm_eps}.")

    def normalizer(norm: Norm, x: jax.Array) -> jax.Array:
        y = normalize_matrix(x, norm, norm_eps)
        return match_frobenius_norm(y, x) if match_frobenius else y

    return MatrixFunction(
        functools.partial(normalizer, norm), functools.partial(normalizer, transposed_norm(norm))
    )


@_step
def scale_step(
    shape_scale: ShapeScale, consistent_rms: Any, norm: Norm, match_frobenius: bool
) -> MatrixFunction:
    """A factor of the shape."""
    check_shape_scale(shape_scale)
    check_norm(norm)

    def scaled(x: jax.Array, fan_out: int, fan_in: int) -> jax.Array:
        factor = shape_factor(fan_out, fan_in, shape_scale, consistent_rms, norm, match_frobenius)
        return (x * factor).astype(x.dtype)

    return MatrixFunction(
        lambda x: scaled(x, x.shape[-2], x.shape[-1]), lambda x: scaled(x, x.shape[-1], x.shape[-2])
    )


@_step
def dual_norm_step(*functions: MatrixFunction) -> MatrixFunction:
    """``O = f(M)`` times the real part of <M, O>; for a polar factor the nuclear norm of M."""
    function = in_turn(functions)

    def times(function: Callable[..., jax.Array], m: jax.Array, *numbers: jax.Array) -> jax.Array:
        o = function(m, *numbers)
        inner = jnp.real(jnp.sum(m.conj() * o, axis=(-2, -1), keepdims=True))
        return o * inner.astype(o.dtype)

    return function._replace(
        upright=functools.partial(times, function.upright),
        transposed=functools.partial(times, function.transposed),
    )
