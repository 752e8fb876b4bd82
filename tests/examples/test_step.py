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
from examples.trainer.training import optimizers, sharding, transformations
from examples.trainer.training import step as train_step
from examples.trainer.training.evaluate import make_evaluate, perplexity, short
from examples.trainer.training.loss import head_loss, token_scores
from examples.trainer.training.optimizers import for_platform
from examples.trainer.training.sharding import make_mesh, replicated
from tests.support.trainer import CUBE, assemble_toy, first_losses


def test_step_that_is_not_finite_changes_nothing():
    mesh = make_mesh("", jax.devices()[:1])

    def loss(params, inputs, targets):  # infinite, or with such a slope
        bad = jnp.where(inputs[0, 0] == 1, jnp.inf, 1.0) * jnp.sum(targets)
        root = jnp.sqrt(params["scale"] - inputs[0, 1])
        return jnp.sum(params["up"]["kernel"] ** 2) * bad + root

    def optimizer(rates):
        return optimizers.build(OptimizerConfig(), 10, peaks=rates)

    params = {"up": {"kernel": jnp.ones((4, 3))}, "scale": jnp.asarray(5.0)}
    begin = train_step.make_init_from(optimizer(optimizers.Rates(0.0, 0.0)))
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


def evaluation(**changes):
    """Of a model for which all tokens are alike, and the inputs that it was given."""
    tokens = Tokens(np.arange(200), bytes=800, sha256="")
    config = RunConfig(model=ModelConfig(context=8), batch_size=2, eval_batches=3, **changes)
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


def test_evaluation_sees_the_same_rows_in_micro_batches():
    evaluate, whole = evaluation()
    evaluate({})
    evaluate, parts = evaluation(accumulate=2)
    evaluate({})
    assert [len(batch) for batch in parts] == [1] * 6
    np.testing.assert_array_equal(np.concatenate(parts), np.concatenate(whole))


# The loss from hidden states


B, T, D = 8, 6, 16


def hidden_and_head(vocabulary, rows=B, dtype="float32"):
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
    return of_logits(logits, targets)


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
    arrays = hidden_and_head(vocabulary, rows, dtype)
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


# Clipping


COUNT = 100_000


def small_gradients(dtype):
    """2 x 1e5 elements of 1e-3, whose squares are far smaller than their sum."""
    return {
        "a": jnp.full((COUNT,), 1e-3, dtype),
        "b": jnp.full((COUNT // 8, 8), 1e-3, dtype),
    }


def norm_in_float64(tree):
    """The oracle."""
    return np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in jax.tree.leaves(tree)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_norm_is_that_of_float64(dtype):
    grads = small_gradients(dtype)
    found = jax.jit(transformations.global_norm)(grads)
    assert found.dtype == jnp.float32
    assert float(found) == pytest.approx(norm_in_float64(grads), rel=1e-5)
    if dtype == "bfloat16":  # what this is in place of
        assert abs(float(optax.tree.norm(grads)) / norm_in_float64(grads) - 1) > 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("largest", [0.1, 10.0])
def test_clipping_is_that_of_float64(dtype, largest):
    values = np.random.default_rng(0).standard_normal((300, 50)) / 100
    grads = {"a": jnp.asarray(values, dtype), "b": small_gradients(dtype)["a"]}
    found, _ = jax.jit(transformations.clip_by_global_norm(largest).update)(
        grads, optax.EmptyState()
    )
    factor = min(1.0, largest / norm_in_float64(grads))
    # Rounded once: half of the last of 8 bits. In float32, divided and multiplied.
    tolerance = 2.0**-8 if dtype == "bfloat16" else 3e-7
    for name, x in grads.items():
        assert found[name].dtype == x.dtype
        exact = np.asarray(x, np.float64) * factor
        np.testing.assert_allclose(np.asarray(found[name], np.float64), exact, rtol=tolerance)
    if dtype == "float32":
        theirs, _ = jax.jit(optax.clip_by_global_norm(largest).update)(grads, optax.EmptyState())
        jax.tree.map(np.testing.assert_array_equal, found, theirs)


@pytest.mark.cpu_program
def test_clipping_stores_no_copy_in_float32():
    grads = jax.eval_shape(lambda: small_gradients("bfloat16"))
    step = jax.jit(transformations.clip_by_global_norm(0.1).update, donate_argnums=0)
    memory = step.lower(grads, optax.EmptyState()).compile().memory_analysis()
    assert memory.temp_size_in_bytes < COUNT  # bytes; a copy of one array has 4 for an element


# Half precision


def test_bfloat16_parameters_halve_the_state(text):
    changes = {"compute_dtype": "bfloat16", "scan": True, "accumulate": 2, "batch_size": 16}
    half, mixed = (
        assemble_toy(text, "", 1, param_dtype=dtype, **changes) for dtype in ("bfloat16", "float32")
    )

    def sizes(tree):
        return [x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if x.ndim]

    state = half.program.abstract
    for part in ("params", "opt_state"):
        expected = sizes(getattr(mixed.program.abstract, part))
        assert sizes(getattr(state, part)) == [size / 2 for size in expected]
    after, _ = jax.eval_shape(
        half.program.train_step, state, optimizers.Rates(0.1, 0.1), *half.loader.batch(0)
    )
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)
    # Parameters are rounded to 8 bits after each step too; the loss falls by 0.25 in these steps.
    assert first_losses(half) == pytest.approx(first_losses(mixed), abs=0.1)


@pytest.mark.parametrize(
    ("name", "dtype", "half"),
    [("normuon", "float16", "f16"), ("muonplus", "auto", None)],
)
def test_products_of_the_polar_step_have_the_dtype_asked_for(name, dtype, half, text):
    rule = OptimizerConfig(name=name, compute_dtype=dtype)
    toy = assemble_toy(text, "", 1, optimizer=rule)
    shapes = jax.eval_shape(toy.init)
    lowered = (
        toy.program.train_step.trace(shapes, optimizers.Rates(0.1, 0.1), *toy.loader.batch(0))
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    products = [line for line in lowered.splitlines() if "dot_general" in line]
    halves = [line for line in products if "xbf16>" in line or "xf16>" in line]
    # The polar step has 15 products for each of two stacks of shapes; the model has float32.
    assert bool(halves) == (half is not None)
    assert all(f"x{half}>" in line for line in halves)


@pytest.mark.parametrize(
    ("platform", "changes", "dtype"),
    [
        ("cpu", {}, "float32"),
        ("gpu", {}, "bfloat16"),
        ("tpu", {}, "bfloat16"),
        ("gpu", {"polar": "gram"}, "bfloat16"),
        ("gpu", {"polar": "gram", "ns_coeffs": "polar_express"}, "float32"),
        ("cpu", {"compute_dtype": "bfloat16"}, "bfloat16"),
        ("gpu", {"compute_dtype": "float32"}, "float32"),
    ],
)
def test_dtype_of_products_by_platform(platform, changes, dtype):
    assert for_platform(OptimizerConfig(**changes), platform).compute_dtype == dtype
