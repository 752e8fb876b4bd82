"""Matrices as they lie in memory, with what is to be done with them, and groups of such."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from optax_muonplus.matrices._matrix_function import Composition, for_layout
from optax_muonplus.matrices._precision import narrowed, narrower

Item = TypeVar("Item")


class MatrixBatch(NamedTuple):
    """Matrices of one shape in one array.

    Attributes:
      array: ``(batch, out, in)``, or ``(batch, in, out)``. It may have been rounded to the input
        dtype of the first function.
      transposed: whether it is the latter; for :func:`apply_to_one` it may be traced.
      dtype: in which functions get the matrices.
      result_dtype: of the results.
    """

    array: jax.Array
    transposed: bool | jax.Array
    dtype: Any
    result_dtype: Any

    @property
    def kind(self) -> tuple[Any, ...]:
        """What has to be equal for a common program: shape, dtypes and layout."""
        dtypes = self.array.dtype, self.dtype, self.result_dtype
        return self.array.shape[-2:], dtypes, self.transposed

    def apply(self, steps: Composition, padded: bool = False) -> Callable[[jax.Array], jax.Array]:
        """``steps`` of arrays like this one, or with zeros behind the matrices if ``padded``."""
        rows, columns = self.array.shape[-2:]
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

    def rounded(self, steps: Composition) -> "MatrixBatch":
        """Rounded before anything else where ``steps`` round it anyway."""
        dtype = narrower(self.array.dtype, steps.input_dtype)
        return self._replace(array=narrowed(self.array, dtype))


def grouped(items: Sequence[Item], kind: Callable[[Item], Hashable]) -> Iterator[list[int]]:
    """Indices of ``items`` of one kind, in the order of their first members."""
    groups: dict[Hashable, list[int]] = {}
    for i, item in enumerate(items):
        groups.setdefault(kind(item), []).append(i)
    yield from groups.values()


def chunked(indices: Sequence[int], sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Runs of ``indices`` whose ``sizes`` add up to ``most`` at most, or of a single one."""
    chunk: list[int] = []
    total = 0
    for i, size in zip(indices, sizes, strict=True):
        if chunk and total + size > most:
            yield chunk
            chunk, total = [], 0
        chunk.append(i)
        total += size
    yield chunk
