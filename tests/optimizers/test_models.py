"""Training of small models in Flax Linen and NNX, Equinox and Haiku, as each of them does it."""

import chex
import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import optax_muonplus as omp
from tests.support.trees import by_path

VOCABULARY, LENGTH, WIDTH, HEADS, STEPS, RATE = 11, 6, 8, 2, 10, 0.02
TOKENS = np.random.default_rng(0).integers(VOCABULARY, size=(4, LENGTH + 1))
GIVEN, KEY = TOKENS[:, :-1], jax.random.key(0)


def cross_entropy(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        attend = nn.MultiHeadDotProductAttention(num_heads=HEADS, name="attention")
        x = x + attend(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
        x = x + nn.Dense(WIDTH)(nn.relu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(VOCABULARY, name="lm_head")(x)


def linen():
    model = LinenModel()
    params = jax.jit(model.init)(KEY, GIVEN)["params"]
    return params, lambda p: cross_entropy(model.apply({"params": p}, GIVEN))


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


def pure_nnx():
    graph, state = nnx.split(NNXModel(nnx.Rngs(0)), nnx.Param)

    def loss(params):
        nnx.replace_by_pure_dict(state, params)
        return cross_entropy(nnx.merge(graph, state)(GIVEN))

    return nnx.to_pure_dict(state), loss


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
        return self.lm_head(x + self.down(jax.nn.relu(self.up(self.norm(x)))))


def equinox():
    """A tree with None where there is no array, and weights stored as (out, in)."""
    params, static = eqx.partition(EquinoxModel(KEY), eqx.is_inexact_array)
    assert params.up.bias is None
    return params, lambda p: cross_entropy(jax.vmap(jax.vmap(eqx.combine(p, static)))(GIVEN))


def haiku():
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
    return jax.jit(model.init)(KEY, GIVEN), lambda p: cross_entropy(model.apply(p, GIVEN))


FLAX = {f"attention/{name}/kernel" for name in ("query", "key", "value", "out")}
NNX = {"up/kernel", "down/kernel", *FLAX}
OF_HAIKU = {f"attention/{name}/w" for name in ("query", "key", "value", "linear")}
# The model, its matrices, and the axes of outputs of some of them.
MODELS = {
    "linen": (
        linen,
        {"Dense_0/kernel", "Dense_1/kernel", *FLAX},
        {"attention/query/kernel": (1, 2), "attention/out/kernel": (2,)},
    ),
    "nnx": (pure_nnx, NNX, {"attention/query/kernel": (1, 2)}),
    "equinox": (equinox, {"up/weight", "down/weight"}, {"up/weight": (0,)}),
    "haiku": (
        haiku,
        {"mlp/~/linear_0/w", "mlp/~/linear_1/w", *OF_HAIKU},
        {"mlp/~/linear_0/w": (1,)},
    ),
}


def assert_falls(losses):
    """By a third, from beginning to end."""
    assert np.all(np.isfinite(losses)) and losses[-1] < 0.67 * losses[0], losses


def assert_moved_as_muon_plus_moves(old, new, output_axes):
    """After one step, by lr sqrt(m/n) for each unit row: an update that AdamW cannot make."""
    change = np.asarray(new, np.float64) - np.asarray(old, np.float64)
    sides = tuple(i for i in range(change.ndim) if i not in output_axes), output_axes
    n, m = (np.prod([change.shape[i] for i in side]) for side in sides)
    rows = np.sqrt((change**2).sum(sides[0]))
    # Two weights of size 1, rounded to 6e-8, differ by about 1e-2.
    np.testing.assert_allclose(rows, RATE * np.sqrt(m / n), rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_training(name):
    make, matrices, moved = MODELS[name]
    params, loss = make()
    labels = by_path(omp.partition_labels(params))
    assert {path for path, label in labels.items() if label == "muon"} == matrices
    tx = omp.muonplus(RATE)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses, before = tx.init(params), [], by_path(params)
    for _ in range(STEPS):
        params, state, value = step(params, state)
        if not losses:
            for path, axes in moved.items():
                assert_moved_as_muon_plus_moves(before[path], by_path(params)[path], axes)
        losses.append(value)
    assert_falls(losses)


def test_nnx_training_with_nnx_optimizer():
    """Variables at init, plain arrays at update: one set of rules for both."""
    model = NNXModel(nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    optimizer = nnx.Optimizer(model, omp.muonplus(RATE), wrt=nnx.Param)
    labels = by_path(omp.partition_labels(params))
    assert {path for path, label in labels.items() if label == "muon"} == NNX
    # Trainers read the shape and dtype of every variable (tunix does at its first step).
    held = jax.tree.leaves(optimizer.opt_state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    arrays = [x for x in held if isinstance(x, nnx.Variable)]
    assert len(arrays) > 2 * len(jax.tree.leaves(params)) - len(NNX)
    assert all(hasattr(x.get_value(), "dtype") for x in arrays)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(GIVEN)))(model)
        optimizer.update(model, grads)
        return loss

    old = np.asarray(model.attention.query.kernel[...])
    losses = [step(model, optimizer)]
    assert_moved_as_muon_plus_moves(old, model.attention.query.kernel[...], (1, 2))
    losses += [step(model, optimizer) for _ in range(STEPS - 1)]
    assert_falls(losses)


def test_a_whole_equinox_model_may_stand_for_its_parameters():
    """Its activation is a leaf without an update. ``optax.adamw`` takes it so too."""
    model = eqx.nn.MLP(4, 3, 8, 1, key=KEY)
    params = eqx.filter(model, eqx.is_inexact_array)
    tx = omp.muonplus(0.1, weight_decay=0.1, adam_weight_decay=0.1)
    expected, _ = tx.update(params, tx.init(params), params)
    updates, _ = tx.update(params, tx.init(params), model)
    chex.assert_trees_all_equal(updates, expected)


def test_callable_modules_as_dimension_numbers_are_trees():
    """Dimension numbers and decay masks in the shape of a module are trees, not functions."""
    params = eqx.filter(eqx.nn.Linear(4, 6, key=KEY), eqx.is_inexact_array)
    dims = omp.muon_dimension_numbers(params)
    assert callable(dims)
    mask = jax.tree.map(lambda x: x.ndim == 2, params)
    options = {"weight_decay": 0.5, "polar": "svd"}
    given = omp.muonplus(1.0, muon_weight_dimension_numbers=dims, weight_decay_mask=mask, **options)
    plain = omp.muonplus(1.0, **options)
    updates, expected = (tx.update(params, tx.init(params), params)[0] for tx in (given, plain))
    np.testing.assert_allclose(updates.weight, expected.weight, rtol=1e-6)
