"""Matrices as they lie in memory, with what is to be done with them, and groups of such."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from optax_muonplus.matrices import Composition, for_layout, matrix_function, narrowed, narrower

Item = TypeVar("Item")

# An elementwise function from the arrays that matrices are made of to the matrices.
Read = Callable[..., jax.Array]


@matrix_function
class ReadOne:
    """The read of matrices that lie in memory as they are."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """The matrices themselves."""
        return x


READ_ONE = ReadOne()


def dtypes_of(read: Read, sources: Sequence[tuple[jax.Array, ...]]) -> list[Any]:
    """Returns the dtype of what ``read`` makes of each tuple, traced once for equal dtypes."""
    given = [tuple(x.dtype for x in arrays) for arrays in sources]
    found = {
        dtypes: jax.eval_shape(read, *(jax.ShapeDtypeStruct((), x) for x in dtypes)).dtype
        for dtypes in dict.fromkeys(given)
    }
    return [found[dtypes] for dtypes in given]


class MatrixBatch(NamedTuple):
    """Matrices of one shape.

    Attributes:
      sources: the arrays that the matrices are made of, all ``(batch, out, in)``, or all
        ``(batch, in, out)``.
      transposed: whether they are the latter; for :func:`apply_to_one` it may be traced.
      dtype: in which functions get the matrices.
      result_dtype: of the results.
      read: from ``sources`` to the matrices. They are made where they are read, so that they need
        no memory of their own.
      rounded_dtype: that the matrices are rounded to when they are read; None is ``dtype``.
    """

    sources: tuple[jax.Array, ...]
    transposed: bool | jax.Array
    dtype: Any
    result_dtype: Any
    read: Read = READ_ONE
    rounded_dtype: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrices."""
        return self.sources[0].shape

    @property
    def array(self) -> jax.Array:
        """The matrices, in the dtype that they are rounded to."""
        return self.matrices(*self.sources)

    def matrices(self, *sources: jax.Array) -> jax.Array:
        """The matrices that are made of arrays like :attr:`sources`."""
        x = self.read(*sources)
        return x if self.rounded_dtype is None else narrowed(x, self.rounded_dtype)

    @property
    def array_dtype(self) -> jnp.dtype:
        """The dtype of :attr:`array`."""
        return jnp.dtype(self.dtype if self.rounded_dtype is None else self.rounded_dtype)

    @property
    def program_key(self) -> tuple[Any, ...]:
        """What has to be equal for a common program: shape, dtypes and layout."""
        sources = tuple(x.dtype for x in self.sources)
        dtypes = sources, self.array_dtype, self.dtype, self.result_dtype
        return self.shape[-2:], dtypes, self.transposed

    def apply(self, steps: Composition, padded: bool = False) -> Callable[[jax.Array], jax.Array]:
        """``steps`` of arrays like this one, or with zeros behind the matrices if ``padded``."""
        rows, columns = self.shape[-2:]
        shape = (rows, columns) if padded else None
        alike, others = steps.split()
        layout = self.transposed if others.functions else False

        def finished(transposed: bool) -> Callable[[jax.Array], jax.Array]:
            function = for_layout(others, transposed, shape)
            return lambda x: narrowed(function(x.astype(self.dtype)), self.result_dtype)

        def applied(x: jax.Array) -> jax.Array:
            y = for_layout(alike, False, shape)(x.astype(self.dtype))
            if not isinstance(layout, jax.Array):
                return finished(layout)(y)
            # What enters and leaves the branches is written to memory.
            y = y.astype(narrower(y.dtype, alike.output_dtype))
            return jax.lax.cond(layout, finished(True), finished(False), y)

        return applied

    def rounded_early(self, steps: Composition) -> "MatrixBatch":
        """Rounds before anything else where ``steps`` round it anyway."""
        return self._replace(rounded_dtype=narrower(self.array_dtype, steps.input_dtype))

    def with_sources(self, change: Callable[[jax.Array], jax.Array]) -> "MatrixBatch":
        """The batch of the matrices whose sources are changed so."""
        return self._replace(sources=tuple(change(x) for x in self.sources))


def grouped(items: Sequence[Item], key: Callable[[Item], Hashable]) -> Iterator[list[int]]:
    """Yields indices of ``items`` with equal keys, in the order of their first members."""
    groups: dict[Hashable, list[int]] = {}
    for i, item in enumerate(items):
        groups.setdefault(key(item), []).append(i)
    yield from groups.values()


def chunked(indices: Sequence[int], sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yields runs of ``indices`` with ``sizes`` that sum to ``most`` at most, or of one."""
    chunk: list[int] = []
    total = 0
    for i, size in zip(indices, sizes, strict=True):
        if chunk and total + size > most:
            yield chunk
            chunk, total = [], 0
        chunk.append(i)
        total += size
    yield chunk
