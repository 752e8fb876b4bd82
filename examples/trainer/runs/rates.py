"""The learning rates of each update, under the names that Levanter gives them in a run of Muon."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.training import optimizers


def rates_by_update(config: OptimizerConfig, steps: int) -> list[dict[str, float]]:
    """Computes the rates of all updates at the start, so that no device is asked later."""
    matrices, rest = (
        np.asarray(jax.vmap(optimizers.schedule(config, peak, steps))(jnp.arange(steps))).tolist()
        for peak in optimizers.rates(config)
    )
    return [
        {"optim/learning_rate": float(f"{a:.6g}"), "optim/adam_lr": float(f"{b:.6g}")}
        for a, b in zip(matrices, rest, strict=True)
    ]


def updates_made(opt_state: optax.OptState) -> int:
    """How many updates an optimizer has made; steps that were skipped are not among them."""
    kind = optax.ScaleByScheduleState
    states = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind))
    return int(next(state for state in states if isinstance(state, kind)).count)
