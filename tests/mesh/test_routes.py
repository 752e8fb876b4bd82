"""Along which mesh axes matrices are sent, chosen by operations and bytes."""

import math

import numpy as np
import pytest

from optax_muonplus.run import routes
from optax_muonplus.run.routes import MeshAxes, cheapest_route
from optax_muonplus.run.schedule import GroupSize


def operations(n, m):
    return 5 * (4 * n * n * m + 2 * n**3)


def route(count, n=1024, m=1024, sharding=("a", "b"), replicas=(), **sizes):
    sizes = sizes or {"a": 4, "b": 2} | {axis: 8 for axis in replicas}
    sizes = {axis: sizes[axis] for axis in sizes if axis in sharding + replicas}
    shards = math.prod(sizes[axis] for axis in sharding)
    stock = GroupSize(count, n * m // (128 * shards), ((n, m),), operations(n, m))
    loads = np.zeros(list(sizes.values()), np.int64)
    return cheapest_route([stock], MeshAxes(sizes, sharding, replicas), (4, 4), loads)


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
    assert (found.all_to_all_axes, found.all_gather_axes) == (spread, gathered)
    assert found.loads.shape == (4, 2)
    assert found.loads.max() == most * operations(1024, 1024)


def test_elements_sent_are_each_shard_there_and_back():
    found = route(16)
    local = 16 * 1024 * 1024 // 8
    assert found.elements_received == (local * 7 // 8, local * 7 // 8)


def test_replicas_divide_the_work():
    found = route(16, sharding=(), replicas=("r",))
    assert (found.replica_axes, found.workers) == (("r",), 8)
    assert (found.loads == 2 * operations(1024, 1024)).all()
    assert found.elements_received == (0, 14 * 1024 * 1024)  # the results of the others
    # One matrix: everybody works on it and nothing moves.
    assert route(1, sharding=(), replicas=("r",)).elements_received == (0, 0)
    # Small ones are sooner done than fetched.
    assert route(8, 32, 32, sharding=(), replicas=("r",)).replica_axes == ()


def test_cost_is_operations_and_bytes(monkeypatch):
    monkeypatch.setattr(routes, "FLOPS_PER_BYTE", 10**9)
    assert route(8, sharding=(), replicas=("r",)).replica_axes == ()
    monkeypatch.setattr(routes, "FLOPS_PER_BYTE", 0)
    assert route(8, 32, 32, sharding=(), replicas=("r",)).replica_axes == ("r",)


def test_loads_are_those_of_devices_on_the_mesh():
    """Whatever axes the matrices travel along, and in which order."""
    sizes = {"a": 2, "r": 2, "b": 3}
    stock = GroupSize(11, 1024, ((1024, 1024),), operations(1024, 1024))
    busy = np.zeros((2, 2, 3), np.int64)
    busy[1, 0, 2] = stock.flops
    found = cheapest_route([stock], MeshAxes(sizes, ("a", "b"), ("r",)), (4, 4), busy)
    assert (found.replica_axes, found.all_to_all_axes) == (("r",), ("a", "b"))
    assert (found.loads == stock.flops).all()
    # Sharded over one axis only: along the other one devices hold other matrices, of which the
    # busiest counts.
    found = cheapest_route([stock._replace(count=2)], MeshAxes(sizes, ("b",), ()), (4, 4), busy)
    assert found.all_to_all_axes == ("b",)
    assert (found.loads - busy == np.array([1, 1, 0]) * stock.flops).all()
