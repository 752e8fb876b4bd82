"""What is set up before the first step: the compiled functions of a run, for its text and mesh."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import optax
from jax.sharding import Mesh

from examples.trainer.data.loader import Loader, loader_of
from examples.trainer.data.token_files import Dataset
from examples.trainer.models.language_model import Forward
from examples.trainer.models.layers import Layout
from examples.trainer.settings import validation
from examples.trainer.settings.model import ModelConfig
from examples.trainer.settings.run import OptimizerConfig, RunConfig
from examples.trainer.system.errors import UserError
from examples.trainer.training import optimizers, sharding
from examples.trainer.training.evaluate import Evaluation, make_evaluate
from examples.trainer.training.loss import head_loss
from examples.trainer.training.optimizers import Rates
from examples.trainer.training.step import (
    Loss,
    Measured,
    Seed,
    TrainState,
    TrainStep,
    make_forward,
    make_init_params,
    make_train_step,
    on_targets,
    shardings_of,
)


@dataclass(frozen=True)
class Program:
    """The compiled functions of a run; runs that differ only in seed and rates can share them."""

    forward: Forward
    abstract: TrainState
    """The shapes, types and shardings of the state."""
    init: Callable[[Seed], TrainState]
    """Seed to the state before the first step."""
    init_from: Callable[[optax.Params, Seed], TrainState]
    """The same with other parameters, whose memory is reused."""
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
    init_params = make_init_params(model, vocab_size)
    rule = optimizers.for_platform(rule, Layout(mesh).platform)
    param_shardings = sharding.of_params(jax.eval_shape(init_params, 0), mesh)

    def optimizer(rates: Rates) -> optax.GradientTransformation:
        shardings = param_shardings if mesh.size > 1 else None
        return optimizers.build(rule, steps, shardings, rates)

    def init_from(params: optax.Params, seed: Seed) -> TrainState:
        opt_state = optimizer(Rates(0.0, 0.0)).init(params)
        return TrainState(params, opt_state, jax.random.key(seed))

    def init(seed: Seed) -> TrainState:
        return init_from(init_params(seed), seed)

    shapes = jax.eval_shape(init, 0)
    abstract = sharding.abstract(shapes, sharding.of_state(shapes, mesh))
    return Program(
        forward=make_forward(model, vocab_size, mesh),
        abstract=abstract,
        init=jax.jit(init, out_shardings=shardings_of(abstract)),  # each device makes its shards
        init_from=jax.jit(init_from, out_shardings=shardings_of(abstract), donate_argnums=0),
        train_step=make_train_step(loss, optimizer, abstract, mesh, accumulate),
        loss=jax.jit(loss, out_shardings=sharding.replicated(mesh)),
    )


def program_of(config: RunConfig, vocab_size: int, mesh: Mesh) -> Program:
    """The functions of a run, which its rates do not change."""
    rule = dataclasses.replace(config.optimizer, learning_rate=0.0, adam_learning_rate=0.0)
    return make_program(config.model, rule, config.steps, config.accumulate, vocab_size, mesh)


@dataclass(frozen=True)
class TrainingSetup:
    """Everything about a run except its folder and its progress; holds no arrays."""

    config: RunConfig
    mesh: Mesh
    dataset: Dataset
    loader: Loader
    program: Program
    init: Callable[[], TrainState]
    """Makes the state before the first step, from the seed of the configuration."""
    train_step: Callable[..., tuple[TrainState, Measured]]
    """State, inputs and targets to the next state and its figures, at the configured rates."""
    evaluate: Callable[[optax.Params], Evaluation]


def check_settings(config: RunConfig) -> None:
    """Refuses settings that make no sense, by the names of their flags; builds nothing."""
    validation.check(config)
    optimizers.check(config.optimizer)


def make_setup(config: RunConfig, dataset: Dataset, mesh: Mesh) -> TrainingSetup:
    """The setup of a run; raises `UserError` if there is too little text or rows do not divide."""
    check_rows(config, mesh)
    program = program_of(config, dataset.tokenizer.get_vocab_size(), mesh)
    rates = optimizers.rates(config.optimizer)
    return TrainingSetup(
        config=config,
        mesh=mesh,
        dataset=dataset,
        loader=loader_of(config, dataset),
        program=program,
        init=lambda: program.init(config.seed),
        train_step=lambda state, *batch: program.train_step(state, rates, *batch),
        evaluate=make_evaluate(program.loss, config, dataset, mesh),
    )


def check_rows(config: RunConfig, mesh: Mesh) -> None:
    parts = sharding.shard_count(mesh, sharding.RULES["batch"]) * config.accumulate
    if config.batch_size % parts:
        raise UserError(
            f"--batch-size {config.batch_size} cannot be dealt out to data x fsdp = "
            f"{parts // config.accumulate} devices in --accumulate {config.accumulate} pieces: "
            f"give a multiple of {parts}, or put devices on tensor, as --mesh tensor=2,... does."
        )
