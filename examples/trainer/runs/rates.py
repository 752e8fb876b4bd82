"""The learning rates of each update, under the names that Levanter gives them in a run of Muon."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.training import optimizers


class LearningRates:
    """Both rates by update. All are computed at the start, so that no device is asked later."""

    def __init__(self, config: OptimizerConfig, steps: int):
        updates = jnp.arange(steps)
        self.matrices, self.rest = (
            np.asarray(jax.vmap(optimizers.schedule(config, peak, steps))(updates)).tolist()
            for peak in optimizers.rates(config)
        )

    def of(self, update: int) -> dict[str, float]:
        """The rates of an update, counted from 0."""
        return {
            "optim/learning_rate": float(f"{self.matrices[update]:.6g}"),
            "optim/adam_lr": float(f"{self.rest[update]:.6g}"),
        }


def updates_made(opt_state: optax.OptState) -> int:
    """How many updates an optimizer has made; steps that were skipped are not among them."""
    is_schedule = functools.partial(_is_a, optax.ScaleByScheduleState)
    states = jax.tree.leaves(opt_state, is_leaf=is_schedule)
    return int(next(state for state in states if is_schedule(state)).count)


def _is_a(kind: type, x: object) -> bool:
    return isinstance(x, kind)
