"""Shards sent to workers, joined to whole matrices, worked on, and sent back; on each device.

See the worked example in ``planning.py``. Two collectives for each bucket, however many matrices
are in it, and none while work is done.

These are explicit collectives under ``jax.shard_map``. Sharding constraints on a stack made the
compiler gather all of it ("involuntary full rematerialization") on a 4 x 2 mesh.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from optax_muonplus._execution.batches import MatrixBatch
from optax_muonplus._execution.batching import apply_batched, apply_to_one
from optax_muonplus._execution.planning import CommGroup, MatrixGroup
from optax_muonplus._execution.routes import Route
from optax_muonplus._execution.schedule import LINE, Bucket, Task
from optax_muonplus._parameters import MatrixView
from optax_muonplus.matrices import Machine, MatrixFunction, compose, on_its_machine


def exchange(
    functions: Sequence[MatrixFunction], comm_group: CommGroup, shards: Sequence[jax.Array]
) -> list[jax.Array]:
    """``functions`` of all items; runs on each device of a mesh, inside ``jax.shard_map``.

    Args:
      functions: functions of matrices, applied one after the other.
      comm_group: the plan for these items.
      shards: for each group of matrices the shards that this device holds, ``(items, lines, 128)``.

    Returns:
      Arrays like ``shards``, in the dtype of results.
    """
    route = comm_group.route
    results: list[dict[int, jax.Array]] = [{} for _ in comm_group.members]
    for bucket in route.buckets:
        buffer = _packed(bucket, shards, route)
        buffer = _to_workers(buffer, route)

        def work(machine: Machine, bucket: Bucket = bucket) -> Callable[[jax.Array], jax.Array]:
            return functools.partial(_work, machine, functions, comm_group, bucket)

        buffer = on_its_machine(work, buffer)
        buffer = _from_workers(buffer, route)
        for segment in bucket.segments:
            results[segment.group][segment.first] = segment.read_send(buffer)
    return [jnp.concatenate([parts[first] for first in sorted(parts)]) for parts in results]


def _packed(bucket: Bucket, shards: Sequence[jax.Array], route: Route) -> jax.Array:
    """The send buffer: one row of shards for each worker."""
    buffer = jax.lax.empty((route.workers, bucket.row, LINE), shards[0].dtype)
    for segment in bucket.segments:
        buffer = segment.write_send(buffer, shards[segment.group])
    return buffer


def _to_workers(buffer: jax.Array, route: Route) -> jax.Array:
    """The receive buffer of this device as a worker, from the send buffers of all."""
    return _moved(buffer, route.replica_axes, route.all_to_all_axes, route.all_gather_axes)


def _from_workers(buffer: jax.Array, route: Route) -> jax.Array:
    """The inverse: replicas that divided the work gather its results; repeated work is dropped."""
    return _moved(buffer, route.all_gather_axes, route.all_to_all_axes, route.replica_axes)


def _moved(
    rows: jax.Array, own_row: tuple[str, ...], all_to_all: tuple[str, ...], gather: tuple[str, ...]
) -> jax.Array:
    """Rows moved from the devices that have them to those that they are for.

    Args:
      rows: one for each device along ``own_row`` and ``all_to_all``.
      own_row: axes along which devices have the same rows: each keeps those at its own index.
      all_to_all: axes over which rows are exchanged.
      gather: axes along which all devices get the same rows.
    """
    if own_row:
        rows = rows.reshape(jax.lax.axis_size(own_row), -1, *rows.shape[1:])
        rows = jax.lax.dynamic_index_in_dim(rows, jax.lax.axis_index(own_row), 0, False)
    if all_to_all:
        rows = jax.lax.all_to_all(rows, all_to_all, 0, 0, tiled=True)
    if gather:
        rows = jax.lax.all_gather(rows, gather, axis=0, tiled=True)
    return rows


def _work(
    machine: Machine,
    functions: Sequence[MatrixFunction],
    comm_group: CommGroup,
    bucket: Bucket,
    buffer: jax.Array,
) -> jax.Array:
    """Returns the results, in the places of the shards that they are made of."""
    route, groups = comm_group.route, [group for group, _ in comm_group.members]
    names = route.all_gather_axes + route.all_to_all_axes
    # Matrices lie in the receive buffer as they were sent, and each is read once: results take
    # their places there if they are as wide.
    in_place = buffer.dtype == comm_group.result_dtype
    results = buffer if in_place else jnp.zeros(buffer.shape, comm_group.result_dtype)
    common = [task.segments[0] for task in bucket.tasks if task.is_common(route.workers)]
    batches: list[list[MatrixBatch]] = []
    views: list[MatrixView] = []
    for segment in common:
        group = groups[segment.group]
        shards = from_lines(segment.read_receive(buffer), group.shard_size)
        items = group.join(shards, names)
        views.append(group.view.stacked(segment.items_each))
        batches.append(
            [
                MatrixBatch((x,), group.view.transposed, comm_group.dtype, comm_group.result_dtype)
                for x in views[-1].to_matrices(items)
            ]
        )
    outputs = iter(apply_batched(functions, [x for parts in batches for x in parts], machine))
    for segment, view, parts in zip(common, views, batches, strict=True):
        items = view.from_matrices([next(outputs) for _ in parts])
        shards = groups[segment.group].cut(items, names)
        results = segment.write_receive(results, in_lines(shards))
    for task in bucket.tasks:
        if not task.is_common(route.workers):
            source = results if in_place else buffer
            results = _work_on_remainder(machine, functions, comm_group, task, source, results)
    return results


def _work_on_remainder(
    machine: Machine,
    functions: Sequence[MatrixFunction],
    comm_group: CommGroup,
    task: Task,
    buffer: jax.Array,
    results: jax.Array,
) -> jax.Array:
    """Works on a task in which each worker has an item of some group, or nothing.

    All workers run one program: what differs between them, such as whether there is an item and of
    which group, is looked up in a table by the worker's index.
    """
    route, groups = comm_group.route, [group for group, _ in comm_group.members]
    present = sorted({segment.group for segment in task.segments})
    names = route.all_gather_axes + route.all_to_all_axes
    layouts = [_ItemLayout(groups[i], names, len(present) > 1) for i in present]
    table = np.zeros((3, route.workers), np.int32)
    for segment in task.segments:
        entry = [1, present.index(segment.group), segment.offset]
        table[:, segment.start : segment.stop] = np.array(entry)[:, None]
    worker = jax.lax.axis_index(route.replica_axes + route.all_to_all_axes)
    has_item, which, offset = jnp.asarray(table)[:, worker]
    steps = compose(functions)

    def work(shards: jax.Array) -> jax.Array:
        elements = from_lines(shards, groups[present[0]].shard_size)
        matrices = jax.lax.switch(which, [layout.read for layout in layouts], elements)
        # Else XLA moves the cast to float32 into the branches, which then return twice the bytes.
        matrices = jax.lax.optimization_barrier(matrices)
        outputs = []
        for i, matrix in enumerate(matrices):
            transposed = _select([layout.transposed[i] for layout in layouts], which)
            batch = MatrixBatch((matrix,), transposed, comm_group.dtype, comm_group.result_dtype)
            outputs.append(apply_to_one(steps, batch, machine))
        return in_lines(jax.lax.switch(which, [layout.write for layout in layouts], outputs))

    lines = task.segments[0].shard_lines
    shards = jax.lax.dynamic_slice_in_dim(buffer, offset, lines, 1)
    if table[0].all():
        outputs = work(shards)
    else:
        idle = jax.lax.dynamic_slice_in_dim(results, offset, lines, 1)
        outputs = jax.lax.cond(has_item == 1, work, lambda _: idle, shards)
    return jax.lax.dynamic_update_slice_in_dim(results, outputs, offset, 1)


def _select(choices: Sequence[bool], which: jax.Array) -> bool | jax.Array:
    """``choices[which]``, not traced where all are the same."""
    return choices[0] if len(set(choices)) == 1 else jnp.asarray(choices)[which]


@dataclasses.dataclass
class _ItemLayout:
    """Reads one item of a group as matrices, and writes it back.

    Groups that share a task have matrices of one shape, some of them transposed. With
    ``same_shape`` tall ones are transposed, so that all have the shape of the wide ones.
    """

    group: MatrixGroup
    names: tuple[str, ...]
    same_shape: bool

    def __post_init__(self) -> None:
        view = self.group.view
        self.swapped = [self.same_shape and _is_tall(x, view) for x in view.block_shapes()]
        self.transposed = [view.transposed != swapped for swapped in self.swapped]

    def read(self, shards: jax.Array) -> list[jax.Array]:
        items = self.group.join(shards[:, None], self.names)
        return self._swap(self.group.view.to_matrices(items))

    def write(self, matrices: list[jax.Array]) -> jax.Array:
        items = self.group.view.from_matrices(self._swap(matrices))
        return self.group.cut(items, self.names)[:, 0]

    def _swap(self, matrices: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(matrices, self.swapped, strict=True)
        return [jnp.swapaxes(x, -1, -2) if swapped else x for x, swapped in pairs]


def _is_tall(shape: tuple[int, int, int], view: MatrixView) -> bool:
    """Whether the matrix as it is stored has more rows than columns."""
    _, rows, columns = shape
    return columns > rows if view.transposed else rows > columns


def in_lines(x: jax.Array) -> jax.Array:
    """Cuts arrays ``(..., elements)`` into ``(..., lines, 128)``, the last filled with zeros."""
    *batch, elements = x.shape
    rest = -elements % LINE
    if rest:
        x = jnp.pad(x, [(0, 0)] * len(batch) + [(0, rest)])
    return x.reshape(*batch, -1, LINE)


def from_lines(x: jax.Array, elements: int) -> jax.Array:
    """Inverts :func:`in_lines`."""
    return x.reshape(*x.shape[:-2], -1)[..., :elements]
