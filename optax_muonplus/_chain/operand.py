"""An array that is computed when it is read, and takes no memory until then."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_muonplus._core.precision import narrower_dtype, saturating_cast


class Operand(NamedTuple):
    """An elementwise function of arrays, computed when it is loaded."""

    arrays: tuple[jax.Array, ...]  # the first has the result's shape; others may be by block
    dtype: Any  # of the result
    compute: Callable[..., jax.Array] | None = None  # None if the result is the only array
    stored: jax.Array | None = None  # the first array as it is in memory, in a narrower dtype

    @classmethod
    def of(cls, x: Any) -> "Operand":
        x = jnp.asarray(x)
        return cls((x,), x.dtype)

    def load(self) -> jax.Array:
        x = self.arrays[0] if self.compute is None else self.compute(*self.arrays)
        return saturating_cast(x, self.dtype)

    def read_for(self, dtype: Any) -> "Operand":
        """Returns an operand that reads ``stored`` if the result is rounded to its dtype anyway."""
        stored = self.stored
        if stored is None or narrower_dtype(self.dtype, dtype) != stored.dtype:
            return self._replace(stored=None)
        return self._replace(arrays=(stored, *self.arrays[1:]), stored=None)

    def round_to(self, dtype: Any) -> "Operand":
        """Returns the operand in ``dtype``, if narrower and with as many exponent bits."""
        return self._replace(dtype=narrower_dtype(self.dtype, dtype))

    def map(self, change: Callable[[jax.Array], jax.Array]) -> "Operand":
        return self._replace(arrays=tuple(change(x) for x in self.arrays))
