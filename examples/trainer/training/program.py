"""The functions that are compiled for a run: its initial state, its step and its loss."""

import functools
from dataclasses import dataclass

import jax
import optax
from jax.sharding import Mesh

from examples.trainer.models import Forward
from examples.trainer.models.layout import Layout
from examples.trainer.settings.model import ModelConfig, head_size
from examples.trainer.settings.run import OptimizerConfig
from examples.trainer.training import left_out, optimizers, sharding, trained_part
from examples.trainer.training.loss import head_loss
from examples.trainer.training.model_function import (
    Loss,
    Seed,
    make_forward,
    make_init_params,
    make_training_loss,
    on_targets,
)
from examples.trainer.training.optimizers import Rates
from examples.trainer.training.step import (
    Begin,
    Init,
    TrainState,
    TrainStep,
    make_begin,
    make_train_step,
    shardings_of,
)


@dataclass(frozen=True)
class Program:
    """The compiled functions of a run; runs that differ only in seed and rates can share them."""

    forward: Forward
    abstract: TrainState
    """The shapes, types and shardings of the state."""
    init: Init
    begin: Begin
    train_step: TrainStep
    loss: Loss


@functools.lru_cache(maxsize=1)  # a sweep does all runs of one program before those of the next
def make_program(
    model: ModelConfig,
    rule: OptimizerConfig,
    steps: int,
    accumulate: int,
    vocab_size: int,
    mesh: Mesh,
) -> Program:
    """The functions of a run; compiles nothing before they are called."""
    loss = on_targets(head_loss, model, vocab_size, mesh)
    training_loss = make_training_loss(model, vocab_size, mesh, rule.qk_clip is not None)
    init_params = make_init_params(model, vocab_size)
    rule = optimizers.for_platform(rule, Layout(mesh).platform)
    part = functools.partial(trained_part.of, config=rule)
    param_shardings = part(sharding.of_params(jax.eval_shape(init_params, 0), mesh))

    def optimizer(rates: Rates) -> optax.GradientTransformation:
        shardings = param_shardings if mesh.size > 1 else None
        built = optimizers.build(rule, steps, shardings, rates, head_size(model))
        return built if rates.largest_norm is None else left_out.above(rates.largest_norm, built)

    no_rates = optimizer(Rates(0.0, 0.0))
    begin = make_begin(no_rates, part, init_params if model.lora.rank else None)

    def init(seed: Seed) -> TrainState:
        return make_begin(no_rates, part)(init_params(seed), seed)

    shapes = jax.eval_shape(init, 0)
    abstract = sharding.abstract(shapes, sharding.of_state(shapes, mesh, rule.shard_over_data))
    return Program(
        forward=make_forward(model, vocab_size, mesh),
        abstract=abstract,
        init=jax.jit(init, out_shardings=shardings_of(abstract)),  # each device makes its shards
        begin=jax.jit(begin, out_shardings=shardings_of(abstract), donate_argnums=0),
        train_step=make_train_step(training_loss, optimizer, abstract, mesh, accumulate, part),
        loss=jax.jit(loss, out_shardings=sharding.replicated(mesh)),
    )
