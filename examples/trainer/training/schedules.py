"""How learning rates move during a run."""

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from examples.trainer.settings.run import OptimizerConfig


def schedule(config: OptimizerConfig, peak: ArrayLike, steps: int) -> optax.Schedule:
    """Learning rate by step; without a floor it is zero at `steps`, one after the last step."""
    if config.schedule == "constant_linear" or config.schedule_from:
        begin = config.schedule_from + int(config.hold_share * (steps - config.schedule_from))
        share = optax.linear_schedule(1.0, 0.0, steps - begin, transition_begin=begin)
    else:
        begin = max(1, int(config.warmup_share * steps))
        start = 1 / begin if config.warmup_start is None else config.warmup_start
        share = optax.warmup_cosine_decay_schedule(start, 1.0, begin, max(steps, begin + 1))
    floor = config.schedule_floor
    if not floor:
        return lambda step: peak * share(step)
    return lambda step: (
        peak * jnp.maximum(share(step), jnp.where(jnp.asarray(step) < begin, 0.0, floor))
    )
