"""Which device works on which matrix, and over which mesh axes matrices travel to it."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from optax_muonplus._execution.mesh import plan as planning
from optax_muonplus._execution.mesh.plan import Route, WorkItem, assign, cheaper, lines_of
from optax_muonplus._execution.mesh.shards import ShardedLeaf
from optax_muonplus._leaves.layout import MatrixLayout
from optax_muonplus._leaves.placement import LeafSharding

kinds_of_items = st.lists(
    st.builds(WorkItem, st.integers(1, 30), st.sampled_from([4, 8]), st.sampled_from([1, 6, 18])),
    min_size=1,
    max_size=5,
)


@settings(deadline=None)
@given(
    kinds_of_items,
    st.lists(st.integers(0, 30), min_size=1, max_size=9),
    st.sampled_from([1, 200, 10**9]),
)
def test_every_item_is_assigned_once(kinds, busy, most):
    workers = len(busy)
    buckets, done = assign(kinds, busy, most)
    items = [[0] * kind.count for kind in kinds]
    loads = list(busy)
    for bucket in buckets:
        rows = np.zeros((workers, lines_of(bucket)), int)
        for slots in bucket:
            assert len({slot.lines for slot in slots}) == 1  # one part of the program cuts them out
            taken = [w for slot in slots for w in range(slot.start, slot.stop)]
            assert len(taken) == len(set(taken))
            for slot in slots:
                assert slot.lines == kinds[slot.kind].lines
                for item in range(slot.items.start, slot.items.stop):
                    items[slot.kind][item] += 1
                for worker in range(slot.start, slot.stop):
                    loads[worker] += kinds[slot.kind].flops * slot.each
                rows[slot.start : slot.stop, slot.offset : slot.offset + slot.width] += 1
        assert rows.max() == 1  # no two in one place
        assert rows.sum(axis=1).max() == lines_of(bucket)  # and no room that nobody needs
    assert all(count == 1 for kind in items for count in kind)
    assert done == loads
    padded = sum(math.ceil(kind.count / workers) * kind.flops for kind in kinds)
    assert max(done) <= max(busy) + padded


@given(kinds_of_items, st.integers(1, 9), st.integers(1, 2000))
def test_buckets_are_bounded(kinds, workers, most):
    buckets, _ = assign(kinds, [0] * workers, most)
    for bucket in buckets:
        # Or no longer than its first round.
        assert lines_of(bucket) * workers <= most or lines_of(bucket) == bucket[0][0].width
        for first, *_ in bucket:
            assert first.each == 1 or first.width * workers <= most


SQUARE, LONG = WorkItem(4, 2, 6), WorkItem(4, 8, 18)


@pytest.mark.parametrize(
    ("kinds", "busy", "loads"),
    [
        # Four square and four long matrices on eight devices: one each, none idle.
        ([SQUARE, LONG], [0] * 8, [18] * 4 + [6] * 4),
        ([LONG._replace(count=12)] * 2, [0] * 8, [54] * 8),
        ([SQUARE._replace(count=48), LONG._replace(count=24)], [0] * 8, [6 * 6 + 3 * 18] * 8),
        # Other work of the devices counts.
        ([SQUARE], [18] * 4 + [0] * 4, [18] * 4 + [6] * 4),
    ],
)
def test_loads_are_even(kinds, busy, loads):
    assert assign(kinds, busy, 10**9)[1] == loads


def test_the_last_share_may_be_assigned_one_by_one():
    """Devices that have one long matrix fewer get more of the squares."""
    _, loads = assign([WorkItem(128, 2, 6), WorkItem(96, 8, 13)], [0] * 64, 10**9)
    assert max(loads) == 2 * 13 + 6


def test_items_of_one_length_share_rounds_and_consecutive_ones_a_slot():
    (bucket,), _ = assign([WorkItem(12, 8, 18)] * 2, [0] * 8, 10**9)
    slots = [[(x.kind, x.items, x.start, x.stop) for x in slots] for slots in bucket]
    assert slots == [
        [(0, slice(0, 8), 0, 8)],
        [(1, slice(0, 8), 0, 8)],
        [(0, slice(8, 12), 0, 4), (1, slice(8, 12), 4, 8)],
    ]


@pytest.mark.parametrize(
    ("kinds", "workers", "most", "rows"),
    [
        # Rows of the rest are all as long as the longest, so that more in one costs nothing.
        ([SQUARE, LONG], 8, 1, [8]),
        # One run of a kind fills a row: of 12 items of 3 lines, 10 lines have room for 3.
        ([WorkItem(24, 3, 1)], 2, 20, [9] * 4),
        # 48 and 24 items for each worker, where 23 fit: four buckets of 18. Where 50 fit, two.
        ([WorkItem(96, 5, 6), WorkItem(48, 5, 6)], 2, 235, [18 * 5] * 4),
        ([WorkItem(96, 5, 6), WorkItem(48, 5, 6)], 2, 500, [36 * 5] * 2),
    ],
)
def test_buckets_are_few_and_equally_long(kinds, workers, most, rows):
    buckets, _ = assign(kinds, [0] * workers, most)
    assert [lines_of(bucket) for bucket in buckets] == rows
    # One part of the program works on all that a row has of a kind.
    own = [{x.kind: x.each for slots in bucket for x in slots} for bucket in buckets]
    assert all(len(rounds) == len(set(map(str, rounds))) for rounds in buckets)
    assert sum(map(len, own)) == sum(map(len, buckets))


def flops(n, m):
    return 5 * (4 * n * n * m + 2 * n**3)


def route(count, n=1024, cut=("a", "b"), replicas=(), loads=None, **sizes):
    """The exchange of ``count`` matrices whose rows are cut, on an otherwise idle mesh."""
    sizes = sizes or {name: {"a": 4, "b": 2, "r": 8}[name] for name in cut + replicas}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    layout = MatrixLayout((1, n, n), (0,), (2,), (1,))
    dtype = jnp.dtype("float32")
    item = ShardedLeaf(layout, LeafSharding(mesh, ((), cut, ())), dtype, dtype)
    loads = np.zeros(list(sizes.values()), np.int64) if loads is None else loads
    start = Route((item,), ((0,),), dtype, replicas, loads)
    return cheaper(start, [WorkItem(count, item.lines, flops(n, n))], tuple(sizes))


@pytest.mark.parametrize("count, most", [(16, 2), (9, 2), (8, 1), (1, 1)])
def test_the_busiest_device_has_an_even_share_rounded_up(count, most):
    found = route(count)
    assert found.all_to_all_axes == ("a", "b")
    assert found.loads.shape == (4, 2)
    assert found.loads.max() == most * flops(1024, 1024)


def test_each_shard_is_received_there_and_back():
    assert route(16).bytes_received == 2 * (16 * 1024 * 1024 * 4 // 8) * 7 // 8


def test_replicas_divide_the_work():
    found = route(16, cut=(), replicas=("r",))
    assert (found.replica_axes, found.workers) == (("r",), 8)
    assert (found.loads == 2 * flops(1024, 1024)).all()
    assert found.bytes_received == 14 * 1024 * 1024 * 4  # the results of the others
    # One matrix: everybody works on it and nothing moves.
    alone = route(1, cut=(), replicas=("r",))
    assert not alone.worker_axes and alone.bytes_received == 0
    # Small ones are sooner done than fetched.
    assert not route(8, 32, cut=(), replicas=("r",)).worker_axes


def test_cost_is_operations_and_bytes(monkeypatch):
    monkeypatch.setattr(planning, "FLOPS_PER_BYTE", 10**9)
    assert not route(8, cut=(), replicas=("r",)).worker_axes
    monkeypatch.setattr(planning, "FLOPS_PER_BYTE", 0)
    assert route(8, 32, cut=(), replicas=("r",)).replica_axes == ("r",)


def test_loads_are_those_of_devices_on_the_mesh():
    """Whatever axes the matrices travel along, and in which order."""
    sizes, one = {"a": 2, "r": 2, "b": 3}, flops(1020, 1020)
    busy = np.zeros((2, 2, 3), np.int64)
    busy[1, 0, 2] = one
    found = route(11, 1020, ("a", "b"), ("r",), busy, **sizes)
    assert found.worker_axes == ("r", "a", "b")
    assert (found.loads == one).all()
    # Sharded over one axis only: along the other one devices hold other matrices, of which the
    # busiest counts.
    found = route(2, 1020, ("b",), (), busy, **sizes)
    assert found.all_to_all_axes == ("b",)
    assert (found.loads - busy == np.array([1, 1, 0]) * one).all()
