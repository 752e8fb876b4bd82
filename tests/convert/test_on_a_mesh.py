"""States in shards: arrays stay where they are, or go where the new state has them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_muonplus as omp
from tests.support.states import filled
from tests.support.trees import SHAPES, random_tree

pytestmark = pytest.mark.several_devices
PARAMS = random_tree(SHAPES)
FALLING = optax.linear_schedule(0.1, 0.02, 10)
AXES = pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=str)
SPECS = {"up": {"kernel": P("a", "b"), "bias": P("b")}, "down": {"kernel": P(None, "a")}}


def momentum(state):
    return omp.transforms.find_momentum(state).mu["up"]["kernel"]


def on_mesh(axes):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(axes,) * 2)
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), PARAMS, SPECS)


@AXES
def test_shards_stay_where_they_are(axes):
    """No array is copied, and counts can be used beside the arrays on the mesh."""
    params = on_mesh(axes)
    tx = omp.muonplus(FALLING)
    old = filled(optax.contrib.muon(FALLING).init(params))
    count = jax.device_put(jnp.asarray(7), jax.devices()[3])  # it was read onto one device
    old = optax.tree.set(old, count=count)
    state, _ = omp.take_over(old, tx.init(params), params)
    ours, theirs = momentum(state), optax.tree.get(old, "MuonState").mu["up"]["kernel"]
    assert ours.sharding == params["up"]["kernel"].sharding
    shards = zip(ours.addressable_shards, theirs.addressable_shards, strict=True)
    for a, b in shards:
        assert a.data.unsafe_buffer_pointer() == b.data.unsafe_buffer_pointer()
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)


@AXES
def test_shards_go_where_the_new_state_has_them(axes):
    params = on_mesh(axes)
    old = filled(optax.adamw(0.1).init(jax.device_get(params)))
    state, _ = omp.take_over(old, omp.muonplus(0.1).init(params), params)
    for name in ("up", "down"):
        mu = omp.transforms.find_momentum(state).mu[name]["kernel"]
        assert mu.sharding == params[name]["kernel"].sharding
        np.testing.assert_array_equal(mu, optax.tree.get(old, "mu")[name]["kernel"])
