"""Which device of a mesh works on which matrix: decided in plain Python before anything is traced.

A worked example. Two devices shard three matrices of 64 x 64 by rows (``P("x")``). A shard has 2048
elements, which are sent as 16 lines of 128.

- All three are alike, so that they are items of one kind, and travel over the same axes in the same
  dtypes, so that they belong to one :class:`Route`.
- Three matrices on two workers: one for each worker, and one left over, for worker 0. There are two
  rounds: one that both workers have (matrices 0 and 1, lines 0 to 15 of the buffers), and one that
  worker 0 has alone (matrix 2, lines 16 to 31). Both fit into one bucket of 32 lines.
- Each device packs a send buffer ``(2 workers, 32, 128)``::

      for worker 0: [its shard of matrix 0 | its shard of matrix 2]
      for worker 1: [its shard of matrix 1 | zeros               ]

- One all-to-all exchanges the rows. Worker 0 then has ``(2 senders, 32, 128)``: both shards of
  matrix 0 and both of matrix 2; it joins them to whole matrices and works on them, while worker 1
  works on matrix 1. The second all-to-all sends the results back the same way, in the same places.
- The loads are 2 and 1 matrices. A device receives 32 lines each way.
"""

import collections
import heapq
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_muonplus._core.precision import narrower_dtype
from optax_muonplus._execution.lower import Program, for_platform
from optax_muonplus._execution.mesh.shards import LANES, ShardedLeaf
from optax_muonplus._leaves.placement import usable_axes

# FLOPs that take as long as the move of one byte: an H100 does about 0.25e15 FLOPs of float32
# products a second as TF32, and receives 0.45e12 bytes over NVLink. It does twice as many in
# bfloat16. With this figure replicas share the work on matrices from 70 rows on. Between hosts,
# whose links are about nine times slower, it would pay from 600 rows on. One figure serves all
# meshes, so that a plan depends on the mesh's axes alone and not on the hosts behind them.
FLOPS_PER_BYTE = 500

# Bytes of one bucket on each device: its buffers need memory besides the matrices. Without a bound
# they took 4 times the shards of 48 layers; in buckets of a twentieth of them, 1.7 times.
BUCKET_BYTES = 2**28


class WorkItem(NamedTuple):
    """Items that are alike; an *item* is one index of a parameter's batch axes."""

    count: int  # number of items
    lines: int  # that one shard of an item takes
    flops: int  # the work on one item


class Slot(NamedTuple):
    """Consecutive items of one kind for consecutive workers, with their place in the buffers.

    A *send buffer* ``(workers, lines, 128)`` has one row of lines for each worker. A worker's
    *receive buffer* ``(senders, lines, 128)`` has the row that each sender has for it. A slot has
    the same lines in both.
    """

    kind: int  # its index
    first: int  # index of the first item
    start: int  # the first worker
    stop: int  # the worker behind the last
    each: int  # items for each worker
    lines: int  # that one shard of an item takes
    offset: int = 0  # the first line

    @property
    def items(self) -> slice:
        """The items of the kind that are in it."""
        return slice(self.first, self.first + self.each * (self.stop - self.start))

    @property
    def width(self) -> int:
        """The number of lines that it has in a row."""
        return self.each * self.lines

    def part(self, start: int, each: int, offset: int) -> "Slot":
        """Returns ``each`` items of every worker from ``start`` on, at another place in a row."""
        first = self.first + start * (self.stop - self.start)
        return self._replace(first=first, each=each, offset=offset)

    def put(self, buffer: jax.Array, shards: jax.Array) -> jax.Array:
        """Writes shards ``(items, lines, 128)`` into the send buffer."""
        rows = shards.reshape(self.stop - self.start, self.width, LANES)
        return jax.lax.dynamic_update_slice(buffer, rows, (self.start, self.offset, 0))

    def take(self, buffer: jax.Array) -> jax.Array:
        """Reads shards ``(items, lines, 128)`` from the send buffer."""
        rows = buffer[self.start : self.stop, self.offset : self.offset + self.width]
        return rows.reshape(-1, self.lines, LANES)


Round = tuple[Slot, ...]
"""Slots that the same part of the program works on, each on other workers."""

Bucket = tuple[Round, ...]
"""Rounds, in order, whose shards are sent together."""


class Route(NamedTuple):
    """Matrices that travel over the same mesh axes in the same dtypes, and who works on them."""

    items: tuple[ShardedLeaf, ...]  # one of each kind
    leaves: tuple[tuple[int, ...], ...]  # for each kind the indices of its arrays
    transfer_dtype: Any  # on the way to the work
    # Their devices hold copies, and divide the work; results are gathered over them.
    replica_axes: tuple[str, ...]
    loads: np.ndarray  # FLOPs of each device of the mesh, with what it had to do before
    buckets: tuple[Bucket, ...] = ()
    bytes_received: int = 0  # by a device, both ways

    @property
    def all_to_all_axes(self) -> tuple[str, ...]:
        """The mesh axes that cut the matrices, over which they are exchanged."""
        return self.items[0].cut_axes

    @property
    def worker_axes(self) -> tuple[str, ...]:
        """The mesh axes whose devices have other matrices, in the order of a send buffer."""
        return self.replica_axes + self.all_to_all_axes

    @property
    def workers(self) -> int:
        """The number of devices that have other matrices."""
        return math.prod(self.items[0].grid(self.worker_axes))


def plan(leaves: Sequence[ShardedLeaf], program: Program) -> tuple[tuple[Route, ...], np.ndarray]:
    """Plans how to apply ``program`` to arrays on one mesh, one at least.

    Arrays travel in the dtype that the first function rounds them to, if it is narrower than theirs
    and has as many exponent bits. The second result is the FLOPs of each device of the mesh.
    """
    program = for_platform(program)
    mesh = leaves[0].sharding.mesh
    together: dict[Any, dict[ShardedLeaf, list[int]]] = {}
    for i, leaf in enumerate(leaves):
        key = leaf.cut_axes, leaf.replica_axes, leaf.dtype, leaf.result_dtype
        together.setdefault(key, {}).setdefault(leaf.item(mesh), []).append(i)
    kinds = {
        key: [_work(x, sum(leaves[i].items for i in which), program) for x, which in alike.items()]
        for key, alike in together.items()
    }
    loads = np.zeros([mesh.shape[name] for name in usable_axes(mesh)], np.int64)
    routes = []
    # The largest matrices first: smaller ones then fill what they leave uneven.
    for key in sorted(kinds, key=lambda key: -max(kind.flops for kind in kinds[key])):
        _, replicas, dtype, _ = key
        narrow = jnp.dtype(narrower_dtype(dtype, program.input_dtype))
        members = tuple(together[key]), tuple(map(tuple, together[key].values()))
        route = Route(*members, narrow, replicas, loads)
        routes.append(cheaper(route, kinds[key], usable_axes(mesh)))
        loads = routes[-1].loads
    return tuple(routes), loads


def _work(item: ShardedLeaf, count: int, program: Program) -> WorkItem:
    shapes = [block[1:] for block in item.layout.block_shapes() for _ in range(block[0])]
    flops = math.prod(item.layout.shape)  # one for each element, if nothing else
    return WorkItem(count, item.lines, flops + sum(map(program.flops, shapes)))


def cheaper(route: Route, kinds: Sequence[WorkItem], mesh_axes: Sequence[str]) -> Route:
    """Assigns the work to the devices that cut matrices, and to replicas if that costs less.

    The cost is the FLOPs of the busiest device plus the bytes that a device receives, in one unit:
    a replica has done small matrices itself sooner than it receives them from another.
    """
    choices = [route, route._replace(replica_axes=())]
    routes = [_assign_route(choice, kinds, mesh_axes) for choice in choices]
    return min(routes, key=lambda x: int(x.loads.max()) + FLOPS_PER_BYTE * x.bytes_received)


def _assign_route(route: Route, kinds: Sequence[WorkItem], mesh_axes: Sequence[str]) -> Route:
    there, back = route.transfer_dtype.itemsize, route.items[0].result_dtype.itemsize
    # Devices along other axes do the same, or work on as much of their own: the busiest counts.
    names = route.worker_axes
    places = [mesh_axes.index(name) for name in names]
    loads = np.moveaxis(route.loads, places, range(len(places)))
    grid = loads.shape[: len(places)]
    before = loads.reshape(route.workers, -1).max(axis=1)
    most = BUCKET_BYTES // (LANES * max(there, back))
    buckets, after = assign(kinds, before.tolist(), most)
    added = (np.array(after) - before).reshape(grid + (1,) * (loads.ndim - len(grid)))
    senders, workers = math.prod(route.items[0].grid(route.all_to_all_axes)), route.workers
    received = (senders - 1) * there + (workers - 1) * back
    return route._replace(
        buckets=buckets,
        loads=np.moveaxis(loads + added, range(len(places)), places),
        bytes_received=received * LANES * sum(map(lines_of, buckets)),
    )


def lines_of(bucket: Bucket) -> int:
    """Counts the lines that each worker receives from each sender."""
    return max(slot.offset + slot.width for slots in bucket for slot in slots)


def assign(
    kinds: Sequence[WorkItem], loads: Sequence[int], max_lines: int
) -> tuple[tuple[Bucket, ...], list[int]]:
    """Assigns items to workers; returns buckets, and the loads of the workers with the items.

    Every worker gets as many items of each kind as divide evenly. The remainders of all kinds are
    assigned together, one item at a time, the largest first, to the worker with the least to do:
    uneven remainders balance each other, in place of padding each by itself. A bucket has
    ``max_lines`` on one device at most, unless one round alone has more.
    """
    workers = len(loads)
    # To assign the last even share one by one too may level what other kinds leave uneven.
    shares = [[max(0, kind.count // workers - held) for kind in kinds] for held in (0, 1)]
    choices = [_assign(kinds, share, loads) for share in shares]
    rounds, after = min(choices, key=lambda choice: max(choice[1]))
    return _into_buckets(rounds, workers, max(1, max_lines // workers)), after


def _assign(
    kinds: Sequence[WorkItem], shares: Sequence[int], loads: Sequence[int]
) -> tuple[list[list[Slot]], list[int]]:
    """Assigns equal shares to all workers, and then the rest; returns rounds, and the loads.

    One round has the first item of some length on each worker, one the second, and so on. Items of
    one length are cut out of a row in the same way, whatever their kind.
    """
    workers = len(loads)
    rounds: dict[tuple[int, int], list[Slot]] = {}
    even = sum(share * kind.flops for share, kind in zip(shares, kinds, strict=True))
    queue = [(load + even, worker) for worker, load in enumerate(loads)]
    heapq.heapify(queue)
    seen: collections.Counter[tuple[int, int]] = collections.Counter()
    for index, kind in sorted(enumerate(kinds), key=lambda x: -x[1].flops):
        for item in range(shares[index] * workers, kind.count):
            load, worker = queue[0]
            heapq.heapreplace(queue, (load + kind.flops, worker))
            slots = rounds.setdefault((kind.lines, seen[kind.lines, worker]), [])
            slots.append(Slot(index, item, worker, worker + 1, 1, kind.lines))
            seen[kind.lines, worker] += 1
    common = [
        [Slot(i, 0, 0, workers, share, kinds[i].lines)] for i, share in enumerate(shares) if share
    ]
    after = [load for load, _ in sorted(queue, key=lambda x: x[1])]
    return [*common, *rounds.values()], after


def _into_buckets(rounds: Sequence[Sequence[Slot]], workers: int, most: int) -> tuple[Bucket, ...]:
    """Cuts rounds into buckets whose rows are about equally long, and have ``most`` lines at most.

    A round that only fills shorter rows joins a bucket, since all rows are padded to one length.
    """
    rows = np.zeros(workers, int)
    for slot in itertools.chain(*rounds):
        rows[slot.start : slot.stop] += slot.width
    total = int(rows.max())
    length = -(-total // -(-total // most))
    # A row that the next item does not fit into has reached this length.
    most = min(most, length + max(slots[0].lines for slots in rounds) - 1)
    buckets: list[list[Round]] = []
    for slots in rounds:
        lines, left = slots[0].lines, slots[0].each
        while left:
            used = max(int(rows[slot.start]) for slot in slots)
            if not buckets or used + lines > max(most, rows.max()):
                buckets.append([])
                rows[:] = used = 0
            each = min(left, max(1, (most - used) // lines))
            placed = [x.part(x.each - left, each, int(rows[x.start])) for x in slots]
            buckets[-1].append(_join(placed))
            for slot in placed:
                rows[slot.start : slot.stop] += slot.width
            left -= each
    return tuple(map(tuple, buckets))


def _join(slots: Sequence[Slot]) -> Round:
    """Joins slots whose items and workers are consecutive."""

    def key(place: tuple[int, Slot]) -> tuple[int, ...]:
        i, slot = place
        return slot.kind, slot.first - slot.start, slot.start - i, slot.offset

    placed = enumerate(sorted(slots, key=lambda slot: slot.start))
    runs = [[slot for _, slot in run] for _, run in itertools.groupby(placed, key)]
    return tuple(run[0]._replace(stop=run[-1].stop) for run in runs)
