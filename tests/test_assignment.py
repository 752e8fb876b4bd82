"""Who works on which matrix: nothing lost, nothing twice, and no device with more than it must."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optax_muonplus import assignment
from optax_muonplus.assignment import Stock, assign, cheapest_route

SQUARE, LONG = ((16, 16),), ((16, 64),)
stocks = st.lists(
    st.builds(
        Stock,
        st.integers(1, 30),
        st.sampled_from([4, 8]),
        st.sampled_from([SQUARE, LONG, ((16, 16), (16, 32))]),
    ),
    min_size=1,
    max_size=5,
)


@settings(deadline=None)
@given(stocks, st.integers(1, 9), st.sampled_from([1, 200, 10**9]))
def test_every_matrix_has_one_place(stocks, workers, most):
    shipments, operations = assign(stocks, workers, most)
    items = [[0] * stock.count for stock in stocks]
    loads = [0] * workers
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
    assert operations == max(loads)
    padded = sum(math.ceil(stock.count / workers) * stock.operations for stock in stocks)
    assert operations <= padded


def test_shipments_are_bounded():
    stocks = [Stock(100, 10, SQUARE), Stock(55, 40, LONG)]
    shipments, _ = assign(stocks, 8, 1000)
    assert len(shipments) > 1
    for shipment in shipments[:-1]:
        assert shipment.row * 8 <= 1000


def test_shapes_fill_each_others_gaps():
    """Four square and four long matrices on eight devices: one each, none idle."""
    stocks = [Stock(4, 2, SQUARE), Stock(4, 8, LONG)]
    (shipment,), operations = assign(stocks, 8, 10**9)
    assert operations == stocks[1].operations
    assert [(b.start, b.stop) for slot in shipment.slots for b in slot.blocks] == [(0, 4), (4, 8)]
    # And tall ones those of wide ones, which are worked on in the same way.
    up, down = Stock(12, 8, LONG), Stock(12, 8, LONG)
    (shipment,), operations = assign([up, down], 8, 10**9)
    assert operations == 3 * up.operations
    assert len(shipment.slots) == 3


def route(count, n=1024, m=1024, sharding=("a", "b"), replicas=(), **sizes):
    sizes = sizes or {"a": 4, "b": 2, "r": 8}
    shards = math.prod(sizes[axis] for axis in sharding)
    stock = Stock(count, n * m // shards, ((n, m),))
    return cheapest_route([stock], sharding, replicas, sizes, (4, 4))


@pytest.mark.parametrize(
    "count, spread, gathered, operations",
    [
        (16, ("a", "b"), (), 2),
        (8, ("a", "b"), (), 1),
        (4, ("a",), ("b",), 1),  # pairs of devices do the same, and half goes home as often
        (2, ("b",), ("a",), 1),
        (1, (), ("a", "b"), 1),  # everybody gathers it, and nothing goes home
        (9, ("a", "b"), (), 2),
    ],
)
def test_few_matrices_are_gathered(count, spread, gathered, operations):
    found = route(count)
    assert (found.spread, found.gathered) == (spread, gathered)
    assert found.operations == operations * Stock(1, 1, ((1024, 1024),)).operations


def test_bytes_are_each_shard_there_and_back():
    found = route(16)
    local = 16 * 1024 * 1024 // 8
    assert found.numbers == (local * 7 // 8, local * 7 // 8)


def test_replicas_divide_the_work():
    found = route(16, sharding=(), replicas=("r",))
    assert (found.divided, found.workers) == (("r",), 8)
    assert found.operations == 2 * Stock(1, 1, ((1024, 1024),)).operations
    assert found.numbers == (0, 14 * 1024 * 1024)  # the results of the others
    # One matrix: everybody works on it and nothing moves.
    assert route(1, sharding=(), replicas=("r",)).numbers == (0, 0)
    # Small ones are sooner done than fetched.
    assert route(8, 32, 32, sharding=(), replicas=("r",)).divided == ()


def test_cost_is_operations_and_bytes(monkeypatch):
    assert route(12).operations == 2 * Stock(1, 1, ((1024, 1024),)).operations
    monkeypatch.setattr(assignment, "OPERATIONS_PER_BYTE", 10**9)
    assert route(8, 32, 32, sharding=(), replicas=("r",)).divided == ()
    monkeypatch.setattr(assignment, "OPERATIONS_PER_BYTE", 0)
    assert route(8, 32, 32, sharding=(), replicas=("r",)).divided == ("r",)
