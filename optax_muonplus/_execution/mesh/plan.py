"""Which device of a mesh works on which matrix: decided in plain Python before tracing.

A worked example. Two devices shard three matrices of 64 x 64 by rows (``P("x")``). A shard has 2048
elements, sent as 16 lines of 128.

- All three are alike: items of one kind, which travel over the same axes in one :class:`Route`.
- Each worker takes one matrix, and worker 0 the third. There are two rounds: a shared one (matrices
  0 and 1, lines 0 to 15 of the buffers), and one for worker 0 (matrix 2, lines 16 to 31). Both fit
  into one bucket of 32 lines.
- Each device packs a send buffer ``(2 workers, 32, 128)``::

      for worker 0: [its shard of matrix 0 | its shard of matrix 2]
      for worker 1: [its shard of matrix 1 | zeros               ]

- One all-to-all exchanges the rows. Worker 0 then has ``(2 senders, 32, 128)``: both shards of
  matrix 0 and both of matrix 2. It joins them to whole matrices and works on them, while worker 1
  works on matrix 1. The second all-to-all sends results back to the same places.

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
from optax_muonplus._execution.lower import Program
from optax_muonplus._execution.mesh.shards import LANES, ShardedLeaf
from optax_muonplus._leaves.placement import usable_axes

# FLOPs that take as long as moving one byte: an H100 does about 0.25e15 FLOPs of float32 products a
# second as TF32, twice as many in bfloat16, and receives 0.45e12 bytes over NVLink. With this
# figure replicas share the work from 70 rows on. Between hosts, whose links are about nine times
# slower, sharing would pay from 600 rows on. With one figure a plan depends on mesh axes only.
FLOPS_PER_BYTE = 500

# Bytes of one bucket on each device, which bounds its buffers. For 48 layers, unbounded buffers
# took 4 times the memory of the shards; buckets of a twentieth of the shards took 1.7 times.
BUCKET_BYTES = 2**28


class WorkItem(NamedTuple):
    """Items of one kind; an *item* is one index of a parameter's batch axes."""

    count: int
    lines: int  # of one shard of an item
    flops: int  # of one item


# A *send buffer* ``(workers, lines, 128)`` has a row for each worker; a worker's *receive buffer*
# ``(senders, lines, 128)`` has the row of each sender for it.
class Slot(NamedTuple):
    """Consecutive items of one kind for consecutive workers, in the same lines of both buffers."""

    kind: int  # index of the kind
    first: int  # index of the first item
    start: int  # first worker
    stop: int  # last worker + 1
    each: int  # items for each worker
    lines: int  # of one shard of an item
    offset: int = 0  # the first line

    @property
    def items(self) -> slice:
        """Its items among all of the kind."""
        return slice(self.first, self.first + self.each * (self.stop - self.start))

    @property
    def width(self) -> int:
        """Its number of lines in a row."""
        return self.each * self.lines

    def part(self, start: int, each: int, offset: int) -> "Slot":
        """Returns ``each`` items of every worker from ``start`` on, at another offset."""
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


Round = tuple[Slot, ...]  # the same part of the program works on them, each on other workers
Bucket = tuple[Round, ...]  # sent together, in this order


class Route(NamedTuple):
    """Matrices that travel over the same mesh axes in the same dtypes, and who works on them."""

    items: tuple[ShardedLeaf, ...]  # one of each kind
    leaves: tuple[tuple[int, ...], ...]  # for each kind the indices of its arrays
    transfer_dtype: Any  # on the way to the workers
    replica_axes: tuple[str, ...]  # devices with copies, which divide the work and gather results
    loads: np.ndarray  # FLOPs of each device of the mesh, in this and all earlier routes
    buckets: tuple[Bucket, ...] = ()
    bytes_received: int = 0  # by a device, both ways

    @property
    def all_to_all_axes(self) -> tuple[str, ...]:
        """The mesh axes that cut the matrices."""
        return self.items[0].cut_axes

    @property
    def worker_axes(self) -> tuple[str, ...]:
        """The mesh axes that workers lie along, in the order of a send buffer."""
        return self.replica_axes + self.all_to_all_axes

    @property
    def workers(self) -> int:
        return math.prod(self.items[0].grid(self.worker_axes))


def plan(leaves: Sequence[ShardedLeaf], program: Program) -> tuple[tuple[Route, ...], np.ndarray]:
    """Plans routes for arrays on one mesh; also returns the FLOPs of each of its devices."""
    mesh = leaves[0].sharding.mesh
    axes = usable_axes(mesh)
    together: dict[Any, dict[ShardedLeaf, list[int]]] = {}
    for i, leaf in enumerate(leaves):
        key = leaf.cut_axes, leaf.replica_axes, leaf.dtype, leaf.result_dtype
        together.setdefault(key, {}).setdefault(leaf.item(mesh), []).append(i)
    kinds = {
        key: [
            _work_item(x, sum(leaves[i].items for i in which), program)
            for x, which in alike.items()
        ]
        for key, alike in together.items()
    }
    loads = np.zeros([mesh.shape[name] for name in axes], np.int64)
    routes = []
    # The largest matrices first: smaller ones then even out the loads.
    for key in sorted(kinds, key=lambda key: -max(kind.flops for kind in kinds[key])):
        _, replicas, dtype, _ = key
        # The program's first function rounds to this dtype: rounding early gives the same numbers.
        narrow = jnp.dtype(narrower_dtype(dtype, program.input_dtype))
        members = tuple(together[key]), tuple(map(tuple, together[key].values()))
        route = Route(*members, narrow, replicas, loads)
        routes.append(cheaper(route, kinds[key], axes))
        loads = routes[-1].loads
    return tuple(routes), loads


def _work_item(item: ShardedLeaf, count: int, program: Program) -> WorkItem:
    shapes = [block[1:] for block in item.layout.block_shapes() for _ in range(block[0])]
    flops = math.prod(item.layout.shape)  # one for each element, if nothing else
    return WorkItem(count, item.lines, flops + sum(map(program.flops, shapes)))


def cheaper(route: Route, kinds: Sequence[WorkItem], mesh_axes: Sequence[str]) -> Route:
    """Assigns work to the devices that cut matrices, and to replicas if that costs less."""
    choices = route, route._replace(replica_axes=())
    routes = [_assign_route(choice, kinds, mesh_axes) for choice in choices]
    # FLOPs of the busiest device, plus bytes that a device receives, in one unit. A replica
    # computes a small matrix sooner than it receives the result.
    return min(routes, key=lambda x: int(x.loads.max()) + FLOPS_PER_BYTE * x.bytes_received)


def _assign_route(route: Route, kinds: Sequence[WorkItem], mesh_axes: Sequence[str]) -> Route:
    there, back = route.transfer_dtype.itemsize, route.items[0].result_dtype.itemsize
    # Devices along other axes do the same work, or as much on their own: the busiest counts.
    places = [mesh_axes.index(name) for name in route.worker_axes]
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
    """Assigns items to workers; returns buckets, and the loads of workers after it."""
    # Every worker gets an equal share of each kind, or one item less. The rest is assigned one by
    # one, the largest first, to the worker with the least load, without padding for each kind.
    workers = len(loads)
    shares = [[max(0, kind.count // workers - held) for kind in kinds] for held in (0, 1)]
    choices = [_assign(kinds, share, loads) for share in shares]
    rounds, after = min(choices, key=lambda choice: max(choice[1]))
    return _into_buckets(rounds, workers, max(1, max_lines // workers)), after


def _assign(
    kinds: Sequence[WorkItem], shares: Sequence[int], loads: Sequence[int]
) -> tuple[list[list[Slot]], list[int]]:
    """Assigns equal shares to all workers, and then the rest; returns rounds and loads."""
    # Rounds by length: the first has the first item of that length on each worker, and so on. Items
    # of one length are cut out of a row in the same way, whatever their kind.
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
    """Cuts rounds into buckets with rows of similar length, at most ``most`` lines."""
    # All rows are padded to one length: a round that only fills shorter rows joins a bucket.
    rows = np.zeros(workers, int)
    for slot in itertools.chain(*rounds):
        rows[slot.start : slot.stop] += slot.width
    total = int(rows.max())
    length = -(-total // -(-total // most))
    # A row has reached this length if the next item does not fit.
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
