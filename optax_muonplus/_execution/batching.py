"""Matrices of one shape worked on together: programs grow with the number of shapes, not of layers.

How, depends on the backend.

On a CPU one matrix fills all cores, and a stack only adds copies and cache misses (eight matrices
of 384 x 1536 in float32 on 2 cores: 11.3 ms each one by one, 13.8 ms in a stack; 384 x 384: 6.4 and
6.6 ms). There each shape is one loop over its matrices, which reads and writes them where they lie.

On a GPU small matrices leave most of the device idle, and a loop that chooses a matrix at run time
waits for the host at every turn. There, and on backends that are not named, matrices are worked on
in stacks. On a TPU they are stacked too, but worked on one by one. See ``stacks.py``.
"""

from collections.abc import Callable, Sequence

import jax
import jax.core
import jax.numpy as jnp

from optax_muonplus._execution.batches import READ_ONE, MatrixBatch, grouped
from optax_muonplus._execution.loops import map_in_place
from optax_muonplus._execution.stacks import map_stacks, on_full_blocks, work_on_stacks
from optax_muonplus.matrices import Composition, Machine, MatrixFunction, compose, on_its_machine


def apply_batched(
    functions: Sequence[MatrixFunction],
    batches: Sequence[MatrixBatch],
    machine: Machine | None = None,
) -> list[jax.Array]:
    """Applies ``functions``, one after the other, to every matrix.

    Args:
      functions: functions of matrices.
      batches: matrices of any shapes.
      machine: where it runs; None is the machine that the program is lowered for.

    Returns:
      One array for each of ``batches``, in order, stored in the same way, in its result dtype.
    """
    if not batches:
        return []
    steps = compose(functions)
    if not any(isinstance(x, jax.core.Tracer) for batch in batches for x in batch.sources):
        # Outside of jit each operation is a program of its own, and a loop would be compiled anew
        # at every call.
        return [batch.apply(steps)(batch.array) for batch in batches]

    def work(machine: Machine) -> Callable[..., list[jax.Array]]:
        def of_sources(*sources: tuple[jax.Array, ...]) -> list[jax.Array]:
            given = [x._replace(sources=y) for x, y in zip(batches, sources, strict=True)]
            return _WORK[machine](steps.on(machine), given)

        return of_sources

    sources = [batch.sources for batch in batches]
    return on_its_machine(work, *sources) if machine is None else work(machine)(*sources)


def apply_to_one(steps: Composition, batch: MatrixBatch, machine: Machine) -> jax.Array:
    """Applies ``steps`` to a single matrix; its layout may be known at run time only."""
    steps = steps.on(machine)
    apply = on_full_blocks(steps, batch) if machine == "tpu" else batch.apply(steps)
    return apply(batch.array)


def _sharded_like_sources(work: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
    """Returns ``work``, on a mesh with Auto axes with results sharded as their matrices are.

    Under ``jax.jit`` nobody knows how the matrices are sharded, so that
    ``jax.lax.with_sharding_constraint`` has nothing to be given. Instead each result is selected
    against its matrix by a condition that is never true but that the compiler cannot see through:
    both then get one sharding. It costs another read of each matrix, which is saved where there is
    one device.
    """

    def constrained(steps: Composition, batches: Sequence[MatrixBatch]) -> list[jax.Array]:
        references = [batch.sources[0] for batch in batches]
        results = work(steps, batches)
        traced = any(isinstance(x, jax.core.Tracer) for x in references)
        if not traced or jax.device_count() == 1:
            return results
        never = jax.lax.optimization_barrier(jnp.array(False))
        pairs = zip(references, results, strict=True)
        return [jax.lax.select(never, x.astype(y.dtype), y) for x, y in pairs]

    return constrained


def _looped(steps: Composition, batches: Sequence[MatrixBatch]) -> list[jax.Array]:
    results: dict[int, jax.Array] = {}
    for members in grouped(batches, lambda x: (x.program_key, x.shape[0])):
        members.reverse()  # see map_in_place
        group = [batches[i] for i in members]
        work = _in_place if _can_be_in_place(group[0]) else _sharded_like_sources(_one_by_one)
        results |= zip(members, work(steps, group), strict=True)
    return [results[i] for i in range(len(batches))]


def _can_be_in_place(batch: MatrixBatch) -> bool:
    """Whether a matrix that is made of other arrays can be made in the place of its result."""
    is_made = batch.read is not READ_ONE
    return is_made and batch.shape[0] == 1 and batch.array_dtype == batch.result_dtype


def _in_place(steps: Composition, batches: Sequence[MatrixBatch]) -> list[jax.Array]:
    """``steps`` of single matrices of one shape, which are made before the loop.

    XLA shards them as what they are made of, and the results as them.
    """
    function = batches[0].apply(steps)
    # Without the axis of size 1 arrays have the shape of the parameter, and can share its memory.
    made = [(batch.with_sources(lambda x: x[0]).array,) for batch in batches]
    results = map_in_place(lambda x: function(x[None])[0], made, in_place=True)
    return [y[None] for y in results]


def _one_by_one(steps: Composition, batches: Sequence[MatrixBatch]) -> list[jax.Array]:
    """``steps`` of batches of one shape, matrix by matrix, each made where it is read."""
    first = batches[0]
    function = first.apply(steps)

    def of_matrix(*sources: jax.Array) -> jax.Array:
        return function(first.matrices(*(x[None] for x in sources)))[0]

    if first.shape[0] == 1:
        results = map_in_place(of_matrix, [x.with_sources(lambda x: x[0]).sources for x in batches])
        return [y[None] for y in results]

    def of_batch(*sources: jax.Array) -> jax.Array:
        return jax.lax.map(lambda parts: of_matrix(*parts), sources)

    return map_in_place(of_batch, [batch.sources for batch in batches])


_WORK: dict[Machine, Callable[[Composition, Sequence[MatrixBatch]], list[jax.Array]]] = {
    "cpu": _looped,
    "tpu": _sharded_like_sources(map_stacks),
    "gpu": _sharded_like_sources(work_on_stacks),
}
