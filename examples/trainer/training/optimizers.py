"""Builds the optimizer of a run; the only place where an optimizer is chosen by name."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

import optax_muonplus as omp
from examples.trainer.settings.rules import RULES
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import transformations
from examples.trainer.training.transformations import clip_by_global_norm
from optax_muonplus.matrices import ScaleByShape
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


def schedules(
    config: OptimizerConfig, steps: int
) -> Callable[[ArrayLike], tuple[ArrayLike, ArrayLike]]:
    """Update, counted from 0, to the rates of the matrices and of the other parameters."""
    matrices, rest = (schedule(config, peak, steps) for peak in rates(config))
    return lambda update: (matrices(update), rest(update))


# The rule for kernels of blocks under --model.scan, [layer, in, out]: each layer is a matrix.
STACKED = ("(^|/)blocks/[a-z]+/[a-z]+/kernel$", omp.MuonDimensionNumbers(1, 2), 3)


def dimension_numbers(
    config: OptimizerConfig, head_size: int | None
) -> Callable[[optax.Params], Any]:
    """The function that says how the parameters are matrices: whole kernels, or heads."""
    if not config.per_head:
        return whole_kernels

    def heads(params: optax.Params) -> Any:
        paths = [path for path, _ in jax.tree.leaves_with_path(params)]
        if not any("attn" in jax.tree_util.keystr(path) for path in paths):
            return whole_kernels(params)  # of a part that another rule updates than attention
        return omp.per_head(head_size, rules=rules_for(params))(params)

    return heads


def whole_kernels(params: optax.Params) -> Any:
    """The axes that make each parameter a matrix; None for parameters that get AdamW."""
    return omp.muon_dimension_numbers(params, rules=rules_for(params))


def rules_for(params: optax.Params) -> list[Any]:
    """The rule for stacked blocks, if there are any.

    The default rules of the library do not guess the meaning of three axes.
    """
    leaves = jax.tree.leaves_with_path(params)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return [STACKED] if any(re.search(STACKED[0], name) for name in names) else []


class Rates(NamedTuple):
    """Peak learning rates. They are inputs of a compiled step, which then serves all rates."""

    matrices: ArrayLike
    rest: ArrayLike


def rates(config: OptimizerConfig) -> Rates:
    rate = config.learning_rate
    if rate is None:
        rate = 0.002 if RULES[config.name].large else 0.02
    return Rates(rate, config.adam_learning_rate)


FLAGS = {
    field.name: f"--optimizer.{field.name.replace('_', '-')}"
    for field in dataclasses.fields(OptimizerConfig)
}
"""Settings are named as the library's arguments."""


def check(config: OptimizerConfig) -> None:
    """Refuses settings that the library refuses, in its own words, with the names of flags."""
    flat = optax.constant_schedule(0.0)
    try:
        if config.name != "adamw":
            matrix_rule(for_platform(config, "cpu"), flat, flat, config.weight_decay)
    except ValueError as error:
        words = str(error).replace("=", " ").split()
        flags = ", ".join(flag for name, flag in FLAGS.items() if name in words)
        raise UserError(f"{error}\nIn flags: {flags}.") from None


LACKING = {
    setting: {
        name
        for name, rule in RULES.items()
        if not rule.function or setting not in rule.takes or setting in rule.fixed
    }
    for setting in {setting for rule in RULES.values() for setting in rule.takes}
} | {
    "normalized": {*RULES} - {"muonplus"},
    "per_head": {"adamw"},
}
"""Settings, each with the rules that do not take it."""


def check_taken(
    given: OptimizerConfig, before: OptimizerConfig, rules: Sequence[OptimizerConfig]
) -> None:
    """Refuses a flag that changes no run of some rules; `before` is what the flags change."""
    default = OptimizerConfig()
    for setting, lacking in LACKING.items():
        value = getattr(given, setting)
        if value in (getattr(default, setting), getattr(before, setting)):
            continue
        if not any(
            getattr(rule, setting) == value
            and (rule.name not in lacking or RULES[rule.name].fixed.get(setting) == value)
            for rule in rules
        ):
            names = ", ".join(dict.fromkeys(rule.name for rule in rules))
            raise UserError(
                f"{FLAGS[setting]} {value} would change nothing under {names}: leave it out."
            )


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
    config: OptimizerConfig,
    steps: int,
    sharding: Any = None,
    peaks: Rates | None = None,
    head_size: int | None = None,
) -> optax.GradientTransformation:
    """The transformation for a run of `steps` steps.

    `sharding` is the tree of the parameters' shardings. `peaks` replaces the configured rates.
    `head_size` is the model's width of a head, which `config.per_head` and QK-clip need.
    """
    numbers = dimension_numbers(config, head_size)
    state_over = "data" if config.shard_over_data else None
    placed = omp.transforms.state_layout(sharding, state_over)
    peaks = peaks or rates(config)
    rate, adam_rate = (schedule(config, peak, steps) for peak in peaks)
    follows = config.decay_follows_rate
    decay = schedule(config, config.weight_decay, steps) if follows else config.weight_decay

    def rule_of(eps: ArrayLike) -> optax.GradientTransformation:
        if config.name == "adamw":
            return adamw(config, rate, adam_rate, decay, eps)
        return matrix_rule(config, rate, adam_rate, decay, numbers, placed, eps)

    if config.adam_eps_before_correction:
        rule = transformations.epsilon_before_correction(rule_of, config.adam_b2)
    else:
        rule = rule_of(transformations.ADAM_EPSILON)
    if not records_inside(config):
        rule = omp.diagnostics.watched(
            rule, every=config.record_every, weight_dimension_numbers=numbers
        )
    if config.mlp_in_rate != 1:
        larger = optax.masked(optax.scale(config.mlp_in_rate), transformations.into_mlp)
        rule = optax.chain(rule, larger)
    if state_over and sharding is not None:
        rule = omp.transforms.shard_state(rule, sharding, state_over)
    if config.qk_clip is not None:  # last, and on biases too, which are no matrices
        where = omp.Matrices(dimension_numbers=whole_kernels)
        bound = omp.contrib.qk_clip(
            config.qk_clip, head_size=head_size, fused="by_head", where=where
        )
        rule = optax.chain(rule, bound)
    if config.clip_norm is not None:
        rule = optax.chain(clip_by_global_norm(config.clip_norm), rule)
    return rule


def adamw(
    config: OptimizerConfig,
    rate: optax.Schedule,
    adam_rate: optax.Schedule,
    decay: optax.ScalarOrSchedule,
    eps: ArrayLike,
) -> optax.GradientTransformation:
    """AdamW on all parameters; matrices and the rest keep their separate rates and decays."""
    rule = functools.partial(
        optax.adamw,
        b1=config.adam_b1,
        b2=config.adam_b2,
        eps=eps,
        nesterov=config.adam_nesterov,
    )
    return optax.partition(
        {
            "muon": rule(rate, weight_decay=decay),
            "adam": rule(adam_rate, weight_decay=config.adam_weight_decay),
        },
        lambda params: omp.Matrices(dimension_numbers=whole_kernels)(params).labels,
    )


def matrix_rule(
    config: OptimizerConfig,
    rate: optax.Schedule,
    adam_rate: optax.Schedule,
    decay: optax.ScalarOrSchedule,
    numbers: Callable[[optax.Params], Any] | None = None,
    sharding: Any = None,
    adam_eps: ArrayLike = transformations.ADAM_EPSILON,
) -> optax.GradientTransformation:
    """A rule of Muon's family on the matrices, AdamW on the rest."""
    rule = choose(config)
    if records_inside(config):
        rule = omp.diagnostics.recorded(rule, every=config.record_every)
    others = optax.adamw(
        adam_rate,
        config.adam_b1,
        config.adam_b2,
        adam_eps,
        weight_decay=config.adam_weight_decay,
        nesterov=config.name == "optax_muon" or config.adam_nesterov,
    )
    where = {"where": omp.Matrices(dimension_numbers=numbers, sharding=sharding)}
    if RULES[config.name].records_inside:
        where = {"muon_weight_dimension_numbers": numbers, "sharding": sharding}
    decays = {"weight_decay": decay} if RULES[config.name].decays else {}
    return rule(rate, **decays, others=others, **where)


def records_inside(config: OptimizerConfig) -> bool:
    return RULES[config.name].records_inside and config.normalized == "all"


def choose(config: OptimizerConfig) -> Callable[..., optax.GradientTransformation]:
    """The rule for the matrices, with its options."""
    rule = RULES[config.name]
    options = {name: getattr(config, name) for name in rule.takes} | rule.fixed
    if options.get("compute_dtype") in ("auto", "float32"):
        options["compute_dtype"] = None
    if not rule.records_inside:
        made = getattr(omp.contrib, rule.function)
        return functools.partial(made, rule=contributed(rule.function, options))
    made = functools.partial(getattr(omp, rule.function), **options)
    if config.name != "muonplus" or config.normalized == "all":
        return made
    return transformations.normalized(made, config.normalized)


def contributed(function: str, options: dict[str, Any]) -> Any:
    """A rule of `omp.contrib`, with options of its momentum, polar factor and size."""
    made, parts = omp.contrib, []
    defaults = {"turbo_muon": made.scale_by_turbo_muon().parts[1].polar_factor}
    for part in (Momentum(), defaults.get(function, Orthogonalize()), ScaleByShape("max")):
        names = [field.name for field in dataclasses.fields(part) if field.name in options]
        parts.append(dataclasses.replace(part, **{name: options[name] for name in names}))
    momentum, polar, scale = parts
    if function == "muoneq" and "shape_scale" not in options:
        scale = ScaleByShape(consistent_rms=0.2)
    return {
        "normuon": lambda: made.NorMuon(momentum=momentum, polar_factor=polar),
        "adamuon": lambda: made.AdaMuon(momentum=momentum, polar_factor=polar),
        "aurora": lambda: made.scale_by_aurora(momentum, made.Aurora(polar)),
        "turbo_muon": lambda: made.scale_by_turbo_muon(momentum, polar),
        "mano": lambda: made.Mano(momentum=momentum),
        "hyperball": lambda: made.scale_by_muon(momentum, polar),
        "muoneq": lambda: made.scale_by_muoneq(momentum, polar_factor=polar, scale=scale),
    }[function]()


def describe(config: OptimizerConfig, params: optax.Params, head_size: int | None = None) -> str:
    """A table of how each parameter is updated."""
    if config.name == "adamw":
        return "all parameters: adamw"
    size: dict[str, Any] = RULES[config.name].size
    if RULES[config.name].records_inside:
        size = {"shape_scale": config.shape_scale, **size}
    if config.name == "muonplus":
        size |= {"norm": config.norm, "match_frobenius": config.match_frobenius}
    table = omp.describe(params, dimension_numbers(config, head_size), **size)
    lines = [table, RULES[config.name].remark]
    if config.normalized != "all":
        lines.append(f"only matrices of {config.normalized} are normalized: others have Muon's rms")
    if config.mlp_in_rate != 1:
        lines.append(f"updates of matrices into the MLP have {config.mlp_in_rate:g} times this rms")
    return "\n".join(filter(None, lines))
