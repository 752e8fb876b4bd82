"""Functions on matrices as values.

A Flax kernel is stored as (in, out), the transpose of the matrix W of ``y = W x``. Transposing it
would cost a copy each way. Every function therefore also provides its transposed form.
"""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .arguments import check_matrices
from .dataclass import matrix_function, static

Matrices = Inexact[Array, "*batch out in"]


class MatrixFunction(abc.ABC):
    """A shape-preserving function of matrices ``(batch, out, in)``.

    A subclass is decorated with :func:`matrix_function` and defines ``__call__``. The other members
    have defaults that are right for every function; better ones save copies and balance devices::

      @matrix_function
      class Sign(MatrixFunction):
          def __call__(self, x):
              return jnp.sign(x)

    A call of it with anything but matrices of floating-point numbers raises ValueError.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lets ``__call__`` check its array, here for all functions on matrices."""
        super().__init_subclass__(**kwargs)
        function = cls.__dict__.get("__call__")
        if function is not None:

            @functools.wraps(function)
            def checked(self: Any, x: Matrices) -> Matrices:
                check_matrices(x)
                return function(self, x)

            cls.__call__ = checked  # ty: ignore[invalid-assignment]

    @abc.abstractmethod
    def __call__(self, x: Matrices) -> Matrices:
        """Returns the function of every matrix of ``x``, an array of the same shape."""

    @property
    def transpose_equivariant(self) -> bool:
        """Whether ``f(x^T) = f(x)^T``, as for the polar factor."""
        return False

    def transposed(self) -> "MatrixFunction":
        """Returns the function ``x -> f(x^T)^T``, for matrices stored as ``(batch, in, out)``."""
        return self if self.transpose_equivariant else ViaTranspose(self)

    @property
    def input_dtype(self) -> jnp.dtype | None:
        """The dtype that matrices are rounded to before anything else, or None.

        They may then be rounded earlier, to send or copy fewer bytes.
        """
        return None

    @property
    def output_dtype(self) -> jnp.dtype | None:
        """The dtype that results were rounded to before they got that of the matrices, or None."""
        return None

    def flops(self, shape: tuple[int, int]) -> int:
        """Counts FLOPs of products for a matrix ``(out, in)``; devices are balanced by them."""
        del shape
        return 0

    def replace(self, **attributes: Any) -> Self:
        """Returns the function with other attributes, which are not checked again."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self) | attributes)
        return copy


class Elementwise(MatrixFunction):
    """A function of each entry; a subclass defines ``__call__``."""

    @property
    def transpose_equivariant(self) -> bool:
        """True: entries may be transposed first."""
        return True


@matrix_function
class ArrayFunction(MatrixFunction):
    """A plain function on arrays ``(batch, out, in)``; nothing else is known of it."""

    function: Callable[[jax.Array], jax.Array] = static()

    def __call__(self, x: Matrices) -> Matrices:
        """Calls the function."""
        return self.function(x)


@matrix_function
class ViaTranspose(MatrixFunction):
    """``x -> f(x^T)^T``, by transposing there and back: two copies more than ``f``."""

    function: MatrixFunction

    def __call__(self, x: Matrices) -> Matrices:
        """Transposes, calls ``f``, and transposes again."""
        return jnp.swapaxes(self.function(jnp.swapaxes(x, -1, -2)), -1, -2)

    def transposed(self) -> MatrixFunction:
        """Returns ``f``."""
        return self.function

    @property
    def input_dtype(self) -> jnp.dtype | None:
        """The dtype that ``f`` rounds matrices to."""
        return self.function.input_dtype

    @property
    def output_dtype(self) -> jnp.dtype | None:
        """The dtype that ``f`` rounded results to."""
        return self.function.output_dtype

    def flops(self, shape: tuple[int, int]) -> int:
        """Counts the FLOPs of ``f``."""
        return self.function.flops(shape[::-1])


@matrix_function
class Composition(MatrixFunction):
    """One function after the other, the first one first."""

    functions: tuple[MatrixFunction, ...]

    def __call__(self, x: Matrices) -> Matrices:
        """Returns ``... f2(f1(x))``."""
        for function in self.functions:
            x = function(x)
        return x

    @property
    def transpose_equivariant(self) -> bool:
        """Whether ``f(x^T) = f(x)^T`` for each function."""
        return all(function.transpose_equivariant for function in self.functions)

    def transposed(self) -> "Composition":
        """Transposes each function."""
        return compose([f.transposed() for f in self.functions])

    @property
    def input_dtype(self) -> jnp.dtype | None:
        """The dtype that the first function rounds matrices to."""
        return self.functions[0].input_dtype

    @property
    def output_dtype(self) -> jnp.dtype | None:
        """The dtype that the last function rounded results to."""
        return self.functions[-1].output_dtype if self.functions else None

    def flops(self, shape: tuple[int, int]) -> int:
        """Adds up the FLOPs of all functions."""
        return sum(function.flops(shape) for function in self.functions)


def compose(functions: Sequence[MatrixFunction]) -> Composition:
    """Makes one function of several, the first one first."""
    return Composition(tuple(functions))


def for_layout(function: MatrixFunction, transposed: bool) -> MatrixFunction:
    """Returns ``function`` for matrices that are stored as (in, out) if ``transposed``."""
    return function.transposed() if transposed else function
