"""Who works on which matrix: nothing lost, nothing twice, and no device with more than it must."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optax_muonplus._mesh import routes
from optax_muonplus._mesh.routes import cheapest_route
from optax_muonplus._mesh.schedule import Stock, assign

SQUARE, LONG = ((16, 16),), ((16, 64),)
stocks = st.lists(
    st.builds(
        Stock,
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
    stocks,
    st.lists(st.integers(0, 30), min_size=1, max_size=9),
    st.sampled_from([1, 200, 10**9]),
)
def test_every_matrix_has_one_place(stocks, busy, most):
    workers = len(busy)
    shipments, done = assign(stocks, busy, most)
    items = [[0] * stock.count for stock in stocks]
    loads = list(busy)
    for shipment in shipments:
        rows = [[0] * shipment.row for _ in range(workers)]
        for slot in shipment.slots:
            shapes = {(stocks[b.kind].shapes, stocks[b.kind].size) for b in slot.blocks}
            assert len(shapes) == 1  # one part of the program can work on all of them
            taken = []
            for block in slot.blocks:
                stock = stocks[block.kind]
                taken += range(block.start, block.stop)
                for item in range(block.first, block.first + block.items):
                    items[block.kind][item] += 1
                for worker in range(block.start, block.stop):
                    loads[worker] += stock.operations * block.each
                    for place in range(block.offset, block.offset + stock.size * block.each):
                        rows[worker][place] += 1
            assert len(taken) == len(set(taken))
        assert max(max(row) for row in rows) == 1  # no two in one place
        assert shipment.row == max(sum(row) for row in rows)  # and no room that nobody needs
    assert all(count == 1 for kind in items for count in kind)
    assert done == loads
    padded = sum(math.ceil(stock.count / workers) * stock.operations for stock in stocks)
    assert max(done) <= max(busy) + padded


@given(stocks, st.integers(1, 9), st.integers(1, 2000))
def test_shipments_are_bounded(stocks, workers, most):
    shipments, _ = assign(stocks, [0] * workers, most)
    for shipment in shipments:
        # Or no longer than its first slot.
        assert shipment.row * workers <= most or shipment.row == width(shipment.slots[0], stocks)
        for slot in shipment.slots:
            block = slot.blocks[0]
            assert block.each == 1 or stocks[block.kind].size * block.each * workers <= most


def width(slot, stocks):
    return stocks[slot.blocks[0].kind].size * slot.blocks[0].each


def blocks(shipments):
    return [block for shipment in shipments for slot in shipment.slots for block in slot.blocks]


def test_kinds_fill_each_others_gaps():
    """Four square and four long matrices on eight devices: one each, none idle."""
    shipments, loads = assign([Stock(4, 2, SQUARE, 6), Stock(4, 8, LONG, 18)], [0] * 8, 10**9)
    assert loads == [18] * 4 + [6] * 4
    assert sorted((b.start, b.stop) for b in blocks(shipments)) == [(0, 4), (4, 8)]
    # Tall ones those of wide ones, which the same part of the program works on.
    shipments, loads = assign([Stock(12, 8, LONG, 18)] * 2, [0] * 8, 10**9)
    assert loads == [54] * 8
    assert len(shipments) == 1 and len(shipments[0].slots) == 3
    # A last round of squares is kept back for those who have one long matrix fewer.
    _, loads = assign([Stock(128, 2, SQUARE, 6), Stock(96, 8, LONG, 13)], [0] * 64, 10**9)
    assert max(loads) == 2 * 13 + 6
    # And what the devices have to do besides is counted.
    _, loads = assign([Stock(4, 2, SQUARE, 6)], [18] * 4 + [0] * 4, 10**9)
    assert loads == [18] * 4 + [6] * 4


def test_gaps_are_filled_beyond_the_bound():
    """Rows are all as long as the longest, so that it costs nothing."""
    shipments, _ = assign([Stock(4, 2, SQUARE, 6), Stock(4, 8, LONG, 18)], [0] * 8, 1)
    assert [shipment.row for shipment in shipments] == [8]


def test_even_numbers_are_dealt_out_evenly():
    shipments, loads = assign([Stock(48, 2, SQUARE, 6), Stock(24, 8, LONG, 18)], [0] * 8, 10**9)
    assert loads == [6 * 6 + 3 * 18] * 8
    assert all((b.start, b.stop) == (0, 8) for b in blocks(shipments))


def operations(n, m):
    return 5 * (4 * n * n * m + 2 * n**3)


def route(count, n=1024, m=1024, sharding=("a", "b"), replicas=(), **sizes):
    sizes = sizes or {"a": 4, "b": 2} | {axis: 8 for axis in replicas}
    sizes = {axis: sizes[axis] for axis in sizes if axis in sharding + replicas}
    shards = math.prod(sizes[axis] for axis in sharding)
    stock = Stock(count, n * m // shards, ((n, m),), operations(n, m))
    loads = np.zeros(list(sizes.values()), np.int64)
    return cheapest_route([stock], sharding, replicas, sizes, (4, 4), loads)


@pytest.mark.parametrize(
    "count, spread, gathered, most",
    [
        (16, ("a", "b"), (), 2),
        (8, ("a", "b"), (), 1),
        (4, ("a",), ("b",), 1),  # pairs of devices do the same, and half goes home as often
        (2, ("b",), ("a",), 1),
        (1, (), ("a", "b"), 1),  # everybody gathers it, and nothing goes home
        (9, ("a", "b"), (), 2),
    ],
)
def test_few_matrices_are_gathered(count, spread, gathered, most):
    found = route(count)
    assert (found.spread, found.gathered) == (spread, gathered)
    assert found.loads.shape == (4, 2)
    assert found.loads.max() == most * operations(1024, 1024)


def test_bytes_are_each_shard_there_and_back():
    found = route(16)
    local = 16 * 1024 * 1024 // 8
    assert found.numbers == (local * 7 // 8, local * 7 // 8)


def test_replicas_divide_the_work():
    found = route(16, sharding=(), replicas=("r",))
    assert (found.divided, found.workers) == (("r",), 8)
    assert (found.loads == 2 * operations(1024, 1024)).all()
    assert found.numbers == (0, 14 * 1024 * 1024)  # the results of the others
    # One matrix: everybody works on it and nothing moves.
    assert route(1, sharding=(), replicas=("r",)).numbers == (0, 0)
    # Small ones are sooner done than fetched.
    assert route(8, 32, 32, sharding=(), replicas=("r",)).divided == ()


def test_cost_is_operations_and_bytes(monkeypatch):
    monkeypatch.setattr(routes, "OPERATIONS_PER_BYTE", 10**9)
    assert route(8, sharding=(), replicas=("r",)).divided == ()
    monkeypatch.setattr(routes, "OPERATIONS_PER_BYTE", 0)
    assert route(8, 32, 32, sharding=(), replicas=("r",)).divided == ("r",)


def test_loads_are_those_of_devices_on_the_mesh():
    """Whatever axes the matrices travel along, and in which order."""
    sizes = {"a": 2, "r": 2, "b": 3}
    stock = Stock(11, 1024, ((1024, 1024),), operations(1024, 1024))
    busy = np.zeros((2, 2, 3), np.int64)
    busy[1, 0, 2] = stock.operations
    found = cheapest_route([stock], ("a", "b"), ("r",), sizes, (4, 4), busy)
    assert (found.divided, found.spread) == (("r",), ("a", "b"))
    assert (found.loads == stock.operations).all()
    # Sharded over one axis only: along the other one devices hold other matrices, of which the
    # busiest counts.
    found = cheapest_route([stock._replace(count=2)], ("b",), (), sizes, (4, 4), busy)
    assert found.spread == ("b",)
    assert (found.loads - busy == np.array([1, 1, 0]) * stock.operations).all()
