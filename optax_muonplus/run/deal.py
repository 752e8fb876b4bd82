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

    count: int  # of items
    lines: int  # that one shard of an item takes
    flops: int  # of an item


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
    # Dealing the last even share one by one too may level what other kinds leave uneven.
    shares = [[max(0, kind.count // len(loads) - held) for kind in kinds] for held in (0, 1)]
    rests = [_deal_rest(kinds, share, loads) for share in shares]
    best = min((0, 1), key=lambda i: max(rests[i][1]))
    most = max(1, max_lines // len(loads))
    return _in_buckets(kinds, shares[best], rests[best][0], len(loads), most), rests[best][1]


def _deal_rest(
    kinds: Sequence[Kind], shares: Sequence[int], loads: Sequence[int]
) -> tuple[list[list[Hand]], list[int]]:
    """Deals what the equal shares of all workers leave; returns turns, and the loads that result.

    One turn has the first item of some length on each worker, one the second, and so on. Items of
    one length are cut out of a row in the same way, whatever their kind.
    """
    even = sum(share * kind.flops for share, kind in zip(shares, kinds, strict=True))
    queue = [(load + even, worker) for worker, load in enumerate(loads)]
    heapq.heapify(queue)
    seen: collections.Counter[tuple[int, int]] = collections.Counter()
    turns: dict[tuple[int, int], list[Hand]] = {}
    for index, kind in sorted(enumerate(kinds), key=lambda x: -x[1].flops):
        for item in range(shares[index] * len(loads), kind.count):
            load, worker = queue[0]
            heapq.heapreplace(queue, (load + kind.flops, worker))
            turn = turns.setdefault((kind.lines, seen[kind.lines, worker]), [])
            turn.append(Hand(index, item, worker, worker + 1, 1, kind.lines))
            seen[kind.lines, worker] += 1
    return list(turns.values()), [load for load, _ in sorted(queue, key=lambda x: x[1])]


def _in_buckets(
    kinds: Sequence[Kind],
    shares: Sequence[int],
    rest: Sequence[Sequence[Hand]],
    workers: int,
    most: int,
) -> tuple[Bucket, ...]:
    """Fills rows of ``most`` lines at most, and all about equally long, with shares and the rest.

    A turn that only fills shorter rows joins a bucket, since all rows are padded to one length.
    """
    extra = np.zeros(workers, int)
    for hand in itertools.chain(*rest):
        extra[hand.start] += hand.lines
    even = sum(share * kind.lines for share, kind in zip(shares, kinds, strict=True))
    total = even + int(extra.max())
    length = -(-total // -(-total // most))
    # A row that the next item does not fit into has reached this length.
    most = min(most, length + max(kind.lines for kind in kinds) - 1)
    buckets: list[list[Turn]] = []
    rows = np.full(workers, most)  # lines in use in the last bucket; there is none yet

    def add(turn: Sequence[Hand], most: int) -> None:
        if max(rows[hand.start] for hand in turn) + turn[0].width > most:
            buckets.append([])
            rows[:] = 0
        buckets[-1].append(_joined([x._replace(offset=int(rows[x.start])) for x in turn]))
        for hand in turn:
            rows[hand.start : hand.stop] += hand.width

    for index, (kind, share) in enumerate(zip(kinds, shares, strict=True)):
        stop = 0
        while stop < share:
            room = int(most - rows[0]) // kind.lines or most // kind.lines
            start, stop = stop, min(stop + max(1, room), share)
            add([Hand(index, start * workers, 0, workers, stop - start, kind.lines)], most)
    for turn in rest:
        add(turn, max(most, int(rows.max())))
    return tuple(map(tuple, buckets))


def _joined(hands: Sequence[Hand]) -> Turn:
    """Joins hands whose items and workers are consecutive."""

    def key(place: tuple[int, Hand]) -> tuple[int, ...]:
        i, hand = place
        return hand.kind, hand.first - hand.start, hand.start - i, hand.offset

    placed = enumerate(sorted(hands, key=lambda hand: hand.start))
    runs = [[hand for _, hand in run] for _, run in itertools.groupby(placed, key)]
    return tuple(run[0]._replace(stop=run[-1].stop) for run in runs)
