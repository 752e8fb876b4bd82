"""A training step: its loss, clipping, sums between hosts, precision, and the evaluation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tokenizers import Tokenizer, models

from examples.trainer.data.token_files import Dataset, Tokens
from examples.trainer.models.layers import ONE_DEVICE, Layout
from examples.trainer.settings.model import ModelConfig
from examples.trainer.settings.run import OptimizerConfig, RunConfig
from examples.trainer.training import loss as training_loss
from examples.trainer.training import optimizers, sharding
from examples.trainer.training import step as train_step
from examples.trainer.training.evaluate import make_evaluate, perplexity, short
from examples.trainer.training.loss import head_loss, token_scores
from examples.trainer.training.optimizers import for_platform
from examples.trainer.training.sharding import make_mesh, replicated
from tests.support.trainer import CUBE


def test_step_that_is_not_finite_changes_nothing():
    mesh = make_mesh("", jax.devices()[:1])

    def loss(params, inputs, targets):  # infinite, or with such a slope
        bad = jnp.where(inputs[0, 0] == 1, jnp.inf, 1.0) * jnp.sum(targets)
        root = jnp.sqrt(params["scale"] - inputs[0, 1])
        return jnp.sum(params["up"]["kernel"] ** 2) * bad + root

    def optimizer(rates):
        return optimizers.build(OptimizerConfig(), 10, peaks=rates)

    params = {"up": {"kernel": jnp.ones((4, 3))}, "scale": jnp.asarray(5.0)}

    def begin(params, seed):
        rule = optimizer(optimizers.Rates(0.0, 0.0))
        return train_step.TrainState(params, rule.init(params), jax.random.key(seed))

    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)),
        jax.eval_shape(begin, params, 0),
    )
    step = train_step.make_train_step(loss, optimizer, abstract, mesh, accumulate=1)
    rates = optimizers.Rates(0.1, 0.1)
    state, measured = step(begin(params, 0), rates, np.array([[0, 0]]), np.array([[1, 1]]))
    assert jnp.isfinite(measured.loss) and state.params["scale"] != 5
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    root_of_zero = np.asarray(state.params["scale"])
    for bad in ([[1.0, 0.0]], [[0.0, root_of_zero]]):
        state, measured = step(state, rates, np.array(bad, np.float32), np.array([[1, 1]]))
        assert jnp.isnan(measured.loss)
        jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.opt_state))
    state, measured = step(state, rates, np.array([[0, 0]]), np.array([[1, 1]]))
    assert jnp.isfinite(measured.loss) and state.params["scale"] != root_of_zero


def test_a_perplexity_has_no_overflow():
    assert perplexity(2.0) == math.exp(2.0)
    for loss in (710.0, 1e30, math.inf):
        assert short(perplexity(loss)) == "1.01e+304"
    assert short(123.456) == "123.46" and short(-0.5, "+.2f") == "-0.50"


def of_logits(logits, targets):
    """The mean cross-entropy."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))


def evaluation():
    """Of a model for which all tokens are alike, and the inputs that it was given."""
    tokens = Tokens(np.arange(200), bytes=800, sha256="")
    config = RunConfig(model=ModelConfig(context=8), batch_size=2, eval_batches=3)
    seen = []

    def uniform(params, inputs):
        jax.debug.callback(lambda x: seen.append(x.tolist()), inputs, ordered=True)
        return jnp.zeros((*inputs.shape, 300))

    def loss(params, inputs, targets):
        return of_logits(uniform(params, inputs), targets)

    data = Dataset(Tokenizer(models.BPE()), tokens, tokens, key="")
    return make_evaluate(jax.jit(loss), config, data, make_mesh("", jax.devices()[:1])), seen


def test_evaluation_of_a_uniform_model():
    evaluate, seen = evaluation()
    found = evaluate({})
    assert found.val_perplexity == pytest.approx(300, rel=1e-5)
    assert found.val_bits_per_byte == pytest.approx(math.log2(300) / 4, rel=1e-5)
    evaluate({})
    assert len(seen) == 6 and seen[:3] == seen[3:]  # the same batches each time


# The loss from hidden states


B, T, D = 8, 6, 16


def hidden_and_head(vocabulary, dtype="float32"):
    """Hidden states, a head, and targets."""
    x, head = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(B, T, D), (D, vocabulary)])
    )
    targets = jax.random.randint(jax.random.key(2), (B, T), 0, vocabulary)
    return x.astype(dtype), head, targets


def loss_and_gradients(loss, x, head, targets):
    """Three times a loss, and its gradients."""
    compute = jax.jit(jax.value_and_grad(lambda x, head: 3 * loss(x, head, targets), (0, 1)))
    value, gradients = compute(x, head)
    return float(value), *(np.asarray(g, np.float32) for g in gradients)


def of_all_logits(x, head, targets):
    logits = jnp.matmul(x, head.astype(x.dtype), preferred_element_type=jnp.float32)
    return of_logits(logits, targets)


# Sums of the same terms in another order. In bfloat16 the gradient of the logits is rounded to 8
# bits too; each gradient is a sum of many.
@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 2e-6), ("bfloat16", 1e-2)])
@pytest.mark.parametrize(
    ("vocabulary", "mesh"),
    [
        (50_257, None),
        (51, CUBE),  # 51 words, 2 shards
        (52, "data=2,tensor=4"),
    ],
)
def test_loss_of_chunks_is_that_of_all_logits(vocabulary, mesh, dtype, rtol, monkeypatch):
    # 7 tokens a chunk on one device, which divides neither the tokens nor the rows.
    monkeypatch.setattr(training_loss, "CHUNK_BYTES", 7 * 4 * vocabulary)
    layout = Layout(sharding.make_mesh(mesh, jax.devices())) if mesh else ONE_DEVICE
    arrays = hidden_and_head(vocabulary, dtype)
    found = loss_and_gradients(lambda *args: head_loss(*args, layout), *arrays)
    for one, expected in zip(found, loss_and_gradients(of_all_logits, *arrays), strict=True):
        np.testing.assert_allclose(one, expected, rtol=rtol, atol=rtol * np.abs(expected).max())


@pytest.mark.parametrize("mesh", [None, CUBE])
def test_scores_of_tokens(mesh):
    layout = Layout(sharding.make_mesh(mesh, jax.devices())) if mesh else ONE_DEVICE
    x, head, targets = hidden_and_head(51)
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


# Half precision


@pytest.mark.parametrize(
    ("platform", "changes", "dtype"),
    [
        ("cpu", {}, "float32"),
        ("gpu", {}, "bfloat16"),
        ("tpu", {}, "bfloat16"),
        ("cpu", {"compute_dtype": "bfloat16"}, "bfloat16"),
        ("gpu", {"compute_dtype": "float32"}, "float32"),
    ],
)
def test_dtype_of_products_by_platform(platform, changes, dtype):
    assert for_platform(OptimizerConfig(**changes), platform).compute_dtype == dtype
