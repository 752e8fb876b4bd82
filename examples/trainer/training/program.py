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
from examples.trainer.training import optimizers, sharding
from examples.trainer.training.model_function import Loss, make_forward, make_init_params, make_loss
from examples.trainer.training.optimizers import Rates
from examples.trainer.training.step import (
    Init,
    TrainState,
    TrainStep,
    abstract_state,
    compile_init,
    make_init,
    make_train_step,
)


@dataclass(frozen=True)
class Program:
    """The compiled functions of a run; runs that differ only in seed and rates can share them."""

    forward: Forward
    abstract: TrainState
    """The shapes, types and shardings of the state."""
    init: Init
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
    loss = make_loss(model, vocab_size, mesh)
    init_params = make_init_params(model, vocab_size)
    rule = optimizers.for_platform(rule, Layout(mesh).platform)
    param_shardings = sharding.of_params(jax.eval_shape(init_params, 0), mesh)

    def optimizer(rates: Rates) -> optax.GradientTransformation:
        shardings = param_shardings if mesh.size > 1 else None
        return optimizers.build(rule, steps, shardings, rates, head_size(model))

    init = make_init(init_params, optimizer(Rates(0.0, 0.0)))
    abstract = abstract_state(init, mesh)
    return Program(
        forward=make_forward(model, vocab_size, mesh),
        abstract=abstract,
        init=compile_init(init, abstract),
        train_step=make_train_step(loss, optimizer, abstract, mesh, accumulate),
        loss=jax.jit(loss, out_shardings=sharding.replicated(mesh)),
    )
