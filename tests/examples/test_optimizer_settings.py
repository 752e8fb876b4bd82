"""Optimizers by name: their updates, decay, rates and schedules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optax_muonplus as omp
from examples.trainer.models import sharding
from examples.trainer.settings.command_line import PRESETS
from examples.trainer.settings.run import DEFAULT_RATES, OptimizerConfig
from examples.trainer.training import optimizers
from examples.trainer.training.step import init_params

PARAMS = {"wte": {"embedding": jnp.ones((3, 4))}, "up": {"kernel": jnp.eye(4, 8) + 1}}


def gradients(seed=0):
    keys = iter(jax.random.split(jax.random.key(seed), 2))
    return jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), PARAMS)


def test_default_rates_by_optimizer():
    for name in DEFAULT_RATES:
        rate = 0.002 if name == "adamw" else 0.02
        assert optimizers.rates(OptimizerConfig(name)) == (rate, rate)
    assert optimizers.rates(OptimizerConfig("muon", 0.5, 0.1)) == (0.5, 0.1)


def test_the_default_is_that_of_the_library():
    config = OptimizerConfig(learning_rate=0.1, clip_norm=None)
    rule = optimizers.build(config, steps=10)
    theirs = omp.muonplus(optimizers.schedule(config, 0.1, 10))
    states = rule.init(PARAMS), theirs.init(PARAMS)
    for seed in range(3):
        found, first = rule.update(gradients(seed), states[0], PARAMS)
        expected, second = theirs.update(gradients(seed), states[1], PARAMS)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        states = first, second


def test_recipes_have_the_form_of_the_paper():
    rule = PRESETS["gpt-small"][1].optimizer
    for name, value in omp.PAPER.items():
        if name not in ("norm", "weight_decay", "adam_weight_decay"):  # those of the table's rows
            assert getattr(rule, name) == value, name
    assert rule.adam_weight_decay == rule.weight_decay


def cosine(s, begin, steps):
    return 0.5 * (1 + np.cos(np.pi * (s - begin) / (steps - begin)))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, lambda s: min(1, (40 - s) / 24)),
        ({"hold_share": 0.75}, lambda s: min(1, (40 - s) / 10)),
        ({"schedule": "warmup_cosine"}, lambda s: 0.25 + 0.1875 * s if s < 4 else cosine(s, 4, 40)),
        # Those of the paper's code.
        ({"schedule_floor": 0.1}, lambda s: max(0.1, min(1, (40 - s) / 24))),
        (
            {"schedule": "warmup_cosine", "warmup_start": 0.0},
            lambda s: s / 4 if s < 4 else cosine(s, 4, 40),
        ),
        # A floor does not lift the warmup, and a cosine ends in it.
        (
            {"schedule": "warmup_cosine", "warmup_start": 0.0, "warmup_share": 0.5,
             "schedule_floor": 0.4},
            lambda s: s / 20 if s < 20 else 0.4 + 0.6 * cosine(s, 20, 40),
        ),
    ],
)  # fmt: skip
def test_schedules_are_their_formulas(settings, expected):
    rate = optimizers.schedule(OptimizerConfig(**settings), 0.5, 40)
    wanted = [0.5 * expected(s) for s in range(41)]
    np.testing.assert_allclose([rate(s) for s in range(41)], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["muonplus", "adamw"])
def test_adamw_epsilon_before_the_bias_correction(name):
    params = {"wte": {"embedding": jnp.zeros((2, 2))}, "up": {"kernel": jnp.zeros((2, 2))}}
    config = OptimizerConfig(
        name=name,
        adam_b2=0.95,
        adam_nesterov=False,
        adam_learning_rate=0.01,
        adam_eps_before_correction=True,
    )
    rule = optimizers.build(config, steps=100)
    state, m, v = rule.init(params), 0.0, 0.0
    for t in range(1, 4):
        g = np.array([[1e-8, -3e-8], [1.0, -2.0]]) * t
        updates, state = rule.update(
            jax.tree.map(lambda _, g=g: jnp.float32(g), params), state, params
        )
        g = g / np.sqrt(2 * np.square(g).sum())  # the gradient of both is clipped
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        expected = -0.01 * m / (1e-8 + np.sqrt(v)) * np.sqrt(1 - 0.95**t) / (1 - 0.9**t)
        np.testing.assert_allclose(updates["wte"]["embedding"], expected, rtol=1e-4)


@pytest.mark.parametrize("name", DEFAULT_RATES)
def test_each_group_decays_by_its_own(name):
    config = OptimizerConfig(
        name=name, adam_learning_rate=0.01, weight_decay=0.2, adam_weight_decay=0.3
    )
    rule = optimizers.build(config, steps=10)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = rule.update(zeros, rule.init(PARAMS), PARAMS)
    rate = optimizers.rates(config).matrices
    np.testing.assert_allclose(
        updates["up"]["kernel"], -0.2 * rate * PARAMS["up"]["kernel"], rtol=1e-5
    )
    np.testing.assert_allclose(updates["wte"]["embedding"], -0.3 * 0.01, rtol=1e-5)


@pytest.mark.parametrize("matched", [False, True])
@pytest.mark.parametrize("name", ["muonplus", "muon"])
def test_the_table_has_the_size_of_updates(name, matched):
    """At learning rate 1, with an exact polar factor, of a kernel 16 x 64 and of one 64 x 16."""
    config = OptimizerConfig(
        name=name, polar="svd", learning_rate=1.0, match_frobenius=matched, clip_norm=None
    )
    keys = jax.random.split(jax.random.key(0))
    grads = {
        "up": {"kernel": jax.random.normal(keys[0], (16, 64))},
        "down": {"kernel": jax.random.normal(keys[1], (64, 16))},
    }
    rule = optimizers.build(config, steps=10)
    updates, _ = rule.update(grads, rule.init(grads), grads)
    table = optimizers.describe(config, grads).splitlines()
    lines = {line.split()[0]: line.split() for line in table if line.strip()}
    for path in ("up", "down"):
        rms = float(jnp.sqrt(jnp.mean(jnp.square(updates[path]["kernel"]))))
        assert float(lines[f"{path}/kernel"][5]) == pytest.approx(rms, rel=0.005)


def test_settings_reach_the_rule():
    plain = OptimizerConfig(learning_rate=1.0, clip_norm=None)
    rule = optimizers.build(plain, 10)
    expected, _ = rule.update(gradients(), rule.init(PARAMS), PARAMS)
    for change in (
        {"norm": "col"},
        {"norm_eps": 0.5},
        {"match_frobenius": False},
        {"shape_scale": "none"},
        {"polar": "svd"},
        {"ns_coeffs": "you"},
        {"ns_steps": 3},
        {"name": "muon"},
    ):
        other = optimizers.build(OptimizerConfig(**{"learning_rate": 1.0, **change}), 10)
        found, _ = other.update(gradients(), other.init(PARAMS), PARAMS)
        apart = jnp.abs(found["up"]["kernel"] - expected["up"]["kernel"]).max()
        assert apart > 1e-3, change


def test_the_table_knows_the_shardings_that_the_run_passes():
    """Without them it would say that XLA gathers the matrices of each mesh."""
    mesh = sharding.make_mesh("fsdp=8", jax.devices())
    params = jax.device_put(PARAMS, NamedSharding(mesh, PartitionSpec()))
    table = optimizers.describe(OptimizerConfig(), params, mesh)
    assert "up/kernel" in table and "sharding=" not in table


def test_the_trainer_asks_nothing_of_its_own_models():
    """Neither about the fused projection, nor about stacked blocks."""
    for name in ("gpt-tiny", "llama-tiny", "gpt-small"):
        config = PRESETS[name][1]
        params = jax.eval_shape(functools.partial(init_params, config.model, 300), 0)
        table = optimizers.describe(config.optimizer, params)
        assert "?" not in table and "your rule" not in table and "attn/" in table
