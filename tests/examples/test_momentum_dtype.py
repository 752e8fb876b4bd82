"""How the trainer's optimizers keep the momentum."""

import jax.numpy as jnp
import pytest

import optax_muonplus as omp
from examples.trainer.settings.rules import RULES
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.training import optimizers


@pytest.mark.parametrize("name", [name for name in RULES if name != "adamw"])
def test_the_momentum_is_kept_as_the_flag_says(name):
    params = {"wte": {"embedding": jnp.ones((3, 4))}, "up": {"kernel": jnp.eye(16, 256)}}
    for mu_dtype in (None, "bfloat16", "int8"):
        rule = optimizers.build(OptimizerConfig(name=name, mu_dtype=mu_dtype), steps=10)
        state = omp.transforms.find_momentum(rule.init(params), as_stored=True)
        assert state[0]["up"]["kernel"].dtype == (mu_dtype or "float32")
