"""Which device works on which matrix: each exactly once, and loads as even as possible."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from optax_muonplus.run.schedule import GroupSize, assign

SQUARE, LONG = ((16, 16),), ((16, 64),)
sizes = st.lists(
    st.builds(
        GroupSize,
        st.integers(1, 30),
        st.sampled_from([4, 8]),
        st.sampled_from([SQUARE, LONG, ((16, 16), (16, 32))]),
        st.sampled_from([1, 6, 18]),
    ),
    min_size=1,
    max_size=5,
)


@settings(deadline=None)
@given(
    sizes,
    st.lists(st.integers(0, 30), min_size=1, max_size=9),
    st.sampled_from([1, 200, 10**9]),
)
def test_every_matrix_is_assigned_once(sizes, busy, most):
    workers = len(busy)
    buckets, done = assign(sizes, busy, most)
    items = [[0] * size.count for size in sizes]
    loads = list(busy)
    for bucket in buckets:
        rows = [[0] * bucket.row for _ in range(workers)]
        for task in bucket.tasks:
            shapes = {(sizes[b.group].shapes, sizes[b.group].shard_lines) for b in task.segments}
            assert len(shapes) == 1  # one part of the program can work on all of them
            taken = []
            for segment in task.segments:
                size = sizes[segment.group]
                taken += range(segment.start, segment.stop)
                for item in range(segment.first, segment.first + segment.items):
                    items[segment.group][item] += 1
                for worker in range(segment.start, segment.stop):
                    loads[worker] += size.flops * segment.items_each
                    for place in range(segment.offset, segment.offset + segment.width):
                        rows[worker][place] += 1
            assert len(taken) == len(set(taken))
        assert max(max(row) for row in rows) == 1  # no two in one place
        assert bucket.row == max(sum(row) for row in rows)  # and no room that nobody needs
    assert all(count == 1 for kind in items for count in kind)
    assert done == loads
    padded = sum(math.ceil(size.count / workers) * size.flops for size in sizes)
    assert max(done) <= max(busy) + padded


@given(sizes, st.integers(1, 9), st.integers(1, 2000))
def test_transfers_are_bounded(sizes, workers, most):
    buckets, _ = assign(sizes, [0] * workers, most)
    for bucket in buckets:
        # Or no longer than its first task.
        assert bucket.row * workers <= most or bucket.row == width(bucket.tasks[0])
        for task in bucket.tasks:
            segment = task.segments[0]
            assert segment.items_each == 1 or segment.width * workers <= most


def test_a_row_is_filled_by_one_run_of_each_group():
    """One part of the program then works on all of it."""
    buckets, _ = assign([GroupSize(24, 3, SQUARE, 1)], [0, 0], 20)  # 4 rows of 3 of 12 matrices
    runs = [[task.segments[0].items_each for task in bucket.tasks] for bucket in buckets]
    assert runs == [[3]] * 4


def width(task):
    return task.segments[0].width


def segments(buckets):
    return [segment for bucket in buckets for task in bucket.tasks for segment in task.segments]


def test_uneven_remainders_of_different_shapes_are_balanced_together():
    """Four square and four long matrices on eight devices: one each, none idle."""
    buckets, loads = assign([GroupSize(4, 2, SQUARE, 6), GroupSize(4, 8, LONG, 18)], [0] * 8, 10**9)
    assert loads == [18] * 4 + [6] * 4
    assert sorted((b.start, b.stop) for b in segments(buckets)) == [(0, 4), (4, 8)]
    # Tall ones those of wide ones, which the same part of the program works on.
    buckets, loads = assign([GroupSize(12, 8, LONG, 18)] * 2, [0] * 8, 10**9)
    assert loads == [54] * 8
    assert len(buckets) == 1 and len(buckets[0].tasks) == 3
    # A last round of squares is kept back for those who have one long matrix fewer.
    _, loads = assign([GroupSize(128, 2, SQUARE, 6), GroupSize(96, 8, LONG, 13)], [0] * 64, 10**9)
    assert max(loads) == 2 * 13 + 6
    # And what the devices have to do besides is counted.
    _, loads = assign([GroupSize(4, 2, SQUARE, 6)], [18] * 4 + [0] * 4, 10**9)
    assert loads == [18] * 4 + [6] * 4


def test_remainders_are_balanced_even_beyond_the_bound_on_transfers():
    """Rows are all as long as the longest, so that it costs nothing."""
    buckets, _ = assign([GroupSize(4, 2, SQUARE, 6), GroupSize(4, 8, LONG, 18)], [0] * 8, 1)
    assert [bucket.row for bucket in buckets] == [8]


def test_divisible_counts_are_assigned_evenly():
    buckets, loads = assign(
        [GroupSize(48, 2, SQUARE, 6), GroupSize(24, 8, LONG, 18)], [0] * 8, 10**9
    )
    assert loads == [6 * 6 + 3 * 18] * 8
    assert all((b.start, b.stop) == (0, 8) for b in segments(buckets))


def test_runs_fill_buckets_evenly():
    """Two kinds with 48 and 24 items for each worker, where 23 fit: four buckets of 18."""
    buckets, _ = assign([GroupSize(96, 5, SQUARE, 6), GroupSize(48, 5, LONG, 6)], [0, 0], 235)
    assert [bucket.row for bucket in buckets] == [18 * 5] * 4
    # Where 50 fit, two of 36.
    buckets, _ = assign([GroupSize(96, 5, SQUARE, 6), GroupSize(48, 5, LONG, 6)], [0, 0], 500)
    assert [bucket.row for bucket in buckets] == [36 * 5] * 2
