"""The argument `sharding`: its forms, and how it goes with types, meshes, jit and derivatives."""

import functools

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import optax_muonplus as omp
from optax_muonplus._execution.mesh import plan as planning
from tests.support.compilation import collectives, compilations
from tests.support.mesh import (
    AUTO,
    DIMS,
    EXPLICIT,
    LEAVES,
    D,
    P,
    assert_same,
    gradients,
    grads_like,
    make_mesh,
    shape,
    shardings,
    small,
)
from tests.support.trees import random_like


@pytest.mark.parametrize(
    "form",
    [
        lambda s: {"q": {"kernel": s}, "k": {"kernel": s}},
        lambda s: {"q": s, "k": s},
        lambda s: s,
        lambda s: lambda params: jax.tree.map(lambda _: s, params),
        lambda s: flax.core.freeze({"q": {"kernel": s}, "k": {"kernel": s}}),
    ],
    ids=["tree", "prefix", "root", "function", "another container"],
)
def test_forms_of_the_argument(form):
    grads, sharding = small()
    tx = omp.scale_by_muonplus(where=omp.Matrices(sharding=form(sharding)))
    compiled = jax.jit(tx.update).lower(grads, tx.init(grads)).compile()
    assert collectives(compiled) == ["all-to-all"] * 2


def test_shardings_of_one_device_are_accepted():
    grads = random_like({"q": {"kernel": shape(D, D)}})
    tx = omp.muonplus(0.1, sharding=jax.tree.map(lambda x: x.sharding, grads))
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads), grads)
    expected, _ = jax.jit(omp.muonplus(0.1).update)(grads, omp.muonplus(0.1).init(grads), grads)
    assert_same(updates, expected)


def test_second_eager_update_compiles_nothing():
    grads, sharding = small()
    tx = omp.muonplus(0.1, sharding=sharding)
    state = tx.init(grads)
    updates, state = tx.update(grads, state, grads)
    assert_same(updates, jax.jit(tx.update)(grads, tx.init(grads), grads)[0], grads_like(sharding))
    with compilations() as compiled:
        tx.update(grads, state, grads)
    assert not compiled


def test_nnx_optimizer_on_a_mesh():
    mesh = make_mesh((4, 2), "ab")
    wanted = {"kernel": NamedSharding(mesh, P("a", "b")), "bias": NamedSharding(mesh, P("b"))}

    def after_one_step(sharding):
        model = nnx.Linear(D, 4 * D, rngs=nnx.Rngs(0))
        if sharding is not None:
            nnx.update(model, jax.device_put(nnx.to_pure_dict(nnx.state(model)), sharding))
        optimizer = nnx.Optimizer(model, omp.muonplus(0.1, sharding=sharding), wrt=nnx.Param)
        grads = jax.tree.map(lambda x: x + x * x, nnx.state(model, nnx.Param))
        nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))(
            model, optimizer, grads
        )
        return nnx.to_pure_dict(nnx.state(model))

    assert_same(after_one_step(wanted), after_one_step(None), wanted)


@pytest.mark.parametrize("types", [AUTO, EXPLICIT])
def test_state_is_sharded_from_init_on(types):
    mesh = make_mesh((4, 2), "ab", types)
    wanted = shardings(mesh, "a", "b")
    params = jax.device_put(gradients(), wanted)
    tx = omp.muonplus(0.1, muon_weight_dimension_numbers=DIMS, sharding=wanted)
    with jax.set_mesh(mesh):
        abstract = jax.eval_shape(tx.init, params)
        states = [tx.init(params), jax.jit(tx.init)(params)]
    for state in states:
        assert jax.tree.structure(state) == jax.tree.structure(abstract)
        found = 0
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            if len(keys) == 3:  # group, module, leaf
                sharding = wanted[keys[1]][keys[2]]
                assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), path
                found += 1
        assert found == len(LEAVES) + 2  # AdamW has two for each
    if types == EXPLICIT:
        momentum = omp.transforms.find_momentum(abstract).mu["up"]["kernel"]
        assert momentum.sharding.spec == P("a", "b")


def test_bfloat16_transfers_keep_unit_rows():
    mesh = make_mesh((4, 2), "ab")
    grads = random_like({f"{i}": {"kernel": shape(64, 128)} for i in range(3)})
    wanted = jax.tree.map(lambda _: NamedSharding(mesh, P("a", "b")), grads)
    build = functools.partial(
        omp.scale_by_muonplus,
        norm="row",
        match_frobenius=False,
        shape_scale="none",
        compute_dtype="bfloat16",
    )
    tx = build(where=omp.Matrices(sharding=wanted))
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
        omp.scale_by_muonplus(ns_steps=2, where=omp.Matrices(sharding=wanted)),
        jax.device_put(weights, wanted),
    )
    assert_same(sharded(jax.device_put(grads, wanted)), expected)


ADAPTIVE = {"adaptive": True, "consistent_rms": 0.2}


@pytest.mark.parametrize(
    "types, options",
    [(AUTO, ADAPTIVE), (EXPLICIT, {"consistent_rms": 0.2}), ((AUTO, EXPLICIT), ADAPTIVE)],
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


def test_a_number_of_steps_may_be_an_array():
    """It is read when the transformation is made: an unknown number would not do for this table."""
    grads, sharding = small()
    tx = omp.orthogonalize("dion", jnp.array(5), where=omp.Matrices(sharding=sharding))
    expected = omp.orthogonalize("dion")
    whole = jax.device_get(grads)
    found, _ = tx.update(grads, tx.init(grads))
    assert_same(found, expected.update(whole, expected.init(whole))[0], grads_like(sharding))
