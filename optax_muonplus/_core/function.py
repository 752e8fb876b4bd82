"""Functions on matrices as values.

Flax kernels are stored as (in, out). To save two copies, every function has a transposed form.
"""

import abc
import copy
import dataclasses
import typing
from collections.abc import Callable, Iterable
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

MatrixArray = jax.Array  # (*batch, out, in), real or complex
_Class = TypeVar("_Class", bound=type)
_Object = TypeVar("_Object")


def adjoint(x: MatrixArray) -> MatrixArray:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def map_matrices(function: Callable[[jax.Array], jax.Array], x: MatrixArray) -> MatrixArray:
    """Applies a function of one matrix to each matrix of ``x``; no sum can mix them."""
    for _ in x.shape[:-2]:
        function = jax.vmap(function)
    return function(x)


def static(**kwargs: Any) -> Any:
    """Declares a field of a :func:`matrix_function` that is a choice, not a leaf of the pytree."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@typing.dataclass_transform(
    frozen_default=True, eq_default=False, field_specifiers=(static, dataclasses.field)
)
def matrix_function(cls: _Class) -> _Class:
    """Makes a class a frozen dataclass and a pytree whose leaves are its hyperparameters.

    Instances are compared by identity, since hyperparameters may be arrays, which have no hash.
    Unlike ``jax.tree_util.register_dataclass``, unflattening does not call ``__post_init__``: JAX
    also unflattens with placeholders, which no check would accept.
    """
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    fields = dataclasses.fields(cls)
    leaves = tuple(field.name for field in fields if not field.metadata.get("static"))
    choices = tuple(field.name for field in fields if field.metadata.get("static"))

    def flatten(function: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        values = [getattr(function, name) for name in (*leaves, *choices)]
        return tuple(values[: len(leaves)]), tuple(values[len(leaves) :])

    def unflatten(chosen: tuple[Any, ...], hyperparams: tuple[Any, ...]) -> Any:
        values = zip((*leaves, *choices), (*hyperparams, *chosen), strict=True)
        return _with(object.__new__(cls), values)

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    return cls


def _with(function: _Object, values: Iterable[tuple[str, Any]]) -> _Object:
    """Sets attributes of a frozen object that was just made."""
    for name, value in values:
        object.__setattr__(function, name, value)
    return function


class MatrixFunction(abc.ABC):
    """A shape-preserving function of matrices ``(batch, out, in)``.

    A subclass is decorated with :func:`matrix_function` and defines ``__call__``. The defaults of
    other members are right for every function; overriding them saves copies and balances devices::

      @matrix_function
      class Sign(MatrixFunction):
          def __call__(self, x):
              return jnp.sign(x)
    """

    @abc.abstractmethod
    def __call__(self, x: MatrixArray) -> MatrixArray:
        """Applies the function to every matrix of ``x``; returns an array of the same shape."""

    @property
    def transpose_equivariant(self) -> bool:
        """Whether ``f(x^T) = f(x)^T``, as for the polar factor."""
        return False

    def transposed(self) -> "MatrixFunction":
        """Returns the function ``x -> f(x^T)^T``, for matrices stored as ``(batch, in, out)``."""
        return self if self.transpose_equivariant else ViaTranspose(self)

    @property
    def input_dtype(self) -> DTypeLike | None:
        """The dtype that inputs are rounded to first, or None: rounding early copies less."""
        return None

    @property
    def output_dtype(self) -> DTypeLike | None:
        """The dtype that results are rounded to before they get that of the matrices, or None."""
        return None

    def flops(self, shape: tuple[int, int]) -> int:
        """Counts the FLOPs of products for a matrix ``(out, in)``, to balance work over devices."""
        del shape
        return 0

    def replace(self, **attributes: Any) -> Self:
        """Returns a copy with other attributes, which are not checked again."""
        return _with(copy.copy(self), attributes.items())


class Elementwise(MatrixFunction):
    """A function of each entry. A subclass defines ``__call__``."""

    @property
    def transpose_equivariant(self) -> bool:
        return True


@matrix_function
class ArrayFunction(MatrixFunction):
    """A user's function of one matrix ``(out, in)``, mapped over all."""

    function: Callable[[jax.Array], jax.Array] = static()

    def __call__(self, x: MatrixArray) -> MatrixArray:
        return map_matrices(self.function, x)


@matrix_function
class ViaTranspose(MatrixFunction):
    """``x -> f(x^T)^T``, with a copy for each transposition."""

    function: MatrixFunction

    def __call__(self, x: MatrixArray) -> MatrixArray:
        return jnp.swapaxes(self.function(jnp.swapaxes(x, -1, -2)), -1, -2)

    def transposed(self) -> MatrixFunction:
        return self.function
