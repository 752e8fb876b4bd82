"""Functions on matrices as values: frozen dataclasses that are pytrees.

A Flax kernel is stored as (in, out), the transpose of the matrix W of ``y = W x``. Transposing it
would cost a copy each way. So every function can also say what it is on transposed matrices.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

_Class = TypeVar("_Class", bound=type)


def static(**kwargs: Any) -> Any:
    """A field of :func:`matrix_function` that is a choice: part of the structure of the pytree."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@typing.dataclass_transform(
    frozen_default=True, eq_default=False, field_specifiers=(static, dataclasses.field)
)
def matrix_function(cls: _Class) -> _Class:
    """Makes a class a frozen dataclass and a pytree whose leaves are its hyperparameters.

    Instances are compared by identity: their hyperparameters may be arrays, which have no hash.

    Like ``jax.tree_util.register_dataclass``, except that unflattening does not call
    ``__post_init__``: JAX also unflattens with placeholders, which no check would accept.
    """
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    fields = dataclasses.fields(cls)
    leaves = tuple(field.name for field in fields if not field.metadata.get("static"))
    choices = tuple(field.name for field in fields if field.metadata.get("static"))

    def flatten(function: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(function, name) for name in leaves), tuple(
            getattr(function, name) for name in choices
        )

    def unflatten(chosen: tuple[Any, ...], hyperparams: tuple[Any, ...]) -> Any:
        function = object.__new__(cls)
        for name, value in zip((*leaves, *choices), (*hyperparams, *chosen), strict=True):
            object.__setattr__(function, name, value)
        return function

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    return cls


class MatrixFunction:
    """A shape-preserving function of matrices ``(batch, out, in)``.

    A subclass is decorated with :func:`matrix_function` and defines ``__call__``. The other members
    have defaults that are right for every function; better ones save copies and balance devices::

      @matrix_function
      class Sign(MatrixFunction):
          def __call__(self, x):
              return jnp.sign(x)
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        """The function of every matrix of ``x``, an array of the same shape."""
        raise NotImplementedError

    @property
    def transpose_equivariant(self) -> bool:
        """Whether ``f(x^T) = f(x)^T``, as for the polar factor."""
        return False

    def transposed(self) -> "MatrixFunction":
        """The function ``x -> f(x^T)^T``, for matrices stored as ``(batch, in, out)``."""
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

    def padded(self, shape: tuple[int, int]) -> "MatrixFunction":
        """The function for matrices of ``shape`` that have rows and columns of zeros behind them.

        Its results have zeros there too.
        """
        return OnPart(self, shape)

    def flops(self, shape: tuple[int, int]) -> int:
        """FLOPs of the matrix products for one matrix ``(out, in)``; devices are balanced by it."""
        del shape
        return 0


@matrix_function
class ArrayFunction(MatrixFunction):
    """A plain function on arrays ``(batch, out, in)``, of which nothing else is known."""

    function: Callable[[jax.Array], jax.Array] = static()

    def __call__(self, x: jax.Array) -> jax.Array:
        """The function of ``x``."""
        return self.function(x)


@matrix_function
class ViaTranspose(MatrixFunction):
    """``x -> f(x^T)^T``, by transposing there and back."""

    function: MatrixFunction

    def __call__(self, x: jax.Array) -> jax.Array:
        """Two copies more than ``f`` itself."""
        return jnp.swapaxes(self.function(jnp.swapaxes(x, -1, -2)), -1, -2)

    def transposed(self) -> MatrixFunction:
        """The function itself."""
        return self.function

    def padded(self, shape: tuple[int, int]) -> MatrixFunction:
        """The function's, transposed."""
        return ViaTranspose(self.function.padded((shape[1], shape[0])))

    @property
    def input_dtype(self) -> jnp.dtype | None:
        """As the function."""
        return self.function.input_dtype

    @property
    def output_dtype(self) -> jnp.dtype | None:
        """As the function."""
        return self.function.output_dtype

    def flops(self, shape: tuple[int, int]) -> int:
        """As the function."""
        return self.function.flops((shape[1], shape[0]))


@matrix_function
class OnPart(MatrixFunction):
    """The function of the first rows and columns, and zeros behind, by cutting and padding."""

    function: MatrixFunction
    shape: tuple[int, int] = static()

    def __call__(self, x: jax.Array) -> jax.Array:
        """Two copies more than the function itself."""
        return with_zeros(self.function(part(x, self.shape)), x.shape[-2:])


@matrix_function
class Composition(MatrixFunction):
    """One function after the other, the first one first."""

    functions: tuple[MatrixFunction, ...]

    def __call__(self, x: jax.Array) -> jax.Array:
        """``... f2(f1(x))``."""
        for function in self.functions:
            x = function(x)
        return x

    @property
    def transpose_equivariant(self) -> bool:
        """If all of them are."""
        return all([function.transpose_equivariant for function in self.functions])

    def transposed(self) -> MatrixFunction:
        """Each of them transposed, in the same order."""
        return Composition(tuple([function.transposed() for function in self.functions]))

    def padded(self, shape: tuple[int, int]) -> "Composition":
        """Each of them."""
        return Composition(tuple([function.padded(shape) for function in self.functions]))

    @property
    def input_dtype(self) -> jnp.dtype | None:
        """That of the first."""
        return self.functions[0].input_dtype

    @property
    def output_dtype(self) -> jnp.dtype | None:
        """That of the last."""
        return self.functions[-1].output_dtype if self.functions else None

    def flops(self, shape: tuple[int, int]) -> int:
        """Their sum."""
        return sum(function.flops(shape) for function in self.functions)

    def split(self) -> "tuple[Composition, Composition]":
        """The first functions, as many as do not depend on the layout, and the others."""
        equivariant = [function.transpose_equivariant for function in self.functions]
        first = (*equivariant, False).index(False)
        return Composition(self.functions[:first]), Composition(self.functions[first:])


def compose(functions: Sequence[MatrixFunction]) -> Composition:
    """One function after the other, as one."""
    return Composition(tuple(functions))


def for_layout(
    function: MatrixFunction, transposed: bool, shape: tuple[int, int] | None = None
) -> MatrixFunction:
    """``function`` for matrices stored as (in, out) if ``transposed``.

    Args:
      function: of matrices (out, in).
      transposed: whether they are stored as (in, out).
      shape: as stored, if there are rows and columns of zeros behind the matrices.
    """
    chosen = function.transposed() if transposed else function
    return chosen if shape is None else chosen.padded(shape)


def part(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The first rows and columns of matrices, as many as ``shape`` says."""
    return x[..., : shape[0], : shape[1]]


def with_zeros(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Matrices with rows and columns of zeros behind, so that they have ``shape``."""
    widths = [(0, n - side) for n, side in zip(shape, x.shape[-2:], strict=True)]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + widths)
