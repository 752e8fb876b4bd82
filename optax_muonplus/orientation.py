"""Functions on matrices, for both ways in which a matrix may lie in memory.

A Flax kernel is stored as (in, out), the transpose of the matrix W of ``y = W x``. Transposing it
would cost a copy each way; instead every function also knows what to do with the transposed matrix.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

ArrayFunction = Callable[[jax.Array], jax.Array]
Operations = Callable[[tuple[int, int]], int]


def no_operations(shape: tuple[int, int]) -> int:
    """Of a function that works on numbers one by one, or adds them up."""
    del shape
    return 0


class MatrixFunction(NamedTuple):
    """A shape-preserving function f of matrices.

    Attributes:
      upright: f, on arrays ``(batch, out, in)``.
      transposed: ``f(x^T)^T``, on arrays ``(batch, in, out)``. The same object as ``upright`` says
        that f does not see the difference, so that both kinds can be stacked.
      operations: of f on a matrix of a given (out, in), besides those on single numbers; what
        devices have to do is compared by it.
    """

    upright: ArrayFunction
    transposed: ArrayFunction
    operations: Operations = no_operations

    def of(self, transposed: bool | jax.Array) -> ArrayFunction:
        """The function for matrices that are, or are not, transposed, as is known or traced."""
        if self.upright is self.transposed:
            return self.upright
        if isinstance(transposed, bool):
            return self.transposed if transposed else self.upright
        return lambda x: jax.lax.cond(transposed, self.transposed, self.upright, x)


def either_way(function: ArrayFunction, operations: Operations = no_operations) -> MatrixFunction:
    """For a function with ``f(x^T) = f(x)^T``, such as the polar factor."""
    return MatrixFunction(function, function, operations)


def upright_only(function: ArrayFunction, operations: Operations = no_operations) -> MatrixFunction:
    """For any function on ``(batch, out, in)``: transposed matrices are turned there and back."""
    return MatrixFunction(function, lambda x: _turn(function(_turn(x))), operations)


def in_turn(functions: Sequence[MatrixFunction]) -> MatrixFunction:
    """One function after the other, as one."""

    def composed(transposed: bool) -> ArrayFunction:
        def apply(x: jax.Array) -> jax.Array:
            for function in functions:
                x = function.of(transposed)(x)
            return x

        return apply

    def operations(shape: tuple[int, int]) -> int:
        return sum(function.operations(shape) for function in functions)

    return MatrixFunction(composed(False), composed(True), operations)


def _turn(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)
