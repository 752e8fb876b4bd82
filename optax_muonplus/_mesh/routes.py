"""Along which mesh axes matrices travel to the devices that work on them: the way of least cost.

Devices that hold shards of the same matrices, or copies of them, share them out. Cost is the
operations of the device with the most to do, and the bytes that a device receives: few matrices are
better gathered by some devices than sent to all, and small ones done twice than fetched.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from optax_muonplus._mesh.schedule import Shipment, Stock, assign

# As long as the move of one byte takes: an H100 does about 0.25e15 operations of float32 products a
# second as TF32, and receives 0.45e12 bytes over NVLink. It does twice as many in bfloat16; links
# between hosts are slower. With this figure replicas share out matrices of 70 rows and more.
OPERATIONS_PER_BYTE = 500

# Of one shipment, on each device: what lies in transit is memory beside the matrices. Without a
# bound it took 4 times the shards of 48 layers; in shipments of a twentieth of them, 1.7 times.
SHIPMENT_BYTES = 2**28


@dataclasses.dataclass(frozen=True)
class Route:
    """Where matrices go to, and what comes of it.

    Attributes:
      spread: mesh axes over which matrices are spread by all-to-all.
      gathered: mesh axes along which they are gathered, and the work is repeated.
      divided: mesh axes of replicas that divide the work; the results are gathered along them.
      workers: how many devices have work of their own: along ``divided`` and ``spread``, in this
        order.
      shipments: the assignment to them.
      loads: operations of each device of the mesh, with what it had to do before.
      numbers: that a device receives on the way out and on the way home.
    """

    spread: tuple[str, ...]
    gathered: tuple[str, ...]
    divided: tuple[str, ...]
    workers: int
    shipments: tuple[Shipment, ...]
    loads: np.ndarray
    numbers: tuple[int, int]


def cheapest_route(
    stocks: Sequence[Stock],
    sharding: tuple[str, ...],
    replicas: tuple[str, ...],
    sizes: Mapping[str, int],
    itemsizes: tuple[int, int],
    loads: np.ndarray,
) -> Route:
    """The route of least cost.

    Args:
      stocks: the kinds of matrices on these devices.
      sharding: mesh axes that the matrices are sharded over.
      replicas: mesh axes along which all devices hold the same.
      sizes: of the mesh axes.
      itemsizes: bytes of a number on the way out and on the way home.
      loads: operations that each device of the mesh has to do besides.
    """
    routes = [
        _route(stocks, sharding, spread, divided, sizes, itemsizes, loads)
        for spread in _subsets(sharding)
        for divided in _subsets(replicas)
    ]

    def cost(route: Route) -> int:
        moved = sum(n * size for n, size in zip(route.numbers, itemsizes, strict=True))
        return int(route.loads.max()) + OPERATIONS_PER_BYTE * moved

    return min(routes, key=cost)


def _subsets(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """All of them, the whole first."""
    for length in range(len(axes), -1, -1):
        yield from itertools.combinations(axes, length)


def _route(
    stocks: Sequence[Stock],
    sharding: tuple[str, ...],
    spread: tuple[str, ...],
    divided: tuple[str, ...],
    sizes: Mapping[str, int],
    itemsizes: tuple[int, int],
    loads: np.ndarray,
) -> Route:
    gathered = tuple(axis for axis in sharding if axis not in spread)
    a, g, q = (math.prod(sizes[axis] for axis in axes) for axes in (spread, gathered, divided))
    # Devices along other axes do the same, or their like: the busiest of them counts.
    axes = list(sizes)
    others = tuple(i for i, axis in enumerate(axes) if axis not in divided + spread)
    workers = [axis for axis in axes if axis in divided + spread]
    order = [workers.index(axis) for axis in divided + spread]
    busy = loads.max(axis=others).transpose(order).flatten().tolist()
    shipments, done = assign(stocks, busy, SHIPMENT_BYTES // max(itemsizes))
    added = np.array([after - before for after, before in zip(done, busy, strict=True)])
    added = added.reshape([sizes[axis] for axis in divided + spread]).transpose(np.argsort(order))
    row = sum(shipment.row for shipment in shipments)
    numbers = ((a - 1) + a * (g - 1)) * row, ((a - 1) + a * (q - 1)) * row
    total = loads + np.expand_dims(added, others)
    return Route(spread, gathered, divided, a * q, shipments, total, numbers)
