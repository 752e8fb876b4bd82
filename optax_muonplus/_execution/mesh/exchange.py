"""Matrices sharded on a mesh, each worked on whole by one device: pack, work, return.

Every device *packs* its shards into a send buffer with a row for each worker, and one all-to-all
sends the rows. A worker joins them into whole matrices, *works* on these, and writes the results
into the same places. A second all-to-all *returns* the rows. Devices that hold copies of a matrix
divide the work and gather the results. ``plan.py`` assigns the work, and has a worked example.

Each bucket has these two collectives, explicit under ``jax.shard_map``: sharding constraints on a
stack made the compiler gather all of it ("involuntary full rematerialization") on a 4 x 2 mesh.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from optax_muonplus._chain.operand import Operand
from optax_muonplus._execution.local import apply_batched, apply_local, apply_to_one
from optax_muonplus._execution.loops import Arrays, concatenate
from optax_muonplus._execution.lower import Program
from optax_muonplus._execution.mesh.plan import Bucket, Round, Route, lines_of, plan
from optax_muonplus._execution.mesh.shards import LANES, ShardedLeaf
from optax_muonplus._leaves.placement import LeafSharding, as_named, axes_of_type, usable_axes
from optax_muonplus._leaves.record import LeafInfo


def apply_sharded(
    program: Program, operands: Sequence[Operand], leaves: Sequence[LeafInfo]
) -> list[jax.Array]:
    """Applies a program to the matrices of leaves on one mesh; results keep their shardings."""
    operands = [_in_whole_blocks(x) for x in operands]
    computes = list(dict.fromkeys(x.compute for x in operands))
    # Hyperparameters that are arrays, as under optax.inject_hyperparams, must be arguments of
    # jax.jit and jax.shard_map. Python numbers stay constants of the program.
    values, structure = jax.tree.flatten((computes, program))
    hyperparams = {i: x for i, x in enumerate(values) if isinstance(x, jax.Array | np.ndarray)}
    numbers = tuple(None if i in hyperparams else x for i, x in enumerate(values))
    static = structure, numbers, tuple(computes.index(x.compute) for x in operands)
    sharded = tuple(ShardedLeaf.of(leaf, x.dtype) for leaf, x in zip(leaves, operands, strict=True))
    arrays = [x.arrays for x in operands]
    return _apply(hyperparams, arrays, static, sharded)


def _in_whole_blocks(operand: Operand) -> Operand:
    """Loads an operand that has one number for each block, since a shard may cut a block."""
    shapes = {x.shape for x in operand.arrays}
    return operand if len(shapes) == 1 else Operand.of(operand.load())


# Outside of jit every operation would be a separate program, compiled at every call.
@functools.partial(jax.jit, static_argnums=(2, 3), inline=True)
def _apply(
    hyperparams: dict[int, jax.Array],
    arrays: Sequence[Arrays],
    static: tuple[Any, tuple[Any, ...], tuple[int, ...]],
    leaves: tuple[ShardedLeaf, ...],
) -> list[jax.Array]:
    structure, numbers, which = static

    def merged(hyperparams: dict[int, jax.Array]) -> tuple[list[Any], Program]:
        return structure.unflatten([hyperparams.get(i, x) for i, x in enumerate(numbers)])

    routes, _ = plan(leaves, merged(hyperparams)[1])

    def on_device(hyperparams: dict[int, jax.Array], *shards: Arrays) -> tuple[jax.Array, ...]:
        computes, program = merged(hyperparams)
        operands = [
            Operand(x, leaf.dtype, computes[i])
            for x, leaf, i in zip(shards, leaves, which, strict=True)
        ]
        results: dict[int, jax.Array] = {}
        for route in routes:
            device = _Device(program, route, leaves)
            work = device.exchange if route.worker_axes else device.work_in_place
            results |= work(operands)
        return tuple(results[i] for i in range(len(leaves)))

    return _on_each_device(on_device, hyperparams, arrays, leaves)


def _on_each_device(
    on_shards: Callable[..., tuple[jax.Array, ...]],
    hyperparams: dict[int, jax.Array],
    arrays: Sequence[Arrays],
    leaves: Sequence[ShardedLeaf],
) -> list[jax.Array]:
    """Calls ``on_shards`` with the shards of ``arrays`` on each device of a mesh."""
    specs = tuple(as_named(x.sharding).spec for x in leaves)
    mesh = leaves[0].sharding.mesh
    # Replicas divide work along axes that cut no array. If members of a jax.vmap lie along such an
    # axis, its devices are not replicas: JAX then raises an error for this array, cut by all axes.
    names = usable_axes(mesh)
    taken = jnp.zeros([mesh.shape[name] for name in names], bool)
    everywhere = LeafSharding(mesh, tuple((name,) for name in names))
    if axes_of_type(mesh, AxisType.Explicit):
        taken = jax.sharding.reshard(taken, as_named(everywhere, [AxisType.Explicit]))
    mapped = jax.shard_map(
        lambda hyperparams, _, *shards: on_shards(hyperparams, *shards),
        mesh=mesh,
        in_specs=(PartitionSpec(), as_named(everywhere).spec, *specs),
        out_specs=specs,
        axis_names=set(names),
        check_vma=False,  # it cannot see that gathered arrays are equal on all devices
    )
    return list(mapped(hyperparams, taken, *arrays))


@dataclasses.dataclass(frozen=True)
class _Device:
    """The work of one device on a route."""

    program: Program
    route: Route
    leaves: Sequence[ShardedLeaf]

    def work_in_place(self, operands: Sequence[Operand]) -> dict[int, jax.Array]:
        """Works on arrays whose matrices are whole on each device; returns results by index."""
        leaves = {i: self.leaves[i] for i in itertools.chain(*self.route.leaves)}
        layouts = [dataclasses.replace(x.layout, shape=x.local_shape) for x in leaves.values()]
        dtypes, some = [x.result_dtype for x in leaves.values()], [operands[i] for i in leaves]
        results = apply_local(self.program, some, layouts, dtypes)
        return dict(zip(leaves, results, strict=True))

    def exchange(self, operands: Sequence[Operand]) -> dict[int, jax.Array]:
        """Sends shards to the workers of their matrices; returns results by index."""
        route = self.route
        shards = [self.shards_of(operands, which) for which in route.leaves]
        results: list[dict[int, jax.Array]] = [{} for _ in shards]
        exchange = functools.partial(_exchange, axes=route.all_to_all_axes)
        for bucket in route.buckets:
            buffer = exchange(_rows_of_replica(self.pack(bucket, shards), route.replica_axes))
            buffer = exchange(self.work(bucket, buffer))
            if route.replica_axes:
                buffer = jax.lax.all_gather(buffer, route.replica_axes, tiled=True)
            for slot in itertools.chain(*bucket):
                results[slot.kind][slot.first] = slot.take(buffer)
        return self.unpack(results)

    def shards_of(self, operands: Sequence[Operand], which: Sequence[int]) -> jax.Array:
        """Returns the shards ``(items, lines, 128)`` of arrays of one kind."""
        # Rounded before reshaping, like a stored momentum: XLA then writes one array for both.
        narrow = [operands[i]._replace(dtype=self.route.transfer_dtype) for i in which]
        parts = [self.leaves[i].to_items(x.load()) for i, x in zip(which, narrow, strict=True)]
        # On a GPU ``jnp.concatenate`` is fewer operations; on a TPU it is another pass.
        return concatenate(parts) if self.program.platform == "tpu" else jnp.concatenate(parts)

    def pack(self, bucket: Bucket, shards: Sequence[jax.Array]) -> jax.Array:
        """Writes shards into the rows of a send buffer."""
        buffer = jnp.zeros((self.route.workers, lines_of(bucket), LANES), shards[0].dtype)
        for slot in itertools.chain(*bucket):
            buffer = slot.put(buffer, shards[slot.kind][slot.items])
        return buffer

    def unpack(self, results: Sequence[dict[int, jax.Array]]) -> dict[int, jax.Array]:
        """Returns arrays by index; ``results`` has their shards by kind and first item."""
        arrays = {}
        for parts, which in zip(results, self.route.leaves, strict=True):
            stops = np.cumsum([self.leaves[i].items for i in which])[:-1]
            items = jnp.split(jnp.concatenate([parts[first] for first in sorted(parts)]), stops)
            arrays |= {i: self.leaves[i].from_items(x) for i, x in zip(which, items, strict=True)}
        return arrays

    def work(self, bucket: Bucket, buffer: jax.Array) -> jax.Array:
        """Works on the matrices of a receive buffer; results take the places of their shards."""
        dtype = self.route.items[0].result_dtype
        # Each matrix in the buffer is read once: results of the same dtype may overwrite it.
        in_place = buffer.dtype == dtype
        results = buffer if in_place else jnp.zeros(buffer.shape, dtype)
        # In a shared round every worker has the same number of items of one kind.
        shared = [x for x, *_ in bucket if x.stop - x.start == self.route.workers]
        batches = [
            self.route.items[x.kind].to_batches(buffer[:, x.offset : x.offset + x.width])
            for x in shared
        ]
        outputs = iter(apply_batched(self.program, list(itertools.chain(*batches))))
        for slot, of_slot in zip(shared, batches, strict=True):
            output = self.route.items[slot.kind].to_rows([next(outputs) for _ in of_slot])
            results = jax.lax.dynamic_update_slice_in_dim(results, output, slot.offset, 1)
        for slots in bucket:
            if slots[0] not in shared:
                results = self.work_on_round(slots, results if in_place else buffer, results)
        return results

    def work_on_round(self, slots: Round, buffer: jax.Array, results: jax.Array) -> jax.Array:
        """Works on a round in which each worker has one item of some kind, or nothing."""
        kinds = sorted({slot.kind for slot in slots})
        # All workers run one program. Each looks up its branch, and the first line of its item.
        table = np.zeros((2, self.route.workers), np.int32)
        for slot in slots:
            table[:, slot.start : slot.stop] = [[kinds.index(slot.kind) + 1], [slot.offset]]
        branch, offset = jnp.asarray(table)[:, jax.lax.axis_index(self.route.worker_axes)]
        rows, unchanged = (
            jax.lax.dynamic_slice_in_dim(x, offset, slots[0].lines, 1) for x in (buffer, results)
        )
        branches = [functools.partial(self.work_on_item, self.route.items[kind]) for kind in kinds]
        if table[0].all():
            branch -= 1
        else:
            branches = [lambda _: unchanged, *branches]
        output = jax.lax.switch(branch, branches, rows)
        return jax.lax.dynamic_update_slice_in_dim(results, output, offset, 1)

    def work_on_item(self, item: ShardedLeaf, rows: jax.Array) -> jax.Array:
        """Works on the rows ``(senders, lines, 128)`` of one item."""
        batches = item.to_batches(rows)
        return item.to_rows([apply_to_one(self.program, x) for x in batches])


def _rows_of_replica(rows: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns this replica's share of rows that all replicas have."""
    if not axes:
        return rows
    rows = rows.reshape(jax.lax.axis_size(axes), -1, *rows.shape[1:])
    return jax.lax.dynamic_index_in_dim(rows, jax.lax.axis_index(axes), 0, False)


def _exchange(rows: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sends each row to its device along ``axes``."""
    return jax.lax.all_to_all(rows, axes, 0, 0, tiled=True) if axes else rows
