"""A configuration, its text and a mesh, put together to the functions that a run calls."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax
import optax
from jax.sharding import Mesh

from examples import optimizers, sharding, training
from examples.config import RunConfig
from examples.data.loader import Loader
from examples.data.prepare import Dataset
from examples.errors import UserError
from examples.evaluate import Evaluation, make_evaluate
from examples.training import Program, TrainState


@dataclass(frozen=True)
class Job:
    """Everything about a run but where it is kept and how far it is; holds no arrays."""

    config: RunConfig
    mesh: Mesh
    dataset: Dataset
    loader: Loader
    program: Program
    init: Callable[[], TrainState]
    """The state before the first step, of the seed of the configuration."""
    train_step: Callable[..., tuple[TrainState, jax.Array]]
    """State, inputs and targets to the next state and the loss, at the rates of the same."""
    evaluate: Callable[[optax.Params], Evaluation]


def assemble(config: RunConfig, dataset: Dataset, mesh: Mesh) -> Job:
    """The parts of a run; raises `UserError` if its text or its rows do not suffice for them."""
    check_rows(config, mesh)
    loader = Loader(dataset.train.ids, config.model.context, config.batch_size, config.seed)
    if loader.n_windows < config.batch_size:
        raise UserError(
            f"too little training text: {dataset.train.meta.tokens} tokens, and a batch needs "
            f"{config.batch_size} x {config.model.context}. Give more text, or a smaller "
            "--batch-size or --model.context."
        )
    optimizer = config.optimizer
    program = training.make_program(
        model=config.model,
        rule=dataclasses.replace(optimizer, learning_rate=0.0, adam_learning_rate=0.0),
        steps=config.steps,
        accumulate=config.accumulate,
        vocab_size=dataset.tokenizer.get_vocab_size(),
        mesh=mesh,
    )
    rates = optimizers.rates(optimizer)
    return Job(
        config=config,
        mesh=mesh,
        dataset=dataset,
        loader=loader,
        program=program,
        init=lambda: program.init(config.seed),
        train_step=lambda state, *batch: program.train_step(state, rates, *batch),
        evaluate=make_evaluate(program.loss, config, dataset.val, mesh),
    )


def check_rows(config: RunConfig, mesh: Mesh) -> None:
    """Refuses rows that cannot be dealt out evenly."""
    devices = sharding.split(mesh, sharding.RULES["batch"])
    parts = devices * config.accumulate
    if config.batch_size % parts:
        more = -(-config.batch_size // parts) * parts
        pieces = f" in --accumulate {config.accumulate} pieces" if config.accumulate > 1 else ""
        mesh_too = ", or put devices on tensor, as --mesh tensor=2,... does" if devices > 1 else ""
        raise UserError(
            f"--batch-size {config.batch_size} cannot be dealt out to data x fsdp = {devices} "
            f"{'devices' if devices > 1 else 'device'}{pieces}: give a multiple of {parts}, for "
            f"example --batch-size {more}{mesh_too}."
        )
