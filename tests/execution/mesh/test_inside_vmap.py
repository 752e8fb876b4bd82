"""Inside ``jax.vmap`` members of a population may lie along axes of a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import optax_muonplus as omp
from tests.support.mesh import AUTO, EXPLICIT, P, assert_same, make_mesh, shape
from tests.support.trees import random_like

TREE = {
    "layers": {"up": {"kernel": shape(8, 3, 16, 32)}},
    "down": {"kernel": shape(8, 32, 16), "bias": shape(8, 16)},
    **{f"{i}": {"kernel": shape(8, 16, 16)} for i in range(3)},
}


def update(grads, where=None):
    """The update after the first, so that the momentum has been stored."""
    tx = omp.muonplus(0.1, layer_axes={"layers": 0}, sharding=where)
    _, state = tx.update(grads, tx.init(grads), grads)
    return tx.update(grads, state, grads)[0]


def placed(grads, mesh, cut):
    """Every parameter cut along the first axis by members, along the last one as ``cut`` says."""
    specs = jax.tree.map(lambda x: P("pop", *[None] * (x.ndim - 2), cut), grads)
    wanted = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    own = jax.tree.map(lambda spec: NamedSharding(mesh, P(*spec[1:])), specs)
    return jax.device_put(grads, wanted), wanted, own


@pytest.fixture(scope="module")
def grads():
    return random_like(TREE)


@pytest.fixture(scope="module")
def expected(grads):
    return jax.jit(jax.vmap(update))(grads)


@pytest.mark.parametrize("cut", [None, "x"])
def test_members_along_an_explicit_axis_need_a_shard_map(grads, expected, cut):
    """``jax.shard_map`` over the members, with ``jax.vmap`` inside."""
    mesh = make_mesh((4, 2), ("pop", "x"), EXPLICIT)
    with jax.set_mesh(mesh):
        members, wanted, own = placed(grads, mesh, cut)
        step = jax.shard_map(
            jax.vmap(lambda x: update(x, own)),
            in_specs=P("pop"),
            out_specs=P("pop"),
            axis_names={"pop"},
        )
        assert_same(jax.jit(step)(members), expected, wanted)
        with pytest.raises(ValueError, match="axis_names"):
            jax.jit(jax.vmap(update))(members)


def test_members_along_an_auto_axis(grads, expected):
    mesh = make_mesh((4, 2), ("pop", "x"), AUTO)
    members, wanted, own = placed(grads, mesh, "x")

    def step(params):
        return optax.apply_updates(params, update(params))

    # The compiler places what an update returns. Parameters stay where they lie.
    moved = jax.jit(jax.vmap(step, spmd_axis_name="pop"))(members)
    assert_same(moved, jax.tree.map(jnp.add, grads, expected), wanted)
    assert_same(jax.jit(jax.vmap(lambda x: update(x, own)))(members), expected)
    # Devices along "pop" have other members, where replicas would divide the work.
    with pytest.raises(ValueError, match="cannot appear in shard_map in_specs"):
        jax.jit(jax.vmap(lambda x: update(x, own), spmd_axis_name="pop"))(members)


def test_what_is_the_same_for_all_members_is_computed_once():
    """So that ``out_axes=None`` and forward derivatives, which are ``jax.vmap``, take it."""
    params = random_like({"a": shape(4, 6), "b": shape(4, 6), "layers": shape(3, 4, 6)})

    def averaged(x):
        grads = jax.tree.map(lambda p: p * x, params)
        return update(jax.lax.pmean(grads, "batch"))

    step = jax.jit(jax.vmap(averaged, out_axes=None, axis_name="batch"))
    assert_same(step(jnp.arange(1.0, 4.0)), jax.jit(update)(params))

    def loss(rate):
        tx = omp.muonplus(rate, layer_axes={"layers": 0})
        updates, _ = tx.update(params, tx.init(params), params)
        moved = jax.tree.leaves(optax.apply_updates(params, updates))
        return sum(jnp.sum(x**2) for x in moved)

    forward, backward = jax.jit(jax.jacfwd(loss))(0.02), jax.jit(jax.grad(loss))(0.02)
    np.testing.assert_allclose(forward, backward, rtol=1e-5)
    size = sum(float(jnp.sum(u**2)) for u in jax.tree.leaves(update_of_rate(params)))
    np.testing.assert_allclose(jax.jit(jax.hessian(loss))(0.02), 2 * size, rtol=1e-4)


def update_of_rate(params):
    """The first update for a rate of one: the loss above is quadratic in the rate."""
    tx = omp.muonplus(1.0, layer_axes={"layers": 0})
    return tx.update(params, tx.init(params), params)[0]
