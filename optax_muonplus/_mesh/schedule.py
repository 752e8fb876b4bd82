"""Which device works on which matrix: dealt out in plain Python before anything is traced.

Every worker gets as many matrices of each kind as divide evenly. The rest is dealt out one by one,
the largest first, to the worker with the least to do: kinds that do not divide the workers fill
each other's gaps instead of being padded each by itself.
"""

import collections
import heapq
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple


class Stock(NamedTuple):
    """Matrices of one kind: alike in shape, layout and sharding.

    Attributes:
      count: how many items there are.
      size: numbers in one shard of an item.
      shapes: (shorter, longer side) of the matrices in an item; a fused parameter has several.
      operations: that the work on an item takes.
    """

    count: int
    size: int
    shapes: tuple[tuple[int, int], ...]
    operations: int


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


def assign(
    stocks: Sequence[Stock], loads: Sequence[int], most: int
) -> tuple[tuple[Shipment, ...], list[int]]:
    """Shipments for the workers, and their loads with the work on them.

    Args:
      stocks: the kinds of matrices.
      loads: operations that each worker has to do besides.
      most: numbers in a shipment on one device, unless one slot alone has more.
    """
    # A last round that is not dealt out evenly may level what other kinds leave uneven.
    plans = (_planned(stocks, loads, most, undealt) for undealt in (0, 1))
    return min(plans, key=lambda plan: max(plan[1]))


def _planned(
    stocks: Sequence[Stock], loads: Sequence[int], most: int, undealt: int
) -> tuple[tuple[Shipment, ...], list[int]]:
    workers = len(loads)
    shares = [max(0, stock.count // workers - undealt) for stock in stocks]
    dealt = sum(share * stock.operations for share, stock in zip(shares, stocks, strict=True))
    piles, loads = _piles(stocks, shares, [load + dealt for load in loads])
    slots = [*_even(stocks, shares, workers, most), *_uneven(stocks, piles)]
    return _shipped(stocks, slots, workers, most), loads


def _shipped(
    stocks: Sequence[Stock], slots: Sequence[Sequence[Block]], workers: int, most: int
) -> tuple[Shipment, ...]:
    """``slots`` in shipments, each block at the end of its worker's row.

    A slot that only fills up shorter rows goes with the others, since all rows are as long.
    """
    shipments: list[Shipment] = []
    waiting: list[Slot] = []
    rows = [0] * workers
    for blocks in slots:
        size = stocks[blocks[0].kind].size * blocks[0].each
        longest = max(rows[worker] for b in blocks for worker in range(b.start, b.stop)) + size
        if waiting and longest > max(rows) and longest * workers > most:
            shipments.append(Shipment(tuple(waiting), max(rows)))
            waiting, rows = [], [0] * workers
        waiting.append(_slot([block._replace(offset=rows[block.start]) for block in blocks]))
        for block in blocks:
            for worker in range(block.start, block.stop):
                rows[worker] += size
    if waiting:
        shipments.append(Shipment(tuple(waiting), max(rows)))
    return tuple(shipments)


def _even(
    stocks: Sequence[Stock], shares: Sequence[int], workers: int, most: int
) -> Iterator[list[Block]]:
    """Slots for what all workers get as many of, in runs that fit into a shipment."""
    for kind, (stock, share) in enumerate(zip(stocks, shares, strict=True)):
        at_once = max(1, most // (stock.size * workers))
        for start in range(0, share, at_once):
            each = min(at_once, share - start)
            yield [Block(kind, start * workers, 0, workers, each)]


def _piles(
    stocks: Sequence[Stock], shares: Sequence[int], loads: Sequence[int]
) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """(kind, item) of the rest for each worker, and the loads that come of it."""
    piles: list[list[tuple[int, int]]] = [[] for _ in loads]
    queue = [(load, worker) for worker, load in enumerate(loads)]
    heapq.heapify(queue)
    for kind in sorted(range(len(stocks)), key=lambda kind: -stocks[kind].operations):
        for item in range(shares[kind] * len(loads), stocks[kind].count):
            load, worker = queue[0]
            piles[worker].append((kind, item))
            heapq.heapreplace(queue, (load + stocks[kind].operations, worker))
    done = {worker: load for load, worker in queue}
    return piles, [done[worker] for worker in range(len(loads))]


def _uneven(
    stocks: Sequence[Stock], piles: Sequence[Sequence[tuple[int, int]]]
) -> list[list[Block]]:
    """A slot for the first item of some shapes on each worker, one for the second, and so on."""
    slots: dict[Hashable, list[Block]] = {}
    for worker, pile in enumerate(piles):
        seen: collections.Counter[Hashable] = collections.Counter()
        for kind, item in pile:
            alike = stocks[kind].shapes, stocks[kind].size
            slots.setdefault((alike, seen[alike]), []).append(Block(kind, item, worker, worker + 1))
            seen[alike] += 1
    return list(slots.values())


def _slot(blocks: Sequence[Block]) -> Slot:
    """``blocks``, on rising workers; those of single items joined where they can be."""
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
