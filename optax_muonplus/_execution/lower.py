"""What runs in place of a chain's functions: the one place that rewrites them for speed or range.

``run_plain`` computes the same without it, up to rounding. The rewrites, in this order:

1. a normalization after a polar factor becomes a :class:`NormalizeBounded`, with fewer passes;
2. a factor of all results, such as a learning rate, becomes the last function;
3. each function gets a form for matrices stored as (in, out);
4. Newton-Schulz becomes a :class:`FastPolar` of the platform;
5. in a stack on a GPU, the polar factor receives the largest entry of each matrix.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optax_muonplus._chain.program import ScaleByDualNorm, is_polar_factor
from optax_muonplus._core.function import (
    Elementwise,
    MatrixFunction,
    ViaTranspose,
    matrix_function,
    static,
)
from optax_muonplus._core.normalize import SUMMED_AXIS, Normalize, normalized_sides
from optax_muonplus._core.orthogonalize import Orthogonalize
from optax_muonplus._core.precision import as_real, root, sum_of_squares, upcast_for_sum
from optax_muonplus._execution.platforms import Platform
from optax_muonplus._execution.polar.fast import FastPolar


@matrix_function
class Program:
    """Functions on matrices in the order in which they run."""

    functions: tuple[MatrixFunction, ...]  # of (batch, out, in)
    transposed: tuple[MatrixFunction, ...]  # the same, of matrices stored as (batch, in, out)
    platform: Platform = static()

    def stored(self, transposed: bool) -> tuple[MatrixFunction, ...]:
        return self.transposed if transposed else self.functions

    def __call__(self, x: jax.Array, transposed: bool) -> jax.Array:
        for function in self.stored(transposed):
            x = function(x)
        return x

    @property
    def input_dtype(self) -> DTypeLike | None:
        return self.functions[0].input_dtype

    @property
    def takes_largest(self) -> bool:
        first = self.functions[0]
        return isinstance(first, FastPolar) and first.takes_largest

    def with_largest(self, largest: jax.Array) -> "Program":
        """Passes the largest entries, ``(batch, 1, 1)``, to the first function, a polar factor."""
        first = self.functions[0].replace(largest=largest)
        rest = self.functions[1:], self.transposed[1:]
        return Program((first, *rest[0]), (first, *rest[1]), self.platform)

    def cut(self, at: int) -> tuple["Program", "Program"]:
        """Returns the first ``at`` functions, and the others."""
        first, rest = (
            Program(self.functions[cut], self.transposed[cut], self.platform)
            for cut in (slice(at), slice(at, None))
        )
        return first, rest

    def flops(self, shape: tuple[int, int]) -> int:
        return sum(function.flops(shape) for function in self.functions)


def lower(
    functions: Sequence[MatrixFunction],
    platform: Platform,
    dtype: DTypeLike = jnp.float32,
    factor: jax.Array | None = None,
) -> Program:
    """Returns the program for matrices of ``dtype``; ``factor`` multiplies all results."""

    def fast(x: Any) -> Any:
        options = x.options if isinstance(x, FastPolar) else x
        is_iteration = isinstance(options, Orthogonalize) and options.is_iteration
        return FastPolar.of(options, platform, dtype) if is_iteration else x

    bounded = _bound(functions) + (() if factor is None else (Times(factor),))
    both = bounded, tuple(function.transposed() for function in bounded)
    return Program(*jax.tree.map(fast, both, is_leaf=_is_polar), platform)


def _is_polar(x: Any) -> bool:
    return isinstance(x, Orthogonalize | FastPolar)


def _bound(functions: Sequence[MatrixFunction]) -> tuple[MatrixFunction, ...]:
    """Replaces each normalization after a polar factor, also within a dual norm."""
    made: list[MatrixFunction] = []
    for i, x in enumerate(functions):
        if isinstance(x, ScaleByDualNorm):
            x = x.replace(functions=_bound(x.functions))
        elif isinstance(x, Normalize) and i and is_polar_factor(functions[i - 1]):
            x = NormalizeBounded(x)
        made.append(x)
    return tuple(made)


@matrix_function
class Times(Elementwise):
    """Multiplies each matrix by a number."""

    factor: ArrayLike

    def __call__(self, x: jax.Array) -> jax.Array:
        return as_real(self.factor, jnp.finfo(x.dtype).dtype) * x


@matrix_function
class NormalizeBounded(MatrixFunction):
    """Normalizes matrices whose entries are at most about 1, in fewer passes."""

    normalize: Normalize

    def __call__(self, x: jax.Array) -> jax.Array:
        # Squares of bounded entries stay in range: no pass has to find the largest entry first.
        y, first = upcast_for_sum(x), None
        eps = as_real(self.normalize.norm_eps, jnp.finfo(y.dtype).dtype)
        sides = normalized_sides(self.normalize.norm, *x.shape[-2:])
        for i, side in enumerate(sides, 1):
            squares = sum_of_squares(y, (SUMMED_AXIS[side],))
            first = squares if first is None else first
            factor = _reciprocal_root(squares + eps)
            if i == len(sides) and self.normalize.match_frobenius:
                # The squared Frobenius norm was the sum of the first side's squared norms. It is
                # now the sum of S / (S + eps) over the last side's squared norms S. The power of
                # two keeps XLA from merging both sums into one over the matrix, another pass.
                before = 2**10 * jnp.sum(first / 2**10, (-2, -1), keepdims=True)
                after = jnp.sum(squares * factor * factor, (-2, -1), keepdims=True)
                factor *= root(jnp.where(after > 0, before / jnp.where(after > 0, after, 1), 0))
            y = y * factor
        return y.astype(x.dtype)

    def transposed(self) -> MatrixFunction:
        other = self.normalize.transposed()
        return NormalizeBounded(other) if isinstance(other, Normalize) else ViaTranspose(self)


def _reciprocal_root(squares: jax.Array) -> jax.Array:
    """Returns ``1 / sqrt(squares)``, and 0 for 0."""
    return jnp.where(squares > 0, jax.lax.rsqrt(jnp.where(squares > 0, squares, 1)), 0)
