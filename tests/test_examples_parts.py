"""The small parts of the trainer: optimizers, schedules, measures, samples."""

import math
import unittest.mock
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_muonplus as omp
from examples import optimizers, training
from examples.config import ModelConfig, OptimizerConfig, RunConfig
from examples.data.loader import Tokens, TokensMeta
from examples.evaluate import bits_per_byte, make_evaluate
from examples.generate import sample_ids
from examples.grid import Optimizer
from examples.loop import Loop
from examples.loss import next_token_loss
from examples.runs import Metrics, read_metrics
from examples.sharding import make_mesh, replicated
from examples.training import TrainState

SHORT = ModelConfig(n_layer=1, d_model=8, context=5)


@pytest.mark.parametrize(("name", "equal"), [("muonplus", True), ("muon", False)])
def test_muonplus_is_muon_with_equal_rows(name, equal):
    params = {"up": {"kernel": jnp.zeros((8, 4))}}
    grads = {"up": {"kernel": jax.random.normal(jax.random.key(0), (8, 4))}}
    rule = optimizers.build(OptimizerConfig(name=name), steps=10)
    updates, _ = rule.update(grads, rule.init(params), params)
    rows = np.linalg.norm(updates["up"]["kernel"], axis=0)  # one for each of the 4 outputs
    assert bool(np.ptp(rows) < 1e-4 * rows.mean()) == equal


@pytest.mark.parametrize("name", get_args(Optimizer))
def test_only_matrices_decay(name):
    config = OptimizerConfig(name=name)
    params = {"wte": {"embedding": jnp.ones((3, 4))}, "up": {"kernel": jnp.ones((4, 4))}}
    grads = jax.tree.map(jnp.zeros_like, params)
    rule = optimizers.build(config, steps=10)
    updates, _ = rule.update(grads, rule.init(params), params)
    # With zero gradients only the decay is left, and only on the matrix.
    expected = -optimizers.rates(config).matrices * config.weight_decay
    np.testing.assert_allclose(updates["up"]["kernel"], expected, rtol=1e-5)
    np.testing.assert_array_equal(updates["wte"]["embedding"], 0)


@pytest.mark.parametrize("name", get_args(Optimizer))
def test_every_rule_can_be_recorded(name):
    params = {"wte": {"embedding": jnp.ones((3, 4))}, "up": {"kernel": jnp.eye(4, 8)}}
    plain, recorded = (
        optimizers.build(OptimizerConfig(name=name, record_every=every), 10) for every in (0, 1)
    )
    expected, _ = plain.update(params, plain.init(params), params)
    updates, state = recorded.update(params, recorded.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, updates, expected)
    record = omp.diagnostics.read(state)
    assert record.step == 1 and list(record.values) == ["up/kernel"]
    last = "update" if name in optimizers.RECORDED_INSIDE else "after"
    assert record.values["up/kernel"][f"{last}/rms"] > 0


def test_records_that_skipped_steps_delay(tmp_path):
    tx = omp.diagnostics.recorded(omp.muonplus, every=2)(0.1)
    params = {"up": {"kernel": jnp.eye(4, 8)}}
    states = [tx.init(params)]
    for _ in range(3):
        states.append(tx.update(params, states[-1], params)[1])
    own = unittest.mock.Mock(spec=Loop, recorded=0)
    with Metrics(tmp_path / "matrices.jsonl", 0) as file:
        for step, updates in ((2, 0), (4, 2), (6, 3)):  # how many steps did update something
            state = TrainState(params, states[updates], jax.random.key(0))
            Loop.record_matrices(own, file, step, state)
    records = read_metrics(tmp_path / "matrices.jsonl")
    assert [(record["step"], record["update"]) for record in records] == [(4, 2)]


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

    def loss(params, inputs, targets):
        return next_token_loss(uniform(params, inputs), targets)

    evaluate = make_evaluate(jax.jit(loss), config, tokens, make_mesh("", jax.devices()[:1]))
    evaluation = evaluate({})
    assert evaluation.val_perplexity == pytest.approx(300, rel=1e-5)
    assert evaluation.val_bits_per_byte == pytest.approx(math.log2(300) / 4, rel=1e-5)
    evaluate({})
    assert len(seen) == 6 and seen[:3] == seen[3:]  # the same batches each time


def test_sample_follows_the_model():
    def next_number(params, tokens, past, start):  # surely the token after the last, modulo 7
        return 1000.0 * jax.nn.one_hot((jnp.asarray(tokens) + 1) % 7, 7), past

    # Longer than the window of 5, so that it has to move.
    new = sample_ids(next_number, {}, [0], 12, SHORT, jax.random.key(0))
    assert new == [i % 7 for i in range(1, 13)]


def test_another_text_of_a_model_compiles_nothing():
    traced = []

    def undecided(params, tokens, past, start):
        traced.append(tokens.shape)
        return jnp.zeros((*tokens.shape, 60)), past

    for seed in range(3):
        sample_ids(undecided, {}, [0] * (seed + 1), 4, SHORT, jax.random.key(seed))
    assert traced == [(1, 5), (1, 1)]


def test_sample_is_drawn():
    def undecided(params, tokens, past, start):
        return jnp.zeros((*tokens.shape, 60)), past

    new = sample_ids(undecided, {}, [0], 40, SHORT, jax.random.key(0))
    assert len(set(new)) > 10


# Rates and schedules


def test_rates_by_default():
    names = {name: optimizers.rates(OptimizerConfig(name=name)) for name in get_args(Optimizer)}
    assert {name for name, rate in names.items() if rate.matrices == 0.002} == {
        "adamw",
        "adamuon",
        "mano",
    }
    assert optimizers.rates(OptimizerConfig(learning_rate=0.5)).matrices == 0.5


def test_schedules():
    steps, peak = 100, 0.5
    constant = optimizers.schedule(OptimizerConfig(schedule="constant_linear"), peak, steps)
    np.testing.assert_allclose([constant(i) for i in (0, 40, 70, 100)], [0.5, 0.5, 0.25, 0])
    cosine = optimizers.schedule(OptimizerConfig(schedule="warmup_cosine"), peak, steps)
    np.testing.assert_allclose(
        [cosine(i) for i in (0, 10, 55, 100)], [0.05, 0.5, 0.25, 0], atol=1e-6
    )


# Steps


def test_a_step_that_is_not_finite_changes_nothing():
    mesh = make_mesh("", jax.devices()[:1])

    def loss(params, inputs, targets):  # infinite, or with such a slope
        bad = jnp.where(inputs[0, 0] == 1, jnp.inf, 1.0) * jnp.sum(targets)
        return jnp.sum(params["up"]["kernel"] ** 2) * bad + jnp.sqrt(params["scale"] - inputs[0, 1])

    def optimizer(rates):
        return optimizers.build(OptimizerConfig(), 10, peaks=rates)

    params = {"up": {"kernel": jnp.ones((4, 3))}, "scale": jnp.asarray(5.0)}
    init = training.make_init(lambda seed: params, optimizer(optimizers.Rates(0.0, 0.0)))
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)),
        jax.eval_shape(init, 0),
    )
    step = training.make_train_step(loss, optimizer, abstract, mesh, accumulate=1)
    rates = optimizers.Rates(0.1, 0.1)
    state, value = step(init(0), rates, np.array([[0, 0]]), np.array([[1, 1]]))
    assert jnp.isfinite(value) and state.params["scale"] != 5
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    root_of_zero = np.asarray(state.params["scale"])
    for bad in ([[1.0, 0.0]], [[0.0, root_of_zero]]):
        state, value = step(state, rates, np.array(bad, np.float32), np.array([[1, 1]]))
        assert jnp.isnan(value)
        jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.opt_state))
    state, value = step(state, rates, np.array([[0, 0]]), np.array([[1, 1]]))
    assert jnp.isfinite(value) and state.params["scale"] != root_of_zero
