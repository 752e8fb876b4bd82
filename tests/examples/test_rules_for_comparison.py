"""The trainer's rules that differ from another rule in one thing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.training import optimizers

PARAMS = {"wte": {"embedding": jnp.ones((3, 4))}, "up": {"kernel": jnp.ones((4, 8))}}


def updates_of(rule):
    """Of three steps, whose gradients differ: momenta of equal ones differ in size only."""
    state, found = rule.init(PARAMS), []
    keys = iter(jax.random.split(jax.random.key(0), 6))
    for _ in range(3):
        grads = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), PARAMS)
        updates, state = rule.update(grads, state, PARAMS)
        found += jax.tree.leaves(updates)
    return found


def test_optax_muon_has_the_updates_of_optax():
    config = OptimizerConfig(name="optax_muon", learning_rate=0.02, clip_norm=None)
    rate = functools.partial(optimizers.schedule, config, steps=10)
    theirs = optax.contrib.muon(
        rate(0.02),
        weight_decay=0.1,
        adam_learning_rate=rate(0.01),
        adam_b2=0.95,
        muon_weight_dimension_numbers={
            "wte": {"embedding": None},
            "up": {"kernel": optax.contrib.MuonDimensionNumbers()},
        },
    )
    found = updates_of(optimizers.build(config, steps=10))
    for x, y in zip(found, updates_of(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_two_flags_make_muon_that_of_optax():
    given = {"shape_scale": "max", "bias_correction": True, "adam_nesterov": True}
    configs = OptimizerConfig(name="muon", **given), OptimizerConfig(name="optax_muon")
    found = (updates_of(optimizers.build(config, steps=10)) for config in configs)
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(x, y)


def test_muoneq_max_is_muoneq_but_for_its_size():
    """Of a matrix with 4 inputs and 8 outputs: sqrt(8 / 4) in place of 0.2 sqrt(8)."""
    own, as_muon = (
        updates_of(
            optimizers.build(
                OptimizerConfig(name=name, learning_rate=1.0, weight_decay=0.0), steps=10
            )
        )[0]
        for name in ("muoneq", "muoneq_max")
    )
    np.testing.assert_allclose(as_muon, own * 2**0.5 / (0.2 * 8**0.5), rtol=1e-5, atol=1e-6)
