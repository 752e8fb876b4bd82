"""Muon+ inside Optax's own wrappers: injection, accumulation, masks and partitions."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from optax.contrib import MuonDimensionNumbers

import optax_muonplus as omp
from tests.support.trees import SHAPES, assert_trees_close, first_update, random_tree

both = pytest.mark.parametrize("maker", [omp.muonplus, omp.muon], ids=["muonplus", "muon"])
# Where the polar factor plays no part: the exact one compiles fastest.
muonplus_svd = functools.partial(omp.muonplus, polar="svd")


def test_a_transformation_that_was_used_can_be_copied():
    """Its own memory of the trees that it saw stays behind: it may hold devices."""
    params = random_tree(SHAPES)
    tx = omp.muonplus(0.1, rules=[("down", None)])
    updates, _ = tx.update(params, tx.init(params), params)
    copy_of = copy.deepcopy(tx)
    assert_trees_close(copy_of.update(params, copy_of.init(params), params)[0], updates)


@pytest.mark.parametrize(
    "options",
    [
        {"rules": [("down/kernel", None)]},
        {"muon_weight_dimension_numbers": omp.per_head({"up": 2})},
        {"muon_weight_dimension_numbers": {"up": None, "down": MuonDimensionNumbers(0, 1)}},
        {"sharding": {"up": None, "down": None}},
    ],
    ids=list,
)
def test_what_is_of_parameters_in_a_state_is_found(options):
    """By ``optax.tree.map_params``, whose placeholder for parameters has no leaves."""
    params = random_tree(SHAPES)
    tx = omp.muonplus(0.1, **options)
    state = tx.init(params)
    marked = optax.tree.map_params(tx, lambda _: "of a parameter", state)
    arrays = [x.shape for x in jax.tree.leaves(state) if x.ndim]
    assert jax.tree.leaves(marked).count("of a parameter") == len(arrays)


@both
def test_inject_hyperparams_without_static_args(maker):
    """Numbers become arrays in the state, also `ns_steps`; changing one changes the update."""
    params, grads = random_tree(SHAPES), random_tree(SHAPES, 1)
    tx = optax.inject_hyperparams(maker)(learning_rate=0.1, weight_decay=0.0, ns_steps=5)
    state = jax.jit(tx.init)(params)
    step = jax.jit(lambda g, s, p: tx.update(g, s, p)[0])
    expected = first_update(maker(0.1), grads, params)
    assert_trees_close(step(grads, state, params), expected)

    def changed(**numbers):
        new = {k: jnp.asarray(v, state.hyperparams[k].dtype) for k, v in numbers.items()}
        return state._replace(hyperparams={**state.hyperparams, **new})

    halved = jax.tree.map(lambda u: u / 2, expected)
    assert_trees_close(step(grads, changed(learning_rate=0.05), params), halved)
    fewer = first_update(maker(0.1, ns_steps=2, weight_decay=0.3), grads, params)
    assert_trees_close(step(grads, changed(ns_steps=2, weight_decay=0.3), params), fewer)


def test_inject_hyperparams_with_a_schedule_and_static_args():
    params, grads = random_tree(SHAPES), random_tree(SHAPES, 1)
    options = {"ns_coeffs": "you", "ns_steps": 4, "mu_dtype": jnp.bfloat16}
    tx = optax.inject_hyperparams(
        omp.muonplus, static_args=("ns_steps", "mu_dtype", "muon_weight_dimension_numbers")
    )(
        learning_rate=optax.linear_schedule(0.1, 0.0, 2),
        muon_weight_dimension_numbers=omp.muon_dimension_numbers,
        **options,
    )
    update, state = jax.jit(tx.update), tx.init(params)
    plain = omp.muonplus(1.0, **options)
    plain_update, plain_state = jax.jit(plain.update), plain.init(params)
    for rate in (0.1, 0.05):
        updates, state = update(grads, state, params)
        np.testing.assert_allclose(state.hyperparams["learning_rate"], rate, rtol=1e-6)
        expected, plain_state = plain_update(grads, plain_state, params)
        expected = jax.tree.map(lambda u, rate=rate: rate * u, expected)
        assert_trees_close(updates, expected, rtol=1e-4)


def test_nested_partition_masked_and_multi_steps():
    """A function of the tree as dimension numbers, asked about trees with holes in them."""
    params, grads = random_tree(SHAPES), random_tree(SHAPES, 1)
    dims = functools.partial(omp.muon_dimension_numbers, rules=[("kernel", MuonDimensionNumbers())])
    inner = optax.partition(
        {"a": muonplus_svd(0.1, muon_weight_dimension_numbers=dims), "b": optax.sgd(1.0)},
        {"up": "a", "down": {"kernel": "b"}},
    )
    mask = {"up": {"kernel": True, "bias": False}, "down": {"kernel": True}}
    tx = optax.MultiSteps(optax.masked(inner, mask), every_k_schedule=1)
    updates = first_update(tx, grads, params)
    expected = first_update(muonplus_svd(0.1), grads, params)
    assert_trees_close(updates["up"]["kernel"], expected["up"]["kernel"])
    assert_trees_close(updates["up"]["bias"], grads["up"]["bias"])
    assert_trees_close(updates["down"]["kernel"], -grads["down"]["kernel"])


def test_extra_args_are_tolerated():
    params, grads = random_tree(SHAPES), random_tree(SHAPES, 1)
    tx = optax.chain(muonplus_svd(0.1), optax.scale(1.0))
    state = tx.init(params)
    plain, _ = jax.jit(tx.update)(grads, state, params)
    extra, _ = jax.jit(tx.update)(grads, state, params, value=1.0, loss=jnp.ones(()))
    assert_trees_close(extra, plain)
