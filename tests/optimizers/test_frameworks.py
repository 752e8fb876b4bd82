"""A small real model of each library: its parameter tree, its training loop, a falling loss."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx
from flax.training.train_state import TrainState

import optax_muonplus as omp

VOCABULARY, LENGTH, WIDTH, HEADS = 11, 6, 8, 2
STEPS = 10
LEARNING_RATE = 0.02
TOKENS = np.random.default_rng(0).integers(VOCABULARY, size=(4, LENGTH + 1))

# Every model below has these parts; the names are each library's own habit.
MATRICES_OF_ATTENTION = {"query", "key", "value", "out"}


def cross_entropy(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()


def labels_by_path(params):
    """``{"block/kernel": "muon", ...}``"""
    with_path, _ = jax.tree.flatten_with_path(omp.partition_labels(params))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in with_path}


def assert_falls(losses):
    """By a third, from beginning to end."""
    assert np.all(np.isfinite(losses))
    assert losses[-1] < 0.67 * losses[0], losses


def assert_matrix_moved_as_muon_plus_moves(old, new, output_axes, learning_rate=LEARNING_RATE):
    """After one step, by lr sqrt(m/n) for each unit row: an update that AdamW cannot make."""
    change = np.asarray(new, np.float64) - np.asarray(old, np.float64)
    reduction_axes = tuple(i for i in range(change.ndim) if i not in output_axes)
    n = np.prod([change.shape[i] for i in reduction_axes])
    m = np.prod([change.shape[i] for i in output_axes])
    rows = np.sqrt((change**2).sum(reduction_axes))
    # Two weights of size 1, rounded to 6e-8, differ by about 1e-2.
    np.testing.assert_allclose(rows, learning_rate * np.sqrt(m / n), rtol=1e-4)


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        attend = nn.MultiHeadDotProductAttention(num_heads=HEADS)
        x = x + attend(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
        x = x + nn.Dense(WIDTH)(nn.relu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(VOCABULARY, name="lm_head")(x)


def test_linen_train_state():
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


def test_nnx_optimizer():
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


def test_nnx_functional_with_pure_dictionaries():
    graph, state = nnx.split(NNXModel(nnx.Rngs(0)), nnx.Param)
    params = nnx.to_pure_dict(state)
    assert {k for k, label in labels_by_path(params).items() if label == "muon"} == NNX_MATRICES
    tx = omp.muonplus(LEARNING_RATE)

    @jax.jit
    def step(params, opt_state):
        def loss(params):
            nnx.replace_by_pure_dict(state, params)
            return cross_entropy(nnx.merge(graph, state)(TOKENS[:, :-1]))

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state, losses = tx.init(params), []
    for _ in range(STEPS):
        params, opt_state, loss = step(params, opt_state)
        losses.append(loss)
    assert_falls(losses)


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


def test_equinox_loop():
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


def test_equinox_trees_that_can_be_called():
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


def test_haiku_loop():
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


def regression():
    """Parameters of a small network and the loss of fitting random numbers with it."""
    rng = np.random.default_rng(1)
    shapes = {"up": {"kernel": (4, 16), "bias": (16,)}, "down": {"kernel": (16, 3)}}
    params = jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    x, y = (jnp.asarray(rng.normal(size=(8, width)), jnp.float32) for width in (4, 3))

    def loss(params):
        hidden = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"][None, :])
        return jnp.mean((hidden @ params["down"]["kernel"] - y) ** 2)

    return params, loss


def train(tx, params, loss, steps, parameters_of_loss=lambda params: params):
    """Parameters after each step, and the losses before them."""

    def step(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(parameters_of_loss(params))
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (params, value)

    return jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), length=steps)[1])(params)


def test_optax_clipping_in_front():
    """... changes nothing for the matrices, whose update does not see the gradient's size."""
    params, loss = regression()
    tx = optax.chain(optax.clip_by_global_norm(1e-9), omp.muonplus(LEARNING_RATE))
    history, losses = train(tx, params, loss, 20)
    for layer in ("up", "down"):
        kernels = params[layer]["kernel"], history[layer]["kernel"][0]
        assert_matrix_moved_as_muon_plus_moves(*kernels, (1,))
    assert_falls(losses)


def test_optax_schedule_free():
    """With beta=0: the averaging takes the momentum's place."""
    params, loss = regression()
    inner = omp.muonplus(LEARNING_RATE, beta=0.0)
    tx = optax.contrib.schedule_free(inner, LEARNING_RATE, b1=0.9)
    _, losses = train(tx, params, loss, 60)
    assert_falls(losses)


def test_optax_lookahead():
    """Fast weights step by Muon+; the slow ones follow them, half way, every third time."""
    params, loss = regression()
    tx = optax.lookahead(omp.muonplus(LEARNING_RATE), sync_period=3, slow_step_size=0.5)
    both = optax.LookaheadParams.init_synced(params)
    history, losses = train(tx, both, loss, 60, parameters_of_loss=lambda p: p.fast)
    kernel, slow = params["up"]["kernel"], history.slow["up"]["kernel"]
    alone, _ = train(omp.muonplus(LEARNING_RATE), params, loss, 3)
    np.testing.assert_array_equal(slow[1], kernel)
    half_way = (kernel + alone["up"]["kernel"][2]) / 2
    np.testing.assert_allclose(slow[2], half_way, rtol=1e-4, atol=1e-5)
    assert_falls(losses)
