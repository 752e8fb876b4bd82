"""Training of small Equinox and Haiku models."""

import chex
import equinox as eqx
import haiku as hk
import jax
import numpy as np
import optax
import optax.contrib

import optax_muonplus as omp
from tests.support.training import (
    HEADS,
    LEARNING_RATE,
    LENGTH,
    STEPS,
    TOKENS,
    VOCABULARY,
    WIDTH,
    assert_falls,
    assert_matrix_moved_as_muon_plus_moves,
    cross_entropy,
    labels_by_path,
)


class EquinoxModel(eqx.Module):
    embedding: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    lm_head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.embedding = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, use_bias=False, key=keys[1])
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=keys[2])
        self.lm_head = eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[3])

    def __call__(self, token):
        x = self.embedding(token)
        x = x + self.down(jax.nn.relu(self.up(self.norm(x))))
        return self.lm_head(x)


def test_equinox_training_loop():
    """A tree with None where there is no array, and weights stored as (out, in)."""
    model = EquinoxModel(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    assert params.up.bias is None
    labels = labels_by_path(params)
    assert {k for k, v in labels.items() if v == "muon"} == {"up/weight", "down/weight"}
    tx = omp.muonplus(LEARNING_RATE)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, opt_state):
        @eqx.filter_value_and_grad
        def loss(model):
            return cross_entropy(jax.vmap(jax.vmap(model))(TOKENS[:, :-1]))

        value, grads = loss(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = tx.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state, value

    losses, old = [], model.up.weight
    for _ in range(STEPS):
        model, opt_state, loss = step(model, opt_state)
        if not losses:
            assert_matrix_moved_as_muon_plus_moves(old, model.up.weight, (0,))
        losses.append(loss)
    assert_falls(losses)
    assert jax.tree.structure(eqx.partition(model, eqx.is_inexact_array)[1]) == jax.tree.structure(
        static
    )


def test_a_whole_equinox_model_may_stand_for_its_parameters():
    """Its activation is a leaf without an update. ``optax.adamw`` takes it so too."""
    model = eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_inexact_array)
    tx = omp.muonplus(0.1, weight_decay=0.1, adam_weight_decay=0.1)
    expected, _ = tx.update(params, tx.init(params), params)
    updates, _ = tx.update(params, tx.init(params), model)
    chex.assert_trees_all_equal(updates, expected)


def test_callable_modules_as_dimension_numbers_are_trees():
    """Dimension numbers and decay masks in the shape of a module are trees, not functions."""
    params = eqx.filter(eqx.nn.Linear(4, 6, key=jax.random.key(0)), eqx.is_inexact_array)
    dims = omp.muon_dimension_numbers(params)
    assert callable(dims)
    mask = jax.tree.map(lambda x: x.ndim == 2, params)
    options = {"weight_decay": 0.5, "polar": "svd"}
    given = omp.muonplus(1.0, muon_weight_dimension_numbers=dims, weight_decay_mask=mask, **options)
    plain = omp.muonplus(1.0, **options)
    updates, expected = (tx.update(params, tx.init(params), params)[0] for tx in (given, plain))
    np.testing.assert_allclose(updates.weight, expected.weight, rtol=1e-6)


def test_haiku_training_loop():
    def forward(tokens):
        x = hk.Embed(VOCABULARY, WIDTH, name="token_embedding")(tokens)
        h = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        mask = np.tril(np.ones((1, 1, LENGTH, LENGTH)))
        initializer = hk.initializers.VarianceScaling()
        attend = hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=initializer, name="attention")
        x = x + attend(h, h, h, mask=mask)
        x = x + hk.nets.MLP([4 * WIDTH, WIDTH], name="mlp")(x)
        return hk.Linear(VOCABULARY, name="lm_head")(x)

    model = hk.without_apply_rng(hk.transform(forward))
    params = jax.jit(model.init)(jax.random.key(0), TOKENS[:, :-1])
    labels = labels_by_path(params)
    assert {k for k, v in labels.items() if v == "muon"} == {
        *(f"attention/{name}/w" for name in ("query", "key", "value", "linear")),
        "mlp/~/linear_0/w",
        "mlp/~/linear_1/w",
    }
    tx = omp.muonplus(LEARNING_RATE)

    @jax.jit
    def step(params, opt_state):
        value, grads = jax.value_and_grad(lambda p: cross_entropy(model.apply(p, TOKENS[:, :-1])))(
            params
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state, losses, old = tx.init(params), [], params
    for _ in range(STEPS):
        params, opt_state, loss = step(params, opt_state)
        if not losses:
            kernels = (p["mlp/~/linear_0"]["w"] for p in (old, params))
            assert_matrix_moved_as_muon_plus_moves(*kernels, (1,))
        losses.append(loss)
    assert_falls(losses)
