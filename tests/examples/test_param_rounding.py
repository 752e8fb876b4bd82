"""Parameters in bfloat16 in the trainer: how they are rounded after an update."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.trainer.settings import validation
from examples.trainer.settings.run import OptimizerConfig, RunConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import optimizers


@pytest.mark.parametrize("name", ["muonplus", "adamw", "normuon"])
@pytest.mark.parametrize("rounding", ["stochastic", "remainders"])
def test_small_steps_add_up_also_in_the_average(name, rounding):
    config = OptimizerConfig(
        name=name, param_rounding=rounding, learning_rate=1e-3, adam_learning_rate=1e-3, ema=0.5
    )
    rule = optimizers.build(config, steps=1000)
    kernel = 1 + jnp.eye(16, 64, dtype=jnp.bfloat16)
    params = {"up": {"kernel": kernel}, "ln": {"scale": jnp.ones(64, jnp.bfloat16)}}
    grads = jax.tree.map(
        lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params
    )
    state, new = rule.init(params), params
    update = jax.jit(rule.update)
    for _ in range(40):
        updates, state = update(grads, state, new)
        new = optax.apply_updates(new, updates)
    for before, after in zip(*map(jax.tree.leaves, (params, new)), strict=True):
        assert after.dtype == jnp.bfloat16 and (before != after).any()
    for mean, after in zip(*map(jax.tree.leaves, (state.average, new)), strict=True):
        np.testing.assert_allclose(mean, np.asarray(after, np.float32), atol=0.02)


def test_rounding_of_float32_is_refused():
    config = RunConfig(optimizer=OptimizerConfig(param_rounding="remainders"))
    with pytest.raises(UserError, match="param-dtype bfloat16, or leave it out"):
        validation.check(config)
    half = dataclasses.replace(config.model, param_dtype="bfloat16")
    validation.check(dataclasses.replace(config, model=half))
