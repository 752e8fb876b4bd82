"""The loss from hidden states: equal to that of all logits, which it never holds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.trainer import models
from examples.trainer.models.layers import ONE_DEVICE, Layout
from examples.trainer.settings.model import ModelConfig
from examples.trainer.training import loss as training_loss
from examples.trainer.training import sharding
from examples.trainer.training.loss import head_loss, next_token_loss, token_scores
from tests.support.trainer import CUBE

B, T, D = 8, 6, 16


def batch(vocabulary, rows=B, dtype="float32"):
    """Hidden states, a head, and targets."""
    x, head = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(rows, T, D), (D, vocabulary)])
    )
    targets = jax.random.randint(jax.random.key(2), (rows, T), 0, vocabulary)
    return x.astype(dtype), head, targets


def loss_and_gradients(loss, x, head, targets):
    """Three times a loss, and its gradients."""
    compute = jax.jit(jax.value_and_grad(lambda x, head: 3 * loss(x, head, targets), (0, 1)))
    value, gradients = compute(x, head)
    return float(value), *(np.asarray(g, np.float32) for g in gradients)


def of_all_logits(x, head, targets):
    logits = jnp.matmul(x, head.astype(x.dtype), preferred_element_type=jnp.float32)
    return next_token_loss(logits, targets)


# Sums of the same terms in another order. In bfloat16 the gradient of the logits is rounded to 8
# bits too; each gradient is a sum of many.
@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 2e-6), ("bfloat16", 1e-2)])
@pytest.mark.parametrize(
    ("vocabulary", "mesh", "rows"),
    [
        (50_257, None, B),
        (51, CUBE, B),  # 51 words, 2 shards
        (51, "fsdp=8", 4),  # fewer rows than devices
        (52, "data=2,tensor=4", B),
    ],
)
def test_loss_of_chunks_is_that_of_all_logits(vocabulary, mesh, rows, dtype, rtol, monkeypatch):
    # 7 tokens a chunk on one device, which divides neither the tokens nor the rows.
    monkeypatch.setattr(training_loss, "CHUNK_BYTES", 7 * 4 * vocabulary)
    layout = Layout(sharding.make_mesh(mesh, jax.devices())) if mesh else ONE_DEVICE
    arrays = batch(vocabulary, rows, dtype)
    found = loss_and_gradients(lambda *args: head_loss(*args, layout), *arrays)
    for one, expected in zip(found, loss_and_gradients(of_all_logits, *arrays), strict=True):
        np.testing.assert_allclose(one, expected, rtol=rtol, atol=rtol * np.abs(expected).max())


def test_one_chunk_and_many_give_the_same(monkeypatch):
    arrays = batch(300)
    once = loss_and_gradients(lambda *args: head_loss(*args, ONE_DEVICE), *arrays)
    monkeypatch.setattr(training_loss, "CHUNK_BYTES", 1)  # a token a chunk
    often = loss_and_gradients(lambda *args: head_loss(*args, ONE_DEVICE), *arrays)
    for one, other in zip(once, often, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mesh", [None, CUBE])
def test_scores_of_tokens(mesh):
    layout = Layout(sharding.make_mesh(mesh, jax.devices())) if mesh else ONE_DEVICE
    x, head, targets = batch(51)
    logits = np.asarray(x, np.float64) @ np.asarray(head, np.float64)
    targets = targets.at[0].set(logits[0].argmax(-1))
    scores = jax.jit(lambda *args: token_scores(*args, layout))(x, head, targets)
    largest = logits.max(-1, keepdims=True)
    nats = (largest + np.log(np.exp(logits - largest).sum(-1, keepdims=True)))[..., 0]
    nats -= np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(scores.nats, nats, atol=1e-5)
    np.testing.assert_array_equal(scores.hits, logits.argmax(-1) == targets)
    assert scores.hits[0].all() and not scores.hits.all()


@pytest.mark.parametrize("evaluates", [False, True])
def test_logits_are_never_held_at_once(evaluates, monkeypatch):
    monkeypatch.setattr(training_loss, "CHUNK_BYTES", 2**20)
    shapes = [((8, 256, 16), "float32"), ((16, 2000), "float32"), ((8, 256), "int32")]
    x, head, targets = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)

    def bytes_of(loss):
        function = loss if evaluates else jax.value_and_grad(loss, argnums=(0, 1))
        compiled = jax.jit(function).lower(x, head, targets).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = 4 * 8 * 256 * 2000
    assert bytes_of(lambda *args: head_loss(*args, ONE_DEVICE)) < logits / 3
    assert bytes_of(of_all_logits) >= logits  # so that the first says something


@pytest.mark.parametrize("tied", [False, True])
def test_loss_of_a_model_is_that_of_its_logits(tied):
    config = ModelConfig(n_layer=1, n_head=2, d_model=16, context=T, tied=tied)
    for family in ("gpt", "llama"):
        graph, params = nnx.split(
            models.build(dataclasses.replace(config, family=family), 50, nnx.Rngs(0))
        )
        tokens = jax.random.randint(jax.random.key(0), (2, T), 0, 50)

        def loss(params, graph=graph, tokens=tokens):
            model = nnx.merge(graph, params)
            return head_loss(model.hidden(tokens, None, 0)[0], model.head(), tokens, ONE_DEVICE)

        def by_logits(params, graph=graph, tokens=tokens):
            return next_token_loss(nnx.merge(graph, params)(tokens), tokens)

        found, expected = (jax.tree.leaves(jax.jit(jax.grad(f))(params)) for f in (loss, by_logits))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)
