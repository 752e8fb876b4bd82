"""An average of the weights, as a part of the optimizer's state: exponential, or of the run's tail.

After update t, with the weights w_t, the average is a_t = a_{t-1} + c_t (w_t - a_{t-1}), a_0 = w_0.

- `--ema d`: c_t = (1 - d) / (1 - d^t). The mean of w_1 ... w_t with weights that fall by d an
  update: Adam's mean with its bias corrected (arXiv:1412.6980, section 3).
- `--tail N` of T steps: c_t = 1 / max(1, t - (T - N)). The plain mean of the last N weights
  (Polyak and Juditsky, 1992; the tail alone: arXiv:1610.03774), and w_t before.

It is kept in float32, 4 bytes for each parameter, with the shardings of the parameters. Parameters
that are not trained have none.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import trained_part

Share = Callable[[jax.Array], jax.Array]
"""The number of an update, from 1, to the share c_t of its weights in the average."""


class AveragedState(NamedTuple):
    """The state of a rule, and the average of the weights that it made."""

    rule: optax.OptState
    count: jax.Array
    """Updates so far."""
    average: optax.Params
    """In float32; `optax.MaskedNode` for parameters that are not trained."""


def with_average(
    rule: optax.GradientTransformation, config: OptimizerConfig, steps: int
) -> optax.GradientTransformation:
    """The rule, which also keeps the average that a run of `steps` steps asks for, if any."""
    if config.ema:
        return averaged(rule, exponential(config.ema))
    return averaged(rule, uniform(first_update(config, steps))) if config.tail else rule


def exponential(decay: float) -> Share:
    return lambda count: (1 - decay) / (1 - decay ** count.astype(jnp.float32))


def uniform(before: int) -> Share:
    """The plain mean of all weights after so many updates."""
    return lambda count: 1 / jnp.maximum(count - before, 1).astype(jnp.float32)


def first_update(config: OptimizerConfig, steps: int) -> int:
    """How many updates come before those of the average."""
    return steps - tail_steps(config.tail, steps) if config.tail else 0


def tail_steps(tail: float, steps: int) -> int:
    """How many of a run's last steps `--tail` averages, 1 at least."""
    return max(1, round(tail * steps)) if tail < 1 else int(tail)


def averaged(
    rule: optax.GradientTransformation, share_of: Share
) -> optax.GradientTransformationExtraArgs:
    """The rule, which also averages the weights after its updates."""
    rule = optax.with_extra_args_support(rule)

    def init(params: optax.Params) -> AveragedState:
        average = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
        return AveragedState(rule.init(params), jnp.zeros((), jnp.int32), average)

    def update(
        updates: optax.Updates, state: Any, params: Any = None, **extra: Any
    ) -> tuple[optax.Updates, AveragedState]:
        updates, inner = rule.update(updates, state.rule, params, **extra)
        count = state.count + 1
        share = share_of(count)
        weights = optax.apply_updates(params, updates)
        average = jax.tree.map(
            lambda mean, x: mean + share * (x.astype(jnp.float32) - mean), state.average, weights
        )
        return updates, AveragedState(inner, count, average)

    return optax.GradientTransformationExtraArgs(init, update)


def in_place(params: optax.Params, average: Any) -> optax.Params:
    """The parameters, with averages in the place of those that are trained, in their types."""
    whole = trained_part.joined(params, average)
    return jax.tree.map(lambda mean, x: mean.astype(x.dtype), whole, params)


def check_settings(rule: OptimizerConfig, steps: int) -> None:
    """Refuses two averages, and a tail that a run of so many steps cannot have."""
    if rule.tail is None:
        return
    if rule.ema:
        raise UserError("--ema and --tail are two averages, and a run keeps one: leave one out.")
    if rule.tail >= 1 and (rule.tail != int(rule.tail) or rule.tail > steps):
        raise UserError(
            f"--tail {rule.tail:g}: give a whole number of steps, at most the {steps} of the run,"
            " or a share of them below 1."
        )


def check(kind: Literal["ema", "tail"], config: OptimizerConfig, steps: int, step: int) -> None:
    """Refuses a checkpoint, of that step, that has no such average."""
    if not getattr(config, kind):
        raise UserError(
            f"--weights {kind}: this run has no such averages; they are kept by a run that has"
            f" --{kind} from its start."
        )
    first = first_update(config, steps)
    if step <= first:
        raise UserError(
            f"--weights {kind}: the average of this run is that of its steps after {first}, and"
            f" the checkpoint is of step {step}: take a later one."
        )
