"""Parameters in bfloat16 that move, on a mesh: as on one device, without a collective."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from optax_muonplus.transforms import param_remainders, shard_state


def params_and_grads():
    keys = jax.random.split(jax.random.key(0), 2)
    kernel = jax.random.normal(keys[0], (16, 32), jnp.bfloat16)
    params = {"up": {"kernel": kernel}, "b": jnp.ones(8, jnp.bfloat16)}
    return params, jax.tree.map(lambda x: jax.random.normal(keys[1], x.shape), params)


def layout_on(mesh, spec):
    return {"up": {"kernel": jax.NamedSharding(mesh, spec)}, "b": jax.NamedSharding(mesh, jax.P())}


def run(tx, params, grads, count=3):
    state = jax.jit(tx.init)(params)
    step = jax.jit(tx.update)
    for _ in range(count):
        updates, state = step(grads, state, params)
        params = jax.jit(optax.apply_updates)(params, updates)
    return params, state


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_sharded_is_unsharded(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), (kind, kind))
    params, grads = params_and_grads()
    expected, _ = run(param_remainders(optax.sgd(1e-3)), params, grads)
    spec = jax.P("data", "model")
    layout = layout_on(mesh, spec)
    tx = param_remainders(optax.sgd(1e-3))
    there = [jax.device_put(x, layout) for x in (params, grads)]
    with jax.set_mesh(mesh):
        found, state = run(tx, *there)
        text = jax.jit(tx.update).lower(there[1], state, there[0]).compile().as_text()
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert found["up"]["kernel"].sharding.spec == spec
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", text)


def test_remainders_over_replicas():
    mesh = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
    params, grads = params_and_grads()
    layout = layout_on(mesh, jax.P(None, "model"))
    expected, _ = run(param_remainders(omp.muonplus(1e-3)), params, grads)
    placed = omp.transforms.state_layout(layout, "data")
    tx = shard_state(param_remainders(omp.muonplus(1e-3, sharding=placed)), layout, "data")
    found, state = run(tx, *[jax.device_put(x, layout) for x in (params, grads)])
    kernel = state.remainders["up"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 8
    for x, other in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
        # Where a sum lies near the middle of two values, rounding takes either.
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (other, x)), rtol=0.01)
