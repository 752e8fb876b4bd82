"""Builds the optimizer of a run; the only place where an optimizer is chosen by name."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.typing import ArrayLike

import optax_muonplus as omp
from examples.trainer.settings.run import DEFAULT_RATES, TAKEN, OptimizerConfig
from examples.trainer.system.errors import UserError


def schedule(config: OptimizerConfig, peak: ArrayLike, steps: int) -> optax.Schedule:
    """Learning rate by step; without a floor it is zero at `steps`, one after the last step."""
    floor = config.schedule_floor
    if config.schedule == "constant_linear":
        begin = int(config.hold_share * steps)
        share = optax.linear_schedule(1.0, 0.0, steps - begin, transition_begin=begin)
        return lambda step: peak * jnp.maximum(share(step), floor)  # as the paper's code
    begin = max(1, int(config.warmup_share * steps))
    start = 1 / begin if config.warmup_start is None else config.warmup_start
    share = optax.warmup_cosine_decay_schedule(start, 1.0, begin, max(steps, begin + 1), floor)
    return lambda step: peak * share(step)


class Rates(NamedTuple):
    """Peak learning rates. They are inputs of a compiled step, which then serves all rates."""

    matrices: ArrayLike
    rest: ArrayLike


def rates(config: OptimizerConfig) -> Rates:
    rate, rest = config.learning_rate, config.adam_learning_rate
    if rate is None:
        rate = DEFAULT_RATES[config.name]
    return Rates(rate, rate if rest is None else rest)


def rates_at(config: OptimizerConfig, steps: int, peaks: Rates, opt_state: Any) -> Rates:
    """The rates of the next update of an optimizer with this state."""
    kind = optax.ScaleByScheduleState
    states = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind))
    made = next(state for state in states if isinstance(state, kind)).count
    return Rates(*(schedule(config, peak, steps)(made) for peak in peaks))


def layer_axes(params: Any) -> dict[str, int] | None:
    """The axis of layers in stacked blocks (--model.scan), which default rules cannot know."""
    return {"^blocks/": 0} if "attn" in params.get("blocks", ()) else None


def matrices(params: optax.Params) -> Any:
    """The axes that make each parameter a matrix; None for parameters that get AdamW."""
    return omp.muon_dimension_numbers(params, layer_axes=layer_axes(params))


EPSILON = 1e-8  # Optax's, and that of the paper's code


def adamw(
    config: OptimizerConfig, rate: optax.Schedule, decay: float
) -> optax.GradientTransformation:
    """AdamW, which adds its epsilon after the bias correction, or before it as the paper's code.

    The update of that code is m sqrt(1 - b2^t) / ((1 - b1^t) (sqrt(v) + eps)). Optax divides the
    moments by 1 - b^t first and then adds its epsilon. Both are the same for an epsilon of
    eps / sqrt(1 - b2^t), which is larger in the first steps.
    """
    b1, b2 = config.adam_b1, config.adam_b2
    given: dict[str, Any] = {"learning_rate": rate, "b1": b1, "b2": b2, "weight_decay": decay}
    given["nesterov"] = config.adam_nesterov
    if not config.adam_eps_before_correction:
        return optax.adamw(**given, eps=EPSILON)
    rule = optax.inject_hyperparams(optax.adamw, tuple(given), hyperparam_dtype=jnp.float32)
    return rule(**given, eps=lambda count: EPSILON / jnp.sqrt(1 - b2 ** (count + 1)))


def build(
    config: OptimizerConfig, steps: int, sharding: Any = None, peaks: Rates | None = None
) -> optax.GradientTransformation:
    """Muon+ or Muon on the matrices and AdamW on the rest, or AdamW on both.

    `sharding` is the tree of the parameters' shardings. `peaks` replaces the configured rates.
    """
    rate, adam_rate = (schedule(config, peak, steps) for peak in peaks or rates(config))
    decay, others = config.weight_decay, adamw(config, adam_rate, config.adam_weight_decay)
    if config.name == "adamw":
        where = omp.Matrices(weight_dimension_numbers=matrices)
        parts: dict[Any, Any] = {"muon": adamw(config, rate, decay), "adam": others}
        rule = optax.partition(parts, lambda params: where.read(params).labels)
    else:
        given = {name: getattr(config, name) for name in TAKEN[config.name]}
        if given["compute_dtype"] == "auto":
            given["compute_dtype"] = None
        given |= {"muon_weight_dimension_numbers": matrices, "sharding": sharding}
        made = omp.muonplus if config.name == "muonplus" else omp.muon
        rule = made(rate, weight_decay=decay, others=others, **given)
    if config.clip_norm is None:
        return rule
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), rule)


def check(config: OptimizerConfig) -> None:
    """Refuses settings that the library refuses, in its own words."""
    try:
        build(config, steps=1)
    except ValueError as error:
        raise UserError(f"--optimizer: {error}") from None


SIZE = ("shape_scale", "norm", "match_frobenius")  # what the size of an update depends on


def describe(config: OptimizerConfig, params: optax.Params, mesh: Mesh | None = None) -> str:
    """A table of how each parameter is updated; on a mesh, by the shardings that it has there."""
    if config.name == "adamw":
        return "all parameters: adamw"
    given: dict[str, Any] = {"layer_axes": layer_axes(params)}
    if mesh is not None and mesh.size > 1:
        given["sharding"] = jax.tree.map(lambda x: x.sharding, params)
    size = {name: getattr(config, name) for name in SIZE if name in TAKEN[config.name]}
    return omp.describe(params, **given, **{"norm": "none", **size})
