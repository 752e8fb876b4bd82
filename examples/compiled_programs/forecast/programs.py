"""The programs of a run, from shapes alone: no data set, no arrays, no run folder."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from examples.trainer.data import tokenizer
from examples.trainer.settings.recipes import VOCABULARIES
from examples.trainer.settings.run import RunConfig
from examples.trainer.training import optimizers, sharding
from examples.trainer.training.program import Program, make_program
from examples.trainer.training.setup import check_rows

PROGRAMS = ("train_step", "evaluation", "init")


def make(config: RunConfig, mesh: Mesh) -> Program:
    """The functions of a run; raises `UserError` if rows do not divide."""
    check_rows(config, mesh)
    return make_program(
        model=config.model,
        rule=dataclasses.replace(config.optimizer, learning_rate=0.0, adam_learning_rate=0.0),
        steps=config.steps,
        accumulate=config.accumulate,
        vocab_size=vocabulary(config),
        mesh=mesh,
    )


def vocabulary(config: RunConfig) -> int:
    """Tokens of the vocabulary; of a tokenizer that is to be trained, the most it can have."""
    name = config.data.tokenizer or ("gpt2" if config.data.source == "fineweb" else "")
    if name in VOCABULARIES:
        return VOCABULARIES[name]
    return tokenizer.named(name, Path()).get_vocab_size() if name else config.data.vocab_size


def traced(name: str, program: Program, config: RunConfig, mesh: Mesh) -> Any:
    """One of `PROGRAMS`, traced: `jaxpr` is what it does, and `lower().compile()` compiles it."""
    step: Any = program.train_step  # jax.jit's functions are typed by what they compute
    loss: Any = program.loss
    init: Any = program.init
    if name == "train_step":
        batch = rows(config.batch_size, config, mesh)
        return step.trace(program.abstract, optimizers.Rates(0.0, 0.0), *batch)
    if name == "evaluation":
        batch = rows(config.batch_size // config.accumulate, config, mesh)
        return loss.trace(program.abstract.params, *batch)
    return init.trace(0)


def rows(n: int, config: RunConfig, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Inputs and targets of `n` rows."""
    row = jax.ShapeDtypeStruct(
        (n, config.model.context), jnp.int32, sharding=sharding.of_batch(mesh)
    )
    return row, row
