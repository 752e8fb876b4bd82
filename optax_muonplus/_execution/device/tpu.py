"""A TPU: matrices of one shape are stacked and worked on one after the other, in a loop.

One matrix and the iteration's temporaries fit into the fast memory of a core (VMEM, 128 MiB on a
v5e); a stack does not. Products read from the stack and write into the results without a copy. A
loop over the parameters themselves, as on a CPU, is slower: every turn copies several to VMEM and
uses one. Splitting symmetric products in halves saves a quarter of the work but takes longer, since
joining the parts reads results again. Seen in programs that XLA compiled for a v5e.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.core
import jax.numpy as jnp

from optax_muonplus._execution.batches import MatrixBatch, cut_into_chunks, group_by
from optax_muonplus._execution.loops import concatenate, map_slices
from optax_muonplus._execution.lower import Program
from optax_muonplus._execution.polar import products

# For a stack, and its results if their dtype differs. The iteration needs hardly any more.
TPU_STACK_BYTES = 200 * 2**20


def apply_one_by_one(program: Program, batches: Sequence[MatrixBatch]) -> list[jax.Array]:
    """Applies ``program`` to one matrix after the other."""
    # Libtpu stores a matrix transposed if only that fills its blocks. Swapping the axes then moves
    # no data; without the swap libtpu transposes the whole stack. For scanned layers a swap would
    # cost 2% (59.5 against 58.4 million cycles).
    block = products.TPU_BLOCK
    swapped = [
        x.shape[0] == 1 and x.shape[-1] % block != 0 and x.shape[-2] % block == 0 for x in batches
    ]
    stored = [_swap_sides(x) if t else x for x, t in zip(batches, swapped, strict=True)]
    results: dict[int, jax.Array] = {}
    last: list[jax.Array] = []
    for group in group_by(stored, lambda x: (x.program_key, x.shape[0] == 1)):
        if stored[group[0]].shape[0] > 1:
            for i in group:
                results[i] = map_slices(_of_arrays(program, stored[i]), stored[i].operand.arrays, 1)
            continue
        narrow = {i: stored[i].round_early(program) for i in group}
        sizes = [math.prod(x.shape) * _itemsize(x) for x in narrow.values()]
        for chunk in cut_into_chunks(group, sizes, TPU_STACK_BYTES):
            stack = concatenate([narrow[i].operand.load() for i in chunk], after=last)
            stack = map_slices(narrow[chunk[0]].of_arrays(program), (stack,), 1, in_place=True)
            last = jnp.split(stack, len(chunk))
            results |= zip(chunk, last, strict=True)
    return [jnp.swapaxes(results[i], -1, -2) if t else results[i] for i, t in enumerate(swapped)]


def _itemsize(batch: MatrixBatch) -> int:
    """Counts bytes per element of a stack and its results; results of its dtype overwrite it."""
    operand, result = batch.operand.dtype, jnp.dtype(batch.result_dtype)
    return operand.itemsize + (0 if operand == result else result.itemsize)


def _swap_sides(batch: MatrixBatch) -> MatrixBatch:
    operand = batch.operand.map(lambda x: jnp.swapaxes(x, -1, -2))
    return batch._replace(operand=operand, transposed=not batch.transposed)


def _of_arrays(program: Program, batch: MatrixBatch) -> Callable[..., jax.Array]:
    function = batch.of_arrays(program)
    return lambda *arrays: function(batch.with_arrays(arrays).operand.load())
