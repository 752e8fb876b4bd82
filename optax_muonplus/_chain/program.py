"""What a part of a chain computes, where this depends on the parts before it.

Parts keep the user's fields. Only this module adapts one part to others, at each traced update.
"""

import itertools
from collections.abc import Sequence
from typing import TypeGuard

import jax
import jax.numpy as jnp

from optax_muonplus._core.function import MatrixFunction, matrix_function
from optax_muonplus._core.normalize import Normalize
from optax_muonplus._core.orthogonalize import Orthogonalize
from optax_muonplus._core.precision import scale_by_pow2, times_pow2
from optax_muonplus._core.scale import ScaleByShape


class DualNorm:
    """Multiplies the result O of the functions before it by <M, O>, where M is the momentum.

    For a polar factor O, <M, O> is the nuclear norm of M, the dual of the spectral norm.
    """


@matrix_function
class ScaleByDualNorm(MatrixFunction):
    """``s(O)`` times the real part of <M, O>, for ``O = f(M)``."""

    functions: tuple[MatrixFunction, ...]  # f
    factors: tuple[MatrixFunction, ...]  # s, by shape

    def __call__(self, x: jax.Array) -> jax.Array:
        o = _apply_all(self.functions, x)
        # The inner product may overflow although the update does not.
        y, power = scale_by_pow2(x)
        inner = jnp.real(jnp.sum(y.conj() * o, axis=(-2, -1), keepdims=True))
        scaled = _apply_all(self.factors, o)
        return times_pow2(scaled * inner.astype(o.dtype), power)

    def transposed(self) -> MatrixFunction:
        return ScaleByDualNorm(_transposed(self.functions), _transposed(self.factors))

    def flops(self, shape: tuple[int, int]) -> int:
        return sum(function.flops(shape) for function in self.functions)


def _apply_all(functions: Sequence[MatrixFunction], x: jax.Array) -> jax.Array:
    for function in functions:
        x = function(x)
    return x


def _transposed(functions: Sequence[MatrixFunction]) -> tuple[MatrixFunction, ...]:
    return tuple(function.transposed() for function in functions)


def functions_of(parts: Sequence[MatrixFunction | DualNorm]) -> tuple[MatrixFunction, ...]:
    """Returns the functions on matrices, or on their momentum, that ``parts`` stand for."""
    functions, before_dual_norm = [], None
    for part in parts:
        if isinstance(part, DualNorm):
            before_dual_norm = len(functions)
            continue
        if isinstance(part, ScaleByShape) and part.norm is None and part.consistent_rms is not None:
            # A dual norm depends on the norm that ``match_frobenius`` restores.
            part = _set_rms(functions, part, keeps=before_dual_norm is not None)
        functions.append(part)
    if before_dual_norm is None:
        return tuple(functions)
    inner, outer = functions[:before_dual_norm], functions[before_dual_norm:]
    # Factors by shape multiply before the inner product, other functions after it.
    factors = tuple(itertools.takewhile(lambda f: isinstance(f, ScaleByShape), outer))
    return ScaleByDualNorm(tuple(inner), factors), *outer[len(factors) :]


def is_polar_factor(function: MatrixFunction | None) -> TypeGuard[Orthogonalize]:
    """Returns whether results are certainly polar factors; a user's function may be anything."""
    return isinstance(function, Orthogonalize) and not callable(function.polar)


def _set_rms(functions: list[MatrixFunction], scale: ScaleByShape, keeps: bool) -> ScaleByShape:
    """Returns ``scale`` with the norm before it, unless the RMS of matrices must be measured."""
    *earlier, norm = functions or [None]
    if not isinstance(norm, Normalize):
        return scale.replace(norm="none") if is_polar_factor(norm) else scale
    keeps &= norm.match_frobenius
    of_polar = bool(earlier) and is_polar_factor(earlier[-1])
    if not of_polar and (keeps or norm.norm in ("none", "long")):
        return scale
    if not keeps:  # the factor sets the RMS, whether or not the norm restores it
        functions[-1] = norm.replace(match_frobenius=False)
    return scale.replace(norm=norm.norm, match_frobenius=keeps)
