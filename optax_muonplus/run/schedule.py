"""Which worker works on which matrix: scheduled in plain Python before anything is traced.

Every worker gets as many matrices of each group as divide evenly. The remainders of all groups are
assigned together, one matrix at a time, the largest first, to the worker with the least to do.
Uneven remainders of different shapes thus balance each other, in place of padding each by itself.
"""

import collections
import heapq
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import jax

LINE = 128
"""Numbers in a line, in which shards are sent.

A TPU stores the last two axes of an array in tiles, of 16 x 128 numbers in bfloat16. A tile of an
array ``(workers, lines, 128)`` belongs to one worker, and an all-to-all moves it as it is. In an
array ``(workers, elements)`` a tile has numbers of 16 workers, and XLA stores all of it anew before
and after the all-to-all. For LLaMA-7B on 256 chips of v5e that makes 42.5 million cycles an update,
by libtpu's estimate, and lines 36.9. Elsewhere it makes no difference.
"""


class GroupSize(NamedTuple):
    """What the schedule knows of a group of matrices alike in shape, layout and sharding.

    An *item* is one index of a parameter's batch axes: one matrix, or several if it is fused.
    """

    count: int  # of items
    shard_lines: int  # that one shard of an item takes
    shapes: tuple[tuple[int, int], ...]  # (shorter, longer side) of the matrices in an item
    flops: int  # of an item


class Segment(NamedTuple):
    """Consecutive items of one group, for consecutive workers, at one place in their buffers.

    A *send buffer* ``(workers, row, 128)`` has one row of lines for each worker. A worker's
    *receive buffer* ``(senders, row, 128)`` has the row that each sender has for it. A segment has
    the same lines in both, and knows how to read and write itself.
    """

    group: int  # its index
    first: int  # index of the first item
    start: int  # the first worker
    stop: int  # the worker behind the last
    items_each: int  # for each worker
    shard_lines: int  # that one shard of an item takes
    offset: int = 0  # the first line in a row

    @property
    def items(self) -> int:
        """How many items are in it."""
        return self.items_each * (self.stop - self.start)

    @property
    def width(self) -> int:
        """How many lines of a row it has."""
        return self.items_each * self.shard_lines

    def write_send(self, buffer: jax.Array, shards: jax.Array) -> jax.Array:
        """The send buffer with this segment's items; ``shards`` ``(items, lines, 128)`` has all."""
        own = shards[self.first : self.first + self.items]
        rows = own.reshape(self.stop - self.start, self.width, -1)
        return jax.lax.dynamic_update_slice(buffer, rows, (self.start, self.offset, 0))

    def read_send(self, buffer: jax.Array) -> jax.Array:
        """This segment's items in a send buffer, ``(items, lines, 128)``."""
        rows = buffer[self.start : self.stop, self.offset : self.offset + self.width]
        return rows.reshape(self.items, self.shard_lines, -1)

    def write_receive(self, buffer: jax.Array, shards: jax.Array) -> jax.Array:
        """The receive buffer with ``shards``, of a shape as :meth:`read_receive` returns."""
        rows = shards.reshape(len(buffer), self.width, -1)
        return jax.lax.dynamic_update_slice(buffer, rows, (0, self.offset, 0))

    def read_receive(self, buffer: jax.Array) -> jax.Array:
        """This segment's shards in a receive buffer, ``(senders, items_each, lines, 128)``."""
        rows = buffer[:, self.offset : self.offset + self.width]
        return rows.reshape(len(buffer), self.items_each, self.shard_lines, -1)


class Task(NamedTuple):
    """Segments that the same part of the program works on, each on other workers."""

    segments: tuple[Segment, ...]

    def is_common(self, workers: int) -> bool:
        """Whether all workers have the same in it."""
        first = self.segments[0]
        return len(self.segments) == 1 and first.stop - first.start == workers


class Bucket(NamedTuple):
    """Tasks, in order, whose shards are sent together."""

    tasks: tuple[Task, ...]
    row: int  # lines that each worker receives from each sender

    @property
    def segments(self) -> list[Segment]:
        """Returns the segments of all tasks."""
        return [segment for task in self.tasks for segment in task.segments]


def assign(
    sizes: Sequence[GroupSize], loads: Sequence[int], max_lines: int
) -> tuple[tuple[Bucket, ...], list[int]]:
    """Makes buckets for the workers, and adds the work on them to the FLOPs that they have.

    A bucket has ``max_lines`` on one device at most, unless one task alone has more.
    """
    workers = len(loads)
    schedules = []
    # Assigning the last even round one by one too may level what other groups leave uneven.
    for held_back in (0, 1):
        shares = [max(0, size.count // workers - held_back) for size in sizes]
        even = sum(share * size.flops for share, size in zip(shares, sizes, strict=True))
        remainders, after = _assign_remainders(sizes, shares, [load + even for load in loads])
        most = _row(sizes, shares, remainders, max(1, max_lines // workers))
        tasks = [*_even(sizes, shares, workers, most), *remainders]
        schedules.append((_buckets(tasks, workers, most), after))
    return min(schedules, key=lambda schedule: max(schedule[1]))


def _even(
    sizes: Sequence[GroupSize], shares: Sequence[int], workers: int, most: int
) -> Iterator[list[Segment]]:
    """Tasks for what all workers get as many of, in runs that fill rows of ``most`` lines."""
    filled = 0
    for group, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        start = 0
        while start < share:
            if filled + size.shard_lines > most:
                filled = 0
            fitting = max(1, (most - filled) // size.shard_lines)
            each = min(fitting, share - start)
            yield [Segment(group, start * workers, 0, workers, each, size.shard_lines)]
            start += each
            filled += each * size.shard_lines


def _row(
    sizes: Sequence[GroupSize],
    shares: Sequence[int],
    remainders: Sequence[Sequence[Segment]],
    most: int,
) -> int:
    """Lines of a row, ``most`` at most, that make no more buckets and all of about one length."""
    added: collections.Counter[int] = collections.Counter()
    for task in remainders:
        for segment in task:
            added[segment.start] += segment.width
    even = sum(share * size.shard_lines for size, share in zip(sizes, shares, strict=True))
    total = even + max(added.values(), default=0)
    goal = -(-total // max(1, -(-total // most)))
    # A row that the next matrix does not fit into has reached the goal.
    return min(most, goal + max((size.shard_lines for size in sizes), default=1) - 1)


def _assign_remainders(
    sizes: Sequence[GroupSize], shares: Sequence[int], loads: Sequence[int]
) -> tuple[list[list[Segment]], list[int]]:
    """Tasks for what does not divide evenly, and the loads that result.

    One task has the first item of some shapes on each worker, one the second, and so on.
    """
    assigned: list[list[tuple[int, int]]] = [[] for _ in loads]
    queue = [(load, worker) for worker, load in enumerate(loads)]
    heapq.heapify(queue)
    for group in sorted(range(len(sizes)), key=lambda group: -sizes[group].flops):
        for item in range(shares[group] * len(loads), sizes[group].count):
            load, worker = queue[0]
            assigned[worker].append((group, item))
            heapq.heapreplace(queue, (load + sizes[group].flops, worker))
    tasks: dict[Hashable, list[Segment]] = {}
    for worker, items in enumerate(assigned):
        seen: collections.Counter[Hashable] = collections.Counter()
        for group, item in items:
            _, lines, shapes, _ = sizes[group]
            segment = Segment(group, item, worker, worker + 1, 1, lines)
            tasks.setdefault((shapes, lines, seen[shapes, lines]), []).append(segment)
            seen[shapes, lines] += 1
    return list(tasks.values()), [load for load, _ in sorted(queue, key=lambda x: x[1])]


def _buckets(tasks: Sequence[Sequence[Segment]], workers: int, most: int) -> tuple[Bucket, ...]:
    """``tasks`` in buckets, each segment behind the others in its workers' rows.

    A task that only fills shorter rows joins the bucket, since all rows are padded to one length.
    """
    buckets: list[Bucket] = []
    current: list[Task] = []
    rows = [0] * workers
    for segments in tasks:
        width = segments[0].width
        longest = max(rows[worker] for s in segments for worker in range(s.start, s.stop)) + width
        if current and longest > max(rows) and longest > most:
            buckets.append(Bucket(tuple(current), max(rows)))
            current, rows = [], [0] * workers
        current.append(_task([s._replace(offset=rows[s.start]) for s in segments]))
        for segment in segments:
            for worker in range(segment.start, segment.stop):
                rows[worker] += width
    return (*buckets, Bucket(tuple(current), max(rows))) if current else tuple(buckets)


def _task(segments: Sequence[Segment]) -> Task:
    """``segments``, on rising workers; consecutive single items are joined."""
    joined: list[Segment] = []
    for segment in segments:
        before = joined[-1] if joined else None
        if before and segment == before._replace(
            first=before.first + before.items, start=before.stop, stop=before.stop + 1
        ):
            joined[-1] = before._replace(stop=segment.stop)
        else:
            joined.append(segment)
    return Task(tuple(joined))
