"""Builds the optimizer of a run; the only place where an optimizer is chosen by name."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

import optax_muonplus as omp
from examples.trainer.settings.rules import MOMENTUM, RULES
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import transformations
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


# Kernels of blocks under --model.scan, [layer, in, out]: each layer is a matrix. The fused
# projection to queries, keys and values is one matrix, as in the paper's code.
RULES_OF_MODELS = (
    ("(^|/)blocks/[a-z]+/[a-z]+/kernel$", omp.MuonDimensionNumbers(1, 2), 3),
    ("(^|/)attn/qkv/kernel$", omp.MuonDimensionNumbers(0, 1), 2),
)


def rules_for(params: optax.Params) -> list[Any]:
    """The rules that find something among the parameters; the library refuses others."""
    leaves = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), len(x.shape))
        for path, x in jax.tree.leaves_with_path(params)
    ]
    return [
        (pattern, numbers, axes)
        for pattern, numbers, axes in RULES_OF_MODELS
        if any(re.search(pattern, name) and axes == given for name, given in leaves)
    ]


def matrices(params: optax.Params) -> Any:
    """The axes that make each parameter a matrix; None for parameters that get AdamW."""
    return omp.muon_dimension_numbers(params, rules=rules_for(params))


def check(config: OptimizerConfig) -> None:
    """Refuses settings that the library refuses, in its own words."""
    flat = optax.constant_schedule(0.0)
    try:
        rule_of(for_platform(config, "cpu"), flat, flat, None, transformations.ADAM_EPSILON)
    except ValueError as error:
        raise UserError(f"--optimizer: {error}") from None


def check_taken(
    given: OptimizerConfig, before: OptimizerConfig, rules: Sequence[OptimizerConfig]
) -> None:
    """Refuses a flag that changes no run of some rules; `before` is what the flags change."""
    taken = {setting for rule in rules for setting in RULES[rule.name].takes}
    names = ", ".join(dict.fromkeys(rule.name for rule in rules))
    for setting in sorted({name for rule in RULES.values() for name in rule.takes} - taken):
        value = getattr(given, setting)
        if value not in (getattr(OptimizerConfig(), setting), getattr(before, setting)):
            flag = f"--optimizer.{setting.replace('_', '-')}"
            raise UserError(f"{flag} {value} would change nothing under {names}: leave it out.")


def for_platform(config: OptimizerConfig, platform: str) -> OptimizerConfig:
    """The configuration on a cpu, gpu or tpu, whose dtype of products is not auto."""
    if config.compute_dtype != "auto":
        return config
    half = dataclasses.replace(config, compute_dtype="bfloat16")
    if platform != "cpu":
        with contextlib.suppress(UserError):  # of a polar step that needs float32
            check(half)
            return half
    return dataclasses.replace(config, compute_dtype="float32")


def build(
    config: OptimizerConfig, steps: int, sharding: Any = None, peaks: Rates | None = None
) -> optax.GradientTransformation:
    """The transformation for a run of `steps` steps.

    `sharding` is the tree of the parameters' shardings. `peaks` replaces the configured rates.
    """
    rate, adam_rate = (schedule(config, peak, steps) for peak in peaks or rates(config))
    if config.adam_eps_before_correction:
        rule = transformations.epsilon_before_correction(
            lambda eps: rule_of(config, rate, adam_rate, sharding, eps), config.adam_b2
        )
    else:
        rule = rule_of(config, rate, adam_rate, sharding, transformations.ADAM_EPSILON)
    if config.clip_norm is not None:
        rule = optax.chain(transformations.clip_by_global_norm(config.clip_norm), rule)
    return rule


def rule_of(
    config: OptimizerConfig,
    rate: optax.Schedule,
    adam_rate: optax.Schedule,
    sharding: Any,
    eps: ArrayLike,
) -> optax.GradientTransformation:
    """A rule of Muon's family on the matrices and AdamW on the rest, or AdamW on both."""
    b1, b2, nesterov = config.adam_b1, config.adam_b2, config.adam_nesterov
    decay, rest = config.weight_decay, config.adam_weight_decay
    others = optax.adamw(adam_rate, b1, b2, eps, weight_decay=rest, nesterov=nesterov)
    where = omp.Matrices(weight_dimension_numbers=matrices, sharding=sharding)
    if config.name == "adamw":
        rule = optax.adamw(rate, b1, b2, eps, weight_decay=decay, nesterov=nesterov)
        parts: dict[Any, optax.GradientTransformation] = {"muon": rule, "adam": others}
        return optax.partition(parts, lambda params: where.read(params).labels)
    given = {name: getattr(config, name) for name in RULES[config.name].takes}
    if given.get("compute_dtype") in ("auto", "float32"):
        given["compute_dtype"] = None
    if config.name in ("muonplus", "muon"):
        given |= {"muon_weight_dimension_numbers": matrices, "sharding": sharding}
        return getattr(omp, config.name)(rate, weight_decay=decay, others=others, **given)
    rule = contributed(config.name, given)
    made = getattr(omp.contrib, config.name)
    return made(rate, rule, weight_decay=decay, others=others, where=where)


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


def describe(config: OptimizerConfig, params: optax.Params) -> str:
    """A table of how each parameter is updated."""
    if config.name == "adamw":
        return "all parameters: adamw"
    size = dict(RULES[config.name].size)
    for name in ("shape_scale", "norm", "match_frobenius"):
        if name in RULES[config.name].takes:
            size[name] = getattr(config, name)
    return omp.describe(params, rules=rules_for(params), **size)
