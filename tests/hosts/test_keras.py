"""Keras 3 on JAX: `model.fit` with `OptaxOptimizer`. Skipped where Keras is not installed."""

import os

import jax
import numpy as np
import optax
import pytest

import optax_muonplus as omp
from tests.support.hosts import assert_falls, readings

os.environ["KERAS_BACKEND"] = "jax"
keras = pytest.importorskip("keras", exc_type=ImportError)
host = pytest.importorskip("examples.hosts.keras")
# Keras' variables, with NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")

JUDGED = {
    "attention/attention_output/bias": "adam",
    "attention/attention_output/kernel": "32x32x1",
    "attention/key/bias": "adam",
    "attention/key/kernel": "32x32x1",
    "attention/query/bias": "adam",
    "attention/query/kernel": "32x32x1",
    "attention/value/bias": "adam",
    "attention/value/kernel": "32x32x1",
    "down/bias": "adam",
    "down/kernel": "32x128x1",
    "embedding/embeddings": "adam",
    "logits/bias": "adam",
    "logits/kernel": "adam",
    "norm_{1..2}/beta": "adam",
    "norm_{1..2}/gamma": "adam",
    "up/bias": "adam",
    "up/kernel": "128x32x1",
}


@pytest.fixture(autouse=True)
def as_users_have_it():
    with jax.numpy_rank_promotion("allow"):  # JAX's default, which Keras needs
        yield


def by_path(variables):
    return {variable.path: variable.value for variable in variables}


def make(learning_rate=0.02, transformation=omp.muonplus, **options):
    return host.OptaxOptimizer(transformation, learning_rate, **options)


def small_model(optimizer):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4, name="up"), keras.layers.Dense(3, name="logits")]
    model = keras.Sequential([keras.Input((5,)), *layers])
    model.compile(optimizer=optimizer, loss="mse")
    return model


def random_gradients(model, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=v.shape).astype(np.float32) for v in model.trainable_variables]


def apply(model, steps=3):
    for seed in range(steps):
        model.optimizer.apply(random_gradients(model, seed), model.trainable_variables)
    return [np.asarray(v.value) for v in model.trainable_variables]


def assert_close(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_the_example_trains_and_every_variable_is_read_as_judged():
    model, losses = host.train(host.muonplus())
    assert_falls(losses, to=0.1)
    assert readings(by_path(model.trainable_variables)) == JUDGED


def test_steps_are_those_of_the_transformation():
    """With a schedule of Keras, seen by both groups."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    model = small_model(make(schedule))
    params = by_path(model.trainable_variables)
    names, state = list(params), omp.muonplus(0.1).init(params)
    for seed in range(3):
        grads = dict(zip(names, random_gradients(model, seed), strict=True))
        updates, state = omp.muonplus(0.1 * 0.5**seed).update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert_close(apply(model), [params[name] for name in names])


def test_a_callback_sets_the_rate_and_a_rate_of_zero_changes_nothing():
    model = small_model(make())
    before = apply(model)
    model.optimizer.learning_rate = 0.0
    assert_close(apply(model), before)


def test_a_decay_may_be_divided_by_the_rate():
    """So that it does not follow the rate, as messages about other libraries' arguments say."""
    apply(small_model(make(0.02, lambda rate: omp.muonplus(rate, weight_decay=0.1 / rate))))


def test_clipping_accumulation_and_averages_are_those_of_keras():
    plain = apply(small_model(make(transformation=optax.sgd)))
    clipped = apply(small_model(make(transformation=optax.sgd, global_clipnorm=1e6)))
    assert_close(clipped, plain)
    model = small_model(make(gradient_accumulation_steps=3, use_ema=True))
    first = [np.asarray(v.value) for v in model.trainable_variables]
    assert_close(apply(model, 2), first)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(apply(model, 3), first, strict=True))


def test_weights_on_disk_have_the_state(tmp_path):
    model, other = small_model(make()), small_model(make())
    apply(model)
    model.save_weights(tmp_path / "w.weights.h5")
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "w.weights.h5")
    momenta = [
        [v.value for v in m.optimizer.variables if "mu_" in v.path and "kernel" in v.path]
        for m in (model, other)
    ]
    assert all(np.abs(momentum).max() > 1e-3 for momentum in momenta[0])
    assert_close(momenta[1], momenta[0])
    assert_close(apply(other), apply(model))
    model.save(tmp_path / "m.keras")
    with pytest.raises(ValueError, match="load it with compile=False"):
        keras.saving.load_model(tmp_path / "m.keras")
    keras.saving.load_model(tmp_path / "m.keras", compile=False)


def test_a_variable_without_gradient_stays():
    model = small_model(make())
    apply(model)
    before = [np.asarray(v.value) for v in model.trainable_variables]
    grads = [None, *random_gradients(model)[1:]]
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        model.optimizer.apply(grads, model.trainable_variables)
    after = [np.asarray(v.value) for v in model.trainable_variables]
    np.testing.assert_array_equal(after[0], before[0])
    assert np.abs(after[2] - before[2]).max() > 1e-3


def test_a_variable_that_becomes_its_gradient_is_no_parameter():
    """Scales of float8 layers are such; a momentum of them would change them a second time."""
    scale = keras.Variable(1.0, name="scale")
    scale.overwrite_with_gradient = True
    optimizer = make()
    optimizer.build([keras.Variable(np.ones((4, 3)), name="kernel"), scale])
    assert not [path for path in by_path(optimizer.variables) if "scale" in path]


def test_two_variables_of_one_path_are_an_error():
    a, b = (keras.Variable(np.ones((2, 2)), name="kernel") for _ in range(2))
    with pytest.raises(ValueError, match=r"layers of .kernel. names of their own"):
        make().build([a, b])


def two(**options):
    """Keras numbers layers in the order in which they are made."""
    return keras.Sequential([keras.layers.Conv2D(8, 3), keras.layers.Conv2D(6, 3, **options)])


LAYERS = {  # by Keras' own name: the layer, its inputs, and its kernel as out x in x batch
    "conv1d": (lambda: keras.layers.Conv1D(8, 3), (2, 9, 5), "8x15x1"),
    "conv2d": (lambda: keras.layers.Conv2D(8, 3), (2, 9, 9, 4), "8x36x1"),
    "grey": (lambda: two(), (2, 9, 9, 1), "adam 6x72x1"),  # as a depthwise one
    "groups": (lambda: two(groups=2), (2, 9, 9, 5), "8x45x1 ?"),
    "conv3d": (lambda: keras.layers.Conv3D(8, 3), (2, 5, 5, 5, 4), "8x108x1"),
    "transpose": (lambda: keras.layers.Conv2DTranspose(8, 3), (2, 9, 9, 4), "?"),
    "depthwise": (lambda: keras.layers.DepthwiseConv2D(3), (2, 9, 9, 4), "adam"),
    "separable": (lambda: keras.layers.SeparableConv2D(8, 3), (2, 9, 9, 4), "adam 8x4x1"),
    "lstm": (lambda: keras.layers.LSTM(8), (2, 5, 4), "32x4x1 32x8x1"),
    "einsum": (lambda: keras.layers.EinsumDense("abc,cde->abde", (None, 4, 6)), (2, 5, 8), "?"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_kernels_of_layers_are_read_by_keras_names(name):
    make_layer, inputs, expected = LAYERS[name]
    keras.utils.clear_session()  # names without numbers
    layer = make_layer()
    layer.build(inputs)
    found = readings(by_path(layer.trainable_variables))
    kernels = [reading for path, reading in found.items() if "kernel" in path]
    assert " ".join(kernels) == expected, found
    assert {reading for path, reading in found.items() if "bias" in path} <= {"adam"}


def test_grouped_queries_have_fewer_keys():
    layer = keras.layers.GroupQueryAttention(6, 4, 2, name="attention")
    layer.build((2, 5, 24), (2, 5, 24))
    found = readings(by_path(layer.trainable_variables))
    sizes = {path.split("/")[-2]: x for path, x in found.items() if path.endswith("kernel")}
    few = {"key": "12x24x1", "value": "12x24x1"}
    assert sizes == {"query": "24x24x1", "attention_output": "24x24x1", **few}
