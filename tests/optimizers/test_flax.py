"""Training of small Flax models: Linen with TrainState, NNX with nnx.Optimizer and functionally."""

import flax.linen as nn
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
