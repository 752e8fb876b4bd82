"""Functions on matrices, for both ways in which a matrix may lie in memory.

A Flax kernel is stored as (in, out), the transpose of the matrix W of ``y = W x``. Transposing it
would cost a copy each way; instead every function also knows what to do with the transposed matrix.
"""

import functools
import itertools
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
      upright: f, on arrays ``(batch, out, in)`` and, behind them, ``numbers``.
      transposed: ``f(x^T)^T``, on arrays ``(batch, in, out)`` likewise. The same object as
        ``upright`` says that f does not see the difference, so that both kinds can be stacked.
      operations: of f on a matrix of a given (out, in), besides those on single numbers; what
        devices have to do is compared by it.
      numbers: hyperparameters that are arrays. On a mesh they are handed to each device, since a
        function under ``jax.shard_map`` may not close over arrays that lie on the mesh.
    """

    upright: Callable[..., jax.Array]
    transposed: Callable[..., jax.Array]
    operations: Operations = no_operations
    numbers: tuple[jax.Array, ...] = ()

    def of(self, transposed: bool | jax.Array) -> ArrayFunction:
        """The function for matrices that are, or are not, transposed, as is known or traced."""
        if self.upright is self.transposed or transposed is False:
            function = self.upright
        elif transposed is True:
            function = self.transposed
        else:
            function = functools.partial(jax.lax.cond, transposed, self.transposed, self.upright)
        return (lambda x: function(x, *self.numbers)) if self.numbers else function


def either_way(function: ArrayFunction, operations: Operations = no_operations) -> MatrixFunction:
    """For a function with ``f(x^T) = f(x)^T``, such as the polar factor."""
    return MatrixFunction(function, function, operations)


def upright_only(function: ArrayFunction, operations: Operations = no_operations) -> MatrixFunction:
    """For any function on ``(batch, out, in)``: transposed matrices are turned there and back."""
    return MatrixFunction(function, lambda x: _turn(function(_turn(x))), operations)


def in_turn(functions: Sequence[MatrixFunction]) -> MatrixFunction:
    """One function after the other, as one."""

    def composed(transposed: bool) -> Callable[..., jax.Array]:
        def apply(x: jax.Array, *numbers: jax.Array) -> jax.Array:
            rest = iter(numbers)
            for function in functions:
                own = tuple(itertools.islice(rest, len(function.numbers)))
                x = function._replace(numbers=own).of(transposed)(x)
            return x

        return apply

    def operations(shape: tuple[int, int]) -> int:
        return sum(function.operations(shape) for function in functions)

    numbers = tuple(itertools.chain.from_iterable(function.numbers for function in functions))
    return MatrixFunction(composed(False), composed(True), operations, numbers)


def _turn(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)
