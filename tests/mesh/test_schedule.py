"""Which device works on which matrix: each exactly once, and loads as even as possible."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

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
def test_every_matrix_is_assigned_once(stocks, busy, most):
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
def test_transfers_are_bounded(stocks, workers, most):
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


def test_uneven_remainders_of_different_shapes_are_balanced_together():
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


def test_remainders_are_balanced_even_beyond_the_bound_on_transfers():
    """Rows are all as long as the longest, so that it costs nothing."""
    shipments, _ = assign([Stock(4, 2, SQUARE, 6), Stock(4, 8, LONG, 18)], [0] * 8, 1)
    assert [shipment.row for shipment in shipments] == [8]


def test_divisible_counts_are_assigned_evenly():
    shipments, loads = assign([Stock(48, 2, SQUARE, 6), Stock(24, 8, LONG, 18)], [0] * 8, 10**9)
    assert loads == [6 * 6 + 3 * 18] * 8
    assert all((b.start, b.stop) == (0, 8) for b in blocks(shipments))
