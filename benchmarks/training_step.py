"""A step of the trainer in `examples`, and the forward and backward pass of the same model."""

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks import timing
from examples.trainer.data.loader import Loader
from examples.trainer.data.placement import place_batch, prefetch
from examples.trainer.settings.run import RunConfig
from examples.trainer.training import optimizers, sharding
from examples.trainer.training.program import Program, make_program
from examples.trainer.training.step import TrainState

Name = Literal["adamw", "muon", "muonplus"]
NAMES: tuple[Name, ...] = ("adamw", "muon", "muonplus")
STEPS = 20  # that are timed together where batches are read
TEXT = 20_000_000  # tokens of the text that they are read from, 40 MB on disk


def measure(
    base: RunConfig,
    vocabulary: int,
    tokens: int,
    rounds: int,
    calls: int = 1,
) -> dict[str, Any]:
    """Measures a step with each optimizer, and what reading batches costs the last of them.

    Args:
      base: settings of the run, with its model.
      vocabulary: size of the model's vocabulary.
      tokens: in a step.
      rounds: how often each step is timed.
      calls: steps that are enqueued before the last is waited for.
    """
    context = base.model.context
    rows = tokens // context
    mesh = sharding.make_mesh("", jax.devices())
    ids = np.random.default_rng(0).integers(0, vocabulary, (2, rows, context))
    batch = [jax.device_put(part.astype(np.int32), sharding.of_batch(mesh)) for part in ids]
    timed: dict[str, Callable[[], Any]] = {}
    for name in NAMES:
        rule = dataclasses.replace(base.optimizer, name=name)
        program = make_program(base.model, rule, base.steps, 1, vocabulary, mesh)
        if not timed:
            gradient = jax.jit(jax.value_and_grad(program.loss))
            params = program.init(1).params
            timed["forward and backward"] = functools.partial(gradient, params, *batch)
        timed[name] = Stepper(program, program.init(0), batch)
    memory = {name: step.memory() for name, step in timed.items() if isinstance(step, Stepper)}
    seconds = timing.interleaved(timed, rounds, calls)
    alone = seconds["forward and backward"]
    figures = {
        name: {
            "median_s": float(np.median(seconds[name])),
            "optimizer_share": float(np.median(1 - alone / seconds[name])),
            **memory[name],
        }
        for name in NAMES
    }
    last: Any = timed[NAMES[-1]]
    return {
        **loading(last.step, rows, context, vocabulary, mesh, rounds),
        "forward_and_backward_s": float(np.median(alone)),
        **figures,
    }


def loading(
    step: Callable[..., jax.Array],
    rows: int,
    context: int,
    vocabulary: int,
    mesh: Mesh,
    rounds: int,
) -> dict[str, Any]:
    """Measures tokens per second with batches that are read, and with one that is there already.

    The text is random and lies in a file, as tokens of a run do. Nothing else is done between
    steps, so that a step waits for nothing but its batch.
    """
    place = sharding.of_batch(mesh)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.random.default_rng(0).integers(0, vocabulary, TEXT, np.uint16).tofile(path)
        loader = Loader(np.memmap(path, np.uint16, "r"), context, rows, seed=0)
        there = place_batch(loader, 0, place)

        def same() -> jax.Array:
            return [step(*there) for _ in range(STEPS)][-1]

        def read() -> jax.Array:
            return [step(*next(ahead)) for _ in range(STEPS)][-1]

        # One untimed round, and the batches that are read ahead and not used.
        needed = range((rounds + 2) * STEPS)
        with prefetch(lambda i: place_batch(loader, i, place), needed) as ahead:
            programs = {"same batch": same, "read ahead": read}
            seconds = timing.interleaved(programs, rounds)
    tokens = STEPS * rows * context
    return {
        "tokens_per_second": {name: tokens / float(np.median(s)) for name, s in seconds.items()},
        "loading_ratio": float(np.median(seconds["read ahead"] / seconds["same batch"])),
    }


@dataclasses.dataclass
class Stepper:
    """Takes one step after the other; each step reuses the memory of the state before it."""

    program: Program
    state: TrainState
    batch: list[jax.Array]

    def __call__(self) -> jax.Array:
        """Takes the next step on the batch and returns its loss."""
        return self.step(*self.batch)

    def step(self, *batch: jax.Array) -> jax.Array:
        """Takes the next step on any batch."""
        rates = optimizers.Rates(0.01, 0.01)
        self.state, measured = self.program.train_step(self.state, rates, *batch)
        return measured.loss

    def memory(self) -> dict[str, int]:
        """Counts bytes of the state, those that a step updates in place, and temporary ones."""
        step: Any = self.program.train_step  # compiled by jax.jit
        lowered = step.lower(self.program.abstract, optimizers.Rates(0.0, 0.0), *self.batch)
        memory = lowered.compile().memory_analysis()
        return {
            "state_bytes": sum(x.nbytes for x in jax.tree.leaves(self.state)),
            "in_place_bytes": memory.alias_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
        }
