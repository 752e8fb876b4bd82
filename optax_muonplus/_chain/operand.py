"""An array that is computed where it is read, in place of a copy of it in memory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_muonplus._core.precision import narrower_dtype, saturating_cast


class Operand(NamedTuple):
    """An array that is computed from others when it is loaded, by an elementwise function.

    The first array has its shape; others may have one number for each block of it.
    """

    arrays: tuple[jax.Array, ...]
    dtype: Any  # what it is rounded to when it is loaded
    compute: Callable[..., jax.Array] | None = None  # None stands for the only array itself

    @classmethod
    def of(cls, x: Any) -> "Operand":
        x = jnp.asarray(x)
        return cls((x,), x.dtype)

    def load(self) -> jax.Array:
        x = self.arrays[0] if self.compute is None else self.compute(*self.arrays)
        return saturating_cast(x, self.dtype)

    def round_to(self, dtype: Any) -> "Operand":
        """Returns the operand in a dtype, if that is narrower and has as many exponent bits."""
        return self._replace(dtype=narrower_dtype(self.dtype, dtype))

    def map(self, change: Callable[[jax.Array], jax.Array]) -> "Operand":
        return self._replace(arrays=tuple(change(x) for x in self.arrays))
