"""Updates of sharded matrices are those of one device."""

import functools

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import optax_muonplus as omp
from optax_muonplus.run import routes
from tests.support.batches import play
from tests.support.mesh import (
    AUTO,
    DIMS,
    EXPLICIT,
    FEW,
    MESHES,
    RULES,
    TREE,
    D,
    P,
    alone,
    assert_same,
    gradients,
    grads_like,
    make_mesh,
    modules_of,
    shape,
    shardings,
    small,
    two_steps,
)
from tests.support.trees import random_like

# Cut along both axes on meshes of either type and of both; the other meshes have a few leaves.
ALL_LEAVES = ("fsdp x tensor", "mixed", "with replicas, explicit")


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_gives_the_update_of_one_device(name):
    sizes, names, a, b, types = MESHES[name]
    leaves = TREE if name in ALL_LEAVES else FEW
    wanted = modules_of(shardings(make_mesh(sizes, names, types), a, b), leaves)
    given = None if types == EXPLICIT else wanted
    tx = omp.muonplus(0.1, muon_weight_dimension_numbers=DIMS, sharding=given)
    updates, state = two_steps(tx, jax.device_put(modules_of(gradients(), leaves), wanted))
    assert_same(updates, modules_of(alone()[0], leaves), wanted)
    mu = omp.transforms.find_momentum(state).mu
    assert_same(mu, modules_of(omp.transforms.find_momentum(alone()[1]).mu, leaves))
    for module, leaf in wanted.items():
        for part, sharding in leaf.items():
            momentum = mu[module][part]
            if isinstance(momentum, jax.Array):
                assert momentum.sharding.is_equivalent_to(sharding, momentum.ndim)


@pytest.mark.parametrize("machine", ["gpu", "tpu"])
@pytest.mark.parametrize("name", ["fsdp x tensor", "with replicas, explicit"])
def test_accelerators_give_the_update_of_one_device(name, machine, monkeypatch):
    """Matrices are stacked there, and a TPU joins shards in a way of its own."""
    sizes, names, a, b, types = MESHES[name]
    leaves = (*FEW, "up2", "k", "narrow") if types == EXPLICIT else TREE
    wanted = modules_of(shardings(make_mesh(sizes, names, types), a, b), leaves)
    tx = omp.muonplus(0.1, muon_weight_dimension_numbers=DIMS, sharding=wanted)
    play(monkeypatch, machine)
    updates, _ = two_steps(tx, jax.device_put(modules_of(gradients(), leaves), wanted))
    assert_same(updates, modules_of(alone()[0], leaves), wanted)


OPTIONS = {
    "row, nesterov": {"norm": "row", "nesterov": True, "bias_correction": True},
    "matched": {"norm": "row_col", "match_frobenius": True, "shape_scale": "max"},
    "adaptive": {"norm": "col", "adaptive": True, "consistent_rms": 0.2},
    "aol": {"norm": "none", "preconditioning": "aol", "polar": "newton_schulz"},
    "cubic": {"norm": "none", "preconditioning": "aol_out", "ns_coeffs": "cubic"},
    "own": {"polar": lambda x: x / (1 + jnp.sum(x * x, axis=-1, keepdims=True))},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_tell_rows_from_columns(name):
    """Not the same on transposed matrices, where each worker has one stored in its own way."""
    leaves = ("up", "down", "wide", "q", "wo", "fused")
    grads = modules_of(gradients(), leaves)
    wanted = modules_of(shardings(make_mesh((4, 2), "ab"), "a", "b"), leaves)
    build = functools.partial(
        omp.muonplus,
        0.1,
        muon_weight_dimension_numbers=functools.partial(
            omp.muon_dimension_numbers, rules=RULES[-1:]
        ),
        **OPTIONS[name],
    )
    expected, _ = two_steps(build(), grads)
    updates, _ = two_steps(build(sharding=wanted), jax.device_put(grads, wanted))
    assert_same(updates, expected, wanted)


def test_an_axis_that_shards_the_batch_holds_no_replicas():
    """Experts over ``a``, two of them a device and fewer than devices: each device has its own."""
    mesh = make_mesh((2, 4), "ab")
    grads = random_like(
        {"experts": {"kernel": shape(4, 128, 128)}, "q": {"kernel": shape(128, 128)}}
    )
    specs = {"experts": P("a", None, "b"), "q": P("a", "b")}
    wanted = {module: {"kernel": NamedSharding(mesh, spec)} for module, spec in specs.items()}
    rules = [("experts", omp.MuonDimensionNumbers(-2, -1))]
    dims = functools.partial(omp.muon_dimension_numbers, rules=rules)
    build = functools.partial(omp.muonplus, 0.1, muon_weight_dimension_numbers=dims)
    expected, _ = two_steps(build(), grads)
    updates, _ = two_steps(build(sharding=wanted), jax.device_put(grads, wanted))
    assert_same(updates, expected, wanted)


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
    monkeypatch.setattr(routes, "FLOPS_PER_BYTE", 0)  # also small replicas are shared out
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


def test_several_rounds_of_transfers_give_the_same_update(monkeypatch):
    monkeypatch.setattr(routes, "BUCKET_BYTES", 4 * D * D)
    mesh = make_mesh((4, 2), "ab")
    leaves = (*FEW, "k", "up2", "down2")
    wanted = modules_of(shardings(mesh, "a", "b"), leaves)
    tx = omp.muonplus(0.1, muon_weight_dimension_numbers=DIMS, sharding=wanted)
    updates, _ = two_steps(tx, jax.device_put(modules_of(gradients(), leaves), wanted))
    assert_same(updates, modules_of(alone()[0], leaves), wanted)


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
