"""A training step: its loss, clipping, sums between hosts, precision, and the evaluation."""

import math
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.trainer.data.token_files import Tokens
from examples.trainer.models import sharding
from examples.trainer.models.sharding import make_mesh
from examples.trainer.runs.loop import Run, evaluate
from examples.trainer.settings.run import ModelConfig, RunConfig
from examples.trainer.training import loss as training_loss
from examples.trainer.training.loss import NO_TARGET, head_loss
from examples.trainer.training.optimizers import Rates
from tests.support.trainer import ADAMW_RULE, CUBE, assemble_toy


def test_step_that_is_not_finite_changes_nothing(text):
    run = assemble_toy(text, "", 1)
    step, rates = run.functions.train_step, Rates(0.1, 0.1)
    state, ids = run.functions.init(0), np.zeros((8, 16), np.int32)
    state, measured = step(state, rates, ids, ids)
    assert jnp.isfinite(measured.loss) and measured.rates.matrices == np.float32(0.1)
    before = jax.tree.map(np.array, (state.params, state.opt_state))
    scale = before[0]["ln_f"]["scale"]
    params = {**state.params, "ln_f": {"scale": jnp.full_like(scale, jnp.inf)}}
    broken = jax.tree.map(np.array, (params, state.opt_state))
    state, measured = step(state._replace(params=params), rates, ids, ids)
    assert jnp.isnan(measured.loss)
    jax.tree.map(np.testing.assert_array_equal, broken, (state.params, state.opt_state))
    state, measured = step(state._replace(params=before[0]), rates, ids, ids)
    assert jnp.isfinite(measured.loss) and (state.params["ln_f"]["scale"] != scale).any()


def of_logits(logits, targets):
    """The mean cross-entropy."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))


def test_evaluation_of_a_uniform_model():
    tokens = Tokens(np.arange(200), bytes=800, digest="")
    config = RunConfig(model=ModelConfig(context=8), batch_size=2, eval_batches=3)
    seen = []

    def loss(scale, inputs, targets):
        seen.append(np.asarray(inputs).tolist())
        return scale * of_logits(jnp.zeros((*inputs.shape, 300)), targets)

    data, functions = unittest.mock.Mock(val=tokens), unittest.mock.Mock(loss=loss)
    run = Run(config, make_mesh("", jax.devices()[:1]), data, functions)
    found = evaluate(run, 1.0)
    assert found["val_perplexity"] == pytest.approx(300, rel=1e-5)
    assert found["val_bits_per_byte"] == pytest.approx(math.log2(300) / 4, rel=1e-5)
    assert evaluate(run, math.inf)["val_perplexity"] == math.exp(700)  # more would overflow
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
        (51, "tensor=8"),
    ],
)
def test_loss_of_chunks_is_that_of_all_logits(vocabulary, mesh, dtype, rtol, monkeypatch):
    monkeypatch.setattr(training_loss, "CHUNK_BYTES", {"cpu": 17 * 4 * vocabulary})  # 2 of 6 tokens
    placed = make_mesh(mesh or "", jax.devices()[: 8 if mesh else 1])
    arrays = jax.device_put(hidden_and_head(vocabulary, dtype), sharding.replicated(placed))

    def loss(*args):
        with sharding.on(placed):
            return head_loss(*args)

    found = loss_and_gradients(loss, *arrays)
    for one, expected in zip(found, loss_and_gradients(of_all_logits, *arrays), strict=True):
        np.testing.assert_allclose(one, expected, rtol=rtol, atol=rtol * np.abs(expected).max())


def test_rows_that_fill_up_a_batch_count_nothing():
    x, head, targets = hidden_and_head(51)
    found = loss_and_gradients(head_loss, x, head, targets.at[3:].set(NO_TARGET))
    expected = loss_and_gradients(of_all_logits, x[:3], head, targets[:3])
    assert found[0] == pytest.approx(3 / 8 * expected[0], rel=1e-6)
    np.testing.assert_allclose(found[2], 3 / 8 * expected[2], atol=1e-6)
    np.testing.assert_array_equal(found[1][3:], 0)


@pytest.mark.parametrize("evaluates", [False, True])
def test_logits_are_never_held_at_once(evaluates, monkeypatch):
    monkeypatch.setattr(training_loss, "CHUNK_BYTES", {"cpu": 2**20})
    shapes = [((8, 256, 16), "float32"), ((16, 2000), "float32"), ((8, 256), "int32")]
    x, head, targets = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)

    def lowered(loss):
        function = loss if evaluates else jax.value_and_grad(loss, argnums=(0, 1))
        return jax.jit(function).lower(x, head, targets)

    def bytes_of(loss):
        return lowered(loss).compile().memory_analysis().temp_size_in_bytes

    logits = 4 * 8 * 256 * 2000
    assert bytes_of(head_loss) < logits / 3
    assert bytes_of(of_all_logits) >= logits  # so that the first says something
    products = lowered(head_loss).as_text().count("dot_general")
    assert products == (1 if evaluates else 3)  # no gradient is computed for an evaluation


# Half precision


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_gradients_of_half_precision_are_summed_between_devices_in_float32(text, family):
    """Those of eight rows on eight devices are the mean of those of each row."""
    given = {"family": family, "compute_dtype": "bfloat16", "optimizer": ADAMW_RULE}
    mesh, one = (assemble_toy(text, *where, **given) for where in (("data=4,fsdp=2", 8), ("", 1)))
    halves = assemble_toy(text, "data=4,fsdp=2", 8, param_dtype="bfloat16", **given)
    params = jax.device_get(halves.functions.init(0).params)
    same = jax.tree.map(lambda x: x.astype(np.float32), params)
    ids = np.random.default_rng(0).integers(0, 300, (8, 17)).astype(np.int32)

    def gradients(run, *args):
        # Else XLA leaves out other roundings to bfloat16 on one device than on several.
        options = {"xla_allow_excess_precision": False}
        compiled = jax.jit(jax.grad(run.functions.loss)).lower(*args).compile(options)
        return jax.device_get(compiled(*args))

    rows = [gradients(one, same, row[None, :-1], row[None, 1:]) for row in ids]
    expected = jax.tree.map(lambda *x: np.mean(x, axis=0), *rows)
    found = gradients(mesh, same, ids[:, :-1], ids[:, 1:])
    rounded = gradients(halves, params, ids[:, :-1], ids[:, 1:])
    for (path, x), g, half in zip(
        *(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), jax.tree.leaves(rounded)),
        strict=True,
    ):
        # Sums of 24-bit numbers in another order; sums of 8 bits differ by 1e-3 and more.
        np.testing.assert_allclose(g, x, atol=1e-6 * np.abs(x).max(), err_msg=str(path))
        assert (half == x.astype(half.dtype)).mean() > 0.98, path  # rounded once
