"""An exponential moving average of the weights, as a part of the optimizer's state.

After update t, with the weights w_t and the decay d, the average is

    a_t = a_{t-1} + (1 - d) / (1 - d^t) (w_t - a_{t-1}),    a_0 = w_0,

which is the mean of w_1 ... w_t with weights that fall by d an update: Adam's mean with its bias
corrected (arXiv:1412.6980, section 3). It is kept in float32, with the shardings of the parameters.
Parameters that are not trained have none.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import trained_part


class AveragedState(NamedTuple):
    """The state of a rule, and the average of the weights that it made."""

    rule: optax.OptState
    count: jax.Array
    """Updates so far."""
    average: optax.Params
    """In float32; `optax.MaskedNode` for parameters that are not trained."""


def averaged(
    rule: optax.GradientTransformation, decay: float
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
        share = (1 - decay) / (1 - decay ** count.astype(jnp.float32))
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


def check(config: OptimizerConfig) -> None:
    """Refuses a run that has no averages."""
    if not config.ema:
        raise UserError(
            "--weights ema: this run has no averages; they are kept by a run that has --ema from"
            " its start."
        )
