"""Over which mesh axes matrices travel to the devices that work on them: the cheapest way.

Devices that hold shards of the same matrices, or copies of them, share the work. The cost of a
route is the FLOPs of the busiest device plus the bytes that a device receives, in one unit. Few
matrices are better all-gathered by groups of devices that repeat the work than sent to all devices;
small ones are better worked on by every replica than fetched from one.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from optax_muonplus.run.schedule import LINE, Bucket, GroupSize, assign

# As long as the move of one byte takes: an H100 does about 0.25e15 FLOPs of float32 products a
# second as TF32, and receives 0.45e12 bytes over NVLink. It does twice as many in bfloat16; links
# between hosts are slower. With this figure replicas share the work on matrices from 70 rows on.
FLOPS_PER_BYTE = 500

# Of one bucket, on each device: its buffers need memory besides the matrices. Without a bound
# they took 4 times the shards of 48 layers; in buckets of a twentieth of them, 1.7 times.
BUCKET_BYTES = 2**28


class Route(NamedTuple):
    """Where matrices go to, and what that costs."""

    # Mesh axes over which matrices are exchanged: each device gets other ones.
    all_to_all_axes: tuple[str, ...]
    # Mesh axes over which matrices are gathered, and the work is repeated.
    all_gather_axes: tuple[str, ...]
    # Mesh axes whose devices hold copies, and divide the work; results are gathered over them.
    replica_axes: tuple[str, ...]
    # How many devices have work of their own: over replica_axes and all_to_all_axes, in this order.
    workers: int
    buckets: tuple[Bucket, ...]  # for them
    loads: np.ndarray  # FLOPs of each device of the mesh, with what it had to do before
    elements_received: tuple[int, int]  # by a device, on the way to the work and on the way back

    @property
    def stays(self) -> bool:
        """Whether devices work on what they have, and send nothing."""
        return not self.all_to_all_axes + self.all_gather_axes + self.replica_axes


class MeshAxes(NamedTuple):
    """Mesh axes, and what they do to the matrices of one route."""

    sizes: Mapping[str, int]  # of all axes of the mesh
    sharding: tuple[str, ...]  # those that the matrices are sharded over
    replicas: tuple[str, ...]  # those over which devices hold copies of them


def cheapest_route(
    groups: Sequence[GroupSize], axes: MeshAxes, itemsizes: tuple[int, int], loads: np.ndarray
) -> Route:
    """The route of least cost, on devices that have ``loads`` FLOPs to do in addition.

    ``itemsizes`` are the bytes of an element on the way to the work and on the way back.
    """
    routes = [
        _route(groups, axes, all_to_all, replicas, itemsizes, loads)
        for all_to_all in _subsets(axes.sharding)
        for replicas in _subsets(axes.replicas)
    ]

    def cost(route: Route) -> int:
        received = sum(n * b for n, b in zip(route.elements_received, itemsizes, strict=True))
        return int(route.loads.max()) + FLOPS_PER_BYTE * received

    return min(routes, key=cost)


def _subsets(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """All of them, the whole first."""
    for length in range(len(axes), -1, -1):
        yield from itertools.combinations(axes, length)


def _route(
    groups: Sequence[GroupSize],
    axes: MeshAxes,
    all_to_all: tuple[str, ...],
    replicas: tuple[str, ...],
    itemsizes: tuple[int, int],
    loads: np.ndarray,
) -> Route:
    gather = tuple(name for name in axes.sharding if name not in all_to_all)
    a, g, r = (
        math.prod(axes.sizes[name] for name in names) for names in (all_to_all, gather, replicas)
    )
    # Devices along other axes do the same, or work on as much of their own: the busiest counts.
    names = list(axes.sizes)
    others = tuple(i for i, name in enumerate(names) if name not in replicas + all_to_all)
    working = [name for name in names if name in replicas + all_to_all]
    order = [working.index(name) for name in replicas + all_to_all]
    before = loads.max(axis=others).transpose(order)
    max_lines = BUCKET_BYTES // (LINE * max(itemsizes))
    buckets, after = assign(groups, before.flatten().tolist(), max_lines)
    added = (np.array(after).reshape(before.shape) - before).transpose(np.argsort(order))
    row = LINE * sum(bucket.row for bucket in buckets)
    received = ((a - 1) + a * (g - 1)) * row, ((a - 1) + a * (r - 1)) * row
    total = loads + np.expand_dims(added, others)
    return Route(all_to_all, gather, replicas, a * r, buckets, total, received)
