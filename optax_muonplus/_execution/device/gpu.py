"""A GPU, and backends without a file here: matrices are worked on in stacks.

Small matrices leave most of the device idle, and a loop that picks a matrix at run time waits for
the host at every turn. Programs grow with the number of shapes, not of layers. The size of a stack
bounds the additional memory for any model. Tall matrices have separate stacks. Transposed
to join the wide ones, they were written three more times: XLA then stores momentum transposed.

Seen in programs compiled for an H100, and run on one H200 (``lab/benchmarks/README.md``).
"""

import itertools
import math
from collections.abc import Sequence

import jax
import jax.core
import jax.numpy as jnp

from optax_muonplus._core.precision import saturating_cast
from optax_muonplus._execution.batches import MatrixBatch, cut_into_chunks, group_by
from optax_muonplus._execution.loops import map_slices
from optax_muonplus._execution.lower import Program

# At most 32 float32 matrices of 1024 x 1024, or 8 of 2048 x 2048. The iteration on square
# matrices needs four times as much in addition: R, R^2, P and the next X.
STACK_BYTES = 2**27


def apply_in_stacks(program: Program, batches: Sequence[MatrixBatch]) -> list[jax.Array]:
    """Applies ``program`` to all matrices, many at a time."""
    results: dict[int, jax.Array] = {}
    short: dict[int, MatrixBatch] = {}
    for i, batch in enumerate(batches):
        narrow, size = _round_once(program, batch), _slice_size(batch)
        if size == batch.shape[0]:
            short[i] = narrow
        else:
            results[i] = _in_slices(program, narrow, size)
    results |= zip(short, _in_stacks(program, list(short.values())), strict=True)
    return [results[i] for i in range(len(batches))]


def _round_once(program: Program, batch: MatrixBatch) -> MatrixBatch:
    """Rounds matrices when they are read, from arrays that are in memory anyway."""
    narrow = batch.round_early(program)
    if narrow.operand.compute is not None:
        # Without the barrier XLA would compute the momentum again for every slice, in float32.
        kept = narrow.with_arrays(jax.lax.optimization_barrier(batch.operand.arrays))
        if not program.takes_largest:
            return kept
        # The pass that writes the momentum finds the largest of each row; later it would be another
        # pass. The largest of all rows is found once for a stack, not in a kernel for each leaf.
        size = jnp.abs(batch.operand.load())
        return kept._replace(largest=jnp.max(size, -1, keepdims=True, initial=0))
    if narrow.operand.dtype.itemsize != jnp.dtype(batch.result_dtype).itemsize:
        return narrow  # XLA decides
    # The momentum that this array was computed from is as narrow: a rounded copy is in memory.
    return narrow.with_arrays((jax.lax.optimization_barrier(narrow.operand.load()),))


def _slice_size(batch: MatrixBatch) -> int:
    """Chooses how many matrices of a leaf are worked on at once: equal slices, if possible."""
    length, *shape = batch.shape
    most = max(1, STACK_BYTES // (math.prod(shape) * jnp.dtype(batch.dtype).itemsize))
    if length <= most:
        return length
    divisor = max(size for size in range(1, most + 1) if length % size == 0)
    return divisor if 2 * divisor > most else most


def _in_slices(program: Program, batch: MatrixBatch, size: int) -> jax.Array:
    """Applies ``program`` to a leaf of many layers or experts, slice by slice."""
    known = () if batch.largest is None else (batch.largest,)
    arrays = (*batch.operand.arrays, *known)

    def on_slice(*arrays: jax.Array) -> jax.Array:
        one = batch.with_arrays(arrays[: len(arrays) - len(known)])
        return _in_stacks(program, [one._replace(largest=arrays[-1] if known else None)])[0]

    length = batch.shape[0]
    whole = length // size * size
    y = map_slices(on_slice, tuple(x[:whole] for x in arrays), size)
    if whole == length:
        return y
    return jnp.concatenate([y, on_slice(*(x[whole:] for x in arrays))])


def _in_stacks(program: Program, batches: Sequence[MatrixBatch]) -> list[jax.Array]:
    """Applies ``program`` to stacks of matrices that are stored in the same shape."""
    results: dict[int, jax.Array] = {}
    for group in group_by(batches, lambda x: x._replace(transposed=False).program_key):
        # Sorted: each stack has the two layouts in two runs.
        members = sorted(group, key=lambda i: batches[i].transposed)
        sizes = [math.prod(batches[i].shape) * batches[i].dtype.itemsize for i in members]
        for chunk in cut_into_chunks(members, sizes, STACK_BYTES):
            parts = [batches[i] for i in chunk]
            split = sum(x.shape[0] for x in parts if not x.transposed)
            array = jnp.concatenate([x.operand.load() for x in parts])
            largest = [x.largest for x in parts if x.largest is not None]
            known = program
            if len(largest) == len(parts):
                known = program.with_largest(jnp.max(jnp.concatenate(largest), -2, keepdims=True))
            stack = _at_once(known, array, parts[0], split)
            stops = itertools.accumulate(x.shape[0] for x in parts)
            results |= zip(chunk, jnp.split(stack, list(stops)[:-1]), strict=True)
    return [results[i] for i in range(len(batches))]


def _at_once(program: Program, x: jax.Array, stack: MatrixBatch, split: int) -> jax.Array:
    """Applies ``program`` to a stack whose matrices are stored as (in, out) from ``split`` on."""
    for function, transposed in zip(program.functions, program.transposed, strict=True):
        if split == 0:
            x = transposed(x)
        elif split == len(x) or function.transpose_equivariant:
            x = function(x)
        else:
            x = jnp.concatenate([function(x[:split]), transposed(x[split:])])
        x = x.astype(stack.dtype)  # only the first function may get a narrower dtype
    return saturating_cast(x, stack.result_dtype)
