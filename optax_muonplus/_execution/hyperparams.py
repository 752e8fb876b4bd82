"""Hyperparameters of functions on matrices, as arguments of ``jax.jit`` and ``jax.shard_map``."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np


class StaticPart(NamedTuple):
    """A pytree without its arrays: hashable, and the same for functions of the same choices."""

    treedef: Any
    numbers: tuple[Any, ...]

    def merge(self, arrays: Sequence[jax.Array]) -> Any:
        """The pytree with ``arrays`` in their places."""
        rest = iter(arrays)
        return self.treedef.unflatten(next(rest) if x is _Array else x for x in self.numbers)


class _Array:
    """Stands where an array was taken out."""


def split_arrays(tree: Any) -> tuple[list[jax.Array], StaticPart]:
    """The arrays among the leaves of ``tree``, and everything else.

    Arrays, which ``optax.inject_hyperparams`` makes of hyperparameters, have to be passed to
    ``jax.jit`` and ``jax.shard_map`` as arguments. Python numbers stay constants of the program.
    """
    leaves, treedef = jax.tree.flatten(tree)
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
    arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]
    numbers = tuple(_Array if array else leaf for leaf, array in zip(leaves, is_array, strict=True))
    return arrays, StaticPart(treedef, numbers)
