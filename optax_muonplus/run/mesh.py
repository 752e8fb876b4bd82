"""Functions on matrices that lie in shards on a mesh, each matrix whole on one of its devices.

Every device packs, for each worker, its shards of the matrices that this worker gets. One
all-to-all sends them; the worker joins them and works, and a second all-to-all sends the results
back, in the same places. See the worked example in ``planning.py``. There are two collectives for
each bucket, however many matrices are in it, and none while work is done.

These are explicit collectives under ``jax.shard_map``. Sharding constraints on a stack made the
compiler gather all of it ("involuntary full rematerialization") on a 4 x 2 mesh.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from optax_muonplus.frame import (
    LeafInfo,
    LeafSharding,
    Operand,
    Program,
    as_named,
    axes_of_type,
    usable_axes,
)
from optax_muonplus.run.deal import LANES, Bucket, Turn, row_of
from optax_muonplus.run.local import apply_batched, apply_local, apply_to_one
from optax_muonplus.run.loops import (
    Arrays,
    Platform,
    concatenated,
    on_its_platform,
    platform_of,
)
from optax_muonplus.run.planning import Exchange, plan
from optax_muonplus.run.sharded_leaf import ShardedLeaf


def apply_sharded(
    program: Program, operands: Sequence[Operand], leaves: Sequence[LeafInfo]
) -> list[jax.Array]:
    """Applies a program to the matrices of leaves on one mesh.

    Matrices travel in the dtype that the first function rounds them to, if it is narrower than
    theirs and has as many exponent bits. Results equal those of rounding after the transfer, have
    the dtypes of the records, and are sharded as the operands.
    """
    operands = [
        _whole_blocks(operand).map(functools.partial(_sharded_as, leaf))
        for operand, leaf in zip(operands, leaves, strict=True)
    ]
    computes = list(dict.fromkeys(x.compute for x in operands))
    # Arrays, which optax.inject_hyperparams makes of hyperparameters, have to be passed to jax.jit
    # and jax.shard_map as arguments. Python numbers stay constants of the program.
    values, structure = jax.tree.flatten((computes, program))
    hyperparams = {i: x for i, x in enumerate(values) if isinstance(x, jax.Array | np.ndarray)}
    numbers = tuple(None if i in hyperparams else x for i, x in enumerate(values))
    static = structure, numbers, tuple(computes.index(x.compute) for x in operands)
    sharded = tuple(ShardedLeaf.of(leaf, x.dtype) for leaf, x in zip(leaves, operands, strict=True))
    arrays = [x.arrays for x in operands]
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arrays))
    # Outside of jit every operation would be a program of its own, and compiled anew at every call.
    apply = _apply if traced else _compiled
    return apply(hyperparams, arrays, static, sharded, _platform(leaves))


def _whole_blocks(operand: Operand) -> Operand:
    """Loads an operand with numbers for blocks, since a shard may cut a block."""
    shapes = {x.shape for x in operand.arrays}
    return operand if len(shapes) == 1 else Operand.of(operand.load())


def _sharded_as(leaf: LeafInfo, x: jax.Array) -> jax.Array:
    """Returns ``x``, which may be a momentum, sharded over Explicit axes as its gradient is."""
    typed = jax.typeof(x).sharding
    if leaf.sharding is None or not axes_of_type(typed.mesh, AxisType.Explicit):
        return x
    wanted = as_named(leaf.sharding, [AxisType.Explicit])
    return x if typed.spec == wanted.spec else jax.sharding.reshard(x, wanted)


def _platform(leaves: Sequence[LeafInfo]) -> Platform | None:
    """Returns the platform of the devices that the argument ``sharding`` names, if it names any.

    Types have abstract meshes, which have no devices. Then work is traced for every platform.
    """
    meshes = (leaf.given_sharding.mesh for leaf in leaves if leaf.given_sharding)
    devices = (mesh.devices for mesh in meshes if isinstance(mesh, Mesh))
    return next((platform_of(x.flat[0].platform) for x in devices), None)


def _apply(
    hyperparams: dict[int, jax.Array],
    arrays: Sequence[Arrays],
    static: tuple[Any, tuple[Any, ...], tuple[int, ...]],
    leaves: tuple[ShardedLeaf, ...],
    platform: Platform | None,
) -> list[jax.Array]:
    structure, numbers, which = static

    def merged(hyperparams: dict[int, jax.Array]) -> tuple[list[Any], Program]:
        return structure.unflatten([hyperparams.get(i, x) for i, x in enumerate(numbers)])

    exchanges, _ = plan(leaves, merged(hyperparams)[1])

    def work_of_device(hyperparams: dict[int, jax.Array], *shards: Arrays) -> tuple[jax.Array, ...]:
        computes, program = merged(hyperparams)
        operands = [
            Operand(x, leaf.dtype, computes[i])
            for x, leaf, i in zip(shards, leaves, which, strict=True)
        ]
        results: dict[int, jax.Array] = {}
        for exchange in exchanges:
            device = _Device(program, exchange, leaves, platform)
            work = device.work_in_place if exchange.is_local else device.send_and_work
            results |= work(operands)
        return tuple(results[i] for i in range(len(leaves)))

    return _on_each_device(work_of_device, hyperparams, arrays, leaves)


_compiled = jax.jit(_apply, static_argnums=(2, 3, 4))


def _on_each_device(
    work: Callable[..., tuple[jax.Array, ...]],
    hyperparams: dict[int, jax.Array],
    arrays: Sequence[Arrays],
    leaves: Sequence[ShardedLeaf],
) -> list[jax.Array]:
    """Runs ``work`` on the shards of ``arrays`` that each device of a mesh has."""
    specs = tuple(as_named(x.sharding).spec for x in leaves)
    mesh = leaves[0].sharding.mesh
    # Replicas divide work along axes that cut no array. Where members of a jax.vmap lie along such
    # an axis, they have other members, and JAX refuses this array, which is cut along all axes.
    names = usable_axes(mesh)
    taken = jnp.zeros([mesh.shape[name] for name in names], bool)
    everywhere = LeafSharding(mesh, tuple((name,) for name in names))
    if axes_of_type(mesh, AxisType.Explicit):
        taken = jax.sharding.reshard(taken, as_named(everywhere, [AxisType.Explicit]))
    mapped = jax.shard_map(
        lambda hyperparams, _, *shards: work(hyperparams, *shards),
        mesh=mesh,
        in_specs=(PartitionSpec(), as_named(everywhere).spec, *specs),
        out_specs=specs,
        axis_names=set(names),
        check_vma=False,  # what is gathered is the same on all devices, which it cannot see
    )
    try:
        return list(mapped(hyperparams, taken, *arrays))
    except ValueError as error:
        if "cannot appear in shard_map in_specs" not in str(error):
            raise
        raise ValueError(
            "Members of a jax.vmap lie along an axis of the mesh, by its spmd_axis_name or their"
            " types. Leave sharding= out, or put jax.shard_map over that axis around a jax.vmap"
            " without a spmd_axis_name."
        ) from error


@dataclasses.dataclass(frozen=True)
class _Device:
    """The part of one device in an exchange."""

    program: Program
    exchange: Exchange
    leaves: Sequence[ShardedLeaf]
    platform: Platform | None  # None is the one that the program is lowered for

    def work_in_place(self, operands: Sequence[Operand]) -> dict[int, jax.Array]:
        """Works on arrays whose matrices are whole on each device; returns results by index."""
        leaves = {i: self.leaves[i] for i in itertools.chain(*self.exchange.leaves)}
        layouts = [dataclasses.replace(x.layout, shape=x.local_shape) for x in leaves.values()]
        dtypes, some = [x.result_dtype for x in leaves.values()], [operands[i] for i in leaves]
        results = apply_local(self.program, some, layouts, dtypes, self.platform)
        return dict(zip(leaves, results, strict=True))

    def send_and_work(self, operands: Sequence[Operand]) -> dict[int, jax.Array]:
        """Sends shards to the workers of their matrices; returns results by index."""

        def to_items(i: int) -> jax.Array:
            # Narrowed before it is reshaped, as momentum is where it is stored: one array for both.
            narrow = operands[i]._replace(dtype=self.exchange.transfer_dtype)
            return self.leaves[i].to_items(narrow.load())

        # A GPU joins arrays with fewer operations, a TPU in place.
        join = functools.partial(
            on_its_platform,
            lambda platform: concatenated if platform == "tpu" else jnp.concatenate,
            platform=self.platform,
        )
        items = [join([to_items(i) for i in indices]) for indices in self.exchange.leaves]
        done: list[dict[int, jax.Array]] = [{} for _ in items]
        for bucket in self.exchange.buckets:
            hands = list(itertools.chain(*bucket))
            buffer = jnp.zeros((self.exchange.workers, row_of(bucket), LANES), items[0].dtype)
            for hand in hands:
                buffer = hand.put(buffer, items[hand.kind][hand.items])
            buffer = self.there_and_back(bucket, buffer)
            for hand in hands:
                done[hand.kind][hand.first] = hand.take(buffer)
        results = {}
        for parts, indices in zip(done, self.exchange.leaves, strict=True):
            stops = np.cumsum([self.leaves[i].items for i in indices])[:-1]
            own = jnp.split(jnp.concatenate([parts[first] for first in sorted(parts)]), stops)
            results |= {i: self.leaves[i].from_items(x) for i, x in zip(indices, own, strict=True)}
        return results

    def there_and_back(self, bucket: Bucket, rows: jax.Array) -> jax.Array:
        """Sends rows, one for each worker; returns the rows that the workers send back."""
        replicas, axes = self.exchange.replica_axes, self.exchange.all_to_all_axes
        copies = self.exchange.all_gather_axes

        def work(platform: Platform) -> Callable[[jax.Array], jax.Array]:
            return functools.partial(dataclasses.replace(self, platform=platform).work, bucket)

        rows = _moved(rows, replicas, axes, copies)
        rows = on_its_platform(work, rows, platform=self.platform)
        return _moved(rows, copies, axes, replicas)

    def work(self, bucket: Bucket, buffer: jax.Array) -> jax.Array:
        """Works on a receive buffer; returns the results, in the places of their shards."""
        dtype = self.exchange.items[0].result_dtype
        # Matrices lie in the buffer as they were sent, and each is read once: results take their
        # places there if they are as wide.
        in_place = buffer.dtype == dtype
        results = buffer if in_place else jnp.zeros(buffer.shape, dtype)
        shared = [x for x in bucket if x[0].stop - x[0].start == self.exchange.workers]
        hands = [turn[0] for turn in shared]
        items, senders = [self.exchange.items[x.kind] for x in hands], self.exchange.senders
        rows = [buffer[:, x.offset : x.offset + x.width] for x in hands]
        batches = [item.to_batches(x, senders) for item, x in zip(items, rows, strict=True)]
        outputs = iter(apply_batched(self.program, list(itertools.chain(*batches)), self.platform))
        for hand, item, own in zip(hands, items, batches, strict=True):
            output = item.to_rows([next(outputs) for _ in own], senders)
            results = jax.lax.dynamic_update_slice_in_dim(results, output, hand.offset, 1)
        for turn in bucket:
            if turn not in shared:
                results = self.of_turn(turn, results if in_place else buffer, results)
        return results

    def of_turn(self, turn: Turn, buffer: jax.Array, results: jax.Array) -> jax.Array:
        """Works on a turn in which each worker has one item of some kind, or nothing.

        All workers run one program, which looks up by the worker's index what it has to do.
        """
        kinds = sorted({hand.kind for hand in turn})
        # The branch of each worker, and the first line of its item.
        table = np.zeros((2, self.exchange.workers), np.int32)
        for hand in turn:
            table[:, hand.start : hand.stop] = [[kinds.index(hand.kind) + 1], [hand.offset]]
        branch, offset = jnp.asarray(table)[:, jax.lax.axis_index(self.exchange.worker_axes)]
        rows, unchanged = (
            jax.lax.dynamic_slice_in_dim(x, offset, turn[0].lines, 1) for x in (buffer, results)
        )
        branches = [functools.partial(self.of_item, self.exchange.items[kind]) for kind in kinds]
        if table[0].all():
            branch -= 1
        else:
            branches = [lambda _: unchanged, *branches]
        output = jax.lax.switch(branch, branches, rows)
        return jax.lax.dynamic_update_slice_in_dim(results, output, offset, 1)

    def of_item(self, item: ShardedLeaf, rows: jax.Array) -> jax.Array:
        """Works on the rows ``(senders, lines, 128)`` of one item."""
        batches = item.to_batches(rows, self.exchange.senders)
        outputs = [apply_to_one(self.program, x, self.platform) for x in batches]
        return item.to_rows(outputs, self.exchange.senders)


def _moved(
    rows: jax.Array, own_row: tuple[str, ...], all_to_all: tuple[str, ...], gather: tuple[str, ...]
) -> jax.Array:
    """Moves rows, one for each device along ``own_row`` and ``all_to_all``, to those devices.

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
