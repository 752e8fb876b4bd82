"""A step of the trainer in `examples`, beside the forward and backward pass of the same model."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from rich.console import Console

from benchmarks import loading, timing
from examples.trainer.settings.run import RunConfig
from examples.trainer.training import optimizers, sharding
from examples.trainer.training import program as training_program
from examples.trainer.training.program import Program
from examples.trainer.training.step import TrainState

Name = Literal["adamw", "muon", "muonplus"]
NAMES: tuple[Name, ...] = ("adamw", "muon", "muonplus")


def make_program(base: RunConfig, name: Name, vocabulary: int) -> Program:
    """The compiled functions of a training run."""
    rule = dataclasses.replace(base.optimizer, name=name)
    mesh = sharding.make_mesh("", jax.devices())
    return training_program.make_program(base.model, rule, base.steps, 1, vocabulary, mesh)


def measure(
    base: RunConfig,
    vocabulary: int,
    tokens: int,
    rounds: int,
    console: Console,
    names: Sequence[Name] = NAMES,
    calls: int = 1,
) -> dict[str, Any]:
    """Seconds and memory of a step with each optimizer, and what reading batches costs the last.

    Args:
      base: settings of the run, with its model.
      vocabulary: size of the model's vocabulary.
      tokens: in a step.
      rounds: how often each step is timed.
      console: where progress is shown.
      names: the optimizers.
      calls: steps that are enqueued before the last is waited for.
    """
    rows = tokens // base.model.context
    mesh = sharding.make_mesh("", jax.devices())
    place = sharding.of_batch(mesh)
    ids = np.random.default_rng(0).integers(0, vocabulary, (2, rows, base.model.context))
    batch = [jax.device_put(part.astype(np.int32), place) for part in ids]
    timed: dict[str, Callable[[], Any]] = {}
    memory = {}
    steppers = {}
    for name in names:
        program = make_program(base, name, vocabulary)
        state = program.init(0)
        if not timed:
            params = program.init(1).params
            gradient = jax.jit(jax.value_and_grad(program.loss))
            timed["forward and backward"] = functools.partial(gradient, params, *batch)
        step: Any = program.train_step  # compiled by jax.jit
        compiled = step.lower(program.abstract, optimizers.Rates(0.0, 0.0), *batch).compile()
        memory[name] = donated(compiled, state)
        steppers[name] = Stepper(program, state)
        timed[name] = functools.partial(steppers[name], *batch)
    seconds = timing.interleaved(timed, rounds, console, calls)
    context, last = base.model.context, steppers[names[-1]]
    read = loading.measure(lambda x: last(*x), rows, context, vocabulary, mesh, rounds, console)
    return {**read, **of_optimizers(seconds, memory)}


def of_optimizers(
    seconds: dict[str, np.ndarray], memory: dict[Name, dict[str, int]]
) -> dict[str, Any]:
    """The time of each step, and what of it the optimizer takes."""
    alone = seconds["forward and backward"]
    return {
        "forward_and_backward_s": float(np.median(alone)),
        **{
            name: {
                "median_s": float(np.median(seconds[name])),
                "optimizer_share": float(np.median(1 - alone / seconds[name])),
                **figures,
            }
            for name, figures in memory.items()
        },
    }


@dataclasses.dataclass
class Stepper:
    """Takes one step after the other; each step reuses the memory of the state before it."""

    program: Program
    state: TrainState

    def __call__(self, *batch: jax.Array) -> jax.Array:
        """Takes the next step and returns its loss."""
        self.state, measured = self.program.train_step(
            self.state, optimizers.Rates(0.01, 0.01), *batch
        )
        return measured.loss


def donated(compiled: Any, state: TrainState) -> dict[str, int]:
    """Bytes of the state, how many of them the step updates in place, and temporary bytes."""
    memory = compiled.memory_analysis()
    return {
        "state_bytes": sum(x.nbytes for x in jax.tree.leaves(state)),
        "in_place_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }
