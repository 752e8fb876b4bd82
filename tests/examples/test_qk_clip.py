"""The trainer's QK-clip: what it measures, that it bounds logits, and that off it does nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.trainer.data.placement import place_batch
from examples.trainer.models import attention
from examples.trainer.models.attention_kernels import largest_logits
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.training import sharding
from examples.trainer.training.step import make_model, make_training_loss
from tests.support.reference_qk_clip import logits
from tests.support.trainer import CUBE, assemble_toy, first_losses

RULE = OptimizerConfig(learning_rate=0.2, adam_learning_rate=0.02)
LLAMA = {"family": "llama", "n_layer": 2, "scan": True, "remat": "full", "tied": False}
STEPS = 24


def with_clip(threshold, rule=RULE):
    return dataclasses.replace(rule, qk_clip=threshold)


def words_of(setup):
    return setup.dataset.tokenizer.get_vocab_size()


def of_model(setup):
    """The loss with the largest logits, and a batch."""
    loss = make_training_loss(setup.config.model, words_of(setup), setup.mesh, True)
    return loss, place_batch(setup.loader, STEPS - 1, sharding.of_batch(setup.mesh))


def trained(setup, steps):
    state, rows = setup.init(), sharding.of_batch(setup.mesh)
    for step in range(steps):
        state, _ = setup.train_step(state, *place_batch(setup.loader, step, rows))
    return state.params


@pytest.mark.parametrize(("t", "block"), [(21, 8), (16, 8), (1, 8), (9, 256)])
def test_largest_logits_in_blocks_are_those_of_the_definition(t, block):
    q, k = (jax.random.normal(jax.random.key(i), (3, t, 2, 4)) for i in (0, 1))
    q = -abs(q) * jnp.sign(k) if t == 1 else q  # all logits are negative
    found = jax.jit(functools.partial(largest_logits, block=block))(q, k)
    expected = [logits(*(np.float64(x[b]) for x in (q, k))).max(axis=(1, 2)) for b in range(3)]
    np.testing.assert_allclose(found[:, 0, :, 0], expected, rtol=1e-5, atol=1e-6)
    documents = jnp.broadcast_to(jnp.arange(t) // 5, (3, t))
    found = jax.jit(functools.partial(largest_logits, block=block))(q, k, documents)
    parts = [[np.float64(x[:, i : i + 5]) for x in (q, k)] for i in range(0, t, 5)]
    each = [[logits(a, b).max(axis=(1, 2)) for a, b in zip(*part, strict=True)] for part in parts]
    np.testing.assert_allclose(found[:, 0, :, 0], np.max(each, axis=0), rtol=1e-5, atol=1e-6)


GROUPS = {"family": "llama", "n_head": 4, "n_kv_head": 2, "d_model": 32}


@pytest.mark.parametrize("changes", [{"family": "gpt"}, GROUPS], ids=["gpt", "llama"])
def test_training_measures_what_attention_multiplies(text, changes, monkeypatch):
    """With the bias and the rotations; by block and head, also of queries that share keys."""
    setup = assemble_toy(text, "", 1, n_layer=2, **changes)
    seen, attend = [], attention.attend
    monkeypatch.setattr(
        attention, "attend", lambda q, k, *rest: seen.append((q, k)) or attend(q, k, *rest)
    )
    loss, batch = of_model(setup)
    _, extra = loss(setup.init().params, *batch)
    assert len(seen) == 2
    for block, (q, k) in zip(extra["max_logits"]["blocks"], seen, strict=True):
        scores = np.stack([logits(np.float64(a), np.float64(b)) for a, b in zip(q, k, strict=True)])
        np.testing.assert_allclose(block["attn"], scores.max(axis=(0, 2, 3)), rtol=1e-5)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_step_scales_the_queries_and_keys_of_heads_above_the_threshold(text, family):
    """As the model itself cuts its kernels into heads; values stay as they were."""
    free = assemble_toy(text, "", 1, family=family, optimizer=RULE)
    loss, batch = of_model(free)
    maxima = np.asarray(loss(free.init().params, *batch)[1]["max_logits"]["blocks"][0]["attn"])
    threshold = float(maxima.mean())
    bound = assemble_toy(text, "", 1, family=family, optimizer=with_clip(threshold))
    x = jax.random.normal(jax.random.key(0), (1, 5, 16))
    found = []
    for setup in (free, bound):
        params = setup.train_step(setup.init(), *batch)[0].params
        model = make_model(setup.config.model, words_of(setup), setup.mesh)(params)
        found.append(model.blocks[0].attn.heads(x))
    (q, k, v), (clipped_q, clipped_k, clipped_v) = found
    factors = np.sqrt(np.minimum(1, threshold / maxima))[None, None, :, None]
    assert factors.min() < 0.99 and factors.max() == 1
    np.testing.assert_allclose(clipped_q, q * factors, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(clipped_k, k * factors, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(clipped_v, v)


def test_a_huge_threshold_changes_no_bit(text):
    free, bound = (
        trained(assemble_toy(text, "", 1, optimizer=rule, **LLAMA), 3)
        for rule in (RULE, with_clip(1e6))
    )
    jax.tree.map(np.testing.assert_array_equal, free, bound)


def test_a_mesh_and_micro_batches_train_as_one_device(text):
    """Whose largest logits are those of all rows, also of queries that share keys."""
    changes = {"optimizer": with_clip(0.05), "scan": True, "n_layer": 2, **GROUPS}
    one = first_losses(assemble_toy(text, "", 1, **changes), 3)
    many = first_losses(assemble_toy(text, CUBE, 8, accumulate=2, **changes), 3)
    free = first_losses(assemble_toy(text, "", 1, **changes | {"optimizer": RULE}), 3)
    assert many == pytest.approx(one, abs=3e-5)  # sums in another order
    assert abs(one[-1] - free[-1]) > 1e-4
