"""Makes a run longer: `--resume RUN --steps N`."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from examples.trainer.runs import places
from examples.trainer.settings.command_line import Resume
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import optimizers


def extended(config: RunConfig, asked: Resume, say: Callable[[str], None]) -> RunConfig:
    """The configuration with the steps that were asked for; says what becomes of the rate."""
    if asked.steps is None:
        if asked.extend != "stretch":
            raise UserError("--extend goes with --steps: give the new number of steps.")
        return config
    if asked.steps <= config.steps:
        raise UserError(
            f"{asked.resume} has {config.steps} steps, and --steps {asked.steps} is no more: give a"
            " larger number, or none to continue it."
        )
    step = max(places.saved_steps(places.checkpoints(asked.resume, config)), default=0)
    rule = config.optimizer
    if asked.extend == "again":
        rule = dataclasses.replace(rule, schedule_from=step)
    longer = dataclasses.replace(
        config,
        steps=asked.steps,
        optimizer=rule,
        earlier_steps=(*config.earlier_steps, config.steps),
    )
    before, after = (rate_at(each, step) for each in (config, longer))
    say(
        f"extended from {config.steps} to {asked.steps} steps, from step {step} on with"
        f" --extend {asked.extend}: the rate of the matrices goes from {before:.3g} to {after:.3g}"
    )
    return longer


def rate_at(config: RunConfig, step: int) -> float:
    rule = config.optimizer
    rate = optimizers.schedule(rule, optimizers.rates(rule).matrices, config.steps)
    return float(jnp.asarray(rate(step)))
