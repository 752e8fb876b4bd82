"""Frozen dataclasses that are pytrees, of which functions on matrices are made."""

import dataclasses
import typing
from typing import Any, TypeVar

import jax

_Class = TypeVar("_Class", bound=type)


def static(**kwargs: Any) -> Any:
    """Makes a field of :func:`matrix_function` that is a choice: not a leaf of the pytree."""
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
        values = vars(function)
        return tuple(values[name] for name in leaves), tuple(values[name] for name in choices)

    def unflatten(chosen: tuple[Any, ...], hyperparams: tuple[Any, ...]) -> Any:
        function = object.__new__(cls)
        values = zip((*leaves, *choices), (*hyperparams, *chosen), strict=True)
        vars(function).update(values)
        return function

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    return cls
