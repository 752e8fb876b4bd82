"""What the parts of a chain mean together: the only place that knows what stands before what.

Parts are values with the fields that a user gives them. What one of them may rely on, because of
the parts before it, is decided here, at each update that is traced.
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

    For a polar factor O this is the nuclear norm of M, the dual of the spectral norm.
    """


@matrix_function
class ScaleByDualNorm(MatrixFunction):
    """``s(O)``, ``O = f(M)``, times the real part of <M, O>; if polar, the nuclear norm of M."""

    functions: tuple[MatrixFunction, ...]  # f
    scales: tuple[MatrixFunction, ...]  # s, each of which multiplies a matrix by a number

    def __call__(self, x: jax.Array) -> jax.Array:
        o = _apply_all(self.functions, x)
        # The inner product may be beyond the largest number where the update is not.
        y, power = scale_by_pow2(x)
        inner = jnp.real(jnp.sum(y.conj() * o, axis=(-2, -1), keepdims=True))
        scaled = _apply_all(self.scales, o)
        return times_pow2(scaled * inner.astype(o.dtype), power)

    def transposed(self) -> MatrixFunction:
        return ScaleByDualNorm(_transposed(self.functions), _transposed(self.scales))

    def flops(self, shape: tuple[int, int]) -> int:
        return sum(function.flops(shape) for function in self.functions)


def _apply_all(functions: Sequence[MatrixFunction], x: jax.Array) -> jax.Array:
    for function in functions:
        x = function(x)
    return x


def _transposed(functions: Sequence[MatrixFunction]) -> tuple[MatrixFunction, ...]:
    return tuple(function.transposed() for function in functions)


def functions_of(parts: Sequence[MatrixFunction | DualNorm]) -> tuple[MatrixFunction, ...]:
    """Returns the functions on matrices, or on their momentum, that ``parts`` mean."""
    functions, before_dual_norm = [], None
    for part in parts:
        if isinstance(part, DualNorm):
            before_dual_norm = len(functions)
            continue
        if isinstance(part, ScaleByShape) and part.norm is None and part.consistent_rms is not None:
            part = _set_rms(functions, part, keeps=before_dual_norm is not None)
        functions.append(part)
    if before_dual_norm is not None:
        inner, outer = functions[:before_dual_norm], functions[before_dual_norm:]
        # A factor by shape may come before the inner product; another function sees the product.
        scales = list(itertools.takewhile(lambda f: isinstance(f, ScaleByShape), outer))
        scaled = ScaleByDualNorm(tuple(inner), tuple(scales))
        functions = [scaled, *outer[len(scales) :]]
    return tuple(functions)


def is_polar_factor(function: MatrixFunction | None) -> TypeGuard[Orthogonalize]:
    """Returns whether results are polar factors for certain; a user's function may be anything."""
    return isinstance(function, Orthogonalize) and not callable(function.polar)


def _set_rms(functions: list[MatrixFunction], scale: ScaleByShape, keeps: bool) -> ScaleByShape:
    """Gives a factor for an RMS the norm before it, which ``keeps`` matching the norm before that.

    Of matrices that are not normalized it measures those that are no polar factors.
    """
    *earlier, norm = functions or [None]
    if not isinstance(norm, Normalize):
        return scale.replace(norm="none") if is_polar_factor(norm) else scale
    keeps &= norm.match_frobenius
    of_polar = bool(earlier) and is_polar_factor(earlier[-1])
    if not of_polar and (keeps or norm.norm in ("none", "long")):
        return scale
    if not keeps:
        functions[-1] = norm.replace(match_frobenius=False)
    return scale.replace(norm=norm.norm, match_frobenius=keeps)
