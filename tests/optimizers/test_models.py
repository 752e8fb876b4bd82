"""Training of small models in Flax Linen and NNX, Equinox and Haiku, as each of them does it."""

import chex
import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import numpy as np
import optax
import optax.contrib
from flax import nnx
from flax.training.train_state import TrainState

import optax_muonplus as omp
from tests.support.training import (
    HEADS,
    LEARNING_RATE,
    LENGTH,
    MATRICES_OF_ATTENTION,
    STEPS,
    TOKENS,
    VOCABULARY,
    WIDTH,
    assert_falls,
    assert_matrix_moved_as_muon_plus_moves,
    cross_entropy,
    labels_by_path,
)


def first_step(params, loss):
    """Trains, and returns the parameters after the first step."""
    tx = omp.muonplus(LEARNING_RATE)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses, after = tx.init(params), [], []
    for _ in range(STEPS):
        params, state, value = step(params, state)
        losses.append(value)
        after.append(params)
    assert_falls(losses)
    return after[0]


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        attend = nn.MultiHeadDotProductAttention(num_heads=HEADS)
        x = x + attend(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
        x = x + nn.Dense(WIDTH)(nn.relu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(VOCABULARY, name="lm_head")(x)


def test_linen_training_with_train_state():
    model = LinenModel()
    params = jax.jit(model.init)(jax.random.key(0), TOKENS[:, :-1])["params"]
    tx = omp.muonplus(LEARNING_RATE)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    attention = {f"MultiHeadDotProductAttention_0/{k}/kernel" for k in MATRICES_OF_ATTENTION}
    labels = labels_by_path(params)
    muon = {path for path, label in labels.items() if label == "muon"}
    assert muon == {"Dense_0/kernel", "Dense_1/kernel", *attention}

    @jax.jit
    def step(state):
        def loss(params):
            return cross_entropy(state.apply_fn({"params": params}, TOKENS[:, :-1]))

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    losses = []
    for _ in range(STEPS):
        state, loss = step(state)
        if not losses:
            for name, output_axes in [("query", (1, 2)), ("out", (2,))]:
                kernels = (
                    p["MultiHeadDotProductAttention_0"][name]["kernel"]
                    for p in (params, state.params)
                )
                assert_matrix_moved_as_muon_plus_moves(*kernels, output_axes)
        losses.append(loss)
    assert_falls(losses)


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.lm_head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x), mask=nn.make_causal_mask(tokens))
        x = x + self.down(nnx.relu(self.up(x)))
        return self.lm_head(x)


NNX_MATRICES = {
    "up/kernel",
    "down/kernel",
    *(f"attention/{name}/kernel" for name in MATRICES_OF_ATTENTION),
}


def test_nnx_training_with_nnx_optimizer():
    """Variables at init, plain arrays at update: one set of rules for both."""
    model = NNXModel(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, omp.muonplus(LEARNING_RATE), wrt=nnx.Param)
    labels = labels_by_path(nnx.state(model, nnx.Param))
    muon = {path.removesuffix("/value") for path, label in labels.items() if label == "muon"}
    assert muon == NNX_MATRICES

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(TOKENS[:, :-1])))(model)
        optimizer.update(model, grads)
        return loss

    old = np.asarray(model.attention.query.kernel[...])
    losses = [step(model, optimizer)]
    assert_matrix_moved_as_muon_plus_moves(old, model.attention.query.kernel[...], (1, 2))
    losses += [step(model, optimizer) for _ in range(STEPS - 1)]
    assert_falls(losses)


def test_no_variable_of_a_state_is_without_an_array():
    """Trainers read the shape and dtype of every one (tunix does at its first step)."""
    model = NNXModel(nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    state = nnx.Optimizer(model, omp.muonplus(LEARNING_RATE), wrt=nnx.Param).opt_state
    held = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    arrays = [x for x in held if isinstance(x, nnx.Variable)]
    assert len(arrays) > 2 * len(jax.tree.leaves(params)) - len(NNX_MATRICES)
    assert all(hasattr(x.get_value(), "dtype") for x in arrays)


def test_nnx_training_with_pure_dictionaries():
    graph, state = nnx.split(NNXModel(nnx.Rngs(0)), nnx.Param)
    params = nnx.to_pure_dict(state)
    assert {k for k, label in labels_by_path(params).items() if label == "muon"} == NNX_MATRICES

    def loss(params):
        nnx.replace_by_pure_dict(state, params)
        return cross_entropy(nnx.merge(graph, state)(TOKENS[:, :-1]))

    first_step(params, loss)


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
    after = first_step(params, lambda p: cross_entropy(model.apply(p, TOKENS[:, :-1])))
    kernels = (p["mlp/~/linear_0"]["w"] for p in (params, after))
    assert_matrix_moved_as_muon_plus_moves(*kernels, (1,))
