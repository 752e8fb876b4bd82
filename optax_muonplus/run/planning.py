"""What is decided about sharded matrices before anything is traced, as one value.

A worked example. Two devices shard three matrices of 64 x 64 by rows (``P("x")``). A shard has 2048
elements, which are sent as 16 lines of 128.

- All three are alike, so that they are items of one :class:`Kind`, and travel over the same axes in
  the same dtypes, so that they belong to one :class:`Exchange`.
- Three matrices on two workers: one for each worker, and one left over, for worker 0. The deal has
  two turns: one that both workers have (matrices 0 and 1, lines 0 to 15 of the buffers), and one
  that worker 0 has alone (matrix 2, lines 16 to 31). Both fit into one bucket, whose row is 32.
- Each device packs a send buffer ``(2 workers, 32, 128)``::

      for worker 0: [its shard of matrix 0 | its shard of matrix 2]
      for worker 1: [its shard of matrix 1 | zeros               ]

- One all-to-all exchanges the rows. Worker 0 then has ``(2 senders, 32, 128)``: both shards of
  matrix 0 and both of matrix 2; it joins them to whole matrices and works on them, while worker 1
  works on matrix 1. The second all-to-all sends the results back the same way, in the same places.
- The loads are 2 and 1 matrices. A device receives 32 lines each way.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_muonplus.frame import Program, usable_axes
from optax_muonplus.method import narrower
from optax_muonplus.run.deal import LANES, Bucket, Kind, deal, row_of
from optax_muonplus.run.polar import for_platform
from optax_muonplus.run.sharded_leaf import ShardedLeaf

# FLOPs that take as long as the move of one byte: an H100 does about 0.25e15 FLOPs of float32
# products a second as TF32, and receives 0.45e12 bytes over NVLink. It does twice as many in
# bfloat16. With this figure replicas share the work on matrices from 70 rows on. Between hosts,
# whose links are about nine times slower, it would pay from 600 rows on. One figure serves all
# meshes, so that a plan depends on the mesh's axes alone and not on the hosts behind them.
FLOPS_PER_BYTE = 500

# Bytes of one bucket on each device: its buffers need memory besides the matrices. Without a bound
# they took 4 times the shards of 48 layers; in buckets of a twentieth of them, 1.7 times.
BUCKET_BYTES = 2**28


class Exchange(NamedTuple):
    """Matrices that travel over the same mesh axes in the same dtypes, and who works on them."""

    items: tuple[ShardedLeaf, ...]  # one of each kind
    leaves: tuple[tuple[int, ...], ...]  # for each kind the indices of its arrays
    transfer_dtype: Any  # on the way to the work
    all_to_all_axes: tuple[str, ...]  # over which matrices are exchanged
    all_gather_axes: tuple[str, ...]  # over which they are gathered, and the work is repeated
    # Their devices hold copies, and divide the work; results are gathered over them.
    replica_axes: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    loads: np.ndarray  # FLOPs of each device of the mesh, with what it had to do before
    bytes_received: int  # by a device, both ways

    @property
    def is_local(self) -> bool:
        """Tells whether devices work on what they have, and send nothing."""
        return not self.all_to_all_axes + self.all_gather_axes + self.replica_axes

    @property
    def worker_axes(self) -> tuple[str, ...]:
        """The mesh axes whose devices have other matrices, in the order of a send buffer."""
        return self.replica_axes + self.all_to_all_axes

    @property
    def workers(self) -> int:
        """The number of devices that have other matrices."""
        return math.prod(self.items[0].grid(self.worker_axes))

    @property
    def senders(self) -> tuple[str, ...]:
        """The mesh axes whose devices send a worker its shards, in the order of its buffer."""
        return self.all_gather_axes + self.all_to_all_axes


def plan(
    leaves: Sequence[ShardedLeaf], program: Program
) -> tuple[tuple[Exchange, ...], np.ndarray]:
    """Plans how to apply ``program`` to arrays on one mesh, one at least.

    Arrays travel in the dtype that the first function rounds them to, if it is narrower than theirs
    and has as many exponent bits. The second result is the FLOPs of each device of the mesh.
    """
    program = for_platform(program)
    mesh = leaves[0].sharding.mesh
    together: dict[Any, dict[ShardedLeaf, list[int]]] = {}
    for i, leaf in enumerate(leaves):
        members = together.setdefault((leaf.axes(), leaf.dtype, leaf.result_dtype), {})
        members.setdefault(leaf.item(mesh), []).append(i)
    kinds = {
        key: [kind(x, sum(leaves[i].items for i in which), program) for x, which in own.items()]
        for key, own in together.items()
    }
    sizes = {name: mesh.shape[name] for name in usable_axes(mesh)}
    loads, exchanges = np.zeros(list(sizes.values()), np.int64), []
    # The largest matrices first: smaller ones then fill what they leave uneven.
    for key in sorted(kinds, key=lambda key: -max(kind.flops for kind in kinds[key])):
        (cut, replicas), dtype, _ = key
        narrow = jnp.dtype(narrower(dtype, program.input_dtype))
        members = tuple(together[key]), tuple(map(tuple, together[key].values()))
        start = Exchange(*members, narrow, cut, (), replicas, (), loads, 0)
        exchanges.append(cheapest(start, kinds[key], sizes))
        loads = exchanges[-1].loads
    return tuple(exchanges), loads


def kind(item: ShardedLeaf, count: int, program: Program) -> Kind:
    """Counts the work of ``program`` on ``count`` items."""
    shapes = [block[1:] for block in item.layout.block_shapes() for _ in range(block[0])]
    flops = math.prod(item.layout.shape)  # one for each element, if nothing else
    return Kind(count, item.lines, flops + sum(map(program.flops, shapes)))


def cheapest(start: Exchange, kinds: Sequence[Kind], sizes: Mapping[str, int]) -> Exchange:
    """Returns the exchange of least cost over some axes of ``start``, in a mesh of ``sizes``.

    Devices that hold shards of the same matrices, or copies of them, share the work. The cost is
    the FLOPs of the busiest device plus the bytes that a device receives, in one unit. Few matrices
    are better all-gathered by groups of devices that repeat the work than sent to all devices;
    small ones are better worked on by every replica than fetched from one.
    """

    def dealt(spread: tuple[str, ...], replicas: tuple[str, ...]) -> Exchange:
        gather = tuple(name for name in start.all_to_all_axes if name not in spread)
        a, g, r = (math.prod(sizes[name] for name in x) for x in (spread, gather, replicas))
        # Devices along other axes do the same, or work on as much of their own: the busiest counts.
        names = [*replicas, *spread]
        order = [list(sizes).index(x) for x in [*names, *(x for x in sizes if x not in names)]]
        loads = start.loads.transpose(order)
        before = loads.reshape(r * a, -1)
        buckets, after = deal(kinds, before.max(axis=1).tolist(), most)
        added = before + (np.array(after) - before.max(axis=1))[:, None]
        received = ((a - 1) + a * (g - 1)) * there + ((a - 1) + a * (r - 1)) * back
        return start._replace(
            all_to_all_axes=spread,
            all_gather_axes=gather,
            replica_axes=replicas,
            buckets=buckets,
            loads=added.reshape(loads.shape).transpose(np.argsort(order)),
            bytes_received=received * LANES * sum(map(row_of, buckets)),
        )

    there, back = start.transfer_dtype.itemsize, start.items[0].result_dtype.itemsize
    most = BUCKET_BYTES // (LANES * max(there, back))
    axes = itertools.product(_subsets(start.all_to_all_axes), _subsets(start.replica_axes))
    choices = itertools.starmap(dealt, axes)
    return min(choices, key=lambda x: int(x.loads.max()) + FLOPS_PER_BYTE * x.bytes_received)


def _subsets(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields all subsets, the largest first."""
    for length in range(len(axes), -1, -1):
        yield from itertools.combinations(axes, length)
