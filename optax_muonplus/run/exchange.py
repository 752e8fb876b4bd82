"""Shards sent to workers, joined to whole matrices, worked on, and sent back; on each device.

See the worked example in ``planning.py``. Two collectives for each bucket, however many matrices
are in it, and none while work is done.

These are explicit collectives under ``jax.shard_map``. Sharding constraints on a stack made the
compiler gather all of it ("involuntary full rematerialization") on a 4 x 2 mesh.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from optax_muonplus.frame import MatrixLayout
from optax_muonplus.method import MatrixFunction, compose
from optax_muonplus.run.batches import MatrixBatch
from optax_muonplus.run.planning import CommGroup, MatrixGroup
from optax_muonplus.run.platform import Platform, on_its_platform
from optax_muonplus.run.schedule import LINE, Bucket, Task
from optax_muonplus.run.stacks import apply_batched, apply_to_one


def exchange(
    functions: Sequence[MatrixFunction], comm_group: CommGroup, shards: Sequence[jax.Array]
) -> list[jax.Array]:
    """``functions`` of all items; runs on each device of a mesh, inside ``jax.shard_map``.

    ``shards`` has for each group of matrices those that this device holds, ``(items, lines, 128)``.
    Results are arrays like these.
    """
    route = comm_group.route
    results: list[dict[int, jax.Array]] = [{} for _ in comm_group.members]
    for bucket in route.buckets:
        # One row of shards for each worker.
        buffer = jax.lax.empty((route.workers, bucket.row, LINE), shards[0].dtype)
        segments = bucket.segments
        for segment in segments:
            buffer = segment.write_send(buffer, shards[segment.group])
        buffer = _moved(buffer, route.replica_axes, route.all_to_all_axes, route.all_gather_axes)
        # A partial function that still lacks the platform and the buffer.
        work = functools.partial(functools.partial, _work, functions, comm_group, bucket)
        buffer = on_its_platform(work, buffer)
        # Back: replicas that divided the work gather its results; repeated work is dropped.
        buffer = _moved(buffer, route.all_gather_axes, route.all_to_all_axes, route.replica_axes)
        for segment in segments:
            results[segment.group][segment.first] = segment.read_send(buffer)
    return [jnp.concatenate([parts[first] for first in sorted(parts)]) for parts in results]


def _moved(
    rows: jax.Array, own_row: tuple[str, ...], all_to_all: tuple[str, ...], gather: tuple[str, ...]
) -> jax.Array:
    """Rows, one for each device along ``own_row`` and ``all_to_all``, moved to those devices.

    Along ``own_row`` devices have the same rows: each keeps those at its own index. Over
    ``all_to_all`` rows are exchanged, and along ``gather`` all devices get the same ones.
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
    functions: Sequence[MatrixFunction],
    comm_group: CommGroup,
    bucket: Bucket,
    platform: Platform,
    buffer: jax.Array,
) -> jax.Array:
    """Returns the results, in the places of the shards that they are made of."""
    route, groups = comm_group.route, [group for group, _ in comm_group.members]
    names = route.all_gather_axes + route.all_to_all_axes
    dtypes = comm_group.dtype, comm_group.result_dtype
    # Matrices lie in the receive buffer as they were sent, and each is read once: results take
    # their places there if they are as wide.
    in_place = buffer.dtype == comm_group.result_dtype
    results = buffer if in_place else jnp.zeros(buffer.shape, comm_group.result_dtype)
    remainders = [task for task in bucket.tasks if not task.is_common(route.workers)]
    common, batches = [], []
    for segment in (task.segments[0] for task in bucket.tasks if task not in remainders):
        group = groups[segment.group]
        shards = from_lines(segment.read_receive(buffer), math.prod(group.local_shape))
        layout = group.layout.stacked(segment.items_each)
        matrices = layout.to_matrices(group.join(shards, names))
        common.append((segment, layout, len(matrices)))
        batches += [MatrixBatch((x,), layout.transposed, *dtypes) for x in matrices]
    outputs = iter(apply_batched(functions, batches, platform))
    for segment, layout, count in common:
        items = layout.from_matrices([next(outputs) for _ in range(count)])
        shards = groups[segment.group].cut(items, names)
        results = segment.write_receive(results, in_lines(shards))
    for task in remainders:
        source = results if in_place else buffer
        results = _work_on_remainder(functions, comm_group, task, platform, source, results)
    return results


def _work_on_remainder(
    functions: Sequence[MatrixFunction],
    comm_group: CommGroup,
    task: Task,
    platform: Platform,
    buffer: jax.Array,
    results: jax.Array,
) -> jax.Array:
    """Works on a task in which each worker has an item of some group, or nothing.

    All workers run one program: what differs between them, such as whether there is an item and of
    which group, is looked up in a table by the worker's index.
    """
    route = comm_group.route
    present = sorted({segment.group for segment in task.segments})
    names = route.all_gather_axes + route.all_to_all_axes
    groups = [comm_group.members[i][0] for i in present]
    # Groups that share a task have matrices of one shape, some of them transposed: tall ones are
    # swapped, so that all have the shape of the wide ones.
    layouts = [(x, [len(groups) > 1 and tall for tall in _are_tall(x.layout)]) for x in groups]
    table = _table(task, present, route.workers)
    worker = jax.lax.axis_index(route.replica_axes + route.all_to_all_axes)
    has_item, which, offset = jnp.asarray(table)[:, worker]
    steps = compose(functions)

    def work(shards: jax.Array) -> jax.Array:
        elements = from_lines(shards, math.prod(groups[0].local_shape))
        readers = [functools.partial(_read_item, names, *layout) for layout in layouts]
        matrices = jax.lax.switch(which, readers, elements)
        # Else XLA moves the cast to float32 into the branches, which then return twice the bytes.
        matrices = jax.lax.optimization_barrier(matrices)
        outputs = []
        for i, matrix in enumerate(matrices):
            choices = [group.layout.transposed != swapped[i] for group, swapped in layouts]
            # Not traced where all are the same.
            transposed = choices[0] if len(set(choices)) == 1 else jnp.asarray(choices)[which]
            batch = MatrixBatch((matrix,), transposed, comm_group.dtype, comm_group.result_dtype)
            outputs.append(apply_to_one(steps, batch, platform))
        writers = [functools.partial(_write_item, names, *layout) for layout in layouts]
        return in_lines(jax.lax.switch(which, writers, outputs))

    lines = task.segments[0].shard_lines
    shards = jax.lax.dynamic_slice_in_dim(buffer, offset, lines, 1)
    if table[0].all():
        outputs = work(shards)
    else:
        idle = jax.lax.dynamic_slice_in_dim(results, offset, lines, 1)
        outputs = jax.lax.cond(has_item == 1, work, lambda _: idle, shards)
    return jax.lax.dynamic_update_slice_in_dim(results, outputs, offset, 1)


def _table(task: Task, present: Sequence[int], workers: int) -> np.ndarray:
    """By worker whether it has an item, of which of the groups, and at which line of its row."""
    table = np.zeros((3, workers), np.int32)
    for segment in task.segments:
        entry = [1, present.index(segment.group), segment.offset]
        table[:, segment.start : segment.stop] = np.array(entry)[:, None]
    return table


def _are_tall(layout: MatrixLayout) -> list[bool]:
    """Whether matrices, as they are stored, have more rows than columns."""
    shapes = [(rows, columns) for _, rows, columns in layout.block_shapes()]
    return [columns > rows if layout.transposed else rows > columns for rows, columns in shapes]


def _read_item(
    names: tuple[str, ...], group: MatrixGroup, swapped: Sequence[bool], shards: jax.Array
) -> list[jax.Array]:
    """Reads one item as matrices, some of them swapped."""
    return _swap(group.layout.to_matrices(group.join(shards[:, None], names)), swapped)


def _write_item(
    names: tuple[str, ...], group: MatrixGroup, swapped: Sequence[bool], matrices: list[jax.Array]
) -> jax.Array:
    """The inverse of :func:`_read_item`."""
    return group.cut(group.layout.from_matrices(_swap(matrices, swapped)), names)[:, 0]


def _swap(matrices: Sequence[jax.Array], swapped: Sequence[bool]) -> list[jax.Array]:
    pairs = zip(matrices, swapped, strict=True)
    return [jnp.swapaxes(x, -1, -2) if swap else x for x, swap in pairs]


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
