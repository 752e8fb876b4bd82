"""A TPU: matrices of one shape are stacked and worked on one after the other, in a loop.

One matrix and what the iteration needs for it stay in the fast memory of a core (VMEM, 128 MiB of a
v5e), where a stack does not. A product reads its matrix from the stack, and writes it into the
results, without a copy. A loop over the parameters themselves, as on a CPU, is slower: at every
turn it would copy several of them to the fast memory, of which it uses one. Symmetric products in
halves, without the quarter that mirrors another, have a quarter less of them and take longer: to
join the parts, results are read again.

This was seen in programs that XLA compiled for a v5e.
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

# Results of a stack on a TPU are another stack. The iteration needs next to nothing more.
TPU_STACK_BYTES = 2**28


def map_stacks(program: Program, batches: Sequence[MatrixBatch]) -> list[jax.Array]:
    """Applies ``program`` to all matrices, one at a time."""
    # Libtpu stores a matrix transposed where only its columns then fill their blocks. To swap the
    # axes moves nothing there; without it libtpu transposes the stack as a whole. Scanned layers
    # are not swapped: that costs 2 % (59.5 against 58.4 million cycles).
    block = products.TPU_BLOCK
    turned = [
        x.shape[0] == 1 and x.shape[-1] % block != 0 and x.shape[-2] % block == 0 for x in batches
    ]
    stored = [_swap_sides(x) if t else x for x, t in zip(batches, turned, strict=True)]
    results: dict[int, jax.Array] = {}
    for group in group_by(stored, lambda x: (x.program_key, x.shape[0] == 1)):
        if stored[group[0]].shape[0] > 1:
            for i in group:
                results[i] = map_slices(_of_arrays(program, stored[i]), stored[i].operand.arrays, 1)
            continue
        narrow = {i: stored[i].round_early(program) for i in group}
        sizes = [math.prod(x.shape) * x.operand.dtype.itemsize for x in narrow.values()]
        for chunk in cut_into_chunks(group, sizes, TPU_STACK_BYTES):
            stack = concatenate([narrow[i].operand.load() for i in chunk])
            stack = map_slices(narrow[chunk[0]].apply(program), (stack,), 1, in_place=True)
            results |= zip(chunk, jnp.split(stack, len(chunk)), strict=True)
    return [jnp.swapaxes(results[i], -1, -2) if t else results[i] for i, t in enumerate(turned)]


def _swap_sides(batch: MatrixBatch) -> MatrixBatch:
    operand = batch.operand.map(lambda x: jnp.swapaxes(x, -1, -2))
    return batch._replace(operand=operand, transposed=not batch.transposed)


def _of_arrays(program: Program, batch: MatrixBatch) -> Callable[..., jax.Array]:
    function = batch.apply(program)
    return lambda *arrays: function(batch.of(arrays).operand.load())
