"""Which device works on which matrix: planned in plain Python before anything is traced.

Devices that hold shards of the same matrices share them out. Every device gets as many matrices of
each kind as divide evenly. The rest is dealt out one by one, the largest first, to the device with
the least to do: kinds that do not divide the devices fill each other's gaps instead of being padded
each by itself.

Over which devices, is chosen by cost: the operations of the device with the most to do, and the
bytes that a device receives. Few matrices are better gathered by some than sent to all.
"""

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

# As long as the move of one byte takes: an H100 does about 0.25e15 operations of float32 products a
# second as TF32, and receives 0.45e12 bytes over NVLink. It does twice as many in bfloat16; links
# between hosts are slower. With this figure replicas share out matrices of 70 rows and more.
OPERATIONS_PER_BYTE = 500

# Of one shipment, on each device: what lies in transit is memory beside the matrices. Without a
# bound it took 4 times the shards of 48 layers; in shipments of a twentieth of them, 1.7 times.
SHIPMENT_BYTES = 2**27

_STEPS = 5  # of Newton-Schulz, in the estimate of operations


class Stock(NamedTuple):
    """Matrices of one kind: alike in shape, layout and sharding.

    Attributes:
      count: how many there are.
      size: numbers in one shard.
      shapes: (shorter, longer side) of what one item consists of; several for a fused parameter.
    """

    count: int
    size: int
    shapes: tuple[tuple[int, int], ...]

    @property
    def operations(self) -> int:
        """Of five Newton-Schulz steps: two products with the longer side, one without."""
        return sum(_STEPS * (4 * n * n * m + 2 * n**3) for n, m in self.shapes)


class Block(NamedTuple):
    """Consecutive items of one kind, on consecutive workers, at one place in their rows.

    Attributes:
      kind: index of the kind.
      first: the first item.
      start: the first worker.
      stop: the worker behind the last.
      each: items for each worker.
      offset: place in the row of shards that a worker receives, in numbers.
    """

    kind: int
    first: int
    start: int
    stop: int
    each: int = 1
    offset: int = 0

    @property
    def items(self) -> int:
        """How many items are in it."""
        return self.each * (self.stop - self.start)


class Slot(NamedTuple):
    """Blocks that are worked on by the same part of the program, on different workers."""

    blocks: tuple[Block, ...]


class Shipment(NamedTuple):
    """What travels together: slots, and the numbers in the row of shards of each worker."""

    slots: tuple[Slot, ...]
    row: int


@dataclasses.dataclass(frozen=True)
class Route:
    """Where matrices go to, and what comes of it.

    Attributes:
      spread: mesh axes over which matrices are spread by all-to-all.
      gathered: mesh axes along which they are gathered, and the work is repeated.
      divided: mesh axes of replicas that divide the work; the results are gathered along them.
      devices: how many hold shards or copies of these matrices.
      workers: how many of them have work of their own: along ``divided`` and ``spread``, in this
        order.
      shipments: the assignment to them.
      operations: of the device with the most to do.
      numbers: that a device receives on the way out and on the way home.
    """

    spread: tuple[str, ...]
    gathered: tuple[str, ...]
    divided: tuple[str, ...]
    devices: int
    workers: int
    shipments: tuple[Shipment, ...]
    operations: int
    numbers: tuple[int, int]


def cheapest_route(
    stocks: Sequence[Stock],
    sharding: tuple[str, ...],
    replicas: tuple[str, ...],
    sizes: Mapping[str, int],
    itemsizes: tuple[int, int],
) -> Route:
    """The route of least cost.

    Args:
      stocks: the kinds of matrices on these devices.
      sharding: mesh axes that the matrices are sharded over.
      replicas: mesh axes along which all devices hold the same.
      sizes: of the mesh axes.
      itemsizes: bytes of a number on the way out and on the way home.
    """
    routes = [
        _route(stocks, (sharding, replicas), spread, divided, sizes, itemsizes)
        for spread in _subsets(sharding)
        for divided in _subsets(replicas)
    ]

    def cost(route: Route) -> int:
        moved = sum(n * size for n, size in zip(route.numbers, itemsizes, strict=True))
        return route.operations + OPERATIONS_PER_BYTE * moved

    return min(routes, key=cost)


def _subsets(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """All of them, the whole first."""
    for length in range(len(axes), -1, -1):
        yield from itertools.combinations(axes, length)


def _route(
    stocks: Sequence[Stock],
    held: tuple[tuple[str, ...], tuple[str, ...]],
    spread: tuple[str, ...],
    divided: tuple[str, ...],
    sizes: Mapping[str, int],
    itemsizes: tuple[int, int],
) -> Route:
    sharding, replicas = held
    devices = math.prod(sizes[axis] for axis in sharding + replicas)
    gathered = tuple(axis for axis in sharding if axis not in spread)
    a, g, q = (math.prod(sizes[axis] for axis in axes) for axes in (spread, gathered, divided))
    shipments, operations = assign(stocks, a * q, SHIPMENT_BYTES // max(itemsizes))
    row = sum(shipment.row for shipment in shipments)
    numbers = ((a - 1) + a * (g - 1)) * row, ((a - 1) + a * (q - 1)) * row
    return Route(spread, gathered, divided, devices, a * q, shipments, operations, numbers)


def assign(stocks: Sequence[Stock], workers: int, most: int) -> tuple[tuple[Shipment, ...], int]:
    """Shipments for ``workers`` devices, and the operations of the one with the most to do.

    Args:
      stocks: the kinds of matrices.
      workers: number of devices.
      most: numbers in a shipment on one device, unless one slot alone has more.
    """
    # A last round that is not dealt out evenly may level what other kinds leave uneven.
    plans = (_planned(stocks, workers, most, undealt) for undealt in (0, 1))
    return min(plans, key=lambda plan: plan[1])


def _planned(
    stocks: Sequence[Stock], workers: int, most: int, undealt: int
) -> tuple[tuple[Shipment, ...], int]:
    shares = [max(0, stock.count // workers - undealt) for stock in stocks]
    shipments: list[Shipment] = []
    waiting: list[Slot] = []
    row = 0
    for block in _even(stocks, shares, workers, most):
        size = stocks[block.kind].size * block.each
        if waiting and (row + size) * workers > most:
            shipments.append(Shipment(tuple(waiting), row))
            waiting, row = [], 0
        waiting.append(Slot((block._replace(offset=row),)))
        row += size
    piles = _piles(stocks, shares, workers)
    longest = max(sum(stocks[kind].size for kind, _ in pile) for pile in piles)
    if waiting and (row + longest) * workers > most:
        shipments.append(Shipment(tuple(waiting), row))
        waiting, row = [], 0
    waiting += _uneven(stocks, piles, row)
    if waiting:
        shipments.append(Shipment(tuple(waiting), row + longest))
    dealt = sum(share * s.operations for share, s in zip(shares, stocks, strict=True))
    most_left = max(sum(stocks[kind].operations for kind, _ in pile) for pile in piles)
    return tuple(shipments), dealt + most_left


def _even(
    stocks: Sequence[Stock], shares: Sequence[int], workers: int, most: int
) -> Iterator[Block]:
    """What all workers get as many of, in runs that fit into a shipment."""
    for kind, (stock, share) in enumerate(zip(stocks, shares, strict=True)):
        at_once = max(1, most // (stock.size * workers))
        for start in range(0, share, at_once):
            each = min(at_once, share - start)
            yield Block(kind, start * workers, 0, workers, each)


def _piles(
    stocks: Sequence[Stock], shares: Sequence[int], workers: int
) -> list[list[tuple[int, int]]]:
    """(kind, item) of the rest for each worker: the largest first, to whom has the least to do."""
    piles: list[list[tuple[int, int]]] = [[] for _ in range(workers)]
    queue = [(0, worker) for worker in range(workers)]
    for kind in sorted(range(len(stocks)), key=lambda kind: -stocks[kind].operations):
        for item in range(shares[kind] * workers, stocks[kind].count):
            load, worker = heapq.heappop(queue)
            piles[worker].append((kind, item))
            heapq.heappush(queue, (load + stocks[kind].operations, worker))
    return piles


def _uneven(
    stocks: Sequence[Stock], piles: Sequence[Sequence[tuple[int, int]]], row: int
) -> list[Slot]:
    """A slot for the first item of some shapes on each worker, one for the second, and so on."""
    rows = [row] * len(piles)
    slots: dict[Hashable, list[Block]] = {}
    for worker, pile in enumerate(piles):
        seen: collections.Counter[Hashable] = collections.Counter()
        for kind, item in pile:
            alike = stocks[kind].shapes, stocks[kind].size
            block = Block(kind, item, worker, worker + 1, 1, rows[worker])
            slots.setdefault((alike, seen[alike]), []).append(block)
            seen[alike] += 1
            rows[worker] += stocks[kind].size
    return [_slot(blocks) for blocks in slots.values()]


def _slot(blocks: Sequence[Block]) -> Slot:
    """``blocks`` of one item each on rising workers, those joined that can be."""
    joined: list[Block] = []
    for block in blocks:
        before = joined[-1] if joined else None
        if before and block == before._replace(
            first=before.first + before.items, start=before.stop, stop=before.stop + 1
        ):
            joined[-1] = before._replace(stop=block.stop)
        else:
            joined.append(block)
    return Slot(tuple(joined))
