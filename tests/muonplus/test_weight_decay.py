"""Cautious decay, and a decay that follows the learning rate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from optax_muonplus._links.decay import cautious_decay
from tests.support.oracle_runs import (
    DIMS,
    SHAPES,
    assert_close,
    oracle_of,
    random_trees,
    updates_of,
)
from tests.support.trees import random_tree


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_cautious_decay_is_the_papers(dtype):
    params, grads = random_trees(3, dtype)
    options = {"weight_decay": 0.5, "cautious_weight_decay": True}
    rules = [omp.muonplus(0.3, muon_weight_dimension_numbers=DIMS, **options), omp.muonplus(0.3)]
    cautious, none = updates_of(rules, params, grads)
    expected = oracle_of(params, grads, learning_rate=0.3, **options)
    assert_close(cautious, expected)
    for key in SHAPES:
        decayed = np.mean(np.abs(cautious[key] - none[key]) > 1e-4)
        assert 0.4 < decayed < 0.6  # of entries drawn from a symmetric distribution


def test_signs_are_compared_not_sizes():
    """Products of these underflow; zeros agree with anything."""
    updates = {"w": jnp.array([[1e-30, -1e-30, 1e-30, 0.0]])}
    params = {"w": jnp.array([[1e-30, 1e-30, -1e-30, 2.0]])}
    link = cautious_decay(0.5)
    found, _ = link.update(updates, link.init(params), params)
    np.testing.assert_allclose(found["w"], [[1.5e-30, -1e-30, 1e-30, 1.0]], rtol=1e-6)


def test_mask_schedule_and_state_are_those_of_plain_decay():
    params = random_tree({"a": (4, 6), "b": (4, 6)})
    mask = {"a": True, "b": False}
    plain, cautious = (
        make(lambda step: 0.1 * (step + 1), mask)
        for make in (optax.add_decayed_weights, cautious_decay)
    )
    state, expected = cautious.init(params), plain.init(params)
    for step in (1, 2):
        updates, state = cautious.update(params, state, params)  # which all agree with themselves
        same, expected = plain.update(params, expected, params)
        jax.tree.map(np.testing.assert_array_equal, updates, same)
        np.testing.assert_allclose(updates["a"], params["a"] * (1 + 0.1 * step), rtol=1e-6)
        updates, _ = cautious.update(jax.tree.map(jnp.negative, params), state, params)
        jax.tree.map(lambda u, w: np.testing.assert_array_equal(u, -w), updates, params)
    assert jax.tree.structure(state) == jax.tree.structure(expected)


def test_cautious_decay_needs_parameters_unless_it_is_zero():
    params = random_tree({"up": {"kernel": (4, 6)}})
    for decay in (0.0, 0.1):
        tx = omp.muon(0.1, weight_decay=decay, cautious_weight_decay=True)
        state = tx.init(params)
        if decay:
            with pytest.raises(ValueError, match="requires the current value of parameters"):
                tx.update(params, state)
        else:
            with_them, _ = tx.update(params, state, params)
            jax.tree.map(np.testing.assert_array_equal, tx.update(params, state)[0], with_them)


@pytest.mark.parametrize(
    "rule", [omp.contrib.NorMuon(), omp.contrib.Mano()], ids=["normuon", "mano"]
)
def test_rivals_may_decay_cautiously(rule):
    params, grads = random_trees(1)
    make = functools.partial(omp.optimizer, rule, where=omp.Matrices(weight_dimension_numbers=DIMS))
    rules = [make(0.3, weight_decay=0.5, cautious_weight_decay=True), make(0.3)]
    cautious, none = updates_of(rules, params, grads)
    for key in SHAPES:
        agree = np.asarray(none[key]) * params[key] <= 0  # of steps downhill, which are added
        expected = none[key] - 0.15 * np.where(agree, params[key], 0)
        np.testing.assert_allclose(cautious[key], expected, rtol=0, atol=1e-6)


def test_embeddings_alone_decay_and_norms_are_spared():
    """By a mask of Optax's own, which is written for the whole model."""
    params = random_tree(
        {"wte": {"embedding": (9, 4)}, "ln": {"scale": (4,)}, "up": {"kernel": (4, 6)}}
    )
    grads = jax.tree.map(lambda x: jnp.sin(9 * x), params)
    mask = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
    others = optax.nadamw(0.1, weight_decay=0.5, mask=mask)
    found, none = (
        tx.update(grads, tx.init(params), params)[0]
        for tx in (omp.muonplus(0.1, others=others), omp.muonplus(0.1))
    )
    expected = none["wte"]["embedding"] - 0.05 * params["wte"]["embedding"]
    np.testing.assert_allclose(found["wte"]["embedding"], expected, atol=1e-7)
    for path in (("ln", "scale"), ("up", "kernel")):
        np.testing.assert_array_equal(found[path[0]][path[1]], none[path[0]][path[1]])
