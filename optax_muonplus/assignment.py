"""Which device works on which matrix: planned in plain Python before anything is traced.

Devices that hold shards of the same matrices share them out. Every device gets as many matrices of
each kind as divide evenly; of what is left, matrices of one shape fill slots in which each device
has one of some kind, and the last ones, too few for all, go to the devices with the least to do.
So shapes that do not divide the devices fill each other's gaps instead of being padded one by one.

Over which devices, is chosen by cost: the operations of the device with the most to do, and the
bytes that a device receives. Few matrices are better gathered by some than sent to all.
"""

import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

# As long as the move of one byte takes. By the vendors' figures an H100 does 0.8e15 operations a
# second in bfloat16 and receives 0.45e12 bytes over NVLink; a TPU v5p 0.46e15 and 0.2e12.
OPERATIONS_PER_BYTE = 2000

# Of one shipment, on each device. What lies in transit is a second copy of the matrices.
SHIPMENT_BYTES = 2**28

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
      workers: devices along ``divided`` and ``spread``, in this order.
      shipments: the assignment to them.
      operations: of the device with the most to do.
      numbers: that a device receives on the way out and on the way home.
    """

    spread: tuple[str, ...]
    gathered: tuple[str, ...]
    divided: tuple[str, ...]
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
        _route(stocks, sharding, spread, divided, sizes, itemsizes)
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
    sharding: tuple[str, ...],
    spread: tuple[str, ...],
    divided: tuple[str, ...],
    sizes: Mapping[str, int],
    itemsizes: tuple[int, int],
) -> Route:
    gathered = tuple(axis for axis in sharding if axis not in spread)
    a, g, q = (math.prod(sizes[axis] for axis in axes) for axes in (spread, gathered, divided))
    shipments, operations = assign(stocks, a * q, SHIPMENT_BYTES // max(itemsizes))
    row = sum(shipment.row for shipment in shipments)
    numbers = ((a - 1) + a * (g - 1)) * row, ((a - 1) + a * (q - 1)) * row
    return Route(spread, gathered, divided, a * q, shipments, operations, numbers)


def assign(stocks: Sequence[Stock], workers: int, most: int) -> tuple[tuple[Shipment, ...], int]:
    """Shipments for ``workers`` devices, and the operations of the one with the most to do.

    Args:
      stocks: the kinds of matrices.
      workers: number of devices.
      most: numbers in a shipment on one device, unless one slot alone has more.
    """
    full = [*_even(stocks, workers, most), *_mixed(stocks, workers)]
    shipments: list[Shipment] = []
    waiting: list[Slot] = []
    row = 0
    for slot in full:
        size = stocks[slot.blocks[0].kind].size * slot.blocks[0].each
        if waiting and (row + size) * workers > most:
            shipments.append(Shipment(tuple(waiting), row))
            waiting, row = [], 0
        waiting.append(Slot(tuple(block._replace(offset=row) for block in slot.blocks)))
        row += size
    partial, rows = _partial(stocks, workers, row)
    done = sum(stocks[b.kind].operations * b.items for slot in full for b in slot.blocks)
    loads = [done // workers] * workers
    for slot in partial:
        for block in slot.blocks:
            for worker in range(block.start, block.stop):
                loads[worker] += stocks[block.kind].operations
    if waiting or partial:
        shipments.append(Shipment((*waiting, *partial), max(rows)))
    return tuple(shipments), max(loads)


def _even(stocks: Sequence[Stock], workers: int, most: int) -> Iterator[Slot]:
    """What divides evenly, in runs that fit into a shipment."""
    for kind, stock in enumerate(stocks):
        share = stock.count // workers
        at_once = max(1, most // (stock.size * workers))
        for start in range(0, share, at_once):
            each = min(at_once, share - start)
            yield Slot((Block(kind, start * workers, 0, workers, each),))


def _leftovers(stocks: Sequence[Stock], workers: int) -> list[list[tuple[int, int]]]:
    """(kind, item) of what does not divide evenly, by the shapes that are worked on."""
    found: dict[Hashable, list[tuple[int, int]]] = {}
    for kind, stock in enumerate(stocks):
        rest = range(stock.count - stock.count % workers, stock.count)
        found.setdefault((stock.shapes, stock.size), []).extend((kind, item) for item in rest)
    return list(found.values())


def _mixed(stocks: Sequence[Stock], workers: int) -> Iterator[Slot]:
    """Slots that all workers have something in, though not all of the same kind."""
    for items in _leftovers(stocks, workers):
        for start in range(0, len(items) - workers + 1, workers):
            yield _slot(
                [Block(*item, w, w + 1) for w, item in enumerate(items[start : start + workers])]
            )


def _partial(stocks: Sequence[Stock], workers: int, row: int) -> tuple[list[Slot], list[int]]:
    """Slots for the last ones, the largest first, and the length of each worker's row.

    Args:
      stocks: the kinds of matrices.
      workers: number of devices.
      row: where the rows stand before.
    """
    slots, rows, loads = [], [row] * workers, [0] * workers
    last = [items[len(items) - len(items) % workers :] for items in _leftovers(stocks, workers)]
    last = [items for items in last if items]
    for items in sorted(last, key=lambda items: -stocks[items[0][0]].operations):
        chosen = sorted(sorted(range(workers), key=loads.__getitem__)[: len(items)])
        blocks = []
        for worker, (kind, item) in zip(chosen, items, strict=True):
            blocks.append(Block(kind, item, worker, worker + 1, 1, rows[worker]))
            rows[worker] += stocks[kind].size
            loads[worker] += stocks[kind].operations
        slots.append(_slot(blocks))
    return slots, rows


def _slot(blocks: Sequence[Block]) -> Slot:
    """``blocks`` of one item each, those joined that can be."""
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
