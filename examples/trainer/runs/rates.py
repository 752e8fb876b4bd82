"""The learning rates of each update, under the names that Levanter gives them in a run of Muon."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.training import optimizers

BLOCK = 1024  # updates whose rates are computed at once, and held in memory


class LearningRates:
    """The rates of any update; a block of them is computed when its first is asked for."""

    def __init__(self, config: OptimizerConfig, steps: int):
        peaks = optimizers.rates(config)
        self.schedules = [jax.vmap(optimizers.schedule(config, peak, steps)) for peak in peaks[:2]]
        self.first = -BLOCK
        """The first update of the block."""
        self.block = np.zeros((2, 0))

    def of(self, update: int) -> dict[str, float]:
        """The rates of an update, counted from 0."""
        if not self.first <= update < self.first + BLOCK:
            self.first = update - update % BLOCK
            updates = self.first + jnp.arange(BLOCK)
            self.block = np.stack([np.asarray(of(updates)) for of in self.schedules])
        matrices, rest = self.block[:, update - self.first].tolist()
        return {
            "optim/learning_rate": float(f"{matrices:.6g}"),
            "optim/adam_lr": float(f"{rest:.6g}"),
        }


def updates_made(opt_state: optax.OptState) -> int:
    """How many updates an optimizer has made; steps that were skipped are not among them."""
    kind = optax.ScaleByScheduleState
    states = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind))
    return int(next(state for state in states if isinstance(state, kind)).count)
