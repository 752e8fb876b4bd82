"""One training step, delayed records, and measures on validation text."""

import math
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models

import optax_muonplus as omp
from examples.trainer.data.token_files import Tokens
from examples.trainer.data.token_folder import Dataset
from examples.trainer.runs.metrics import Metrics, read_metrics
from examples.trainer.runs.recorder import Recorder
from examples.trainer.settings.model import ModelConfig
from examples.trainer.settings.run import OptimizerConfig, RunConfig
from examples.trainer.training import optimizers, sharding
from examples.trainer.training import step as train_step
from examples.trainer.training.evaluate import bits_per_byte, make_evaluate, perplexity, short
from examples.trainer.training.loss import next_token_loss
from examples.trainer.training.sharding import make_mesh, replicated
from examples.trainer.training.step import TrainState


def test_step_that_is_not_finite_changes_nothing():
    mesh = make_mesh("", jax.devices()[:1])

    def loss(params, inputs, targets):  # infinite, or with such a slope
        bad = jnp.where(inputs[0, 0] == 1, jnp.inf, 1.0) * jnp.sum(targets)
        root = jnp.sqrt(params["scale"] - inputs[0, 1])
        return jnp.sum(params["up"]["kernel"] ** 2) * bad + root, {}

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


def test_delayed_records_are_written_once(tmp_path):
    tx = omp.diagnostics.recorded(omp.muonplus, every=2)(0.1)
    params = {"up": {"kernel": jnp.eye(4, 8)}}
    states = [tx.init(params)]
    for _ in range(3):
        states.append(tx.update(params, states[-1], params)[1])
    own = unittest.mock.Mock(recorded=0)
    own.setup.config.optimizer.record_every = 2
    with Metrics(tmp_path / "matrices.jsonl", 0) as own.matrices:
        for step, updates in ((2, 0), (4, 2), (6, 3)):  # how many steps did update something
            state = TrainState(params, states[updates], jax.random.key(0))
            Recorder.record_matrices(own, step, state)
    records = read_metrics(tmp_path / "matrices.jsonl")
    assert [(record["step"], record["update"]) for record in records] == [(4, 2)]


def test_bits_per_byte():
    # 3 tokens of 2 nats each for 4 bytes: 6 nats = 8.656 bits, 2.164 bits for a byte.
    assert bits_per_byte(2.0, tokens=3, n_bytes=4) == pytest.approx(2.1640, abs=1e-4)


def test_a_perplexity_has_no_overflow():
    assert perplexity(2.0) == math.exp(2.0)
    for loss in (710.0, 1e30, math.inf):
        assert short(perplexity(loss)) == "1.01e+304"
    assert short(123.456) == "123.46" and short(-0.5, "+.2f") == "-0.50"


def evaluation(**changes):
    """Of a model for which all tokens are alike, and the inputs that it was given."""
    tokens = Tokens(np.arange(200), bytes=800, sha256="")
    config = RunConfig(model=ModelConfig(context=8), batch_size=2, eval_batches=3, **changes)
    seen = []

    def uniform(params, inputs):
        jax.debug.callback(lambda x: seen.append(x.tolist()), inputs, ordered=True)
        return jnp.zeros((*inputs.shape, 300))

    def loss(params, inputs, targets):
        return next_token_loss(uniform(params, inputs), targets)

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


def test_micro_batches_move_no_rows_between_devices():
    mesh = make_mesh("data=2", jax.devices()[:2])
    rows = jax.device_put(np.arange(24).reshape(8, 3), sharding.of_batch(mesh))
    split = jax.jit(lambda x: train_step.micro_batches(x, 2, mesh))(rows)
    assert split.shape == (2, 4, 3)
    for before, after in zip(rows.addressable_shards, split.addressable_shards, strict=True):
        assert before.device == after.device
        np.testing.assert_array_equal(after.data.reshape(-1, 3), before.data)
