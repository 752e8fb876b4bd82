"""Matrices of one shape are worked on together: programs that do not grow, and derivatives.

That numbers are the same is in `mesh/test_run_equals_plain.py`.
"""

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from tests.support.batches import (
    D,
    everywhere_mapped,
    everywhere_stacked,
    layers,
    temporary_bytes,
    traced_update,
)
from tests.support.compilation import compilations
from tests.support.trees import random_like

WAYS = {
    "loops": lambda monkeypatch: None,
    "stacks": everywhere_stacked,
    "one after the other": lambda monkeypatch: everywhere_mapped(monkeypatch, 12 * D * D, 24),
}


# Three shapes take, in five steps, 3 products each where plain. The two that are not square have
# the Gram form: 4 each but for the first with its 3 in float32, as on a CPU; with two restarts in
# bfloat16, three segments that take 3, 7 and 7. On a GPU such small squares share a stack.
PRODUCTS = {"cpu": 15 + 19 + 19, "cuda": 17 + 17, "tpu": 15 + 17 + 17}


@pytest.mark.cpu_program
@pytest.mark.parametrize("count", [2, 6])
def test_programs_hold_one_iteration_for_each_shape(count):
    traced = traced_update(omp.muonplus(0.1), layers(count))
    for platform, products in PRODUCTS.items():
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("dot_general") == products
    # Nor does the compiler add any.
    assert traced.lower().compile().as_text().count(" dot(") == PRODUCTS["cpu"]


@pytest.mark.cpu_program
@pytest.mark.parametrize(
    "donated, options",
    [
        ((), {}),
        ((1,), {}),
        ((), {"mu_dtype": "int8"}),
        ((1,), {"mu_dtype": "int8"}),
        ((1,), {"nesterov": False}),
        ((1,), {"bias_correction": True}),
    ],
    ids=str,
)
def test_temporary_memory_grows_neither_with_layers_nor_with_steps(donated, options):
    tx = omp.scale_by_muonplus(**options)
    few = temporary_bytes(tx, layers(2), donated)
    # Some 800 bytes of flags and pointers for each layer; a copy of its matrices would be 11 kB.
    # XLA copies codes that are donated, 2.8 kB.
    most = 4000 if donated and "mu_dtype" in options else 1000
    assert temporary_bytes(tx, layers(8), donated) - few < 6 * most
    more_steps = omp.scale_by_muonplus(ns_steps=13, **options)
    assert temporary_bytes(more_steps, layers(2), donated) == pytest.approx(few, abs=1000)


@pytest.mark.cpu_program
def test_a_learning_rate_takes_no_memory_beside_gradients_that_are_kept():
    """XLA gives results of two loops of equal size each other's places among the updates."""
    few, many = (temporary_bytes(omp.muonplus(0.1), layers(count)) for count in (2, 8))
    assert many - few < 6 * 1000


@pytest.mark.cpu_program
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_training_step_needs_the_memory_of_its_gradients_and_no_more(weight_decay):
    """Updates take the places of the gradients, which are temporary in a training step."""
    tx = omp.muonplus(0.1, weight_decay=weight_decay)

    def step(params, state, x):
        grads = jax.grad(lambda p: sum(jnp.sum(jnp.sin(w) * x) for w in jax.tree.leaves(p)))(params)
        updates, state = tx.update(jax.lax.optimization_barrier(grads), state, params)
        return optax.apply_updates(params, updates), state

    def beside_gradients(count):
        params = layers(count)
        state = jax.eval_shape(tx.init, params)
        x = jax.ShapeDtypeStruct((), jnp.float32)
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, x).compile()
        gradients = sum(4 * x.size for x in jax.tree.leaves(params))
        return compiled.memory_analysis().temp_size_in_bytes - gradients

    assert beside_gradients(8) - beside_gradients(2) < 6 * 1000


@pytest.mark.parametrize("way", ["loops", "stacks", "one after the other"])
def test_updates_can_be_differentiated(way, monkeypatch):
    """The derivative along a direction, forward and backward, against a difference quotient."""
    WAYS[way](monkeypatch)
    with jax.enable_x64(True):
        grads, direction, weights = (random_like(layers(1, jnp.float64), i) for i in range(3))
        tx = omp.muonplus(1.0, ns_steps=2)
        state = tx.init(grads)

        @jax.jit
        def weighted(t):
            moved = jax.tree.map(lambda g, d: g + t * d, grads, direction)
            return optax.tree.vdot(tx.update(moved, state, grads)[0], weights)

        quotient = (weighted(1e-5) - weighted(-1e-5)) / 2e-5
        for derivative in (jax.grad, jax.jacfwd):
            # Without optimization, emitters of fusions (jaxlib 0.12.0) give infinity for stacks.
            options = {"xla_backend_optimization_level": 1}
            found = jax.jit(derivative(weighted), compiler_options=options)(0.0)
            np.testing.assert_allclose(found, quotient, rtol=1e-6)


def test_updates_can_be_differentiated_by_hyperparameters():
    with jax.enable_x64(True):
        grads, weights = (random_like(layers(1, jnp.float64), i) for i in range(2))

        @jax.jit
        def weighted(norm_eps):
            tx = omp.scale_by_muonplus(norm_eps=norm_eps, ns_steps=2)
            return optax.tree.vdot(tx.update(grads, tx.init(grads))[0], weights)

        quotient = (weighted(0.1 + 1e-5) - weighted(0.1 - 1e-5)) / 2e-5
        np.testing.assert_allclose(jax.grad(weighted)(0.1), quotient, rtol=1e-6)


@pytest.mark.parametrize("way", ["loops", "stacks", "one after the other"])
def test_updates_of_several_models_at_once(way, monkeypatch):
    """Under vmap: an ensemble is so many models of their own."""
    WAYS[way](monkeypatch)
    grads = [random_like(layers(1), seed) for seed in range(3)]
    tx = omp.scale_by_muonplus()
    stacked = jax.tree.map(lambda *x: np.stack(x), *grads)
    update = jax.jit(lambda g: tx.update(g, tx.init(g))[0])
    together = jax.jit(jax.vmap(update))(stacked)
    for i, g in enumerate(grads):
        alone = update(g)
        for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(a[i], b, atol=1e-5)


def test_a_second_eager_update_compiles_nothing():
    """Outside of jit, where a loop made anew at every call would be compiled anew."""
    grads = random_like(layers(1))
    tx = omp.muonplus(0.1)
    _, state = tx.update(grads, tx.init(grads), grads)
    with compilations() as compiled:
        tx.update(grads, state, grads)
        assert not compiled
        jax.jit(lambda x: x * 3.25)(1.0)
        assert compiled  # the listener does hear
