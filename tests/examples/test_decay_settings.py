"""Decay in the trainer, and the rules that hold norms in its place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.trainer.settings import validation
from examples.trainer.settings.rules import RULES
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import optimizers


@pytest.mark.parametrize("name", RULES)
def test_a_decay_that_follows_the_rate_is_as_large_at_its_peak_and_falls_with_it(name):
    """Gradients are zero; hyperball has no decay, and AdamW's group its own."""
    zeros = {"up": {"kernel": jnp.zeros((4, 8))}}
    for follows in (False, True):
        config = OptimizerConfig(name=name, learning_rate=0.5, decay_follows_rate=follows)
        rule, rate = optimizers.build(config, 10), optimizers.schedule(config, 1.0, 10)
        params = {"up": {"kernel": jnp.eye(4, 8) + 1}}
        state, update = rule.init(params), jax.jit(rule.update)
        for step in range(10):
            updates, state = update(zeros, state, params)
            share = rate(step) ** (1 + follows) * RULES[name].decays
            expected = -0.5 * 0.1 * share * params["up"]["kernel"]
            rounding = 5e-7 if name in ("hyperball", "muown") else 0  # of the parameters
            np.testing.assert_allclose(updates["up"]["kernel"], expected, 1e-5, rounding)
            params = optax.apply_updates(params, updates)


@pytest.mark.parametrize("name", ["muonplus", "muon"])
def test_cautious_decay_reaches_the_rule(name):
    params = {"up": {"kernel": jnp.ones((4, 8))}}
    grads = {"up": {"kernel": jax.random.normal(jax.random.key(0), (4, 8))}}
    plain, cautious, none = (
        optimizers.build(OptimizerConfig(name=name, **given), 10)
        for given in ({}, {"cautious_weight_decay": True}, {"weight_decay": 0})
    )
    plain, cautious, none = (
        rule.update(grads, rule.init(params), params)[0]["up"]["kernel"]
        for rule in (plain, cautious, none)
    )
    np.testing.assert_array_equal(cautious, jnp.where(none < 0, plain, none))
    assert np.any(none > 0) and np.any(none < 0)


@pytest.mark.parametrize("name", ["hyperball", "muown"])
def test_updates_that_hold_norms_are_not_scaled(name):
    with pytest.raises(UserError, match=f"--optimizer.mlp-in-rate: {name} holds the norms"):
        validation.check(OptimizerConfig(name=name, mlp_in_rate=0.5))


@pytest.mark.parametrize("name", ["hyperball", "muown"])
def test_the_table_says_where_it_has_no_size_of_updates(name):
    table = optimizers.describe(OptimizerConfig(name=name), {"up": {"kernel": jnp.ones((4, 8))}})
    assert table.splitlines()[-1].startswith(f"{name}: scale and rms are ")
