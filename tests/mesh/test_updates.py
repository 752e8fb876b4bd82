"""Updates of sharded matrices are those of one device."""

import functools

import jax
import jax.monitoring
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import optax_muonplus as omp
from optax_muonplus.run import planning
from tests.support.mesh import (
    AUTO,
    EXPLICIT,
    D,
    P,
    assert_same,
    grads_like,
    make_mesh,
    shape,
    small,
)
from tests.support.trees import random_like


def test_bfloat16_transfers_keep_unit_rows():
    mesh = make_mesh((4, 2), "ab")
    grads = random_like({f"{i}": {"kernel": shape(64, 128)} for i in range(3)})
    wanted = jax.tree.map(lambda _: NamedSharding(mesh, P("a", "b")), grads)
    build = functools.partial(
        omp.scale_by_muonplus, norm="row", shape_scale="none", compute_dtype="bfloat16"
    )
    tx = build(sharding=wanted)
    sharded = jax.device_put(grads, wanted)
    updates, _ = jax.jit(tx.update)(sharded, tx.init(sharded))
    expected, _ = jax.jit(build().update)(grads, build().init(grads))
    for found, update in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.linalg.norm(found, axis=0), 1, atol=1e-6)
        # Rounded on the way or on arrival: the same numbers.
        np.testing.assert_allclose(found, update, atol=1e-6)


@pytest.mark.parametrize("spec", [P("a", "b"), P(None, "b"), P()])
def test_updates_on_a_mesh_can_be_differentiated(spec, monkeypatch):
    monkeypatch.setattr(planning, "FLOPS_PER_BYTE", 0)  # also small replicas are shared out
    mesh = make_mesh((4, 2), "ab")
    grads = random_like({f"{i}": {"kernel": shape(D, 2 * D)} for i in range(3)})
    weights = random_like(grads, seed=1)
    wanted = jax.tree.map(lambda _: NamedSharding(mesh, spec), grads)

    def of_update(tx, weights):
        def inner(grads):
            updates, _ = tx.update(grads, tx.init(grads))
            return optax.tree.vdot(updates, weights)

        return jax.jit(jax.grad(inner))

    expected = of_update(omp.scale_by_muonplus(ns_steps=2), weights)(grads)
    sharded = of_update(
        omp.scale_by_muonplus(ns_steps=2, sharding=wanted), jax.device_put(weights, wanted)
    )
    assert_same(sharded(jax.device_put(grads, wanted)), expected)


ADAPTIVE = {"adaptive": True, "consistent_rms": 0.2}


@pytest.mark.parametrize(
    "types, options", [(AUTO, ADAPTIVE), (EXPLICIT, {}), ((AUTO, EXPLICIT), ADAPTIVE)]
)
def test_injected_hyperparameters_on_the_mesh(types, options):
    """As those do that a step before gave back."""
    mesh = make_mesh((4, 2), "ab", types)
    sharding = NamedSharding(mesh, P("a", "b"))
    whole = jax.device_get(small()[0])
    grads = jax.device_put(whole, sharding)
    build = optax.inject_hyperparams(omp.muonplus)
    tx = build(0.1, sharding=sharding, **options)
    update, state = jax.jit(tx.update), tx.init(grads)
    alone = build(0.1, **options)
    _, alone_state = alone.update(whole, alone.init(whole), whole)
    _, state = update(grads, state, grads)
    state.hyperparams["norm_eps"] = state.hyperparams["norm_eps"] * 10
    alone_state.hyperparams["norm_eps"] = alone_state.hyperparams["norm_eps"] * 10
    expected, _ = alone.update(whole, alone_state, whole)
    assert_same(update(grads, state, grads)[0], expected, grads_like(sharding))
    assert_same(tx.update(grads, state, grads)[0], expected, grads_like(sharding))
