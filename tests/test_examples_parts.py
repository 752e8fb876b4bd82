"""The small parts of the trainer: optimizers, schedules, measures, samples."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import optimizers
from examples.config import ModelConfig, OptimizerConfig, RunConfig
from examples.data.loader import Tokens, TokensMeta
from examples.evaluate import bits_per_byte, make_evaluate
from examples.generate import sample_ids
from examples.sharding import make_mesh


@pytest.mark.parametrize(("name", "equal"), [("muonplus", True), ("muon", False)])
def test_muonplus_is_muon_with_equal_rows(name, equal):
    params = {"up": {"kernel": jnp.zeros((8, 4))}}
    grads = {"up": {"kernel": jax.random.normal(jax.random.key(0), (8, 4))}}
    rule = optimizers.build(OptimizerConfig(name=name), steps=10)
    updates, _ = rule.update(grads, rule.init(params), params)
    rows = np.linalg.norm(updates["up"]["kernel"], axis=0)  # one for each of the 4 outputs
    assert bool(np.ptp(rows) < 1e-4 * rows.mean()) == equal


@pytest.mark.parametrize("name", ["muonplus", "muon", "adamw"])
def test_only_matrices_decay(name):
    config = OptimizerConfig(name=name)
    params = {"wte": {"embedding": jnp.ones((3, 4))}, "up": {"kernel": jnp.ones((4, 4))}}
    grads = jax.tree.map(jnp.zeros_like, params)
    rule = optimizers.build(config, steps=10)
    updates, _ = rule.update(grads, rule.init(params), params)
    # With zero gradients only the decay is left, and only on the matrix.
    rate = config.adam_learning_rate if name == "adamw" else config.learning_rate
    expected = -rate * config.weight_decay
    np.testing.assert_allclose(updates["up"]["kernel"], expected, rtol=1e-5)
    np.testing.assert_array_equal(updates["wte"]["embedding"], 0)


# Measures and samples


def test_bits_per_byte():
    # 3 tokens of 2 nats each for 4 bytes: 6 nats = 8.656 bits, 2.164 bits for a byte.
    assert bits_per_byte(2.0, tokens=3, n_bytes=4) == pytest.approx(2.1640, abs=1e-4)


def test_evaluation_of_a_uniform_model():
    tokens = Tokens(np.arange(200), TokensMeta("int64", tokens=200, bytes=800, sha256=""))
    config = RunConfig(model=ModelConfig(context=8), batch_size=2, eval_batches=3)
    seen = []

    def uniform(params, inputs):
        jax.debug.callback(lambda x: seen.append(x.tolist()), inputs, ordered=True)
        return jnp.zeros((*inputs.shape, 300))

    evaluate = make_evaluate(uniform, config, tokens, make_mesh("", jax.devices()[:1]))
    evaluation = evaluate({})
    assert evaluation.val_perplexity == pytest.approx(300, rel=1e-5)
    assert evaluation.val_bits_per_byte == pytest.approx(math.log2(300) / 4, rel=1e-5)
    evaluate({})
    assert len(seen) == 6 and seen[:3] == seen[3:]  # the same batches each time


def test_sample_follows_the_model():
    def next_number(params, tokens):  # surely the token after the last one, modulo 7
        return 1000.0 * jax.nn.one_hot((tokens + 1) % 7, 7)

    # Longer than the window of 5, so that it has to move.
    new = sample_ids(next_number, {}, [0], n_new=12, context=5, key=jax.random.key(0))
    assert new == [i % 7 for i in range(1, 13)]


def test_sample_is_drawn():
    def undecided(params, tokens):
        return jnp.zeros((*tokens.shape, 60))

    new = sample_ids(undecided, {}, [0], n_new=40, context=5, key=jax.random.key(0))
    assert len(set(new)) > 10


# Schedules


def test_schedules():
    steps, peak = 100, 0.5
    constant = optimizers.schedule(OptimizerConfig(schedule="constant_linear"), peak, steps)
    np.testing.assert_allclose([constant(i) for i in (0, 40, 70, 100)], [0.5, 0.5, 0.25, 0])
    cosine = optimizers.schedule(OptimizerConfig(schedule="warmup_cosine"), peak, steps)
    np.testing.assert_allclose(
        [cosine(i) for i in (0, 10, 55, 100)], [0.05, 0.5, 0.25, 0], atol=1e-6
    )
