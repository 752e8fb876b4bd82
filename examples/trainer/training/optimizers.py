"""Builds the optimizer of a run; the only place where an optimizer is chosen by name."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.typing import ArrayLike

import optax_muonplus as omp
from examples.trainer.settings.run import MOMENTUM, RULES, OptimizerConfig
from examples.trainer.system.errors import UserError
from optax_muonplus.polar import Orthogonalize
from optax_muonplus.transforms import Momentum


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
        rate = 0.002 if RULES[config.name].large else 0.02
    return Rates(rate, rate if rest is None else rest)


def schedules(
    config: OptimizerConfig, steps: int
) -> Callable[[ArrayLike], tuple[ArrayLike, ArrayLike]]:
    """Update, counted from 0, to the rates of the matrices and of the other parameters."""
    matrices, rest = (schedule(config, peak, steps) for peak in rates(config))
    return lambda update: (matrices(update), rest(update))


def layer_axes(params: Any) -> dict[str, int] | None:
    """The axis of layers in stacked blocks (--model.scan), which default rules cannot know."""
    return {"^blocks/": 0} if "attn" in params.get("blocks", ()) else None


def matrices(params: optax.Params) -> Any:
    """The axes that make each parameter a matrix; None for parameters that get AdamW."""
    return omp.muon_dimension_numbers(params, layer_axes=layer_axes(params))


def check(config: OptimizerConfig) -> None:
    """Refuses settings that the library refuses, in its own words."""
    flat = optax.constant_schedule(0.0)
    try:
        rule_of(config, flat, flat, None)
    except ValueError as error:
        raise UserError(f"--optimizer: {error}") from None


def for_platform(config: OptimizerConfig, platform: str) -> OptimizerConfig:
    """The configuration on a cpu, gpu or tpu, whose dtype of products is not auto."""
    if config.compute_dtype != "auto":
        return config
    dtype = "float32" if platform == "cpu" else "bfloat16"
    return dataclasses.replace(config, compute_dtype=dtype)


def build(
    config: OptimizerConfig, steps: int, sharding: Any = None, peaks: Rates | None = None
) -> optax.GradientTransformation:
    """The transformation for a run of `steps` steps.

    `sharding` is the tree of the parameters' shardings. `peaks` replaces the configured rates.
    """
    rate, adam_rate = (schedule(config, peak, steps) for peak in peaks or rates(config))
    rule = rule_of(config, rate, adam_rate, sharding)
    if config.clip_norm is not None:
        rule = optax.chain(optax.clip_by_global_norm(config.clip_norm), rule)
    return rule


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


def rule_of(
    config: OptimizerConfig, rate: optax.Schedule, adam_rate: optax.Schedule, sharding: Any
) -> optax.GradientTransformation:
    """A rule of Muon's family on the matrices and AdamW on the rest, or AdamW on both."""
    decay, others = config.weight_decay, adamw(config, adam_rate, config.adam_weight_decay)
    where = omp.Matrices(weight_dimension_numbers=matrices, sharding=sharding)
    if config.name == "adamw":
        parts: dict[Any, Any] = {"muon": adamw(config, rate, decay), "adam": others}
        return optax.partition(parts, lambda params: where.read(params).labels)
    given = {name: getattr(config, name) for name in RULES[config.name].takes}
    if given.get("compute_dtype") in ("auto", "float32"):
        given["compute_dtype"] = None
    if config.name in ("muonplus", "muon"):
        given |= {"muon_weight_dimension_numbers": matrices, "sharding": sharding}
        return getattr(omp, config.name)(rate, weight_decay=decay, others=others, **given)
    rule = contributed(config.name, given)
    return omp.optimizer(rule, rate, decay, others=others, where=where)


def contributed(name: str, given: dict[str, Any]) -> Any:
    """A rule of `omp.contrib` with the given settings of its momentum and its polar factor."""
    made = omp.contrib
    momentum = Momentum(**{key: given.pop(key) for key in MOMENTUM if key in given})
    if name == "mano":
        return made.Mano(momentum=dataclasses.replace(momentum, nesterov=False))
    if name == "turbo_muon":
        own = made.scale_by_turbo_muon().parts[1].polar_factor
        return made.scale_by_turbo_muon(momentum, dataclasses.replace(own, **given))
    kind = {"normuon": made.NorMuon, "adamuon": made.AdaMuon}[name]
    return kind(momentum=momentum, polar_factor=Orthogonalize(**given))


def describe(config: OptimizerConfig, params: optax.Params, mesh: Mesh | None = None) -> str:
    """A table of how each parameter is updated; on a mesh, by the shardings that it has there."""
    if config.name == "adamw":
        return "all parameters: adamw"
    given: dict[str, Any] = {"layer_axes": layer_axes(params)}
    if mesh is not None and mesh.size > 1:
        given["sharding"] = jax.tree.map(lambda x: x.sharding, params)
    size = dict(RULES[config.name].size)
    for name in ("shape_scale", "norm", "match_frobenius"):
        if name in RULES[config.name].takes:
            size[name] = getattr(config, name)
    return omp.describe(params, **given, **size)
