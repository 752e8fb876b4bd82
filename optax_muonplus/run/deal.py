"""Which worker gets which matrix: dealt in plain Python before anything is traced.

Every worker gets as many matrices of each kind as divide evenly. The remainders of all kinds are
dealt together, one matrix at a time, the largest first, to the worker with the least to do. Uneven
remainders of different kinds thus balance each other, in place of padding each by itself.
"""

import collections
import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

LANES = 128
"""Numbers in a line, in which shards are sent.

A TPU stores the last two axes of an array in tiles, of 16 x 128 numbers in bfloat16. A tile of an
array ``(workers, lines, 128)`` belongs to one worker, and an all-to-all moves it as it is. In an
array ``(workers, elements)`` a tile has numbers of 16 workers, and XLA stores all of it anew before
and after the all-to-all. For LLaMA-7B on 256 chips of v5e that makes 42.5 million cycles an update,
by libtpu's estimate, and lines 36.9. Elsewhere it makes no difference.
"""


class Kind(NamedTuple):
    """Items that are alike; an *item* is one index of a parameter's batch axes."""

    count: int  # number of items
    lines: int  # that one shard of an item takes
    flops: int  # the work on one item


class Hand(NamedTuple):
    """Consecutive items of one kind, for consecutive workers, at one place in their rows.

    A *send buffer* ``(workers, row, 128)`` has one row of lines for each worker. A worker's
    *receive buffer* ``(senders, row, 128)`` has the row that each sender has for it. A hand has the
    same lines in both.
    """

    kind: int  # its index
    first: int  # index of the first item
    start: int  # the first worker
    stop: int  # the worker behind the last
    each: int  # items for each worker
    lines: int  # that one shard of an item takes
    offset: int = 0  # the first line in a row

    @property
    def items(self) -> slice:
        """The items of the kind that are in it."""
        return slice(self.first, self.first + self.each * (self.stop - self.start))

    @property
    def width(self) -> int:
        """The number of lines of a row that it has."""
        return self.each * self.lines

    def part(self, start: int, each: int, offset: int) -> "Hand":
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


Turn = tuple[Hand, ...]
"""Hands that the same part of the program works on, each on other workers."""

Bucket = tuple[Turn, ...]
"""Turns, in order, whose shards are sent together."""


def row_of(turns: Bucket) -> int:
    """Counts the lines that each worker receives from each sender in a bucket."""
    return max(hand.offset + hand.width for turn in turns for hand in turn)


def deal(
    kinds: Sequence[Kind], loads: Sequence[int], max_lines: int
) -> tuple[tuple[Bucket, ...], list[int]]:
    """Deals items to workers, and adds the FLOPs of the items to the loads of the workers.

    A bucket has ``max_lines`` on one device at most, unless one turn alone has more.
    """
    workers = len(loads)
    # Dealing the last even share one by one too may level what other kinds leave uneven.
    shares = [[max(0, kind.count // workers - held) for kind in kinds] for held in (0, 1)]
    deals = [_dealt(kinds, share, loads) for share in shares]
    turns, after = min(deals, key=lambda dealt: max(dealt[1]))
    return _in_buckets(turns, workers, max(1, max_lines // workers)), after


def _dealt(
    kinds: Sequence[Kind], shares: Sequence[int], loads: Sequence[int]
) -> tuple[list[list[Hand]], list[int]]:
    """Deals equal shares to all workers, and then the rest; returns turns, and loads behind them.

    One turn has the first item of some length on each worker, one the second, and so on. Items of
    one length are cut out of a row in the same way, whatever their kind.
    """
    workers = len(loads)
    turns: dict[tuple[int, int], list[Hand]] = {}
    even = sum(share * kind.flops for share, kind in zip(shares, kinds, strict=True))
    queue = [(load + even, worker) for worker, load in enumerate(loads)]
    heapq.heapify(queue)
    seen: collections.Counter[tuple[int, int]] = collections.Counter()
    for index, kind in sorted(enumerate(kinds), key=lambda x: -x[1].flops):
        for item in range(shares[index] * workers, kind.count):
            load, worker = queue[0]
            heapq.heapreplace(queue, (load + kind.flops, worker))
            turn = turns.setdefault((kind.lines, seen[kind.lines, worker]), [])
            turn.append(Hand(index, item, worker, worker + 1, 1, kind.lines))
            seen[kind.lines, worker] += 1
    given = [(i, share) for i, share in enumerate(shares) if share]
    common = [[Hand(i, 0, 0, workers, share, kinds[i].lines)] for i, share in given]
    after = [load for load, _ in sorted(queue, key=lambda x: x[1])]
    return [*common, *turns.values()], after


def _in_buckets(turns: Sequence[Sequence[Hand]], workers: int, most: int) -> tuple[Bucket, ...]:
    """Cuts turns into buckets whose rows are about equally long, and have ``most`` lines at most.

    A turn that only fills shorter rows joins a bucket, since all rows are padded to one length.
    """
    rows = np.zeros(workers, int)
    for hand in itertools.chain(*turns):
        rows[hand.start : hand.stop] += hand.width
    total = int(rows.max())
    length = -(-total // -(-total // most))
    # A row that the next item does not fit into has reached this length.
    most = min(most, length + max(turn[0].lines for turn in turns) - 1)
    buckets: list[list[Turn]] = []
    for turn in turns:
        lines, left = turn[0].lines, turn[0].each
        while left:
            used = max(int(rows[hand.start]) for hand in turn)
            if not buckets or used + lines > max(most, rows.max()):
                buckets.append([])
                rows[:] = used = 0
            each = min(left, max(1, (most - used) // lines))
            hands = [x.part(x.each - left, each, int(rows[x.start])) for x in turn]
            buckets[-1].append(_joined(hands))
            for hand in hands:
                rows[hand.start : hand.stop] += hand.width
            left -= each
    return tuple(map(tuple, buckets))


def _joined(hands: Sequence[Hand]) -> Turn:
    """Joins hands whose items and workers are consecutive."""

    def key(place: tuple[int, Hand]) -> tuple[int, ...]:
        i, hand = place
        return hand.kind, hand.first - hand.start, hand.start - i, hand.offset

    placed = enumerate(sorted(hands, key=lambda hand: hand.start))
    runs = [[hand for _, hand in run] for _, run in itertools.groupby(placed, key)]
    return tuple(run[0]._replace(stop=run[-1].stop) for run in runs)
