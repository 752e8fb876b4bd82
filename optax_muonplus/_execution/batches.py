"""Batches of matrices as they are stored: what a device works on at once."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from optax_muonplus._chain.operand import Operand
from optax_muonplus._core.precision import saturating_cast
from optax_muonplus._execution.lower import Program

Item = TypeVar("Item")


class MatrixBatch(NamedTuple):
    """Matrices of one shape that are loaded where they are worked on."""

    operand: Operand  # arrays (batch, out, in), or (batch, in, out)
    transposed: bool  # whether they are stored as (batch, in, out)
    dtype: Any  # of the matrices that functions get
    result_dtype: Any
    # Largest absolute value of each row, (batch, rows, 1), if known before loading.
    largest: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.operand.arrays[0].shape

    @property
    def program_key(self) -> tuple[Any, ...]:
        """Shape, dtypes and layout: batches with equal keys share a program."""
        arrays = tuple((x.dtype, x.shape[-2:]) for x in self.operand.arrays)
        return arrays, self.operand.dtype, self.dtype, self.result_dtype, self.transposed

    def with_arrays(self, arrays: tuple[jax.Array, ...]) -> "MatrixBatch":
        return self._replace(operand=self.operand._replace(arrays=arrays))

    def of_arrays(self, program: Program) -> Callable[[jax.Array], jax.Array]:
        """Returns ``program`` as a function of arrays like those of this batch."""
        return lambda x: saturating_cast(
            program(x.astype(self.dtype), self.transposed), self.result_dtype
        )

    def round_early(self, program: Program) -> "MatrixBatch":
        """Rounds to the dtype that ``program`` rounds to first, which copies fewer bytes."""
        return self._replace(operand=self.operand.round_to(program.input_dtype))


def group_by(items: Sequence[Item], key: Callable[[Item], Hashable]) -> list[list[int]]:
    """Returns indices of ``items`` with equal keys, in the order of their first members."""
    groups: dict[Hashable, list[int]] = {}
    for i, item in enumerate(items):
        groups.setdefault(key(item), []).append(i)
    return list(groups.values())


def cut_into_chunks(indices: Sequence[int], sizes: Sequence[int], most: int) -> list[list[int]]:
    """Cuts ``indices`` into runs whose ``sizes`` sum to at most ``most``, or of one index."""
    chunks: list[list[int]] = []
    total = 0
    for i, size in zip(indices, sizes, strict=True):
        total += size
        if not chunks or total > most:
            chunks.append([])
            total = size
        chunks[-1].append(i)
    return chunks
