"""Configuration to Optax transformation: the only place where an optimizer is chosen by name."""

import functools
from typing import Any

import jax
import optax

import optax_muonplus as omp
from examples.config import OptimizerConfig

HOLD = 0.4  # share of the run at the peak rate, the paper's GPT schedule
WARMUP = 0.1  # share of the run spent rising to the peak rate, the paper's LLaMA schedule


def schedule(config: OptimizerConfig, peak: float, steps: int) -> optax.Schedule:
    """Learning rate by step; it would reach zero at `steps`, one after the last step."""
    if config.schedule == "constant_linear":
        hold = int(HOLD * steps)
        return optax.linear_schedule(peak, 0.0, steps - hold, transition_begin=hold)
    warmup = max(1, int(WARMUP * steps))
    # From peak / warmup and not from zero, so that the first step is not lost.
    return optax.warmup_cosine_decay_schedule(peak / warmup, peak, warmup, max(steps, warmup + 1))


def build(
    config: OptimizerConfig, steps: int, sharding: Any = None
) -> optax.GradientTransformation:
    """The transformation for a run of `steps` steps; `sharding` is that of each parameter."""
    rate = schedule(config, config.learning_rate, steps)
    adam_rate = schedule(config, config.adam_learning_rate, steps)
    if config.name == "adamw":
        rule = optax.adamw(
            adam_rate,
            b1=config.adam_b1,
            b2=config.adam_b2,
            weight_decay=config.weight_decay,
            mask=is_matrix,
        )
    else:
        rule = matrix_rule(config, rate, adam_rate, sharding)
    if config.clip_norm is None:
        return rule
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), rule)


def matrix_rule(
    config: OptimizerConfig, rate: optax.Schedule, adam_rate: optax.Schedule, sharding: Any
) -> optax.GradientTransformation:
    """Muon+ or Muon on the matrices, AdamW on the rest."""
    rule = omp.muon if config.name == "muon" else functools.partial(omp.muonplus, norm=config.norm)
    return rule(
        rate,
        beta=config.beta,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
        adam_learning_rate=adam_rate,
        adam_b1=config.adam_b1,
        adam_b2=config.adam_b2,
        sharding=sharding,
    )


def is_matrix(params: optax.Params) -> optax.Params:
    """True where muonplus would see a matrix, so that adamw decays the same parameters."""
    return jax.tree.map(lambda label: label == "muon", omp.partition_labels(params))


def describe(config: OptimizerConfig, params: optax.Params) -> str:
    """A table of what becomes of each parameter."""
    if config.name == "adamw":
        return "all parameters: adamw"
    return omp.describe(params, norm=config.norm if config.name == "muonplus" else "none")
