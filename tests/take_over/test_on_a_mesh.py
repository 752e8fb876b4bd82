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


@AXES
def test_under_jit_nothing_moves_and_no_second_state_is_made(axes):
    """Read off the compiled program; the report comes out of it too."""
    params = on_mesh(axes)
    tx = omp.muonplus(FALLING)
    old = filled(optax.contrib.muon(FALLING).init(params))

    def switch(old, params):
        return omp.take_over(old, tx.init(params), params)

    mesh = params["up"]["kernel"].sharding.mesh
    with jax.set_mesh(mesh):  # else the zeros of the new state would be on one device
        compiled = jax.jit(switch, donate_argnums=0).lower(old, params).compile()
    assert not any(word in compiled.as_text() for word in ("all-", "collective", "reduce"))
    buffers = 2 * 8 * 12 * 4 // 8
    assert compiled.memory_analysis().alias_size_in_bytes >= buffers
    expected, _ = omp.take_over(old, tx.init(params), params)
    expected = jax.device_get(expected)
    state, report = compiled(old, params)
    assert jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(state), expected))
    assert "up/kernel: momentum" in report.kept


def test_under_jit_shards_get_the_explicit_sharding_of_the_new_state():
    params = on_mesh(AxisType.Explicit)
    mesh = params["up"]["kernel"].sharding.mesh
    old = optax.adamw(0.1).init(jax.device_put(params, NamedSharding(mesh, P("b"))))
    with jax.set_mesh(mesh):
        switch = jax.jit(lambda old, new: omp.take_over(old, new, params)[0])
        state = switch(old, omp.muonplus(0.1).init(params))
    assert momentum(state).sharding.spec == P("a", "b")
