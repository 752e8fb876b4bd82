"""Losses of version 0.2 for its options, which stay what they were."""

import dataclasses

import jax
import numpy as np
import pytest

from examples.trainer.models import sharding
from examples.trainer.settings.command_line import PRESETS
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.training import optimizers
from examples.trainer.training.step import make_functions

GOLDEN = {
    ("gpt-tiny", "muonplus"): (5.30423, 4.719066, 4.165732, 3.644558, 3.414531, 2.885997),
    ("llama-tiny", "muonplus"): (5.627721, 5.006454, 4.574957, 4.13533, 3.889517, 3.463),
}
OLD = OptimizerConfig(
    adam_learning_rate=0.01, norm="col_row", match_frobenius=False, shape_scale="spectral",
    weight_decay=0.1, adam_b2=0.95, adam_nesterov=False,
)  # fmt: skip


@pytest.mark.parametrize(("preset", "name"), GOLDEN)
def test_losses_are_those_of_version_0_2(preset, name):
    config = PRESETS[preset][1]
    schedule = config.optimizer.schedule
    rule = dataclasses.replace(OLD, name=name, learning_rate=0.02, schedule=schedule)
    model = dataclasses.replace(config.model, n_layer=2, d_model=32, context=16)
    mesh = sharding.make_mesh("", jax.devices()[:1])
    config = dataclasses.replace(config, model=model, optimizer=rule, steps=6, accumulate=2)
    functions = make_functions(config, 300, mesh)
    state, rng, losses = functions.init(3), np.random.default_rng(0), []
    for _ in range(6):
        ids = np.minimum(rng.integers(0, 300, (4, 17)).astype(np.int32), 40)
        rates = optimizers.rates(rule)
        state, measured = functions.train_step(state, rates, ids[:, :-1], ids[:, 1:])
        losses.append(float(measured.loss))
    # Sums of 24-bit numbers in another order.
    np.testing.assert_allclose(losses, GOLDEN[preset, name], rtol=2e-6)
