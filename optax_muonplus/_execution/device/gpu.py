"""A GPU, and backends without a file here: matrices are worked on in stacks.

Small matrices leave most of the device idle, and a loop that picks a matrix at run time waits for
the host at every turn. Programs grow with the number of shapes, not of layers. Similar shapes share
a stack if its launches would take longer than work on zeros. The size of a stack bounds the
additional memory for any model. Tall matrices have separate stacks. Transposed to join the wide
ones, they were written three more times: XLA then stores momentum transposed.

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
from optax_muonplus._execution.polar.fast import FastPolar
from optax_muonplus._execution.polar.products import part, with_zeros
from optax_muonplus._leaves.layout import Shape

# At most 32 float32 matrices of 1024 x 1024, or 8 of 2048 x 2048. The iteration on square
# matrices needs four times as much in addition: R, R^2, P and the next X.
STACK_BYTES = 2**27

# FLOPs that take as long as the launches of a stack, at 500 TFLOP/s: about 40 kernels, after each
# of which an H100 waited 1.7 µs in an update of GPT-Small. The passes over an element, about 40
# bytes at 3 TB/s, take as long as FLOPS_PER_ELEMENT.
STACK_FLOPS = 3e10
FLOPS_PER_ELEMENT = 7000


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
    """Applies ``program`` to stacks of matrices that are stored in the same or a similar shape."""
    results: dict[int, jax.Array] = {}
    shapes = _stack_shapes(program, [batch.shape for batch in batches])
    dtypes = [(x.operand.dtype, x.dtype, x.result_dtype) for x in batches]
    for group in group_by(range(len(batches)), lambda i: (shapes[i], dtypes[i])):
        # Sorted: each stack has its shapes and the two layouts in runs.
        members = sorted(group, key=lambda i: (batches[i].shape[1:], batches[i].transposed))
        shape = shapes[members[0]]
        nbytes = math.prod(shape) * batches[members[0]].dtype.itemsize
        sizes = [batches[i].shape[0] * nbytes for i in members]
        for chunk in cut_into_chunks(members, sizes, STACK_BYTES):
            outputs = _in_one_stack(program, [batches[i] for i in chunk], shape)
            results |= zip(chunk, outputs, strict=True)
    return [results[i] for i in range(len(batches))]


def _stack_shapes(program: Program, shapes: Sequence[Shape]) -> list[Shape]:
    """Chooses the shape of a stack for each batch: zeros may lengthen the longer side."""
    polar = program.functions[0]
    if not (isinstance(polar, FastPolar) and polar.transpose_equivariant):
        return [shape[1:] for shape in shapes]

    def cost(shape: Shape) -> int:
        return polar.flops(shape) + FLOPS_PER_ELEMENT * math.prod(shape)

    chosen: dict[Shape, Shape] = {}
    for shape in sorted({shape[1:] for shape in shapes}, key=max, reverse=True):
        fits = (x for x in chosen.values() if x[0] >= shape[0] and x[1] >= shape[1])
        longer = min((x for x in fits if min(x) == min(shape)), default=shape)
        count = sum(x[0] for x in shapes if x[1:] == shape)
        saves = count * (cost(longer) - cost(shape)) < STACK_FLOPS
        chosen[shape] = longer if saves else shape
    return [chosen[shape[1:]] for shape in shapes]


def _in_one_stack(
    program: Program, batches: Sequence[MatrixBatch], shape: Shape
) -> list[jax.Array]:
    """Applies ``program`` to batches whose matrices fit into ``shape``, in one stack."""
    x = jnp.concatenate([with_zeros(batch.operand.load(), shape) for batch in batches])
    largest = [x.largest for x in batches if x.largest is not None]
    if len(largest) == len(batches):
        rows = jnp.concatenate([with_zeros(y, (shape[0], 1)) for y in largest])
        program = program.with_largest(jnp.max(rows, -2, keepdims=True))
    if all(batch.shape[1:] == shape for batch in batches):
        return _results(_at_once(program, x, batches), batches)
    first, rest = program.cut(1)
    runs = [list(run) for _, run in itertools.groupby(batches, lambda x: x.shape[1:])]
    stops = list(itertools.accumulate(sum(x.shape[0] for x in run) for run in runs))
    results: list[jax.Array] = []
    for run, y in zip(runs, jnp.split(_at_once(first, x, batches), stops[:-1]), strict=True):
        results += _results(_at_once(rest, part(y, run[0].shape[1:]), run), run)
    return results


def _at_once(program: Program, x: jax.Array, batches: Sequence[MatrixBatch]) -> jax.Array:
    """Applies ``program`` to the stack of ``batches``, transposed ones last."""
    split = sum(batch.shape[0] for batch in batches if not batch.transposed)
    for function, transposed in zip(program.functions, program.transposed, strict=True):
        if split == 0:
            x = transposed(x)
        elif split == len(x) or function.transpose_equivariant:
            x = function(x)
        else:
            x = jnp.concatenate([function(x[:split]), transposed(x[split:])])
        x = x.astype(batches[0].dtype)  # only the first function may get a narrower dtype
    return x


def _results(stack: jax.Array, batches: Sequence[MatrixBatch]) -> list[jax.Array]:
    """Returns the results of each batch of a stack, in their dtype."""
    stops = list(itertools.accumulate(batch.shape[0] for batch in batches))
    return jnp.split(saturating_cast(stack, batches[0].result_dtype), stops[:-1])
