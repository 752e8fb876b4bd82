"""Matrices of one shape worked on together: programs grow with the number of shapes, not of layers.

How, depends on the backend.

On a CPU one matrix fills all cores, and a stack only adds copies and cache misses (eight matrices
of 384 x 1536 in float32 on 2 cores: 11.3 ms each one by one, 13.8 ms in a stack; 384 x 384: 6.4 and
6.6 ms). There each shape is one loop over its matrices, which reads and writes them where they lie.

On a GPU small matrices leave most of the device idle, and a loop that chooses a matrix at run time
waits for the host at every turn. There, and on backends that are not named, matrices are worked on
in stacks. On a TPU they are stacked too, but worked on one by one. See ``stacks.py``.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.core

from optax_muonplus._execution.batches import MatrixBatch, grouped
from optax_muonplus._execution.stacks import map_stacks, on_full_blocks, work_on_stacks
from optax_muonplus._xla.loops import map_in_place
from optax_muonplus.matrices._matrix_function import Composition, MatrixFunction, compose


def apply_batched(
    functions: Sequence[MatrixFunction], batches: Sequence[MatrixBatch]
) -> list[jax.Array]:
    """Applies ``functions``, one after the other, to every matrix.

    Args:
      functions: functions of matrices.
      batches: matrices of any shapes.

    Returns:
      One array for each of ``batches``, in order, stored in the same way, in its result dtype.
    """
    if not batches:
        return []
    steps = compose(functions)
    if not any(isinstance(batch.array, jax.core.Tracer) for batch in batches):
        # Outside of jit each operation is a program of its own, and a loop would be compiled anew
        # at every call.
        return [batch.apply(steps)(batch.array) for batch in batches]

    def on(work: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
        def with_arrays(*arrays: jax.Array) -> list[jax.Array]:
            pairs = zip(batches, arrays, strict=True)
            return work(steps, [batch._replace(array=array) for batch, array in pairs])

        return with_arrays

    return jax.lax.platform_dependent(
        *[batch.array for batch in batches],
        cpu=on(_looped),
        tpu=on(map_stacks),
        default=on(work_on_stacks),
    )


def apply_to_one(steps: Composition, batch: MatrixBatch) -> jax.Array:
    """``steps`` of a single matrix, whose layout may be known at run time only."""
    on_tpu = on_full_blocks(steps, batch)
    return jax.lax.platform_dependent(batch.array, tpu=on_tpu, default=batch.apply(steps))


def _looped(steps: Composition, batches: Sequence[MatrixBatch]) -> list[jax.Array]:
    results: dict[int, jax.Array] = {}
    for members in grouped(batches, lambda x: (x.kind, len(x.array))):
        members.reverse()  # see map_in_place
        function = batches[members[0]].apply(steps)
        group = _one_by_one(function, [batches[i].array for i in members])
        results |= zip(members, group, strict=True)
    return [results[i] for i in range(len(batches))]


def _one_by_one(
    function: Callable[[jax.Array], jax.Array], arrays: list[jax.Array]
) -> list[jax.Array]:
    """``function`` of each array ``(batch, rows, columns)``, matrix by matrix."""
    if arrays[0].shape[0] > 1:
        each = functools.partial(jax.lax.map, lambda matrix: function(matrix[None])[0])
        return map_in_place(each, arrays)
    # Without the axis of size 1 arrays have the shape of the parameter, and can share its memory.
    results = map_in_place(lambda x: function(x[None])[0], [x[0] for x in arrays])
    return [y[None] for y in results]
